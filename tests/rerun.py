"""Run pytest, and run failed tests once more alone: `python -m tests.rerun ARGS`.

A test that passes the second time does not fail the run. Its name is printed under "FLAKY" and added to `flaky.txt`.
"""

import collections
import pathlib
import subprocess
import sys
import time

import pytest

REPORT = pathlib.Path("flaky.txt")
N_SLOWEST = 10


class Recorder:
    """A pytest plugin that records which tests fail, and how long each one takes."""

    def __init__(self):
        self.failed = []
        self.seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


def run(args):
    """Return the exit code of pytest, or 0 if every failed test passes when it is run again alone."""
    began = time.monotonic()
    recorder = Recorder()
    code = pytest.main(args, plugins=[recorder])
    is_cut_short = any(arg == "-x" or arg.startswith(("--exitfirst", "--maxfail")) for arg in args)
    if code == pytest.ExitCode.TESTS_FAILED and recorder.failed and not is_cut_short:
        code = rerun(recorder.failed, code)
    print(f"\nThe {N_SLOWEST} slowest tests of {time.monotonic() - began:.0f} s:")
    for name, seconds in recorder.seconds.most_common(N_SLOWEST):
        print(f"{seconds:6.1f} s  {name}")
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
