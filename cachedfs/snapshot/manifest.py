"""Manifest of an export: the list of its files, written last. An export with one is complete."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.core.objects import Objects
from cachedfs.errors import ObjectChanged, ObjectNotFound
from cachedfs.origins.base import Reply
from cachedfs.shared.metadata_rows import LATEST_S, DamagedFile
from cachedfs.snapshot.archive import MOST_BLOCKS, MOST_INDEX, Bundle

__all__ = ["NAME", "ExportFolder", "Manifest", "gathered", "is_ours"]

T = TypeVar("T")

NAME = "manifest.json"
FORMAT = 3
MOST_BYTES = 16 << 20  # most bytes of a manifest
MOST_BUNDLES = 100_000
MOST_METADATA = 1 << 30  # bytes; an import writes the metadata file to the temporary folder
_KIND = "cachedfs export"
_NAME = re.compile(r"blocks-[0-9a-f]{32}\.zip|metadata-[0-9a-f]{32}\.jsonl\.gz")


def is_ours(name: str) -> bool:
    """Return whether only an export can have an object with this name."""
    return bool(_NAME.fullmatch(name))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One export: origin (`identity`), bytes per block, time it was made, metadata file, and bundles."""

    identity: str
    block_size: int
    made_at: float
    metadata: str
    metadata_size: int
    bundles: tuple[Bundle, ...]

    def encode(self) -> bytes:
        """Return the manifest as JSON."""
        return json.dumps({"kind": _KIND, "format": FORMAT, **dataclasses.asdict(self)}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Parse a manifest. Raises DamagedFile for anything that an export would not write."""
        if data.count(b"{") + data.count(b"[") > MOST_BUNDLES + 100:  # each takes more memory than its text
            raise DamagedFile("it has too many bundles")
        try:
            found: dict[str, Any] = json.loads(data)
            if found.pop("kind") != _KIND:
                raise DamagedFile("it is not the manifest of an export")
            if (version := found.pop("format")) != FORMAT:
                raise DamagedFile(
                    f"it has format {version!r}, not {FORMAT}: another release of cachedfs wrote it"
                )
            manifest = cls(**found | {"bundles": tuple(Bundle(**each) for each in found["bundles"])})
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedFile(f"it is invalid: {error}") from error
        if not manifest._is_sound():
            raise DamagedFile("it has a value that no export writes")
        return manifest

    def _is_sound(self) -> bool:
        numbers = [self.block_size, self.metadata_size]
        for bundle in self.bundles:
            numbers += [bundle.size, bundle.index_at, bundle.blocks, bundle.size - bundle.index_at]
        return (
            isinstance(self.identity, str)
            and type(self.made_at) in (int, float)
            and 0 <= self.made_at < LATEST_S
            and all(type(number) is int and 0 < number < 1 << 62 for number in numbers)
            and all(is_ours(name) for name in (self.metadata, *(bundle.name for bundle in self.bundles)))
            and self.metadata_size <= MOST_METADATA
            and all(bundle.size - bundle.index_at <= MOST_INDEX for bundle in self.bundles)
            and all(bundle.blocks <= MOST_BLOCKS for bundle in self.bundles)
        )


class ExportFolder:
    """A folder at an origin that has an export, or will have one."""

    def __init__(self, objects: Objects, path: str) -> None:
        self._objects, self.path = objects, path

    def url(self, name: str = "") -> str:
        return self._objects.url(f"{self.path}/{name}" if name else self.path)

    async def infos(self) -> dict[str, ObjectInfo]:
        """Return the objects in the folder by name. Reads use these versions, without further lookups."""
        found = self._objects.origin(self.path).list(self.path)
        with contextlib.suppress(ObjectNotFound):  # then there is no manifest either
            return {info.path.rpartition("/")[2]: info async for info in found if info.kind == "file"}
        return {}

    async def manifest(self, info: ObjectInfo) -> Manifest:
        """Read the manifest. Raises DamagedFile if it is invalid."""
        size = info.size or 0
        if size > MOST_BYTES:
            raise DamagedFile(f"it is not a manifest: it has {size} bytes")
        return Manifest.decode(await self.bytes_of(info, Range(0, size)))

    @contextlib.asynccontextmanager
    async def reading(self, info: ObjectInfo, span: Range) -> AsyncIterator[Reply]:
        """Open a read of the bytes `span` of one object version. Raises ObjectChanged for other bytes."""
        async with self._objects.origin(info.path).read(info.path, span, info) as reply:
            if (reply.start, reply.stop) != (span.start, span.stop):
                raise ObjectChanged(
                    f"{self._objects.url(info.path)}: the origin sent other bytes than requested; try again"
                )
            yield reply

    async def bytes_of(self, info: ObjectInfo, span: Range) -> bytes:
        """Return the bytes `span` of one object version."""
        async with self.reading(info, span) as reply:
            return b"".join([piece async for piece in reply.body])


async def gathered(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at once and return their results.

    After a failure, cancel the others and raise it.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except* Exception as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
