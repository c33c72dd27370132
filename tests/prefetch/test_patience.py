"""How long a prefetch plan pauses while its origin is unreachable."""

from cachedfs.prefetch.requests import pause_after


def test_pauses_grow_while_the_origin_is_unreachable():
    now, waits = 0.0, []
    for _ in range(7):
        waits.append(pause_after(now))
        now += waits[-1]
    assert waits == [1, 1, 2, 4, 8, 15, 15]
