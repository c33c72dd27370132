"""Arguments that are URLs: how a shell completes them, and what to do where one is not quoted."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shlex
from collections.abc import MutableMapping
from typing import Annotated, Any

import typer

from cachedfs.cli.arguments import CommonOptions, argument
from cachedfs.cli.urls import Location, cached_url, locate

PROTOCOLS = ("gs://", "drive://My Drive/", "cgs://", "cdrive://My Drive/", "cachedfs::")
MOST = 1000  # completions at most: no shell usefully shows more
SHELL = "_CACHEDFS_COMPLETE"  # environment variable set by the completing shell: its name, and the action
BEGUN = "_CACHEDFS_BEGUN"  # environment variable: what bash split off the current word; completions omit it


def rejoin(environ: MutableMapping[str, str]) -> None:
    """Undo how bash splits URLs on the command line: it ends a word at each colon and equals sign.

    Joins whole URLs in `COMP_WORDS` again. The current word stays as bash split it, since the completions
    replace only that; the part before it is stored in `environ` under BEGUN.
    """
    if environ.get(SHELL) != "complete_bash":
        return
    at = int(environ.get("COMP_CWORD", 0))
    words = (split(environ.get("COMP_WORDS", "")) + [""] * (at + 1))[: at + 1]
    found = re.sub(r"\n([:=]+)(\n|$)", r"\1", "\n".join(words)).split("\n")
    environ[BEGUN], found[-1] = found[-1].removesuffix(words[-1]), words[-1]
    environ["COMP_WORDS"], environ["COMP_CWORD"] = shlex.join(found), str(len(found) - 1)


def split(line: str) -> list[str]:
    """Return the words of a line as a shell splits them; an unclosed quote ends with the line."""
    for end in ("", "'", '"', "\\"):
        with contextlib.suppress(ValueError):  # unclosed quote, or a trailing backslash
            return shlex.split(line + end)
    return []


def urls_known(common: CommonOptions, incomplete: str) -> list[str]:
    """Return the completions of a URL that starts with `incomplete`, in the form the shell expects.

    They are one level below its last slash, or further down while there is only one and it is a folder: the shell
    would end the word there.
    """
    begun = os.environ.get(BEGUN, "")
    text = begun + incomplete
    logging.disable()
    try:
        found = names_below(text, common) if "://" in text else [p for p in PROTOCOLS if p.startswith(text)]
        while len(found) == 1 and found[0].endswith("/") and (below := names_below(found[0], common)):
            found = below
    except Exception:  # an error message would garble the line being typed
        return []
    finally:
        logging.disable(logging.NOTSET)
    found = [url.removeprefix(begun) for url in found[:MOST]]
    if os.environ.get(SHELL) == "complete_bash":  # other shells quote completions themselves
        found = [re.sub(r"""([ \t'"()&;<>|$`\\!*?\[\]#{}])""", r"\\\1", url) for url in found]
    return found


def names_below(text: str, common: CommonOptions) -> list[str]:
    """Return the URLs in the folder of `text` that start with `text`, sorted; folders end with a slash."""
    folder = text[: text.rindex("/") + 1]
    location = locate(folder, common, offline=True)
    return sorted(folder + name for name in names_in(location) if (folder + name).startswith(text))


def names_in(location: Location) -> set[str]:
    """Return the names in a folder from its cached listing, and those with cached blocks at or below them."""
    path = location.path.rstrip("/")
    found = set(location.cache.paths_below(location.identity, path))
    with contextlib.suppress(OSError):  # not listed yet
        infos = location.fs.ls(location.path, detail=True)
        found |= {f"{info['name']}/" if info["type"] == "directory" else str(info["name"]) for info in infos}
    names = (each[len(path) :].lstrip("/") for each in found)
    return {first + slash for first, slash, _ in (name.partition("/") for name in names if name)}


def url_argument(metavar: str, help: str, **settings: Any) -> Any:
    """Return a typer argument for a URL, with completion."""
    return argument(metavar, help, autocompletion=urls_known, **settings)


def check_quoted(urls: list[str] | None) -> list[str] | None:
    """Return the URLs. Raises BadParameter for a word after a URL that is neither a URL nor a local file."""
    for url, word in itertools.pairwise(urls or ()):
        if "://" not in url or "://" in word or "::" in word:
            continue
        try:
            cached_url(word)
        except ValueError:
            whole = shlex.quote(f"{url} {word}")
            what = f"{word!r} has no protocol. If it belongs to the URL before it, quote it: {whole}"
            raise typer.BadParameter(what, param_hint="URL") from None
    return urls


Urls = Annotated[list[str], url_argument("URL", "What to read.", callback=check_quoted)]
UrlsBeforeTarget = Annotated[list[str] | None, url_argument("URL", "What to read.", callback=check_quoted)]


def before_target(urls: list[str] | None) -> list[str]:
    """Return the URLs before a TARGET. Raises BadParameter if there are none: a single argument is taken for TARGET."""
    if not urls:
        raise typer.BadParameter(
            "it is missing, after the URL: where to copy it, such as . for this folder", param_hint="TARGET"
        )
    return urls
