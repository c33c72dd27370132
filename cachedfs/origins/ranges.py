"""Ranges as HTTP writes them: the only place where an end is inclusive. Pure."""

from __future__ import annotations

import re

from cachedfs.common.types import Range, Suffix

__all__ = ["content_range", "number", "range_header"]


def range_header(want: Range | Suffix | None) -> str | None:
    """Return the `Range` header for a non-empty range, always with an end; None for the whole object."""
    if want is None:
        return None
    if isinstance(want, Suffix):
        return f"bytes=-{want.size}"
    return f"bytes={want.start}-{want.stop - 1}"


def content_range(text: str) -> tuple[int, int, int | None]:
    """Return start, stop and total of `bytes a-b/N`, where N may be `*`."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", text.strip())
    if not found:
        raise ValueError(f"the answer has no usable Content-Range: {text!r}")
    return int(found[1]), int(found[2]) + 1, number(found[3])


def number(text: str | None) -> int | None:
    """Return the number that a header holds; None where it holds none."""
    return int(text) if text is not None and text.isdigit() else None
