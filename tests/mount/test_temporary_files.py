"""The folder of the local copies of written files."""

import os
import shutil
import stat
import tempfile

import pytest

from cachedfs.cache.block_store import BlockStore
from cachedfs.mount.temporary_files import temporary_file, temporary_folder
from tests.cache.audit import audit


@pytest.fixture
def cache(tmp_path):
    cache = BlockStore(str(tmp_path / "c"), explicit=True)
    yield cache
    cache.close()


def test_it_is_a_private_folder_in_the_cache_directory(cache):
    folder = temporary_folder(None, cache.root)
    assert os.path.dirname(folder) == cache.root
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert temporary_folder("", cache.root) == folder
    with temporary_file(folder) as file:
        assert file.write(b"1") == 1
        assert os.listdir(folder) == []
        assert audit(cache).ok
    shutil.rmtree(os.path.dirname(cache.root))  # users may delete a cache at any time
    temporary_file(folder).close()
    assert stat.S_IMODE(os.stat(cache.root).st_mode) == 0o700


@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_without_a_usable_cache_directory_it_is_that_of_temporary_files(cache, tmp_path, kind):
    assert temporary_folder(None, None) is None
    folder = temporary_folder(None, cache.root)
    os.rmdir(folder)
    if kind == "a file":
        open(folder, "xb").close()
    else:
        os.symlink(tmp_path, folder)
    assert temporary_folder(None, cache.root) is None
    temporary_file(None).close()


def test_a_named_folder_that_cannot_be_used_is_an_error_that_names_it(cache, tmp_path, monkeypatch):
    assert temporary_folder(str(tmp_path), cache.root) == str(tmp_path)
    missing = tmp_path / "missing"
    with pytest.raises(OSError, match=f"^{missing}: .*No such file or directory; give another folder"):
        temporary_folder(str(missing), cache.root)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(missing))
    assert temporary_folder(".", None) == str(tmp_path)
    with pytest.raises(FileNotFoundError):
        temporary_file(None)
