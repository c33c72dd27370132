"""HDF5Dataset: rows in any order, chunks, requests, workers, links and errors."""

import contextlib
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest

h5py = pytest.importorskip("h5py")
torch = pytest.importorskip("torch")


from cachedfs.datasets import Loader, hdf5_dataset, hdf5_layout  # noqa: E402
from cachedfs.datasets.hdf5_dataset import HDF5Dataset  # noqa: E402
from cachedfs.errors import ObjectChanged, ObjectNotFound  # noqa: E402
from cachedfs.filesystem import CachedFileSystem  # noqa: E402
from tests.datasets import virtual  # noqa: E402
from tests.support import KiB, forget  # noqa: E402

N = 203
IMAGES = np.random.default_rng(0).integers(0, 255, (N, 8, 6), dtype="u1")
LABELS = np.arange(N, dtype="i8") * 10

LAYOUTS = {
    "contiguous": {},
    "chunked": {"chunks": (10, 8, 6)},
    "chunked in two": {"chunks": (10, 4, 6), "compression": "gzip", "shuffle": True},
    "row by row": {"chunks": (1, 8, 6), "compression": "lzf"},
}


def made(write):
    """Return the bytes of an HDF5 file."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        write(file)
    return buffer.getvalue()


def pairs(images=IMAGES, labels=LABELS, **layout):
    def write(file):
        file.create_dataset("image", data=images, **layout)
        file.create_dataset("label", data=labels)

    return made(write)


def large(file):
    """Write 16 chunks of 1 MiB, which is a block each."""
    file.create_dataset("image", data=wide(), chunks=(4, 256 << 10))
    file.create_dataset("label", data=np.arange(64))


def wide():
    return np.arange(64, dtype="u1")[:, None] + np.zeros((1, 256 << 10), "u1")


def check(samples, indexes):
    assert len(samples) == len(indexes)
    for (image, label), index in zip(samples, indexes, strict=True):
        np.testing.assert_array_equal(image, IMAGES[index])
        assert label == LABELS[index]


@pytest.fixture
def url(cloud):
    cloud.put("a.h5", pairs(chunks=(10, 8, 6)))
    return cloud.url("a.h5")


# Rows.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_rows_in_any_order(tmp_path, layout):
    (tmp_path / "a.h5").write_bytes(pairs(**LAYOUTS[layout]))
    rows = HDF5Dataset(tmp_path / "a.h5")
    for indexes in ([0], [5, 6, 7], [200, 3, 3, -1, 57, 4], range(N), np.arange(N)[::-7], []):
        check(rows.__getitems__(indexes), indexes)
    check([rows[-1], rows[np.int64(2)]], [-1, 2])
    images = [image for image, _ in rows.__getitems__([3, 5, 3])]
    for image in images:
        image += 1  # each sample has its own memory
    np.testing.assert_array_equal(images, IMAGES[[3, 5, 3]] + np.uint8(1))
    check([rows[3]], [3])
    (label,) = HDF5Dataset(tmp_path / "a.h5", ["label"])[3]
    assert label == HDF5Dataset(tmp_path / "a.h5", "label")[3] == 30
    assert rows.group_size == {"row by row": 1, "contiguous": 1}.get(layout, 10)
    assert rows.dtypes == {"image": np.dtype("u1"), "label": np.dtype("i8")}
    assert rows.shapes == {"image": (8, 6), "label": ()}
    assert len(rows) == N


def test_groups_strings_and_fields(cloud):
    records = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")])

    def write(file):
        file["train/text"] = ["eins", "zwei"]
        file["train/record"] = records
        file["train/empty"] = np.zeros((2, 0))

    cloud.put("a.h5", made(write))
    rows = HDF5Dataset(cloud.url("a.h5"), ["train/text", "train/record", "train/empty"])
    text, record, empty = rows[1]
    assert (text, record, empty.shape) == (b"zwei", records[1], (0,))
    list(rows.items([0, 1]))


BYTE_ORDERS = {
    "numbers": np.arange(6, dtype=">f4").reshape(3, 2),
    "flags": np.array([True, False, True]),
    "records": np.array([(1, 2.5), (3, 4.5), (5, 6.5)], dtype=[("a", ">i4"), ("b", "<f8")]),
}


def test_rows_are_in_native_byte_order(cloud):
    def write(file):
        for name, data in BYTE_ORDERS.items():
            file[name] = data
        file.create_dataset("arrays", (3,), np.dtype((">f4", (2,))))[:] = np.arange(6).reshape(3, 2)

    cloud.put("a.h5", made(write))
    names = [*BYTE_ORDERS, "arrays"]
    rows = HDF5Dataset(cloud.url("a.h5"), names)
    assert all(rows.dtypes[name].isnative for name in names)
    for i, sample in enumerate(rows.__getitems__(range(3))):
        for name, row in zip(names, sample, strict=True):
            assert row.dtype.isnative
            np.testing.assert_array_equal(row, BYTE_ORDERS.get(name, BYTE_ORDERS["numbers"])[i])
    numbers, arrays = HDF5Dataset(cloud.url("a.h5"), ("numbers", "arrays")).batch(range(3))  # as tensors
    assert numbers.tolist() == arrays.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_dropped_dataset_does_not_wait_for_the_lock_of_h5py(url):
    """A thread that fetches bytes may collect garbage while a reader holds the lock of h5py and waits for the bytes."""
    held = [HDF5Dataset(url)]
    file = held[0]._file()._file
    with h5py._objects.phil:
        thread = threading.Thread(target=held.clear, daemon=True)
        thread.start()
        thread.join(600)
        assert not thread.is_alive()
    assert file.id.valid
    HDF5Dataset(url)  # the next read closes it
    assert not file.id.valid


def epoch_of(rows, monkeypatch):
    """Return the offsets that HDF5 read in a shuffled epoch, all that it read, and the bytes read from the cache."""
    reads, readinto = [], hdf5_dataset._Bytes.readinto

    def recording(self, buffer):
        reads.append(self._position)
        return readinto(self, buffer)

    before = rows.fs.stats().bytes_served
    with monkeypatch.context() as patch, Loader(rows, batch_size=10, shuffle="window", n_threads=1) as loader:
        patch.setattr(hdf5_dataset._Bytes, "readinto", recording)
        samples = [int(label) for batch in loader for label in batch[1]]
    assert sorted(samples) == sorted(LABELS.tolist())
    return reads, rows.fs.stats().bytes_served - before


def test_a_chunk_of_a_window_is_read_and_decompressed_once(cloud, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 255, (N, 400, 100), dtype="u1")
    size = len(cloud.put("a.h5", pairs(noise, chunks=(5, 400, 100), compression="gzip")))
    rows = HDF5Dataset(cloud.url("a.h5"))
    reads, n_bytes = epoch_of(rows, monkeypatch)
    starts = [start for group in range(41) for start, _ in rows._file().columns["image"].pieces(group)]
    assert [reads.count(start) for start in starts] == [1] * 41
    # A chunk of images is 195 KiB; the rest is what buffers read beyond the ends.
    assert n_bytes <= size + 64 * KiB
    kept, _ = epoch_of(rows, monkeypatch)
    assert not {*kept} & {*starts}  # HDF5 caches all of them


# Cost in requests.


def test_a_batch_requests_its_blocks_at_once_and_then_nothing(cloud):
    cloud.put("a.h5", made(large))
    rows = HDF5Dataset(cloud.url("a.h5"), storage_options={"cachedfs": {"read_ahead": 0}})
    n_opening = len(cloud.asked())
    assert n_opening <= 3
    batch = rows.__getitems__([60, 20, 40, 22, 61])
    assert cloud.server.peak_concurrency > 1
    # Chunks do not start at blocks, and readahead of the opening may still arrive.
    assert 1 <= len(cloud.asked()) <= 6
    assert [int(image[7]) for image, _ in batch] == [int(label) for _, label in batch] == [60, 20, 40, 22, 61]
    rows.__getitems__([22, 61, 41])
    assert cloud.asked() == []


def test_the_headers_of_all_members_are_fetched_in_one_round_trip(cloud):
    def write(file):
        for i in range(6):
            file[f"{i}"] = file[f"group/{i}"] = wide()[:4]

    cloud.put("a.h5", made(write))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", target_options=cloud.options["gs"], read_ahead=0)
    path, rounds = cloud.path("a.h5"), []

    def before(group):
        rounds.append(len(cloud.asked()))
        hdf5_layout.fetch_headers(fs, path, group)
        assert len(cloud.asked()) > 1

    with fs.open(path) as raw, h5py.File(raw) as file:
        assert len(dict(hdf5_layout.members_of(file["/"], before=before))) == 13
    assert [*rounds[1:], len(cloud.asked())] == [0, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_items_contain_the_bytes_of_the_rows(cloud, layout):
    data = cloud.put("a.h5", pairs(**LAYOUTS[layout]))
    rows = HDF5Dataset(cloud.url("a.h5"))
    # Everything else is erased; HDF5 has its metadata in memory already.
    kept = np.zeros(len(data), bool)
    for path, start, stop in rows.items([7, 150]):
        assert path == cloud.path("a.h5")
        kept[start:stop] = True
    wiped = np.where(kept, np.frombuffer(data, "u1"), 255).astype("u1").tobytes()
    file = rows._file()
    file._bytes._file = io.BytesIO(wiped)
    file._version = None
    check(rows.__getitems__([7, 150]), [7, 150])


# Processes and threads.


def test_threads_read_concurrently(cloud):
    cloud.put("a.h5", pairs(**LAYOUTS["chunked in two"]))
    rows = HDF5Dataset(cloud.url("a.h5"))

    def read(seed):
        for indexes in np.random.default_rng(seed).integers(0, N, (40, 8)):
            check(rows.__getitems__(indexes), indexes)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(read, range(6)))


# Errors.


UNKNOWN = 299  # number of no filter


def filtered(file):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((2,))
    properties.set_filter(UNKNOWN, h5py.h5z.FLAG_OPTIONAL)
    space, kind = h5py.h5s.create_simple((4,)), h5py.h5t.NATIVE_INT8
    h5py.h5d.create(file.id, b"filtered", kind, space, properties)


def unusual(file):
    """Write datasets that have no samples in common, or cannot be read."""
    filtered(file)
    file["group/scalar"] = 3
    file["image"], file["label"] = IMAGES, LABELS[:-1]
    for name, dtype in (("big", ">i4"), ("little", "<i4")):
        file.create_dataset(name, (1,), dtype=h5py.vlen_dtype(np.dtype(dtype)))[0] = np.array([1], dtype)
    assert file["big"][0].tolist() != [1]  # else there is nothing to refuse any more


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("images", "'images' is not a dataset there; .*'image', 'label'"),
        ((), "'' is not a dataset there; the datasets are 'big', 'filtered', 'group/scalar', 'image'"),
        (("image", "label", "image"), r"expected each name once, and 'image' occurs twice in \["),
        ("group", "'group' is not a dataset"),
        ("group/scalar", "'group/scalar' has no rows"),
        (("image", "label"), r"unequal length have no common samples: \{'image': 203, 'label': 202\}"),
        (("little", "big"), "'big' has rows of their own lengths of >i4, .*h5py"),
        ("filtered", "'filtered' is encoded by HDF5 filter 299, .*: pip install hdf5plugin, and `import"),
    ],
)
def test_datasets_without_common_or_readable_rows_are_refused(tmp_path, monkeypatch, names, message):
    monkeypatch.setattr(hdf5_layout, "PLUGINS", ())
    (tmp_path / "a.h5").write_bytes(made(unusual))
    with pytest.raises(ValueError, match=rf"a\.h5: .*{message}"):
        HDF5Dataset(tmp_path / "a.h5", names)
    assert HDF5Dataset(tmp_path / "a.h5", "little")[0].tolist() == [1]


def test_a_process_imports_the_filters_that_are_installed(cloud, monkeypatch, tmp_path):
    """A spawned worker has none of the imports of its parent."""
    (tmp_path / "our_filters.py").write_text(
        f"import h5py\nh5py.h5z.filter_avail = {{{UNKNOWN}}}.__contains__\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(h5py.h5z, "filter_avail", h5py.h5z.filter_avail)  # restored at the end
    monkeypatch.setattr(hdf5_layout, "PLUGINS", ("not_installed", "our_filters"))
    cloud.put("a.h5", made(filtered))
    assert HDF5Dataset(cloud.url("a.h5"), "filtered")[3] == 0


def test_data_in_other_files_is_refused_and_does_not_end_the_process(tmp_path):
    virtual.write(tmp_path / "a.h5")
    for name, what in (("x", "virtual dataset over"), ("y", "virtual dataset over"), ("group/x", "link to")):
        with pytest.raises(
            ValueError, match=rf"a\.h5: '{name}' is a {what} another file, 'part\.h5', which is not read"
        ):
            HDF5Dataset(tmp_path / "a.h5", name)
    assert HDF5Dataset(tmp_path / "a.h5", "own")[1] == 2


def test_soft_links_are_followed_to_another_file_too(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(3)  # which HDF5 would confuse with that of the other file
        file["group/external"] = h5py.ExternalLink("part.h5", "x")
        file["group/folder"] = h5py.ExternalLink("part.h5", "/")
        file["group/own"] = np.arange(3) * 2
        links = {
            "soft": "/group/near",
            "group/near": "external",
            "into": "group/./folder",
            "good": "group/own",
        }
        for name, target in (
            links | {"around": "/again", "again": "/around", "astray": "/nowhere/x"}
        ).items():
            file[name] = h5py.SoftLink(target)
    other_file, cycle = "a link to another file, 'part.h5', .*as one file", "a link that leads back to itself"
    for name, what in {
        "soft": other_file,
        "into/x": other_file,
        "astray": "not a dataset there",
        "again/x": cycle,
    }.items():
        with pytest.raises(ValueError, match=f"a.h5: .*'{name}' is {what}"):
            HDF5Dataset(tmp_path / "a.h5", name)
    assert HDF5Dataset(tmp_path / "a.h5", "good")[2] == 4


def test_a_damaged_chunk_is_an_error_that_names_file_dataset_and_samples(cloud):
    content = bytearray(
        made(lambda file: file.create_dataset("x", data=LABELS, chunks=(50,), fletcher32=True))
    )
    with h5py.File(io.BytesIO(content)) as file:
        content[file["x"].id.get_chunk_info(1).byte_offset] ^= 1
    cloud.put("a.h5", bytes(content))
    rows = HDF5Dataset(cloud.url("a.h5"), "x")
    assert rows[3] == 30
    with pytest.raises(OSError, match=r"/a\.h5: 'x': h5py cannot read sample 60: "):
        rows[60]
    with pytest.raises(OSError, match=r"/a\.h5: 'x': h5py cannot read samples 61 to 63: "):
        rows.__getitems__([63, 61])


def test_a_file_that_is_not_hdf5_is_named(cloud):
    cloud.put("a.h5", b"no" * 1000)
    with pytest.raises(OSError, match=r"a\.h5: not an HDF5 file that h5py can read: .*signature"):
        HDF5Dataset(cloud.url("a.h5"))
    cloud.put("b.h5", pairs()[:-2000])
    with pytest.raises(OSError, match=r"b\.h5: not an HDF5 file that h5py can read: .*truncated"):
        HDF5Dataset(cloud.url("b.h5"))
    with pytest.raises(ObjectNotFound, match=r"c\.h5"):
        HDF5Dataset(cloud.url("c.h5"))


def test_versions_are_never_mixed(cloud):
    cloud.put("a.h5", made(large))
    rows = HDF5Dataset(cloud.url("a.h5"), storage_options={"cachedfs": {"read_ahead": 0}})
    rows[0]
    cloud.put(
        "a.h5", made(lambda file: file.create_dataset("image", data=255 - wide(), chunks=(4, 256 << 10)))
    )
    with pytest.raises(ObjectChanged, match=r"a\.h5"):
        rows.__getitems__([20, 40, 60])
    with pytest.raises(ObjectChanged, match=r"a\.h5"):
        rows[30]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"images": IMAGES[:5, :4], "labels": LABELS[:5]},
            r"'image' is 5 rows of uint8\[4, 6\], and was 203 rows of uint8\[8, 6\]",
        ),
        ({"labels": LABELS.astype("f4")}, r"'label' is 203 rows of float32\[\], and was 203 rows of int64"),
    ],
)
def test_a_process_that_opens_a_different_file_reports_it(cloud, changed, message):
    cloud.put("a.h5", pairs())
    rows = pickle.dumps(HDF5Dataset(cloud.url("a.h5"), storage_options={"cachedfs": {"max_age": 0}}))
    cloud.put("a.h5", pairs(**changed))
    forget()
    copy = pickle.loads(rows)
    for _ in range(2):
        with pytest.raises(
            ObjectChanged, match=rf"/a\.h5: replaced since the dataset was created: {message}.*again$"
        ):
            copy[0]


def test_a_file_replaced_right_after_opening_is_read_in_one_version(tmp_path, monkeypatch):
    memory = fsspec.filesystem("memory")

    def put(value):
        with io.BytesIO() as written:
            with h5py.File(written, "w") as file:
                file.create_dataset("x", data=np.full((400, 1000), value, "i4"), chunks=(10, 1000))
            memory.pipe_file("/replaced/a.h5", written.getvalue())

    put(1)
    opened = CachedFileSystem._open

    def then_replaced(self, path, *given, **options):
        file = opened(self, path, *given, **options)
        put(2)
        return file

    monkeypatch.setattr(CachedFileSystem, "_open", then_replaced)
    options = {"cachedfs": {"cache_dir": str(tmp_path), "max_age": 0}}
    dataset = HDF5Dataset("cachedfs::memory://replaced/a.h5", "x", storage_options=options)
    monkeypatch.setattr(CachedFileSystem, "_open", opened)
    found = []
    for numbers in ([0, 100, 200], [300]):
        with contextlib.suppress(ObjectChanged):
            found += [int(row[0]) for row in dataset.__getitems__(numbers)]
    assert set(found) <= {1}
