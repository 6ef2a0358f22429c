"""Ctrl-C between the acts of the engine, never within one.

A `KeyboardInterrupt` comes after any bytecode. Halfway through an admission it would leave a request that the KV
manager knows and the scheduler does not: blocks that nobody gives back, an engine that serves nobody any more.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_put_aside: list[Any] = []
"""The handler that a deferral in the main thread has put aside, while there is one."""


@contextmanager
def interrupts_deferred() -> Iterator[Callable[[], None]]:
    """Within it an interrupt only takes note. It strikes at the end, or when what is given here is called.

    Within another one it does nothing, and leaves the interrupts to that one. Other threads than the main one get none.
    """
    if threading.current_thread() is not threading.main_thread() or _put_aside:
        yield _nothing
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield _nothing
        return
    noted: list[tuple[int, Any]] = []

    def strike() -> None:
        if noted:
            interrupt = noted[0]
            noted.clear()
            handler(*interrupt)

    signal.signal(signal.SIGINT, lambda *interrupt: noted.append(interrupt))
    try:
        _put_aside.append(handler)
        yield strike
    finally:
        _put_aside.clear()
        signal.signal(signal.SIGINT, handler)
        strike()


def _nothing() -> None:
    pass
