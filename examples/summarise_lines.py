"""Train on one large file with a line of JSON for each article, in a plain DataLoader whose workers share it.

Each worker reads its own part of the file's bytes, and takes the lines that begin there: none comes twice, and a file that is
larger than memory is no problem. Lines are not shuffled; packed, they can be (docs/guide-packing.md).

python examples/summarise_lines.py                                  # on a simulated Google Drive
python examples/summarise_lines.py "drive://My Drive/pubmed.jsonl"  # on your own: a file, or a pattern of several
"""

import collections
import json
import sys
import time

from torch.utils.data import DataLoader, get_worker_info

from cachedfs.datasets import LineDataset

EPOCHS, WORKERS = 2, 2
# The data do not change: nobody is asked whether they have.
OPTIONS = {"cachedfs": {"max_age": "immutable"}}


def decode(line: bytes) -> dict:
    """Return the article, and which worker read it."""
    return json.loads(line) | {"worker": get_worker_info().id}


def main(url: str) -> None:
    articles = LineDataset(f"cachedfs::{url}", decode=decode, storage_options=OPTIONS)
    print(articles)
    loader = DataLoader(articles, batch_size=32, num_workers=WORKERS, collate_fn=list)
    for epoch in range(EPOCHS):
        began, read_by, seen = time.perf_counter(), collections.Counter(), set()
        for batch in loader:  # a list of articles: tokenise it, and train
            read_by.update(article["worker"] for article in batch)
            seen |= {article["article_id"] for article in batch}
        seconds = time.perf_counter() - began
        shares = " and ".join(f"{n:,}" for _, n in sorted(read_by.items()))
        print(
            f"epoch {epoch}: {shares} articles by {WORKERS} workers, {len(seen):,} different, in {seconds:.2f} s"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        import simulated

        with simulated.cloud("drive", simulated.article_lines):
            main("drive://My Drive/demo/pubmed.jsonl")
