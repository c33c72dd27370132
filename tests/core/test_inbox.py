"""Calls from other threads into an event loop."""

import asyncio
import contextlib
from contextvars import ContextVar

import pytest

from cachedfs.core.inbox import Inbox

number = ContextVar("number", default=0)


class CountingLoop(asyncio.SelectorEventLoop):
    n_wakes = 0

    def call_soon_threadsafe(self, *args, **kwargs):
        self.n_wakes += 1
        return super().call_soon_threadsafe(*args, **kwargs)


@pytest.fixture
def loop():
    with contextlib.closing(CountingLoop()) as loop:
        yield loop


def run_what_is_ready(loop):
    loop.call_soon(loop.call_soon, loop.stop)
    loop.run_forever()


def test_many_calls_wake_the_loop_once_and_keep_their_order_and_context(loop):
    inbox, seen = Inbox(loop), []
    for n in range(5):
        number.set(n)
        inbox.add(lambda n=n: seen.append((n, number.get())))
    run_what_is_ready(loop)
    assert (seen, loop.n_wakes) == ([(n, n) for n in range(5)], 1)
    inbox.add(lambda: seen.append("later"))
    run_what_is_ready(loop)
    assert (seen[5:], loop.n_wakes) == (["later"], 2)


def test_a_call_that_raises_does_not_hold_up_the_others(loop):
    inbox, seen, errors = Inbox(loop), [], []
    loop.set_exception_handler(lambda _, context: errors.append(type(context["exception"])))
    inbox.add(lambda: 1 / 0)
    inbox.add(lambda: seen.append(1))
    run_what_is_ready(loop)
    assert (seen, errors) == ([1], [ZeroDivisionError])


def test_a_loop_that_cannot_be_woken_is_tried_again_by_the_next_call(loop, monkeypatch):
    inbox, seen = Inbox(loop), []

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inbox.add(lambda: seen.append(1))
    monkeypatch.undo()
    inbox.add(lambda: seen.append(2))
    run_what_is_ready(loop)
    assert seen == [1, 2]


def test_a_closed_loop_refuses_calls():
    loop = asyncio.new_event_loop()
    inbox = Inbox(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            inbox.add(print)
