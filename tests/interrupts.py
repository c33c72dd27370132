"""Ctrl-C at whatever moment of a function: for programs of tests, in a process of their own."""

import signal
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable
from types import CodeType

__all__ = ["interrupt_within"]


def interrupt_within(code: CodeType, call: Callable[[], object], *, times: int = 100) -> None:
    """Call `call` until a KeyboardInterrupt came so often while `code` ran; after that Ctrl-C is ignored."""
    sys.setswitchinterval(1e-6)
    n = 0

    def ctrl_c(_, frame):  # elsewhere it would end the program that counts
        nonlocal n
        while frame:
            if frame.f_code is code:
                n += 1
                raise KeyboardInterrupt
            frame = frame.f_back

    def interrupt():
        while n < times:
            time.sleep(1e-4)
            interrupt_main()

    signal.signal(signal.SIGINT, ctrl_c)
    threading.Thread(target=interrupt, daemon=True).start()
    while n < times:
        try:
            call()
        except KeyboardInterrupt:
            pass
    signal.signal(signal.SIGINT, signal.SIG_IGN)
