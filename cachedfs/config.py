"""Options of a filesystem: an immutable `Config`, and the parsing of option values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from cachedfs.common.types import CacheBounds

__all__ = ["Config", "SharedOptions", "flag", "parse_size", "shared_folder"]

KiB = 1024
MiB = 1024 * KiB
MOST_AT_ONCE = 128  # requests in flight with concurrency="auto"
DRIVE_SIZE = 5_000_000_000  # bytes of a shared cache on Google Drive, unless another size is given
FIRST_AT_ONCE = 32  # requests in flight until the throughput of the origin is known

_UNITS = {
    "": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
    "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
    "kib": KiB, "mib": MiB, "gib": 1024 * MiB, "tib": 1024**2 * MiB,
}  # fmt: skip
_SIZE = r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*|%)\s*"

# Keywords that fsspec accepts for the constructor of any filesystem.
FSSPEC_KEYWORDS = frozenset(
    {"asynchronous", "loop", "batch_size", "skip_instance_cache", "use_listings_cache", "listings_expiry_time",
     "max_paths", "add_docs", "add_aliases"}
)  # fmt: skip


class SharedOptions(NamedTuple):
    """The options of the shared cache in `folder`. Filesystems with other ones have an engine of their own."""

    folder: str
    trust: str
    is_read_only: bool
    size: int | None = None


class Config(NamedTuple):
    """The options of one filesystem, from keywords, environment variables and configuration files."""

    cache_dir: tuple[str, ...] | None = None
    """Directory of the cache. None: the platform's user cache folder. A second one is a `shared_cache` to read only."""
    cache_size: int | float | None = None
    """Maximum size: bytes (int) or fraction of the disk (float). None ("auto"): half of the free space at first use."""
    keep_free: int | float = 0.1
    """Disk space to keep free: bytes (int) or a fraction of the disk (float)."""
    block_size: int = MiB
    """Bytes per block, the unit of caching and eviction. Part of every cache key: a new value starts a new cache."""
    request_size: int = 8 * MiB
    """Maximum bytes per request: adjacent missing blocks are fetched together up to this size."""
    concurrency: int = MOST_AT_ONCE
    """Upper limit of the requests in flight that callers wait for, per origin and process; "auto" is 128.

    Their number starts at 32 and adapts to the throughput. Twice as many speculative requests come on top."""
    read_ahead: int = 128 * MiB
    """Largest readahead window in bytes, for one open file or across the chunks of one array. 0 disables readahead."""
    max_age: float = 60.0
    """Seconds until the metadata of an object or a listing expires. 0: check at every open. inf: never check."""
    stale_if_error: bool = True
    """While the origin is unreachable, serve cached data with expired metadata, and log one warning."""
    offline: bool = False
    """Never send requests to the origin. Reading data that is not cached raises `OriginUnavailable` at once."""
    verify_always: bool = False
    """Verify the checksums of cached pages on every read, instead of once per process."""
    shared_cache: str | None = None
    """Folder or URL that several machines or users share, as a cache behind their own. None: no such cache."""
    shared_cache_size: int | None = None
    """Bytes that may stay in the shared cache, cleaned once an hour; None: no limit (on Google Drive 5 GB)."""
    shared_cache_trust: str = "group"
    """Who may put data there: "group" (the users that may write there, but never all), or "anyone"."""

    @property
    def shared(self) -> SharedOptions | None:
        """The shared cache, if there is one."""
        layers = (self.cache_dir or ())[1:]
        folder = layers[0] if layers else self.shared_cache
        if folder is None:
            return None
        size = self.shared_cache_size
        if size is None and folder.startswith("drive://"):
            size = DRIVE_SIZE
        return SharedOptions(folder, self.shared_cache_trust, bool(layers), size)

    @property
    def bounds(self) -> CacheBounds:
        """`cache_size` and `keep_free` as one value."""
        return CacheBounds(size=self.cache_size, keep_free=self.keep_free)

    @property
    def whole_request(self) -> int:
        """Size in bytes of the largest request: `request_size` rounded down to whole blocks.

        It is at least one block.
        """
        return max(1, self.request_size // self.block_size) * self.block_size

    @property
    def first_concurrency(self) -> int:
        """The number of concurrent requests at the start; buffers and request sizes are planned for it."""
        return min(FIRST_AT_ONCE, self.concurrency)

    @property
    def lifetime_s(self) -> float:
        """Seconds until metadata expires: `max_age`, or infinity if `offline` is set."""
        return math.inf if self.offline else self.max_age

    @classmethod
    def resolve(
        cls,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        *,
        protocol: str | None = None,
    ) -> Config:
        """Return the config: `given` options first, then `defaults`, then our own defaults.

        `defaults` are those of fsspec's configuration. Values may be text, as in environment variables. Unknown names
        in `defaults` are ignored. Raises ValueError for an unknown option in `given` and for an invalid value. The
        message names the option, the value and the accepted values, and where options of the target, `protocol`, go.
        Example: `Config.resolve({"cache_size": "200GB"})`.
        """
        unknown = [name for name in given if name not in _PARSERS]
        if unknown:
            raise ValueError(_unknown_option(unknown[0], protocol))
        merged = {k: v for k, v in (defaults or {}).items() if k in _PARSERS} | dict(given)
        config = cls(**{name: _parsed(name, value) for name, value in merged.items()})
        if len(config.cache_dir or ()) > 1 and config.shared_cache is not None:
            raise ValueError(
                "cachedfs options: give a second directory in cache_dir or a shared_cache, not both"
            )
        return config


def parse_size(value: Any) -> int | float:
    """Return a size in bytes (int), or a fraction of the disk (float) for a percentage.

    Examples: `8388608`, `"8MiB"`, `"200GB"`, `"10%"`. Raises ValueError for anything else.
    """
    if isinstance(value, bool) or value is None:
        raise ValueError("expected a size")
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a size must not be negative")
        return value
    size = re.fullmatch(_SIZE, str(value))
    if size is not None and size[2] == "%":
        if not float(size[1]) <= 100:
            raise ValueError("a share must be between 0% and 100%")
        return float(size[1]) / 100
    if size is None or size[2].lower() not in _UNITS:
        raise ValueError("expected bytes, a size like '8MiB' or '200GB', or a share like '10%'")
    return int(float(size[1]) * _UNITS[size[2].lower()])


def _cache_size(value: Any) -> int | float | None:
    return None if value is None or value == "auto" else parse_size(value)


def _bytes(value: Any) -> int:
    size = parse_size(value)
    if isinstance(size, float):
        raise ValueError("expected bytes or a size like '8MiB'")
    return size


def _at_least(least: int, parse: Callable[[Any], int]) -> Callable[[Any], int]:
    def parsed(value: Any) -> int:
        number = parse(value)
        if number < least:
            raise ValueError(f"expected at least {least}")
        return number

    return parsed


def _block_size(value: Any) -> int:
    size = _at_least(64 * KiB, _bytes)(value)
    if size % (64 * KiB):
        raise ValueError("expected a multiple of 64 KiB, the size of a checksum page")
    return size


def _count(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("expected a whole number")
    return int(value)


def _max_age(value: Any) -> float:
    if value == "immutable":
        return math.inf
    try:
        age = math.nan if isinstance(value, bool) else float(value)
    except ValueError:
        age = math.nan
    if not age >= 0:
        raise ValueError("expected seconds, 0 or more, or 'immutable'")
    return age


def flag(value: Any) -> bool:
    """Return True or False from a text of the environment, where Python would take "False" for true."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError("expected True or False")
    return text in ("1", "true", "yes", "on")


def _directories(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes | os.PathLike)
    paths = [os.fspath(path) for path in (value if several else [value])]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        raise ValueError("expected a directory, or a list of it and a shared cache to read")
    if len(paths) > 2:
        raise ValueError("expected at most one directory after the first: the shared cache to read")
    return tuple(os.path.abspath(os.path.expanduser(path)) for path in paths)


def shared_folder(value: Any) -> str | None:
    """Return the folder or URL of a shared cache as it is used; None for none. Raises ValueError for anything else."""
    if value in (None, "", "none"):
        return None
    path = os.fspath(value)
    if not isinstance(path, str):
        raise ValueError("expected a folder or a URL")
    protocol, is_url, place = path.removeprefix("cachedfs::").removeprefix("file://").partition("://")
    if is_url:
        # Here: they import fsspec, which `--help` does not need.
        from fsspec.registry import known_implementations, registry

        from cachedfs.common.urls import ORIGINS

        if protocol not in {*ORIGINS, *known_implementations, *registry}:
            raise ValueError(
                f"no installed package knows the protocol {protocol}://; correct it, or install that package"
            )
        return f"{ORIGINS.get(protocol, protocol)}://{place.rstrip('/')}"
    return os.path.abspath(os.path.expanduser(protocol))


def _trust(value: Any) -> str:
    if value not in ("group", "anyone"):
        raise ValueError("expected 'group' or 'anyone'")
    return str(value)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "cache_dir": _directories,
    "cache_size": _cache_size,
    "keep_free": parse_size,
    "block_size": _block_size,
    "request_size": _at_least(64 * KiB, _bytes),
    "concurrency": lambda value: MOST_AT_ONCE if value == "auto" else _at_least(1, _count)(value),
    "read_ahead": _bytes,
    "max_age": _max_age,
    "stale_if_error": flag,
    "offline": flag,
    "verify_always": flag,
    "shared_cache": shared_folder,
    "shared_cache_size": lambda value: None if value in (None, "none") else _bytes(value),
    "shared_cache_trust": _trust,
}


# Options of fsspec's own caches, and ours with the same meaning.
_ELSEWHERE = {"cache_storage": "cache_dir", "expiry_time": "max_age", "check_files": "max_age"}


def _parsed(name: str, value: Any) -> Any:
    try:
        return _PARSERS[name](value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"cachedfs option {name}={value!r}: {error}") from None


def _unknown_option(name: str, protocol: str | None) -> str:
    import difflib  # imported here, because only mistakes need it

    if name in _ELSEWHERE:
        near = [_ELSEWHERE[name]]
    else:
        near = difflib.get_close_matches(name, [*_PARSERS, *FSSPEC_KEYWORDS], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(_PARSERS)}."
    examples = ", ".join(
        f"{each}={{{name!r}: ...}}" for each in ([protocol] if protocol else ["gs", "drive"])
    )
    return (
        f"cachedfs has no option {name!r}; {hint} Options of the target go in a dictionary named like its protocol: "
        f"{examples}, or in target_options={{...}}."
    )
