"""Errors are the builtin classes that callers catch, with errno, and can be pickled."""

import errno
import pickle

import pytest

from cachedfs import errors

CASES = [
    (errors.ObjectNotFound, FileNotFoundError, errno.ENOENT),
    (errors.IsAFolder, IsADirectoryError, errno.EISDIR),
    (errors.AccessDenied, PermissionError, errno.EACCES),
    (errors.NotDownloadable, OSError, errno.ENOTSUP),
    (errors.ObjectExists, FileExistsError, errno.EEXIST),
    (errors.ObjectChanged, OSError, errno.ESTALE),
    (errors.OriginUnavailable, OSError, errno.EHOSTUNREACH),
    (errors.SignInRefused, PermissionError, errno.EACCES),
    (errors.NoSuchBucket, FileNotFoundError, errno.ENOENT),
    (errors.OriginUnreachable, OSError, errno.EHOSTUNREACH),
    (errors.ChecksumMismatch, OSError, errno.EHOSTUNREACH),
    (errors.QuotaExceeded, OSError, errno.EDQUOT),
    (errors.RequestRejected, ValueError, errno.EINVAL),
    (errors.CacheError, OSError, errno.EIO),
]


@pytest.mark.parametrize(("ours", "builtin", "code"), CASES)
def test_an_error_has_its_builtin_class_and_errno_and_survives_pickling(ours, builtin, code):
    error = pickle.loads(pickle.dumps(ours("gs://b/k: what was tried; what to do")))
    assert type(error) is ours
    assert isinstance(error, builtin)
    assert isinstance(error, errors.CachedFSError)
    assert error.errno == code
    assert str(error) == "gs://b/k: what was tried; what to do"


def test_a_kept_error_has_no_frames_of_its_own_and_of_its_causes():
    def failed():
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise errors.CacheError("kept") from cause

    with pytest.raises(errors.CacheError) as caught:
        failed()
    kept = errors.without_frames(caught.value)
    assert [kept.__traceback__, kept.__cause__.__traceback__] == [None, None]
    assert str(kept) == "kept"
