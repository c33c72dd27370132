"""The demo's job on little data: what it prints is true, and it says so when it is not."""

import dataclasses
import io
import os
import pathlib
import subprocess
import sys
import time

import pytest
from rich.console import Console

from cachedfs import demo

ROOT = pathlib.Path(__file__).parent.parent
N_TEXTS, N_IMAGES, SIDE = 100, 100, 64


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return list(demo.run(folder, profile="off", n_texts=N_TEXTS, n_images=N_IMAGES, side=SIDE))


def printed(rows, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(demo.table_of(rows))
    return console.file.getvalue()


def test_all_bytes_are_right(rows):
    assert len(rows) == 9
    assert all(row.is_right for row in rows)
    assert not dataclasses.replace(rows[0], expected="another digest").is_right


def test_only_the_first_pass_asks_the_cloud(rows):
    for row in rows:
        if row.when == "first":
            assert row.cached.requests > 0
        else:
            assert (row.cached.requests, row.cached.sent) == (0, 0)
            assert row.cached.hits > 0


def test_the_first_pass_fetches_everything_once(rows):
    first = [row for row in rows if row.when == "first"]
    texts, by_xarray, by_zarr = (row.cached for row in first)
    assert texts.requests <= N_TEXTS + 1  # and one listing
    assert texts.sent == first[0].plain.sent
    for images in (by_xarray, by_zarr):
        assert N_IMAGES * SIDE**2 <= images.sent < 1.2 * N_IMAGES * SIDE**2


def test_a_sample_is_scaled_and_marked(rows):
    by_zarr = rows[-1]
    assert by_zarr.part == demo.PART
    assert by_zarr.times_faster == by_zarr.plain.seconds * demo.PART / by_zarr.cached.seconds
    assert f"~{by_zarr.plain.requests * demo.PART}" in printed(rows, 120)


def test_the_table_fits_80_columns(rows):
    text = printed(rows, 80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert max(map(len, demo.LEGEND.splitlines())) <= 80


def test_a_failure_names_the_url_and_the_cause(tmp_path):
    from cachedfs.sim import GCSServer

    with (
        GCSServer(folder=tmp_path / "cloud", process=True) as server,
        demo.Session(server, tmp_path / "cache") as session,
        pytest.raises(RuntimeError, match=r"(?s)zarr of cachedfs::gs://demo/nothing failed:.*NotFoundError"),
    ):
        session.read("zarr", "demo/nothing", seed=0)


def test_a_missing_package_is_one_sentence_with_the_command(monkeypatch):
    monkeypatch.setattr(demo, "NEEDED", {"no_such_module": "no-such-package"})
    with pytest.raises(SystemExit) as exit_:
        demo.main([])
    assert exit_.value.code == "The demo needs no-such-package: pip install no-such-package"


def test_interrupted_it_leaves_nothing_behind(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cachedfs.demo"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True
    )
    with process:
        for line in process.stdout:
            if line.startswith("... reading"):
                break
        os.killpg(process.pid, 2)  # what Ctrl-C does: all of the terminal's processes get it
        assert process.wait(30) == 130
    assert list(tmp_path.iterdir()) == []
    # A reader that was just being started notices that nobody gives it orders, and ends.
    deadline = time.monotonic() + 20
    while is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(process.pid)


def is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
