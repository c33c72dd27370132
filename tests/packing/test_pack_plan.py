"""The plan of a pack: chunk and shard shapes, and the memory it takes."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.packing.layout import choose_codec, default_shard_size, shapes_of, shard_sizes, small_fields
from cachedfs.packing.pack_types import Field
from cachedfs.packing.runner import PackProgress
from cachedfs.packing.shard_encoder import ArrayEncoding
from cachedfs.packing.sources.detect import kind_of
from cachedfs.packing.task import ArrayWriter
from tests.support import ROOT, MiB


@pytest.mark.parametrize(
    ("paths", "head", "kind"),
    [
        (["b/x.jsonl"], b"{", "jsonl"),
        (["b/0.jsonl.gz", "b/1.JSONL.gz"], b"", "jsonl"),
        (["b/x.txt"], b"", "lines"),
        (["b/0.txt", "b/1.txt"], b"", "files"),
        (["b/x.tsv.bz2"], b"", "csv"),
        (["b/part-0"], b"PAR1....", "parquet"),
        (["b/data"], b"\x89HDF\r\n\x1a\n", "hdf5"),
        (["b/data"], bytes(257) + b"ustar\0" + bytes(249), "tar"),
        (["b/x.tar", "b/y.jpg"], b"nothing known", "files"),
    ],
)
def test_the_kind_of_source_is_detected_by_names_and_first_bytes(paths, head, kind):
    assert kind_of(paths, head) == kind


fields = st.builds(
    lambda dtype, shape, is_ragged: Field("x", dtype, () if is_ragged else tuple(shape), is_ragged),
    st.sampled_from(["uint8", "float32", "int64"]),
    st.lists(st.integers(1, 2000), max_size=3),
    st.booleans(),
)


@given(fields, st.floats(0, 1e10), st.none() | st.integers(1 << 10, 1 << 30), st.integers(1 << 10, 1 << 30))
def test_shards_are_whole_chunks_and_no_larger_than_requested(field, mean, chunk, shard):
    inner, outer, _ = shapes_of(field, mean, chunk=chunk, shard=shard, why="")
    assert all(whole % part == 0 for whole, part in zip(outer, inner, strict=True))
    size, one = (np.prod(part, dtype=float) * np.dtype(field.dtype).itemsize for part in (outer, inner))
    assert size <= max(shard, one)
    assert one <= max(chunk or MiB, field.row_size)


def test_small_fields_and_codecs_are_chosen_by_measurement():
    means = {"image": 100_000.0, "label": 8.0, "caption": 3000.0, "mask": 20_000.0}
    assert small_fields(means) == {"label", "caption"}
    assert small_fields({"label": 8.0}) == set()
    assert len(small_fields({str(i): 8.0 for i in range(30)})) == 3
    assert choose_codec({"lz4": 0.99, "zstd": 0.95})[0] == "none"
    assert choose_codec({"lz4": 0.6, "zstd": 0.58})[0] == "lz4"
    assert choose_codec({"lz4": 0.6, "zstd": 0.4}) == (
        "zstd",
        "samples are lz4 60 %, zstd 40 % of their size",
    )
    assert default_shard_size("drive")[0] > default_shard_size("gs")[0]
    # The shards of all fields cover the same samples.
    assert shard_sizes({"image": 9000.0, "mask": 900.0}, 40 * MiB) == {"image": 40 * MiB, "mask": 4 * MiB}


def test_damaged_progress_is_ignored_and_names_are_distinct():
    progress = PackProgress()
    progress.starts = {"x": [0, 2, 7]}
    progress.rows = {name: np.array([i]) for i, name in enumerate(["a", "a.npy", "arr_0", "x/y", "süß"])}
    progress.skipped = {3: "no image"}
    data = progress.as_bytes()
    assert vars(PackProgress.from_bytes(data)) == vars(progress)
    for i in range(0, len(data), 7):
        assert vars(PackProgress.from_bytes(data[:i])) == vars(PackProgress())
        for bits in (1, 0xFF):
            damaged = PackProgress.from_bytes(data[:i] + bytes([data[i] ^ bits]) + data[i + 1 :])
            assert vars(damaged) in (vars(progress), vars(PackProgress()))


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(1, 7), st.sets(st.integers(0, 20)), st.booleans())
def test_rows_are_cut_into_shards_wherever_batches_end(sizes, n_rows, others, is_resumed):
    encoding = ArrayEncoding("int64", (), (n_rows,), (n_rows,), "none")
    found, rows, at = {}, np.arange(sum(sizes)), 0

    def emit(name, index, values):
        assert index not in found
        found[index] = values.tolist()

    writer = ArrayWriter("x", encoding, emit, lambda name, index: index not in others)
    for size in sizes:
        writer.add(rows[at : at + size])
        at += size
        if is_resumed and not others:
            again = ArrayWriter("x", encoding, emit)
            again.restore(writer.length, writer.rest)
            writer = again
    writer.finish()
    wanted = {i: rows[i * n_rows : (i + 1) * n_rows].tolist() for i in range(-(-len(rows) // n_rows))}
    assert found == {i: each for i, each in wanted.items() if i not in others}


MEMORY = """
    import re, sys
    from cachedfs.datasets import pack
    done = pack(sys.argv[1], sys.argv[2], n_workers=4)
    # Not getrusage: it counts what the parent had when this process was started.
    print(done.samples, int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is read from /proc")
@pytest.mark.parametrize(
    "kind",
    ["jsonl", *(pytest.param(kind, marks=pytest.mark.stress) for kind in ("one file", "lines", "parquet"))],
)
def test_memory_stays_below_a_gigabyte(folder, kind):
    names = {"one file": "x.bin", "lines": "x.txt", "jsonl": "x.jsonl", "parquet": "x.parquet"}
    source = folder / names[kind]
    with open(source, "wb") as file:
        if kind == "one file":
            file.truncate(1500 * MiB)
        elif kind == "parquet":  # one row group, 290 MB decoded
            texts = pyarrow.array([bytes([65 + i % 26]) * 240_000 for i in range(100)])
            table = pyarrow.table({"text": texts.take(np.arange(1200) % 100)})
            pyarrow.parquet.write_table(table, file)
        else:
            line = b'{"text": "%s", "label": 3}\n' % (b"word " * 100)
            file.write(line * (200 * MiB // len(line)))
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(source), str(folder / "out.zarr")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    samples, peak = map(int, done.stdout.split())
    assert samples >= 1
    assert peak < 1000, f"{peak} MiB"


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    from cachedfs.datasets import pack

    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n')
    (tmp_path / "x.png").write_bytes(b"")
    for module in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "distributed", None)
    for name in ("text_lines", "json_lines"):
        monkeypatch.delitem(sys.modules, f"cachedfs.packing.sources.{name}", raising=False)
    with pytest.raises(ImportError, match=r"packing jsonl needs pyarrow: pip install 'cachedfs\[pack\]'"):
        pack(str(tmp_path / "x.jsonl"), str(tmp_path / "out.zarr"))
    with pytest.raises(ImportError, match="needs Pillow: pip install pillow"):
        pack(str(tmp_path / "x.png"), str(tmp_path / "out.zarr"), decode="image")
    with pytest.raises(ImportError, match="pip install distributed"):
        pack([str(tmp_path / "x.png")], str(tmp_path / "out.zarr"), client="tcp://127.0.0.1:1")
