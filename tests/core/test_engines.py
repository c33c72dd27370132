"""The default cache directory, also for users without a home folder."""

import os
import stat
import tempfile

import pytest

from cachedfs.config import Config
from cachedfs.core import engines

NAMED_OPTION = "set cache_dir= to choose another folder"


@pytest.fixture(autouse=True)
def nothing_said():
    engines._warn.cache_clear()


def root_of_default():
    engines._close_all()  # as in a new process
    cache = engines.engine_for(Config()).cache
    return cache.root


def no_home_at_all(tmp_path, monkeypatch):
    return "this user has no home folder, so cachedfs caches in "


def home_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))
    return f"{tmp_path}/home/.cache cannot be written (Not a directory), so cachedfs caches in "


def home_on_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(engines, "is_network", lambda path: True)
    return f"{tmp_path}/home is on a network file system, so"


@pytest.mark.parametrize("lacking", [no_home_at_all, home_that_cannot_be_written, home_on_a_network])
def test_without_a_home_the_temporary_folder_is_used_with_one_warning(
    no_home, tmp_path, monkeypatch, caplog, lacking
):
    says = lacking(tmp_path, monkeypatch)
    root = root_of_default()
    assert root == root_of_default()
    assert os.path.dirname(root) == str(no_home)
    assert stat.S_IMODE(os.stat(root).st_mode) == 0o700
    (message,) = caplog.messages
    assert message.startswith(says)
    assert message.endswith(f"{no_home}; {NAMED_OPTION}")


def test_where_nothing_can_be_written_nothing_is_cached(no_home, monkeypatch):
    def none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setattr(os, "access", lambda *args, **options: False)
    (no_home / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_home / "file" / ".cache"))
    cache = engines.engine_for(Config()).cache
    assert cache.root is None
    assert "give another cache_dir" in cache.cannot_store
