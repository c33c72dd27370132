"""Memory that a read fills."""

import pytest

from cachedfs.common.buffer import zeros
from tests.support import MiB


@pytest.mark.parametrize("size", [0, 1, 5 * MiB + 3])
def test_what_was_filled_in_is_returned_without_a_copy(size):
    buffer = zeros(size)
    assert buffer.getvalue() == bytes(size)
    with buffer.getbuffer() as view:
        view[size // 2 :] = b"x" * len(view[size // 2 :])
    assert buffer.getvalue() == bytes(size // 2) + b"x" * (size - size // 2)
    assert buffer.getvalue() is buffer.getvalue()
