"""ZarrDataset over packed stores: ragged samples, requests and prefetch items."""

import fsspec
import numpy as np
import pytest
import zarr

torch = pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("PIL")


from cachedfs.datasets import ZarrDataset, pack  # noqa: E402
from tests.packing import packs  # noqa: E402
from tests.support import forget, noise  # noqa: E402

SMALL = {"chunk_bytes": "4KiB", "shard_bytes": "16KiB"}


@pytest.fixture
def packed(cloud):
    """A store of 60 samples of 0 to 6 KB; return its URL and the samples."""
    files = [cloud.put(f"src/{i:02}.bin", noise(i * 101, seed=i)) for i in range(60)]
    pack(cloud.url("src"), cloud.url("out.zarr"), **SMALL)
    forget()
    cloud.asked()
    return cloud.url("out.zarr"), files


def test_a_batch_requests_offsets_and_data_once(packed, cloud):
    url, files = packed
    dataset = ZarrDataset(url, "data")
    cloud.asked()
    assert dataset.__getitems__([3, 30, 3, -1, 0]) == [files[i] for i in (3, 30, 3, -1, 0)]
    assert len(cloud.asked()) <= 2 + 2 * 3  # index and chunks of the offsets, of three shards of data
    dataset.__getitems__([30, -1, 3])
    assert cloud.asked() == []


@pytest.fixture
def skewed(cloud):
    """A dataset of 300 samples with a large, a small, a one-number and a mostly empty array."""
    members = []
    for i in range(300):
        members += [(f"{i:03}.big", noise(900, seed=i)), (f"{i:03}.cls", b"%d" % i)]
        members += [(f"{i:03}.txt", noise(50, seed=i))] if i % 7 == 0 else [(f"{i:03}.txt", b"")]
    cloud.put("x.tar", packs.tar(members))
    pack(cloud.url("x.tar"), cloud.url("skewed.zarr"), **SMALL)
    return ZarrDataset(cloud.url("skewed.zarr"))


def ranges(items):
    """Return the ranges that are no shard index."""
    return [item for item in items if not isinstance(item, str) and item[2] is not None]


def test_reads_are_declared_sample_by_sample_for_all_arrays(skewed):
    order = np.random.default_rng(0).permutation(300).tolist()
    alone = [
        ZarrDataset(skewed.url, name) for name in sorted(skewed.arrays, key=lambda n: n in skewed._ragged)
    ]
    expected = [item for i in order for each in alone for item in ranges(each.items([i]))]
    assert len({item[0].rpartition("/")[0] for item in expected}) == len(alone)
    declared = list(skewed.items(order))
    assert ranges(declared) == expected
    indexes = [item for item in declared if item[2] is None]
    assert len(indexes) == len({*indexes})


def test_an_order_is_consumed_only_as_far_as_it_is_declared(skewed):
    for arrays in (None, ("big", "txt")):
        taken = []
        items = ZarrDataset(skewed.url, arrays).items(taken.append(i) or i % 300 for i in range(900))
        next(items)
        assert len(taken) <= 256
        while next(items)[2] is None:
            pass
        assert len(taken) <= 2 * 256
        items.close()


def test_numbers_text_and_images(cloud):
    samples = packs.records(90)
    cloud.put("x.jsonl", packs.lines_of(samples))
    pack(cloud.url("x.jsonl"), cloud.url("lines.zarr"), **SMALL)
    dataset = ZarrDataset(cloud.url("lines.zarr"), ("text", "ids", "label"), named=True)
    for sample, expected in zip(dataset.__getitems__(range(90)), samples, strict=True):
        assert sample["text"] == expected["text"]
        assert sample["ids"].tolist() == expected["ids"]
        assert sample["label"] == expected["label"]
    twice = dataset.__getitems__([7, 7])
    twice[0]["ids"][:] = -1
    assert twice[1]["ids"].tolist() == samples[7]["ids"]
    pixels = [np.full((4 + i, 5, 3), i, "u1") for i in range(9)]
    for i, each in enumerate(pixels):
        cloud.put(f"img/{i}.png", packs.png(each))
    pack(cloud.url("img"), cloud.url("img.zarr"), decode="image")
    images = ZarrDataset(cloud.url("img.zarr"), "image")
    for i in (8, 0, 3):
        np.testing.assert_array_equal(images[i], pixels[i])


def test_invalid_offsets_are_an_error(cloud, packed):
    url, _ = packed
    group = zarr.open_group(url, mode="r+")
    group["data_offsets"][3] = 10**9
    forget()
    fsspec.filesystem("cachedfs", target_protocol="gs").invalidate_cache()
    with pytest.raises(ValueError, match="its offsets do not match its elements"):
        ZarrDataset(url, "data")[2]


def test_a_subgroup_can_be_read_alone(tmp_path):
    files = {"x.h5": packs.hdf5(train__ids=packs.vlen("i4", [[1], [2, 3]]), train__label=[5, 6])}
    packs.packed(tmp_path, files)
    group = ZarrDataset(f"{tmp_path}/out.zarr/train", ("ids", "label"))
    assert [(ids.tolist(), int(label)) for ids, label in group] == [([1], 5), ([2, 3], 6)]
    whole = ZarrDataset(f"{tmp_path}/out.zarr", arrays="train/ids")
    assert [ids.tolist() for ids in whole] == [[1], [2, 3]]
    everything = ZarrDataset(f"{tmp_path}/out.zarr", named=True)[1]
    assert (everything["train/ids"].tolist(), everything["train/label"]) == ([2, 3], 6)
