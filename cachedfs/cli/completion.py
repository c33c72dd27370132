"""Shell completion of URLs from cached metadata. Sends no request and prints nothing on stderr."""

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
MOST = 1000  # completions at most: no shell usefully shows more
SHELL = (
    "_CACHEDFS_COMPLETE"  # environment variable set by the completing shell: which shell, and which action
)
BEGUN = "_CACHEDFS_BEGUN"  # environment variable: what bash split off the current word; completions omit it
BREAKS = ":="  # characters at which bash splits words, besides spaces


def rejoin(environ: MutableMapping[str, str]) -> None:
    """Undo how bash splits URLs on the command line: it ends a word at each colon and equals sign.

    Joins whole URLs in `COMP_WORDS` again. The current word stays as bash split it, since the completions
    replace only that; the part before it is stored in `environ` under BEGUN.
    """
    if environ.get(SHELL) != "complete_bash":
        return
    words, begun = joined(split(environ.get("COMP_WORDS", "")), int(environ.get("COMP_CWORD", 0)))
    environ["COMP_WORDS"], environ["COMP_CWORD"] = shlex.join(words), str(len(words) - 1)
    environ[BEGUN] = begun


def split(line: str) -> list[str]:
    """Return the words of a line as a shell splits them; an unclosed quote ends with the line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words += iter(lexer.get_token, None)
    except ValueError:  # unclosed quote, or a trailing backslash
        words.append(lexer.token or "")
    return words


def joined(words: list[str], at: int) -> tuple[list[str], str]:
    """Return the words up to index `at` with split URLs joined, and the prefix of the last word.

    The last word stays as bash split it; the prefix is the part that bash split off.
    """
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
    """Return the completions of a URL that starts with `incomplete`, in the form the shell expects."""
    begun = os.environ.get(BEGUN, "")
    is_bash = os.environ.get(SHELL) == "complete_bash"
    logging.disable()
    try:
        found = offered(begun + incomplete, ctx)
    except Exception:  # an error message would garble the line being typed
        return []
    finally:
        logging.disable(logging.NOTSET)
    # Other shells quote completions themselves.
    return [_quoted(url.removeprefix(begun)) if is_bash else url.removeprefix(begun) for url in found]


def _quoted(text: str) -> str:
    return "".join(f"\\{c}" if c in " \t'\"()&;<>|$`\\!*?[]#{}" else c for c in text)


def offered(text: str, ctx: typer.Context) -> list[str]:
    """Return the URLs that start with `text`: one level below its last slash.

    Descends further while there is only one candidate and it is a folder.
    """
    if "://" in text:
        found = names_below(text, ctx)
    else:
        found = [protocol for protocol in PROTOCOLS if protocol.startswith(text)]
    while len(found) == 1 and found[0].endswith("/"):  # otherwise the shell would end the word here
        below = names_below(found[0], ctx)
        if not below:
            break
        found = below
    return found[:MOST]


def names_below(text: str, ctx: typer.Context) -> list[str]:
    """Return the URLs in the folder of `text` that start with `text`, sorted; folders end with a slash.

    Uses only cached metadata and cached blocks.
    """
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
    """Return the names in a folder from its cached listing."""
    try:
        found = place.fs.ls(place.path, detail=True)
    except OSError:  # not listed yet
        return set()
    head = len(place.path.rstrip("/")) + bool(place.path.strip("/"))
    return {str(info["name"])[head:].rstrip("/") + "/" * (info["type"] == "directory") for info in found}


def cached(place: Place) -> set[str]:
    """Return the names in a folder that have cached blocks, and the subfolders that contain some."""
    path = place.path.rstrip("/")
    head = len(path) + bool(path)
    below = place.fs._source.runtime.cache.paths_below(place.fs._source.identity, path)
    return first_parts(each[head:] for each in below)


def first_parts(names: Iterable[str]) -> set[str]:
    """Return the first component of each path, with a slash if more components follow."""
    parts = (name.partition("/") for name in names if name)
    return {first + slash for first, slash, _ in parts}
