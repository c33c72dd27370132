"""What a shell offers for a URL that is begun: what is known of it here. Nobody is asked, and nothing is ever said on stderr."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from cachedfs.cli.arguments import Place

__all__ = ["PROTOCOLS", "offered", "rejoin", "urls_known"]

PROTOCOLS = ("gs://", "drive://My Drive/", "cgs://", "cdrive://My Drive/", "cachedfs::")
MOST = 1000  # names that are offered: no shell shows more of use
SHELL = "_CACHEDFS_COMPLETE"  # in the environment of a shell that asks: which one, and what for
BEGUN = "_CACHEDFS_BEGUN"  # what of the word in hand bash has split off, and wants no answer to
BREAKS = ":="  # characters at which bash ends a word, besides spaces


def rejoin(environ: MutableMapping[str, str]) -> None:
    """Undo what bash does to URLs on a line to complete: a word ends at each colon and each equals sign there.

    Whole URLs are one word of `COMP_WORDS` again. The word in hand stays as bash has it, as its answer has to fit that;
    what belongs in front of it is in `environ` under BEGUN.
    """
    if environ.get(SHELL) != "complete_bash":
        return
    words, begun = joined(split(environ.get("COMP_WORDS", "")), int(environ.get("COMP_CWORD", 0)))
    environ["COMP_WORDS"], environ["COMP_CWORD"] = shlex.join(words), str(len(words) - 1)
    environ[BEGUN] = begun


def split(line: str) -> list[str]:
    """Return the words of a line as a shell would; a quote that is still open ends with the line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words += iter(lexer.get_token, None)
    except ValueError:  # no closing quote, or nothing behind a backslash
        words.append(lexer.token or "")
    return words


def joined(words: list[str], at: int) -> tuple[list[str], str]:
    """Return the words up to number `at`, each URL as one but the last as it was; and what belongs in front of that."""
    words = words[: at + 1] + [""] * (at + 1 - len(words))
    found = words[:1]
    is_open = False
    for word in words[1:]:
        is_break = bool(word) and not word.strip(BREAKS)
        if len(found) > 1 and (is_open or is_break):
            found[-1] += word
        else:
            found.append(word)
        is_open = is_break
    return [*found[:-1], words[at]], found[-1].removesuffix(words[at])


def urls_known(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return how a URL that ends in `incomplete` may go on, as the asking shell wants it."""
    begun = os.environ.get(BEGUN, "")
    is_bash = os.environ.get(SHELL) == "complete_bash"
    logging.disable()
    try:
        found = offered(begun + incomplete, ctx)
    except Exception:  # a line that is being typed is no place for errors
        return []
    finally:
        logging.disable(logging.NOTSET)
    # The other shells quote by themselves.
    return [_quoted(url.removeprefix(begun)) if is_bash else url.removeprefix(begun) for url in found]


def _quoted(text: str) -> str:
    return "".join(f"\\{c}" if c in " \t'\"()&;<>|$`\\!*?[]#{}" else c for c in text)


def offered(text: str, ctx: typer.Context) -> list[str]:
    """Return the URLs that begin with `text`: one level below the last slash, and what is below if that is one folder."""
    if "://" in text:
        found = names_below(text, ctx)
    else:
        found = [protocol for protocol in PROTOCOLS if protocol.startswith(text)]
    while len(found) == 1 and found[0].endswith("/"):  # else the shell would take it for the end of the word
        below = names_below(found[0], ctx)
        if not below:
            break
        found = below
    return found[:MOST]


def names_below(text: str, ctx: typer.Context) -> list[str]:
    """Return the URLs of what is known in the folder that `text` begins a name in, folders with a slash, by name."""
    from cachedfs.cli.arguments import place_of
    from cachedfs.cli.output import Given

    folder = text[: text.rindex("/") + 1]
    values = [each.params for each in (ctx.find_root(), ctx)]
    given = Given(
        cache_dir=next((v for each in values if (v := each.get("cache_dir"))), None),
        options=[v for each in values for v in each.get("options") or ()],
    )
    place = place_of(folder, given, offline=True)
    names = listed(place) | cached(place)
    return sorted(folder + name for name in names if (folder + name).startswith(text))


def listed(place: Place) -> set[str]:
    """Return the names in a folder as it was listed last."""
    try:
        found = place.fs.ls(place.path, detail=True)
    except OSError:  # it was not
        return set()
    head = len(place.path.rstrip("/")) + bool(place.path.strip("/"))
    return {str(info["name"])[head:].rstrip("/") + "/" * (info["type"] == "directory") for info in found}


def cached(place: Place) -> set[str]:
    """Return the names in a folder of what blocks are of, and of the folders that lead there."""
    path = place.path.rstrip("/")
    head = len(path) + bool(path)
    below = place.fs._source.runtime.cache.paths_below(place.fs._source.identity, path)
    return first_parts(each[head:] for each in below)


def first_parts(names: Iterable[str]) -> set[str]:
    """Return the first part of each name, with a slash where there are more."""
    parts = (name.partition("/") for name in names if name)
    return {first + slash for first, slash, _ in parts}
