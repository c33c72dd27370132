"""Every example runs as it is: offline, on a simulated cloud."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FIRST_PASS = {"drive_folder.py": 200, "small_files.py": 201}  # requests: of the files, and of a listing


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_its_second_pass_asks_nobody(path):
    assert len(path.read_text().splitlines()) < 80
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    requests = [int(n) for n in re.findall(r"(\d+) requests", done.stdout)]
    assert requests == [FIRST_PASS[path.name], 0], done.stdout
