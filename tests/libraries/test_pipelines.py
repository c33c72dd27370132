"""Grain, tf.data and DataChain: pipelines that read each sample by its URL."""

import fsspec
import numpy as np
import pytest


def number(url):
    with fsspec.open(url) as file:
        return int(file.read())


def numbers(place, n=12):
    for i in range(n):
        place.put(f"n/{i:02}", b"%d" % i)
    return [place.url(f"n/{i:02}") for i in range(n)]


def test_grain_maps_urls(place):
    grain = pytest.importorskip("grain")
    urls = numbers(place)
    for _ in place.twice(fetches=12):
        rows = grain.MapDataset.source(urls).shuffle(seed=7).map(number).batch(4)
        assert sorted(np.concatenate([*rows]).tolist()) == list(range(12))


def test_tf_data_takes_a_generator(place):
    tf = pytest.importorskip("tensorflow")
    urls = numbers(place)
    signature = tf.TensorSpec(shape=(), dtype=tf.int64)
    for _ in place.twice(fetches=12):
        rows = tf.data.Dataset.from_generator(lambda: map(number, urls), output_signature=signature)
        assert sorted(rows.batch(4).unbatch().as_numpy_iterator()) == list(range(12))
