"""The demo on little data: right bytes, exact request counts, the printed table, failures."""

import io
import multiprocessing
import os
import subprocess
import sys
import textwrap

import pytest
from rich.console import Console

from cachedfs.demo import comparison, jobs
from tests.support import ROOT, until

N_TEXTS, N_IMAGES, SIDE = 100, 100, 64
ORIGINS = ["cachedfs.origins.gcs.origin", "cachedfs.origins.drive.filesystem", "xarray.backends.zarr"]
COUNTS = {"n_texts": N_TEXTS, "n_images": N_IMAGES, "side": SIDE}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["sklearn.datasets", "xarray", "zarr.storage", "gcsfs", *ORIGINS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "PROCESSES", processes)
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # as a reader without cachedfs sets it
        return list(comparison.run(tmp_path_factory.mktemp("demo"), profile="off", **COUNTS))


@pytest.fixture
def blocks(found):
    return [block for _, block in found]


def printed(found, width):
    console = Console(file=io.StringIO(), width=width)
    for protocol, cloud in comparison.CLOUDS.items():
        console.print(comparison.table_of(cloud, [block for where, block in found if where == protocol]))
    return console.file.getvalue()


def block_of(first, rest=1.0, *, plain_s=12.0, part=1):
    """Return a block of the table with made-up numbers."""

    def line(name, seconds):
        return comparison.Line(name, comparison.TimedPass(seconds, 1, 1, 0, ""), True, part)

    return comparison.Block("what", line("plain", plain_s), {}, (line("cached", first), line("cached", rest)))


def test_all_bytes_are_right(found, blocks):
    assert [where for where, _ in found] == ["drive", "drive", "gs", "gs"]
    assert all(len(block.cached) == 3 for block in blocks)
    assert all(line.is_right for block in blocks for line in block.lines)


def test_every_dataset_is_also_read_without_cachedfs(blocks):
    for block in blocks:
        assert block.plain.reading.requests > 0
        assert block.plain.reading.hits == 0


def test_only_the_first_pass_sends_requests(blocks):
    for block in blocks:
        first, *rest = block.cached
        assert first.reading.requests > 0
        for line in rest:
            assert (line.reading.requests, line.reading.sent) == (0, 0)
            assert line.reading.hits > 0


def test_the_first_pass_fetches_everything_once(blocks):
    texts, *arrays = (block.cached[0].reading for block in blocks)
    # For Drive also the parent folders, a listing, and a token of the change feed.
    assert texts.requests <= N_TEXTS + 5
    for images, count in zip(arrays, (N_IMAGES // 4, N_IMAGES, N_IMAGES), strict=True):
        assert count * SIDE**2 <= images.sent < 1.2 * count * SIDE**2


def test_a_sample_is_scaled_except_for_its_opening(blocks):
    pydrive2 = blocks[0].plain
    assert pydrive2.part == comparison.PYDRIVE2.part
    # A lookup and a download per file, one listing, and the path to the folder; an empty file is a lookup and a 416.
    assert 2 * N_TEXTS < pydrive2.reading.requests < 2 * N_TEXTS + 8
    assert blocks[3].plain.part == comparison.GCSFS.part


def test_the_compared_bytes_are_those_of_the_sample():
    data = comparison.Data("", "", [b"a", b"b", b"c", b"d"], 4, 4)
    chosen = sorted(jobs.drawn(4, seed=1, part=2))
    assert len(chosen) == 2
    assert data.digest(1, 2) == jobs.digest([data.items[index] for index in chosen])
    assert data.digest(1, 100) != data.digest(), "one is drawn at least"


def test_the_mount_is_computed_from_the_same_files(blocks):
    assert [list(block.modeled) for block in blocks] == [["first pass", "again"]] * 2 + [[]] * 2
    big = comparison.on_a_mount(comparison.Data("", "", [], 120_000_000, 1000))
    assert big == {"first pass": 20 + 1000 * 0.18 + 2.0, "again": 0.96}
    small = comparison.on_a_mount(comparison.Data("", "", [], 120_000_000, 10))
    assert small["first pass"] == 10 * 0.18 + 2.0, "a small folder is listed at once"


def test_times_faster_is_relative_to_the_measured_line():
    block = block_of(4.0)
    assert comparison.cells(block, block.cached[0])[-1] == "3.0"
    sampled = block_of(4.0, plain_s=2000, part=9)
    assert comparison.cells(sampled, sampled.plain) == ["~2,000", "~1"]


def test_everything_printed_fits_80_columns(found):
    text = printed(found, 80)
    assert "…" not in text
    assert "SIMULATED" in comparison.describe("Google Drive", comparison.profiles()["drive"])
    texts = [
        text,
        comparison.LEGEND,
        comparison.YOURS,
        *(comparison.describe("Google Drive", p) for p in comparison.profiles().values()),
    ]
    assert max(len(line) for each in texts for line in each.splitlines()) <= 80


def test_wrong_bytes_are_reported_with_exit_status_1(monkeypatch):
    block = block_of(1.0)
    wrong = block.cached[0]._replace(is_right=False)
    lied = block._replace(cached=(wrong, *block.cached[1:]))
    monkeypatch.setattr(comparison, "run", lambda folder, report: iter([("drive", lied), ("gs", block)]))
    console = Console(file=io.StringIO(), width=80)
    assert comparison.show(console) == 1
    assert "WRONG BYTES: what: cached" in console.file.getvalue()
    assert comparison.YOURS not in console.file.getvalue()
    monkeypatch.setattr(comparison, "run", lambda folder, report: iter([("drive", block), ("gs", block)]))
    assert comparison.show(console) == 0
    assert console.file.getvalue().endswith(f"{comparison.YOURS}\n")


def test_a_failure_names_the_url_and_the_cause(tmp_path):
    from cachedfs.sim import GCSServer

    with (
        GCSServer(folder=tmp_path / "cloud", process=True) as server,
        comparison.ReaderProcess(comparison.Cloud(server, "gs"), tmp_path / "cache", "zarr") as reader,
        pytest.raises(FileNotFoundError) as failed,
    ):
        reader.read("cachedfs::gs://demo/nothing")
    assert failed.value.__notes__ == ["zarr of cachedfs::gs://demo/nothing failed"]


def test_pydrive2_is_retried_where_it_gives_up():
    answers = [OSError("429"), OSError("429"), b"content"]

    def call(path):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert jobs.stubborn(call, "path") == b"content"
    answers += [OSError("1"), OSError("2"), OSError("3")]
    with pytest.raises(OSError, match="3"):
        jobs.stubborn(call, "path")


def test_a_missing_package_is_one_sentence_with_the_command(monkeypatch):
    monkeypatch.setattr(comparison, "NEEDED", {"no_such_module": "no-such-package"})
    with pytest.raises(SystemExit) as exit_:
        sys.exit(comparison.main([]))
    assert exit_.value.code == "The demo needs no-such-package: pip install 'cachedfs[demo]'"


def test_an_interrupted_demo_leaves_nothing_running(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    code = """
        import functools, sys
        from cachedfs.demo import comparison as demo
        demo.run = functools.partial(demo.run, n_texts=10, n_images=10, side=64)
        sys.exit(demo.main([]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True
    )
    with process:
        for line in process.stdout:
            if line.startswith("... reading"):
                break
        os.killpg(process.pid, 2)  # what Ctrl-C does: all processes of the terminal get it
        assert process.wait(120) == 130
    assert list(tmp_path.iterdir()) == []
    # A reader that was being started notices that its pipe is closed, and ends.
    until(lambda: not is_alive(process.pid))


def is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
