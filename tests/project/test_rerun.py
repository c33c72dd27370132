"""`tests.rerun`: a test that fails once is named as flaky; one that fails twice, or does not run again, fails the run."""

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
FAILS_TWICE = FAILS_ONCE + "\ndef test_fails(): assert False\n"
FAILS_THEN_SKIPS = (
    FAILS_ONCE
    + """
def test_skips(): pytest.skip() if pathlib.Path("skip").exists() else (pathlib.Path("skip").touch(), pytest.fail())
"""
)


@pytest.mark.parametrize(("code", "status"), [(FAILS_ONCE, 0), (FAILS_TWICE, 1), (FAILS_THEN_SKIPS, 1)])
def test_only_a_test_that_passes_the_second_time_does_not_fail_the_run(tmp_path, code, status):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "tests.rerun", "test_example.py", "-n", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout
    assert (tmp_path / "flaky.txt").read_text() == "test_example.py::test_fails_once\n"
    assert "FLAKY\ntest_example.py::test_fails_once\n" in done.stdout
