"""Ctrl-C between the acts of the engine, never within one.

A `KeyboardInterrupt` comes after any bytecode. Halfway through an admission it would leave a request that the KV
manager knows and the scheduler does not: blocks that nobody gives back, an engine that serves nobody any more.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_put_aside: list[Any] = []
"""The handler that a deferral in the main thread has put aside, while there is one."""


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Within it an interrupt only takes note; it strikes at the end. Other threads than the main one get none.

    Within another one it does nothing, and leaves the interrupts to that one.
    """
    if threading.current_thread() is not threading.main_thread() or _put_aside:
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    noted: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda *interrupt: noted.append(interrupt))
    try:
        _put_aside.append(handler)
        yield
    finally:
        _put_aside.clear()
        signal.signal(signal.SIGINT, handler)
        if noted:
            handler(*noted[0])
