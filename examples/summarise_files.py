"""Train on many small JSON files: an article and its abstract in each, as PubMed's articles come for summarisation.

A hundred thousand of them in a folder of Drive take hours an epoch through a mount. Here the first epoch asks once for each
file, 16 at a time and in the order in which it reads them; from the second on nobody is asked.

python examples/summarise_files.py                                   # on a simulated Google Drive
python examples/summarise_files.py "drive://My Drive/pubmed/*.json"  # on your own
"""

import json
import sys
import time

from cachedfs.datasets import FileDataset, Loader

EPOCHS = 2
# The data do not change: nobody is asked whether they have.
OPTIONS = {"cachedfs": {"max_age": "immutable"}}


def score(article: dict) -> float:
    """Return how many of the abstract's words the first three sentences have: ROUGE-1 recall of the usual baseline."""
    summary = " ".join(article["article_text"][:3]).split()
    abstract = " ".join(article["abstract_text"]).replace("<S>", "").replace("</S>", "").split()
    return sum(min(summary.count(word), abstract.count(word)) for word in {*abstract}) / len(abstract)


def main(url: str) -> None:
    articles = FileDataset(f"cachedfs::{url}", decode=json.loads, storage_options=OPTIONS)
    asked = articles.fs.stats().requests
    print(f"{len(articles):,} articles, listed by {asked} requests")
    with Loader(articles, batch_size=16, shuffle=True, seed=0, collate_fn=list) as loader:
        for epoch in range(EPOCHS):
            began, scores = time.perf_counter(), {}
            for batch in loader:  # a list of articles: tokenise it, and train
                scores |= {article["article_id"]: score(article) for article in batch}
            seconds, before, asked = time.perf_counter() - began, asked, articles.fs.stats().requests
            print(
                f"epoch {epoch}: {len(scores):,} different articles in {seconds:.2f} s, {asked - before} requests"
            )
    print(f"the first three sentences as a summary: ROUGE-1 recall {sum(scores.values()) / len(scores):.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        import simulated

        with simulated.cloud("drive", simulated.articles):
            main("drive://My Drive/pubmed/*.json")
