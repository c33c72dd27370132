"""A shared cache in a folder of Google Drive, behind a local cache."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Mapping
from typing import Any

from cachedfs.shared.shared_bucket import SharedBucket

QUOTA_SHARE = 10  # at least 1 / QUOTA_SHARE of the account's storage stays free
_ASK_S = 60.0  # between two times that the account is asked how much is free


class SharedDrive(SharedBucket):
    """A shared cache in a folder of Google Drive: for the next session of Colab, or for colleagues.

    Names are not unique there, so there are no leases. What is removed is deleted, as the trash counts as used.
    """

    answers_s = 10.0
    counts_requests = True
    options: Mapping[str, Any] = {"trash_only": False}

    def __init__(self, url: str, *, is_read_only: bool) -> None:
        super().__init__(url, is_read_only=is_read_only)
        self._asked_at, self._is_short = -math.inf, False

    def has_leases(self, size: int) -> bool:
        return False

    def check_room(self) -> None:
        if time.monotonic() - self._asked_at >= _ASK_S:
            self._asked_at, origin = time.monotonic(), self._opened()
            quota = self._io.run(self._timely(origin.storage_quota(self._base)))
            self._is_short = quota is not None and quota[1] * QUOTA_SHARE < quota[0]
        if self._is_short:
            raise OSError(errno.EDQUOT, f"less than 1/{QUOTA_SHARE} of the account's storage is free")
