"""The system calls of the cache, and how a test replaces one of them in the whole cache and nowhere else."""

import operator
import sys

from cachedfs.cache import disk

# The functions of `disk`, and what the other modules call directly; but for calls that cannot fail and change nothing.
CALLS = [
    *(name for name, it in vars(disk).items() if getattr(it, "__module__", "") == disk.__name__ and name[0].islower()), "fcntl.lockf", "os.access", "os.chmod", "os.close", "os.fstat",
    "os.link", "os.lstat", "os.makedirs", "os.open", "os.path.exists", "os.pread", "os.preadv", "os.pwrite", "os.rename", "shutil.rmtree",
]  # fmt: skip


class _Overlay:
    """A module in which one name has another value."""

    def __init__(self, module, name, value):
        self._module = module
        setattr(self, name, value)

    def __getattr__(self, name):
        return getattr(self._module, name)


def real_call(call):
    """Return a function by its name in `CALLS`."""
    module, _, name = call.rpartition(".")
    return operator.attrgetter(name)(sys.modules[module] if module else disk)


def replace_call(patch, call, function):
    """Make the cache call `function` in place of a call named as in `CALLS`."""
    module, _, names = call.partition(".")
    if not names:
        patch.setattr(disk, call, function)
        return
    for user in _users_of_disk():
        if hasattr(user, module):
            patch.setattr(user, module, _overlay(getattr(user, module), names.split("."), function))


def _users_of_disk():
    """Return the modules of the cache, and the one that calls `os.access` for it."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(("cachedfs.cache.", "cachedfs.common.user_folders")) and module is not disk
    ]


def _overlay(module, names, function):
    name, *rest = names
    return _Overlay(module, name, _overlay(getattr(module, name), rest, function) if rest else function)
