"""What a program loads that only imports cachedfs, or only creates a filesystem.

Each module takes 0.2 to 3 ms. What reads, writes and stores is imported with the first use of it.
"""

import os
import subprocess
import sys

MOST_IMPORTED, MOST_CREATED = 5, 32  # modules of cachedfs
SLOW = {"aiohttp", "google", "gcsfs", "platformdirs", "secrets", "sqlite3", "zlib_ng"}


def loaded(code, cache_dir):
    """Return the modules that a new process has loaded after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"],
        env=os.environ | {"FSSPEC_CACHEDFS_CACHE_DIR": str(cache_dir)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def ours(modules):
    return {name.removeprefix("cachedfs") for name in modules if name.partition(".")[0] == "cachedfs"}


def test_what_an_import_loads(tmp_path):
    assert len(ours(loaded("import cachedfs", tmp_path))) <= MOST_IMPORTED


def test_what_the_first_filesystem_loads(tmp_path):
    before = loaded("import fsspec", tmp_path)
    after = loaded("import fsspec; fsspec.filesystem('cachedfs', target_protocol='gs')", tmp_path)
    assert len(ours(after)) <= MOST_CREATED, sorted(ours(after))
    assert not (after - before) & SLOW
    assert list(tmp_path.iterdir()) == []
