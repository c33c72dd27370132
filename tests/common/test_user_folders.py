"""Folders of a user without a home folder, or with one that cannot be written."""

import os
import stat
from functools import partial

import platformdirs
import pytest

from cachedfs.common.user_folders import found_folder, writable_folder

of_cache = partial(platformdirs.user_cache_dir, "cachedfs")


def test_a_folder_of_the_home_is_made_and_without_a_home_a_private_one(no_home, tmp_path, monkeypatch):
    assert found_folder(of_cache) is None
    assert found_folder(lambda: "~/.cache") is None  # of an older platformdirs
    private = writable_folder(of_cache)
    assert private == writable_folder(of_cache) == str(no_home / f"cachedfs-{os.getuid()}")
    assert stat.S_IMODE(os.stat(private).st_mode) == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert found_folder(of_cache) == writable_folder(of_cache) == str(tmp_path / "home" / "cachedfs")
    assert os.listdir(tmp_path / "home") == ["cachedfs"]


@pytest.mark.parametrize("kind", ["symlink", "file", "writable by others", "of another user"])
def test_a_private_folder_that_another_user_may_control_is_refused(no_home, tmp_path, monkeypatch, kind):
    private = no_home / f"cachedfs-{os.getuid()}"
    if kind == "symlink":
        private.symlink_to(tmp_path)
    elif kind == "file":
        private.write_text("in the way")
    else:
        private.mkdir(0o700)
        if kind == "writable by others":
            private.chmod(0o770)
        else:
            owner = private.stat().st_uid
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
            private.rename(no_home / f"cachedfs-{owner + 1}")
    with pytest.raises(PermissionError, match="set HOME or TMPDIR"):
        writable_folder(of_cache)
