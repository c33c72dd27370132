"""The manifest: which objects an export is made of. Written last, so that what has one is whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import ObjectChanged, ObjectNotFound
from cachedfs.fetch.source import Source
from cachedfs.origins.base import Reply
from cachedfs.snapshot.archive import BadBundle

__all__ = ["Bundle", "ExportFolder", "Manifest", "NAME", "is_ours"]


NAME = "manifest.json"
FORMAT = 1
LATEST_S = 1e12  # no time is later: neither overflows nor is no number
MOST_BYTES = 16 << 20  # bytes:
MOST_BUNDLES = 100_000
_KIND = "cachedfs export"
_BUNDLE = re.compile("blocks-[0-9a-f]{32}")
_FACTS = re.compile("facts-[0-9a-f]{16}")


def is_ours(name: str) -> bool:
    """Return whether an object beside a manifest can only be a part of an export."""
    return bool(_BUNDLE.fullmatch(name) or _FACTS.fullmatch(name))


@dataclasses.dataclass(frozen=True)
class Bundle:
    """One bundle: its name, its whole size, where its index begins, how many blocks it has."""

    name: str
    size: int
    index_at: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One export: whose objects (`identity`), in blocks of which size, at what time, in which bundles and facts."""

    identity: str
    block_size: int
    made_at: float
    facts: str
    facts_size: int
    bundles: tuple[Bundle, ...]

    def encode(self) -> bytes:
        return json.dumps({"kind": _KIND, "format": FORMAT, **dataclasses.asdict(self)}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Return what the bytes say. Raises BadBundle for anything that an export would not write."""
        if data.count(b"{") + data.count(b"[") > MOST_BUNDLES + 100:  # each takes more memory than its bytes
            raise BadBundle("it has too many bundles")
        try:
            found: dict[str, Any] = json.loads(data)
            if found.pop("kind") != _KIND:
                raise BadBundle("it is no manifest of an export")
            if (version := found.pop("format")) != FORMAT:
                raise BadBundle(
                    f"it has format {version!r}, not {FORMAT}: another release of cachedfs wrote it"
                )
            manifest = cls(**found | {"bundles": tuple(Bundle(**each) for each in found["bundles"])})
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise BadBundle(f"it makes no sense: {error}") from error
        manifest._check()
        return manifest

    def _check(self) -> None:
        numbers = [self.block_size, self.facts_size]
        for bundle in self.bundles:
            numbers += [bundle.size, bundle.index_at, bundle.blocks]
        names = [(_FACTS, self.facts), *((_BUNDLE, bundle.name) for bundle in self.bundles)]
        is_sound = (
            isinstance(self.identity, str)
            and type(self.made_at) in (int, float)
            and 0 <= self.made_at < LATEST_S
            and all(type(number) is int and 0 < number < 1 << 62 for number in numbers)
            and all(isinstance(name, str) and shape.fullmatch(name) for shape, name in names)
            and all(bundle.index_at < bundle.size for bundle in self.bundles)
        )
        if not is_sound:
            raise BadBundle("it says what cannot be")


class ExportFolder:
    """A folder at an origin that holds an export, or is to hold one."""

    def __init__(self, source: Source, path: str) -> None:
        self._source, self.path = source, path

    def url(self, name: str = "") -> str:
        return self._source.url(f"{self.path}/{name}" if name else self.path)

    async def infos(self) -> dict[str, ObjectInfo]:
        """Return the objects in it, by name: reads are then of these versions, and ask nobody where they are."""
        found = self._source.origin(self.path).list(self.path)
        with contextlib.suppress(ObjectNotFound):  # then it has no manifest either
            return {info.path.rpartition("/")[2]: info async for info in found if info.kind == "file"}
        return {}

    async def manifest(self, info: ObjectInfo) -> Manifest:
        """Return the manifest. Raises BadBundle for what is none."""
        size = info.size or 0
        if size > MOST_BYTES:
            raise BadBundle(f"it is no manifest: it has {size} bytes")
        return Manifest.decode(await self.bytes_of(info, Range(0, size)))

    @contextlib.asynccontextmanager
    async def reading(self, info: ObjectInfo, span: Range) -> AsyncIterator[Reply]:
        """Give the bytes `[start, stop)` of one version of an object, as they come."""
        async with self._source.origin(info.path).read(info.path, span, info) as reply:
            if (reply.start, reply.stop) != (span.start, span.stop):
                raise ObjectChanged(
                    f"{self._source.url(info.path)}: other bytes came than were asked for; try again"
                )
            yield reply

    async def bytes_of(self, info: ObjectInfo, span: Range) -> bytes:
        """Return bytes `[start, stop)` of one version of an object."""
        async with self.reading(info, span) as reply:
            return b"".join([piece async for piece in reply])
