"""Run pytest, and run failed tests once more alone: `python -m tests.rerun ARGS`.

A test that passes the second time does not fail the run. Its name is printed under "FLAKY" and added to `flaky.txt`.
"""

import pathlib
import subprocess
import sys

REPORT = pathlib.Path("flaky.txt")
TESTS_FAILED = 1  # pytest's exit code; others mean that the run itself went wrong


def run(args, report=REPORT):
    """Return the exit code of pytest, or 0 where every failed test passes when it is run again alone."""
    pytest = [sys.executable, "-m", "pytest"]
    code = subprocess.call([*pytest, "--cache-clear", *args])
    if code != TESTS_FAILED:
        return code
    print("\nThe tests that failed are run once more, alone.", flush=True)
    again = subprocess.run(
        [*pytest, *args, "-n", "0", "--last-failed", "--last-failed-no-failures=none", "-rp"],
        stdout=subprocess.PIPE,
        text=True,
    )
    print(again.stdout)
    flaky = [line.removeprefix("PASSED ") for line in again.stdout.splitlines() if line.startswith("PASSED ")]
    if flaky:
        print("FLAKY", *flaky, sep="\n")
        with report.open("a") as file:
            file.writelines(f"{name}\n" for name in flaky)
    return again.returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
