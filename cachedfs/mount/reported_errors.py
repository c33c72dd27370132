"""The errors of a mount's calls: the errno that a program sees, and what that cannot say in the log."""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from cachedfs.errors import OriginUnavailable, OriginUnreachable
from cachedfs.mount.inodes import StaleInode

logger = logging.getLogger("cachedfs.mount")

_EXPECTED = {
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.EROFS, errno.EPERM,
    errno.EILSEQ,  # a name that is not UTF-8
    errno.ENAMETOOLONG, errno.EINVAL,
}  # fmt: skip


def reported(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turn every exception into OSError with an errno, and log those that programs do not expect.

    The object of the method has `_fs`, and `_subject`, which gets the arguments and says what the call is about.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except Exception as error:  # of any kind: the kernel takes nothing but an errno
            code = _errno_of(error, is_offline=self._fs.config.offline)
            if code not in _EXPECTED and not isinstance(error, StaleInode):
                logger.error(
                    "%s of %s: %s", method.__name__, self._subject(*args), error or type(error).__name__
                )
            raise OSError(code, os.strerror(code)) from error

    return call


def _errno_of(error: Exception, *, is_offline: bool) -> int:
    if isinstance(error, UnicodeError):
        return errno.EILSEQ
    if isinstance(error, OriginUnavailable) and not (is_offline or isinstance(error, OriginUnreachable)):
        return errno.EIO  # the network is there: the service is busy or broken
    return getattr(error, "errno", None) or errno.EIO
