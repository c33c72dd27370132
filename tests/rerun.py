"""Run pytest, and run failed tests once more alone: `python -m tests.rerun ARGS`.

A test that passes the second time does not fail the run. Its name is printed under "FLAKY" and added to `flaky.txt`.
"""

import pathlib
import subprocess
import sys

import pytest

REPORT = pathlib.Path("flaky.txt")


class Failures:
    """A plugin of pytest that notes the tests that fail."""

    def __init__(self):
        self.names = []

    def pytest_runtest_logreport(self, report):
        if report.failed and report.nodeid not in self.names:
            self.names.append(report.nodeid)


def run(args):
    """Return the exit code of pytest, or 0 where every failed test passes when it is run again alone."""
    failures = Failures()
    code = pytest.main(args, plugins=[failures])
    is_cut_short = any(arg == "-x" or arg.startswith(("--exitfirst", "--maxfail")) for arg in args)
    if code != pytest.ExitCode.TESTS_FAILED or is_cut_short or not failures.names:
        return code
    print("\nThe tests that failed are run once more, alone.", flush=True)
    again = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-rp", *failures.names], stdout=subprocess.PIPE, text=True
    )
    print(again.stdout)
    passed = {
        line.removeprefix("PASSED ") for line in again.stdout.splitlines() if line.startswith("PASSED ")
    }
    flaky = [name for name in failures.names if name in passed]
    if flaky:
        print("FLAKY", *flaky, sep="\n")
        with REPORT.open("a") as file:
            file.writelines(f"{name}\n" for name in flaky)
    return 0 if flaky == failures.names else code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
