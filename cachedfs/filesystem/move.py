"""Move several objects as one step: if one cannot be moved, bring the others back.

`next_step` decides what to do with one object. `ObjectMove` sends the requests.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from cachedfs.common.checksums import StatedChecksum, stated_of
from cachedfs.common.text import counted
from cachedfs.errors import CachedFSError

logger = logging.getLogger("cachedfs.filesystem")

_MOST_NAMED = 20  # objects in an error; the log names all


class StatedContent(NamedTuple):
    """The size and the checksum of an object; None where the origin does not state them."""

    size: int | None
    checksum: StatedChecksum | None = None

    @classmethod
    def of(cls, size: int | None, details: Mapping[str, Any]) -> StatedContent:
        return cls(size, stated_of(details))

    def may_equal(self, other: StatedContent) -> bool:
        """Return whether all that both state is equal."""
        ours, theirs = self.checksum, other.checksum
        if ours is not None and theirs is not None and ours.name == theirs.name and ours != theirs:
            return False
        return self.size is None or other.size is None or self.size == other.size


@dataclasses.dataclass(slots=True, eq=False)
class MovedObject:
    """An object to move. `content` is that of the source before the move, if it is known."""

    source: str
    target: str
    content: StatedContent | None = None
    had_target: bool = False  # an object may have had the target's name before
    is_optional: bool = False  # it may not exist: then there is nothing to move
    has_begun: bool = False
    is_missing: bool = False


class Place(enum.Enum):
    """The object, if any, that has a name after a failed move."""

    NOTHING = enum.auto()
    OBJECT = enum.auto()  # the moved object, as far as the origin states it
    OTHER = enum.auto()  # another object
    UNKNOWN = enum.auto()  # the lookup failed


class Step(enum.Enum):
    """The next step for an object after a failed move, or its end."""

    REMOVE_COPY = enum.auto()
    MOVE_BACK = enum.auto()
    COPY_BACK = enum.auto()
    BACK = enum.auto()
    COPY_LEFT = enum.auto()  # back, but its copy may be there
    REPLACED = enum.auto()  # back, but its copy has replaced what had the target's name
    AWAY = enum.auto()  # not at its old place, as far as is known


def next_step(source: Place, target: Place, *, had_target: bool) -> Step:
    """Return what brings an object back from `target` to `source`.

    What had the target's name before is gone: its replacement stays there.
    """
    if source is Place.NOTHING and target is Place.OBJECT:
        return Step.COPY_BACK if had_target else Step.MOVE_BACK
    if source in (Place.NOTHING, Place.UNKNOWN):
        return Step.AWAY
    if target is Place.OBJECT:
        return Step.REPLACED if had_target else Step.REMOVE_COPY
    return Step.COPY_LEFT if target is Place.UNKNOWN and not had_target else Step.BACK


def place_of(before: StatedContent | None, found: StatedContent | None) -> Place:
    """Return what a name has where the origin answered `found`, None for nothing."""
    if found is None:
        return Place.NOTHING
    return Place.OBJECT if before is None or before.may_equal(found) else Place.OTHER


class Requests(NamedTuple):
    """The requests of a move.

    `move` is None where the origin cannot move an object in one step. `content` returns None for a name without an
    object. `gather` runs coroutines, several at a time. `url` returns the URL of a path, for messages.
    """

    copy: Callable[[str, str], Awaitable[None]]
    remove: Callable[[str], Awaitable[None]]
    move: Callable[[str, str], Awaitable[None]] | None
    content: Callable[[str], Awaitable[StatedContent | None]]
    gather: Callable[[Sequence[Coroutine[Any, Any, None]]], Awaitable[object]]
    url: Callable[[str], str]


class ObjectMove:
    """A move of several objects: all of them, or none and an error."""

    def __init__(self, objects: Collection[MovedObject], requests: Requests) -> None:
        self._objects = list(objects)
        self._requests = requests
        self._failed: list[tuple[MovedObject, Exception]] = []

    async def run(self) -> None:
        """Move all objects. Raises the error of the first one that cannot be moved, after bringing the others back.

        An object that is its own target, or the target of another one, is not removed.
        """
        copy, remove, move, *_ = self._requests
        moved = [each for each in self._objects if each.source != each.target]
        if move is not None:
            await self._each(moved, lambda each: move(each.source, each.target))
        else:
            await self._each(self._objects, lambda each: copy(each.source, each.target))
            targets = {each.target for each in self._objects}
            if not self._failed:
                left = [each for each in moved if each.source not in targets]
                await self._each(left, lambda each: remove(each.source))
        if self._failed:
            await self._bring_back([each for each in moved if not each.is_missing])

    async def _each(
        self, objects: Iterable[MovedObject], do: Callable[[MovedObject], Awaitable[None]]
    ) -> None:
        """Call `do` for each object; begin no other ones after a failure."""

        async def one(moved: MovedObject) -> None:
            if self._failed:
                return
            moved.has_begun = True
            try:
                await do(moved)
            except Exception as error:  # raised again once the others are back
                if moved.is_optional and await self._is_missing(moved, error):
                    moved.is_missing = True
                else:
                    self._failed.append((moved, error))

        await self._requests.gather([one(moved) for moved in objects if not moved.is_missing])

    async def _is_missing(self, moved: MovedObject, error: Exception) -> bool:
        """Return whether there is no object, or none that the account may see: its access may be to the folder only."""
        if not isinstance(error, PermissionError):
            return isinstance(error, FileNotFoundError)
        try:
            return await self._requests.content(moved.source) is None
        except Exception as failure:  # of any kind: the first error is raised then
            return isinstance(failure, PermissionError)

    async def _bring_back(self, objects: list[MovedObject]) -> None:
        """Bring all objects back and raise the error; return if all were moved and only answers were lost."""
        begun = [each for each in objects if each.has_begun]
        places = await self._places(begun)
        if len(begun) == len(objects) and {*places.values()} <= {(Place.NOTHING, Place.OBJECT)}:
            return
        ends = {each: next_step(*places[each], had_target=each.had_target) for each in begun}
        written = [each for each in begun if ends[each] in _WRITES]
        await self._requests.gather([self._do(each, ends[each]) for each in written])
        places = await self._places(written)
        ends |= {each: next_step(*places[each], had_target=each.had_target) for each in written}
        self._raise(ends)

    async def _places(self, objects: Collection[MovedObject]) -> dict[MovedObject, tuple[Place, Place]]:
        found: dict[str, Place] = {}

        async def look(path: str, before: StatedContent | None) -> None:
            try:
                found[path] = place_of(before, await self._requests.content(path))
            except Exception as error:  # named by the error of the move
                logger.debug("not found out whether %s is there: %s", self._requests.url(path), error)
                found[path] = Place.UNKNOWN

        await self._requests.gather(
            [look(path, each.content) for each in objects for path in (each.source, each.target)]
        )
        return {each: (found[each.source], found[each.target]) for each in objects}

    async def _do(self, moved: MovedObject, step: Step) -> None:
        source, target, requests = moved.source, moved.target, self._requests
        try:
            if step is Step.MOVE_BACK and requests.move is not None:
                await requests.move(target, source)
            elif step in (Step.MOVE_BACK, Step.COPY_BACK):
                await requests.copy(target, source)
            if step is Step.REMOVE_COPY or (step is Step.MOVE_BACK and requests.move is None):
                await requests.remove(target)
        except Exception as error:  # the caller looks where the object is
            logger.debug("not back at its old place: %s: %s", requests.url(source), error)

    def _raise(self, ends: Mapping[MovedObject, Step]) -> NoReturn:
        url = self._requests.url
        moved, error = self._failed[0]
        said = error.message if isinstance(error, CachedFSError) else f"{type(error).__name__}: {error}"
        protocol, _, reason = said.partition(f"{moved.source}: ")
        said = said if " " in protocol else reason or said  # its URL is named already
        begin = f"Cannot move {url(moved.source)} to {url(moved.target)}: {said}."
        if not all(end is Step.BACK for end in ends.values()):
            logger.error("%s %s", begin, _outcome(ends, url, most=len(ends)))
        text = f"{begin} {_outcome(ends, url, most=_MOST_NAMED)}"
        if not isinstance(error, CachedFSError):
            error.add_note(text)
            raise error
        raised = type(error)(text)
        raised.errno = error.errno
        raise raised from error


_WRITES = (Step.REMOVE_COPY, Step.MOVE_BACK, Step.COPY_BACK)


def _outcome(ends: Mapping[MovedObject, Step], url: Callable[[str], str], *, most: int) -> str:
    """Return the sentences that say where the objects are after a failed move."""

    def named(*steps: Step) -> list[tuple[str, str]]:
        return [(url(each.source), url(each.target)) for each, end in ends.items() if end in steps]

    away = named(Step.AWAY, Step.MOVE_BACK, Step.COPY_BACK)
    copies = named(Step.REMOVE_COPY, Step.COPY_LEFT)
    replaced = named(Step.REPLACED)
    said = ["All other objects are back at their old place."]
    if away:
        pairs = _listed([f"{source} is at {target}" for source, target in away], most)
        said = [
            f"{counted(len(away), 'object')} could not be brought back, all others are at their old place: {pairs}."
        ]
    if copies:
        said.append(f"Copies may be left at {_listed([target for _, target in copies], most)}.")
    if replaced:
        said.append(
            "Other objects may have had these names before, so the copies stay there: "
            f"{_listed([target for _, target in replaced], most)}."
        )
    return " ".join(said)


def _listed(names: Sequence[str], most: int) -> str:
    more = [f"and {len(names) - most:,} more (the log names them)"] if len(names) > most else []
    return "; ".join([*names[:most], *more])
