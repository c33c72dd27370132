"""Pack lines of JSON into a sharded Zarr store on a Dask cluster, and train on it in random order.

The cluster's workers write a shard each, of the same bytes as one machine would; what a lost worker had begun another does
again. Here the cluster is two processes of this machine; for your own, give `Client` the address of its scheduler. Needs
distributed.

python examples/pack_on_dask.py                                        # on a simulated Google Cloud Storage
python examples/pack_on_dask.py gs://bucket/pubmed.jsonl gs://bucket/pubmed.zarr   # your own lines, and where to
"""

import json
import sys
import time

from distributed import Client, LocalCluster

from cachedfs.datasets import pack

EPOCHS = 2
# The data do not change: nobody is asked whether they have.
OPTIONS = {"cachedfs": {"max_age": "immutable"}}


def train(url: str) -> None:
    from cachedfs.datasets import Loader, ZarrDataset  # here: the workers that pack need no torch

    articles = ZarrDataset(url, named=True, storage_options=OPTIONS)
    asked = articles.fs.stats().requests
    with Loader(articles, batch_size=32, shuffle=True, seed=0, collate_fn=list) as loader:
        for epoch in range(EPOCHS):
            began, seen = time.perf_counter(), set()
            for batch in loader:  # a list of dictionaries, as the lines were: tokenise it, and train
                seen |= {article["article_id"] for article in batch}
            seconds, before, asked = time.perf_counter() - began, asked, articles.fs.stats().requests
            took = f"{seconds:.2f} s, {asked - before} requests"
            print(f"epoch {epoch}: {len(seen):,} different articles in {took}")
    sentences = json.loads(batch[-1]["article_text"])  # lists of texts are packed as JSON
    print(f"{len(sentences)} sentences in the last one, the first: {sentences[0]}")


def main(source: str, target: str) -> None:
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, Client(cluster) as client:
        print(pack(f"cachedfs::{source}", f"cachedfs::{target}", client=client))
    train(f"cachedfs::{target}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        import simulated

        with simulated.cloud("gs", simulated.article_lines):
            main("gs://demo/pubmed.jsonl", "gs://demo/pubmed.zarr")
