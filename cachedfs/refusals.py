"""Object versions that came whole and were not what their checksum says: nothing more is read of them until they are gone."""

from __future__ import annotations

from cachedfs.errors import WrongBytes
from cachedfs.model import ObjectKey

__all__ = ["Refusals"]

MOST = 1000  # versions whose open handles are told


class Refusals:
    """What a process refused: each time that a version came wrong is another error.

    Looked at from any thread, changed on the loop. Before a refusal is to be seen, all of the version was removed.
    """

    def __init__(self) -> None:
        self._last: dict[str, WrongBytes] = {}  # by the digest of the key
        self._removing: set[str] = set()

    def last(self, key: ObjectKey) -> WrongBytes | None:
        """Return the error of the last time that this version came wrong."""
        return self._last.get(key.digest)

    def check(self, key: ObjectKey, known: WrongBytes | None) -> None:
        """Raise WrongBytes if all of a version came and was wrong since its last refusal was the one `known`."""
        last = self.last(key)
        if last is not None and last is not known:
            raise WrongBytes(last.message)

    def is_removing(self, key: ObjectKey) -> bool:
        """Return whether a version came wrong, and its blocks are just being removed."""
        return key.digest in self._removing

    def begin(self, key: ObjectKey) -> None:
        self._removing.add(key.digest)

    def end(self, key: ObjectKey, error: WrongBytes) -> None:
        self._removing.discard(key.digest)
        self._last[key.digest] = error
        while len(self._last) > MOST:
            self._last.pop(next(iter(self._last)))
