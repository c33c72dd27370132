"""Local files that are there when they are complete, and not before: a reader never meets half of one."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fsspec.utils import isfilelike

__all__ = ["filled"]


async def filled(target: Any, fill: Callable[[Any], Awaitable[None]]) -> None:
    """Have `fill` write into `target`: into an open file as it is, at a path into a file that then takes the name."""
    if isfilelike(target):
        await fill(target)
        return
    temporary = f"{os.fspath(target)}.{uuid.uuid4().hex[:8]}.part"
    try:
        # Not in a thread: one that is cancelled would make the file all the same, when it is too late to remove it.
        with open(temporary, "wb") as file:  # noqa: ASYNC230
            await fill(file)
        os.replace(temporary, target)
    except BaseException:  # an interrupt or a cancellation too leaves no half file behind
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
