"""Run with only the dependencies installed: local files are read, and missing packages are named."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import fsspec

import cachedfs
import cachedfs.datasets


def missing(use: Callable[[], object]) -> str:
    """Return the error message about a library that is not installed."""
    try:
        use()
    except ImportError as error:
        return str(error)
    return "nothing was missing"


with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "data").mkdir()
    (Path(folder) / "data" / "key").write_bytes(b"data")
    options = {"cache_dir": f"{folder}/cache", "keep_free": 0}
    with fsspec.open(f"cachedfs::file://{folder}/data/key", cachedfs=options) as file:
        assert file.read() == b"data"
    assert {"cachedfs", "cgs", "drive", "cdrive"} <= set(fsspec.available_protocols())
    for protocol, path in {"gs": "b/k", "drive": "My Drive/k"}.items():
        fs = cachedfs.CachedFileSystem(target_protocol=protocol, **options)
        said = missing(lambda path=path, fs=fs: fs.cat_file(path))
        assert f"cachedfs[{protocol.replace('gs', 'gcs')}]" in said, said
    said = missing(lambda: cachedfs.datasets.ZarrDataset)
    assert "cachedfs[torch]" in said or "cachedfs[zarr]" in said, said
assert cachedfs.__file__.startswith(sys.prefix), f"not the installed package: {cachedfs.__file__}"
