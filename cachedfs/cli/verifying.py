"""`verify`: is what is cached what the origin has?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from cachedfs.cli.get import counting, progress
from cachedfs.cli.given import Given
from cachedfs.cli.output import FAILED, print_json, say
from cachedfs.cli.places import Place, at_each
from cachedfs.cli.shared import Urls, command

if TYPE_CHECKING:
    from cachedfs.common.types import Verified

__all__ = ["verify"]


@command(
    "cachedfs verify gs://my-bucket/train.jsonl",
    "cachedfs verify gs://my-bucket/data 'drive://My Drive/data'",
    "cachedfs verify --json -o offline=true gs://my-bucket/data",
)
def verify(given: Given, urls: Urls) -> None:
    """Check what is cached of objects and folders, and drop what is wrong.

    Every cached byte is read from the disk and compared with its checksum, and each object that is here as a whole with the
    checksum of the origin. What is dropped is fetched again when it is read. The exit status is 1 if anything was wrong.
    """
    found: list[tuple[Place, list[Verified]]] = []

    def verify_one(place: Place) -> None:
        with progress(None, is_quiet=given.as_json) as advance:
            found.append((place, verified(place, advance)))

    is_ok = at_each(urls, given, verify_one)
    if given.as_json:
        objects = [(place, each) for place, some in found for each in some]
        print_json([{"url": place.url(each.path), **without_path(each)} for place, each in objects])
    else:
        for place, some in found:
            for each in some:
                if not each.ok:
                    say(f"{place.url(each.path)}: {trouble(each)}")
            say(f"{place.text}: {summary(some)}")
    if not (is_ok and all(each.ok for _, some in found for each in some)):
        raise typer.Exit(FAILED)


def verified(place: Place, advance: Callable[[int], None]) -> list[Verified]:
    """Return the verdicts on what a URL or a pattern names."""
    paths = [str(info["name"]) for info in place.matches()] if place.is_pattern else [place.path]
    return [each for path in paths for each in place.fs.verify(path, callback=counting(advance))]


def without_path(found: Verified) -> dict[str, object]:
    values = found._asdict()
    del values["path"]
    return values


def trouble(found: Verified) -> str:
    n = len(found.bad)
    return f"{n:,} block{'' if n == 1 else 's'} dropped: {found.reason}"


def summary(found: list[Verified]) -> str:
    """Return what was looked over, in one line."""
    objects, sound = sum(bool(each.blocks or each.bad) for each in found), sum(each.blocks for each in found)
    whole, bad = sum(each.whole is True for each in found), sum(len(each.bad) for each in found)
    if not objects:
        return "nothing is cached"
    parts = [f"{_n(sound, 'block')} of {_n(objects, 'object')} right"]
    if bad:
        parts.append(f"{bad:,} wrong and dropped")
    return ", ".join(parts) + f"; {whole:,} whole and as the origin says"


def _n(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
