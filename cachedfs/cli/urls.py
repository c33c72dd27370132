"""Arguments that are URLs: resolved to a filesystem and path, completed by a shell, and checked for quotes."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import logging
import os
import re
import shlex
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cachedfs.cli.arguments import CommonOptions, argument
from cachedfs.cli.output import print_error
from cachedfs.errors import AccessDenied, NotDownloadable, ObjectChanged, ObjectNotFound
from cachedfs.origins.drive_links import canonical_path, is_bare_link, is_drive_link

if TYPE_CHECKING:
    from cachedfs.cache.block_store import BlockStore
    from cachedfs.filesystem import CachedFileSystem

OURS = ("cachedfs", "cgs", "cdrive")  # protocols that already read through the cache
AT_DRIVE = ("My Drive", "Shared with me", "shared:", "id:")  # prefixes of Google Drive paths
OBJECT_ERRORS = (AccessDenied, NotDownloadable, ObjectChanged, ObjectNotFound)  # errors of a single object
T = TypeVar("T")
PROTOCOLS = ("gs://", "drive://My Drive/", "cgs://", "cdrive://My Drive/", "cachedfs::")
MOST = 1000  # completions at most: no shell usefully shows more
SHELL = "_CACHEDFS_COMPLETE"  # environment variable set by the completing shell: its name, and the action
BEGUN = "_CACHEDFS_BEGUN"  # environment variable: what bash split off the current word; completions omit it


@dataclasses.dataclass(frozen=True)
class Location:
    """A URL as the user wrote it, with the filesystem and path it resolves to."""

    text: str
    fs: CachedFileSystem
    path: str

    def url(self, path: str) -> str:
        """Return the URL of another path of this filesystem, in the form the user chose for this one."""
        url = self.fs.unstrip_protocol(path)
        if not self.text.startswith("cachedfs::"):
            url = url.removeprefix("cachedfs::")
        return url if "://" in self.text else url.removeprefix("file://")

    @property
    def is_pattern(self) -> bool:
        return "*" in self.path

    def named(self, path: str) -> str | None:
        """Return what this URL names of a path, by its text alone: the path or a folder above it, or None."""
        above = self.path.rstrip("/")
        if not above:
            return ""
        from fsspec.utils import glob_translate

        pattern = glob_translate(above) if self.is_pattern else re.escape(above)
        return next(
            filter(re.compile(pattern).fullmatch, itertools.accumulate(path.split("/"), "{}/{}".format)), None
        )

    def cached_bytes(self, path: str) -> int:
        return sum(stop - start for start, stop in self.fs.cached_extent(path))

    def cached_paths(self) -> list[str]:
        """Return the path, or what has cached blocks and matches the pattern. Sends no request."""
        if not self.is_pattern:
            return [self.path]
        above = self.path.partition("*")[0].rpartition("/")[0]
        named = map(self.named, self.cache.paths_below(self.identity, above))
        return sorted({name for name in named if name is not None})

    @property
    def cache(self) -> BlockStore:
        return self.fs._objects.engine.cache

    @property
    def identity(self) -> str:
        """The name under which the cache has the blocks of this origin."""
        return self.fs._objects.identity

    def entries(self) -> list[dict[str, Any]]:
        """Return the entry of the path, or those that match the pattern. Raises ObjectNotFound if there are none."""
        if not self.is_pattern:
            return [self.fs.info(self.path)]
        found = list(self.fs.glob(self.path, detail=True).values())
        if not found:
            raise ObjectNotFound(f"{self.text}: nothing has such a name")
        return found

    def paths(self) -> list[str]:
        """Return the path, as that of an object, whose name may end in a slash; or the paths that match the pattern."""
        if self.is_pattern:
            return [str(info["name"]) for info in self.entries()]
        ends_in_slash = self.text.endswith("/") and not self.path.endswith("/")
        return [str(self.fs._strip_object(f"{self.path}/" if ends_in_slash else self.path))]


def locate(text: str, common: CommonOptions, **more: Any) -> Location:
    """Resolve a URL under the common options, overridden by `more` options of cachedfs.

    From then on error messages name this URL.
    """
    from cachedfs.common.urls import filesystem_at

    common.url = text
    url = cached_url(text)
    fs, path = filesystem_at(url, options_of(url, common, **more))
    return Location(text, fs, fs._strip(path))


def options_of(url: str, common: CommonOptions, **more: Any) -> dict[str, Any]:
    """Return the common options, and `more` of cachedfs, as storage options for a URL; a bare path has none."""
    from fsspec.core import split_protocol

    ours, theirs = common.split()
    ours |= more
    if url.startswith("cachedfs::"):
        return {"cachedfs": ours, split_protocol(url.rpartition("::")[2])[0] or "file": theirs}
    return {} if os.path.isabs(url) else {"target_options": theirs, **ours}


def at_each(urls: Sequence[str], common: CommonOptions, do: Callable[[Location], T]) -> list[T]:
    """Return the results of `do` for each URL; report a URL that cannot be read and go on with the others.

    Raises errors that affect more than one URL, and every error if there is only one.
    """
    results = []
    for text in urls:
        location = locate(text, common)
        try:
            results.append(do(location))
        except OBJECT_ERRORS as error:
            if len(urls) == 1:
                raise
            print_error(error, common.url, as_json=common.as_json)
            common.has_failed = True
    return results


def cached_url(text: str) -> str:
    """Return the cachedfs URL for a URL or local path. Raises ValueError if it is not valid."""
    above, chained, last = text.rpartition("::")
    if found := re.match("(gs|gcs|drive|cgs|cdrive|https?):/(?!/)", last):
        raise ValueError(f"{text!r} is no URL: write {above}{chained}{found[1]}://{last[found.end() :]}")
    if (at_drive := drive_url(text)) is not None:
        return f"cachedfs::{at_drive}"
    if "://" in text or "::" in text:
        _refuse_unknown(text, last)
        first = re.split("::|://", text, maxsplit=1)[0]
        return text if first in OURS else f"cachedfs::{text}"
    path = os.path.expanduser(text)
    if os.path.isabs(path) or text.startswith((".", "~")) or os.path.lexists(path):
        return f"cachedfs::file://{os.path.abspath(path)}"
    if text.startswith(AT_DRIVE):
        raise ValueError(f"{text!r} has no protocol: write 'drive://{text}' for Google Drive")
    known = canonical_path(text)
    at_drive = f"My Drive/{text}" if known == text else known
    raise ValueError(
        f"{text!r} has no protocol, and no local file has this name: "
        f"write gs://{text or 'my-bucket'} for Google Cloud Storage, 'drive://{at_drive}' for Google Drive"
    )


def drive_url(text: str) -> str | None:
    """Return the `drive://` URL that a link, an id alone or a path of Colab's mount stands for; else None.

    Without a protocol, a local file of this name comes first.
    """
    above, _, last = text.rpartition("::")
    if above and above not in OURS:
        return None
    is_bare = is_bare_link(last) and not os.path.lexists(last)
    is_drive = is_drive_link(last) or is_bare or (not above and _is_at_colab(last))
    return f"drive://{canonical_path(last)}" if is_drive else None


def _is_at_colab(text: str) -> bool:
    """Return whether a path is one of Google Drive as Colab mounts it, and it is not mounted here."""
    mounted = "/".join(text.split("/")[:3])
    return text.startswith("/content/") and canonical_path(text) != text and not os.path.lexists(mounted)


def _refuse_unknown(text: str, last: str) -> None:
    """Raise ValueError if the last protocol of a URL is not installed or has no path."""
    from fsspec.registry import available_protocols, registry

    known = {*available_protocols(), *registry}
    protocol, has_path, _ = last.partition("://")
    if not has_path:
        if not last or last in known:
            example = f"{text}://..." if last else f"{text}gs://my-bucket"
            raise ValueError(f"{text!r} is no URL: a path is missing, as in {example}")
        return  # a local path
    if protocol not in known:
        # Ignore case and blanks. Suggest the protocols of cachedfs before others.
        wanted, ours = protocol.strip().lower(), ["gs", "drive"]
        near = difflib.get_close_matches(wanted, ours, n=1) or difflib.get_close_matches(wanted, known, n=1)
        meant = f"; did you mean {near[0]}://?" if near else ""
        raise ValueError(f"{text!r}: no protocol that is installed is called {protocol!r}{meant}")


# How a shell completes URLs, and what to do where one is not quoted


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
