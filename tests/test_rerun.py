"""`tests.rerun`: a test that fails once is named as flaky; one that fails twice fails the run."""

import pytest

from tests import rerun

FAILS_ONCE = """
import pathlib

def test_passes(): pass

def test_fails_once():
    marker = pathlib.Path({marker!r})
    ran = marker.exists()
    marker.touch()
    assert ran
"""
FAILS_TWICE = FAILS_ONCE + "\ndef test_fails(): assert False\n"


@pytest.mark.parametrize(("code", "status"), [(FAILS_ONCE, 0), (FAILS_TWICE, 1)])
def test_only_a_test_that_fails_twice_fails_the_run(tmp_path, monkeypatch, capfd, code, status):
    monkeypatch.chdir(tmp_path)
    tests = tmp_path / "test_example.py"
    tests.write_text(code.format(marker=str(tmp_path / "ran")))
    report = tmp_path / "flaky.txt"
    args = [f"--rootdir={tmp_path}", "-c", "/dev/null", "-q", tests.name]
    assert rerun.run(args, report) == status
    assert report.read_text() == "test_example.py::test_fails_once\n"
    assert "FLAKY\ntest_example.py::test_fails_once\n" in capfd.readouterr().out
