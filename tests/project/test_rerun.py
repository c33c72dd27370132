"""`tests.rerun`: a test that passes the second time is flaky; any other failure fails the run."""

import os
import subprocess
import sys

from tests.support import ROOT

TESTS = """
import pathlib, pytest

def test_passes(): pass

def test_fails_once():
    marker = pathlib.Path("ran")
    ran = marker.exists()
    marker.touch()
    assert ran

def test_fails(): assert False
"""


def test_only_a_test_that_passes_the_second_time_does_not_fail_the_run(tmp_path):
    (tmp_path / "test_example.py").write_text(TESTS)
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    command = [sys.executable, "-m", "tests.rerun", "-n", "0", "-k"]
    environment = os.environ | own

    def run(which):
        return subprocess.run(
            [*command, which], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    assert run("test_fails").returncode == 1
    assert (tmp_path / "flaky.txt").read_text() == "test_example.py::test_fails_once\n"
    (tmp_path / "ran").unlink()
    done = run("test_fails_once")
    assert done.returncode == 0, done.stdout
    assert "FLAKY\ntest_example.py::test_fails_once\n" in done.stdout
