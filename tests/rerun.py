"""Run pytest, and run failed tests once more alone: `python -m tests.rerun ARGS`.

A test that passes the second time does not fail the run. Its name is printed under "FLAKY" and added to `flaky.txt`.
"""

import pathlib
import subprocess
import sys

import pytest

REPORT = pathlib.Path("flaky.txt")


class Recorder:
    """A pytest plugin that records which tests fail."""

    def __init__(self):
        self.failed = []

    def pytest_runtest_logreport(self, report):
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


def run(args):
    """Return the exit code of pytest, or 0 if every failed test passes when it is run again alone."""
    recorder = Recorder()
    code = pytest.main(["--durations=10", *args], plugins=[recorder])
    is_cut_short = any(arg == "-x" or arg.startswith(("--exitfirst", "--maxfail")) for arg in args)
    if code == pytest.ExitCode.TESTS_FAILED and recorder.failed and not is_cut_short:
        return rerun(recorder.failed, code)
    return code


def rerun(names, code):
    """Run tests again alone; return 0 if all pass, else `code`."""
    print("\nThe tests that failed are run once more, alone.", flush=True)
    again = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-rp", *names], stdout=subprocess.PIPE, text=True
    )
    print(again.stdout)
    passed = {
        line.removeprefix("PASSED ") for line in again.stdout.splitlines() if line.startswith("PASSED ")
    }
    flaky = [name for name in names if name in passed]
    if flaky:
        print("FLAKY", *flaky, sep="\n")
        with REPORT.open("a") as file:
            file.writelines(f"{name}\n" for name in flaky)
    return 0 if flaky == names else code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
