"""Build the release and test it in new environments: `python -m tests.release`, or `make dist`.

The wheel and the sdist are written to dist/. The wheel built from the sdist must equal that of the tree, byte for byte.
It is installed with its dependencies only, where errors must name the missing packages, and with extras, where a program
and the command line read the simulated cloud. `mypy --strict` checks the types of the installed package.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cachedfs

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
EXTRAS = "cli,gcs,sim"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where wheel and sdist go")
    out = parser.parse_args(arguments).out
    with tempfile.TemporaryDirectory(prefix="cachedfs-release-") as name:
        try:
            wheel = build(out, Path(name))
            try_out(wheel, Path(name))
        except subprocess.CalledProcessError as error:
            print(
                f"{' '.join(map(str, error.cmd))}\n{error.stdout or ''}{error.stderr or ''}", file=sys.stderr
            )
            return 1
        except AssertionError as error:
            print(f"not fit for a release: {error}", file=sys.stderr)
            return 1
    print(f"{wheel.name} and its sdist work where nothing else is installed")
    return 0


def build(out: Path, folder: Path) -> Path:
    """Build wheel and sdist in `out`, compare the wheel of the sdist with that of the tree; return the wheel."""
    for old in [*out.glob("*.whl"), *out.glob("*.tar.gz")]:
        old.unlink()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    run([*command, out, ROOT])  # the sdist of the tree, and its wheel
    run([*command, folder / "of-tree", "--wheel", ROOT])
    [wheel], [sdist], [of_tree] = out.glob("*.whl"), out.glob("*.tar.gz"), (folder / "of-tree").glob("*")
    version = cachedfs.__version__
    names = (wheel.name, sdist.name)
    assert names == (f"cachedfs-{version}-py3-none-any.whl", f"cachedfs-{version}.tar.gz"), names
    assert wheel.read_bytes() == of_tree.read_bytes(), "the sdist makes another wheel than the tree"
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "cachedfs").rglob("*.py")}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wrong = found ^ (modules | {"cachedfs/py.typed"})
    assert not wrong, f"only in the wheel, or only in the tree: {sorted(wrong)}"
    return wheel


def try_out(wheel: Path, folder: Path) -> None:
    """Test the wheel in two environments in parallel; pip mostly waits."""
    with ThreadPoolExecutor(2) as at_once:
        bare = at_once.submit(try_bare, wheel, folder)
        python = environment(folder / "extras", f"{wheel}[{EXTRAS}]")
        types = at_once.submit(check_types, python, folder)
        print(run([python, HERE / "smoke.py"], cwd=folder), end="")
        bare.result()
        types.result()


def try_bare(wheel: Path, folder: Path) -> None:
    """Check that the wheel works with its dependencies only, and names missing packages."""
    python = environment(folder / "bare", str(wheel))
    run([python, HERE / "smoke_bare.py"], cwd=folder)
    script = [python.parent / "cachedfs", "--help"]
    said = subprocess.run(script, capture_output=True, text=True, cwd=folder, check=False).stderr
    assert said == 'The command line needs typer and rich: pip install "cachedfs[cli]"\n', said


def check_types(python: Path, folder: Path) -> None:
    """Check that the installed package has the types that a user's program needs."""
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull]
    mypy += ["--python-executable", python, "--cache-dir", folder / "mypy"]
    run([*mypy, HERE / "typed.py"], cwd=folder)


def environment(folder: Path, what: str) -> Path:
    """Return the Python of a new environment with only a wheel and its dependencies."""
    run([sys.executable, "-m", "venv", "--without-pip", folder])
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python]
    run([*pip, "install", "--no-compile", what])  # most of it is never imported
    return python


def run(command: Sequence[str | Path], cwd: Path = ROOT) -> str:
    """Run a command without this checkout on the path; return its output. Raises CalledProcessError."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FSSPEC_"))
    }
    environ["SOURCE_DATE_EPOCH"] = "1767225600"  # any value, so that two builds are equal
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
