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

N_TEXTS, N_IMAGES, SIDE = 100, 64, 64
NOTHING = comparison.Case("gs://demo/nothing", "no data", [], jobs.ZARR, "gcsfs", jobs.ZARR, 1)
MODULES = ["zarr.storage", "gcsfs", "cachedfs.origins.gcs.origin", "cachedfs.origins.drive.filesystem"]


@pytest.fixture(scope="module")
def quick_processes():
    """Start readers from a process that has already imported what they need."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(MODULES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "PROCESSES", processes)
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # as a reader without cachedfs sets it
        yield


@pytest.fixture(scope="module")
def blocks(tmp_path_factory, quick_processes):
    sizes = {"n_texts": N_TEXTS, "n_images": N_IMAGES, "side": SIDE}
    return list(comparison.run(tmp_path_factory.mktemp("demo"), profile="off", **sizes))


def test_all_bytes_are_right_and_only_the_first_pass_sends_requests(blocks):
    assert [block.case.protocol for block in blocks] == ["drive", "gs"]
    for block in blocks:
        assert all(each.is_right for each in (block.plain, *block.cached))
        assert block.plain.requests > block.plain.hits == 0
        first, *rest = block.cached
        assert first.requests > 0
        assert [(each.requests, each.sent) for each in rest] == [(0, 0), (0, 0)]
        assert all(each.hits for each in rest)
    texts, images = (block.cached[0] for block in blocks)
    # For Drive also the parent folders, a listing, and a token of the change feed.
    assert texts.requests <= N_TEXTS + 5
    assert N_IMAGES * SIDE**2 <= images.sent < 1.2 * N_IMAGES * SIDE**2
    # Of the sample, only the opening is not scaled. A file is a lookup and a download, and the folder has a path and a listing.
    assert 2 * N_TEXTS < blocks[0].plain.requests < 2 * N_TEXTS + 8


def test_what_is_printed_fits_80_columns_and_wrong_bytes_are_reported(blocks, monkeypatch):
    def shown(found):
        monkeypatch.setattr(comparison, "run", lambda folder, report: iter(found))
        console = Console(file=io.StringIO(), width=80)
        return comparison.show(console), console.file.getvalue()

    status, text = shown(blocks)
    assert status == 0
    assert text.endswith(f"{comparison.YOURS}\n")
    assert "SIMULATED" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    wrong = blocks[0].cached[0]._replace(is_right=False)
    status, text = shown([blocks[0]._replace(cached=(wrong, *blocks[0].cached[1:])), blocks[1]])
    assert status == 1
    assert "a call: cachedfs, first pass" in " ".join(text.partition("WRONG BYTES: ")[2].split())
    assert comparison.YOURS not in text


def test_a_failure_names_the_url_and_the_cause(tmp_path, quick_processes):
    from cachedfs.sim import GCSServer

    with (
        GCSServer(folder=tmp_path / "cloud", process=True) as server,
        comparison.ReaderProcess(server, NOTHING, tmp_path / "cache") as reader,
        pytest.raises(FileNotFoundError) as failed,
    ):
        reader.read("cachedfs", seed=0)
    assert failed.value.__notes__ == ["zarr of cachedfs::gs://demo/nothing failed"]


def test_a_missing_package_is_one_sentence_with_the_command(monkeypatch):
    monkeypatch.setattr(comparison, "NEEDED", {"no_such_module": "no-such-package"})
    with pytest.raises(SystemExit) as exit_:
        sys.exit(comparison.main())
    assert exit_.value.code == "The demo needs no-such-package: pip install 'cachedfs[demo]'"


def test_an_interrupted_demo_leaves_nothing_running(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    code = """
        import functools, sys
        from cachedfs.demo import comparison as demo
        demo.run = functools.partial(demo.run, n_texts=10, n_images=10, side=64)
        sys.exit(demo.main())
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
