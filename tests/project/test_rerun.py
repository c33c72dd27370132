"""`tests.rerun`: a test that passes the second time is flaky; any other failure fails the run."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT

FAILS_ONCE = """
import pathlib, pytest

def test_passes(): pass

def test_fails_once():
    marker = pathlib.Path("ran")
    ran = marker.exists()
    marker.touch()
    assert ran
"""
ALSO_OTHERS = (
    FAILS_ONCE
    + """
def test_fails(): assert False

def test_skips(): pytest.skip() if pathlib.Path("skip").exists() else (pathlib.Path("skip").touch(), pytest.fail())
"""
)


def rerun(folder, code, *arguments):
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "test_example.py").write_text(code)
    return subprocess.run(
        [sys.executable, "-m", "tests.rerun", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("code", "processes", "status"), [(FAILS_ONCE, 1, 0), (ALSO_OTHERS, 0, 1)])
def test_only_a_test_that_passes_the_second_time_does_not_fail_the_run(tmp_path, code, processes, status):
    done = rerun(tmp_path, code, "test_example.py", "-n", str(processes))
    assert done.returncode == status, done.stdout
    assert (tmp_path / "flaky.txt").read_text() == "test_example.py::test_fails_once\n"
    assert "FLAKY\ntest_example.py::test_fails_once\n" in done.stdout
    assert "  test_example.py::test_passes\n" in done.stdout  # in the list of the slowest
