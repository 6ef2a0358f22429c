"""What waits for one consumer: a single output, however far the consumer is behind.

The engine's thread puts outputs in, a task of the consumer's event loop takes them out. One that is not taken before
the next comes is merged with it, so a slow consumer neither stops the engine nor piles up memory, and misses nothing:
outputs that hold the whole answer replace each other, those that hold what is new are joined. A put costs O(what
waits).
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from leafkv.engine.outputs import merge

if TYPE_CHECKING:
    from leafkv.engine.outputs import RequestOutput


class OutputCollector:
    """The outputs of one request on their way to one consumer. Made in the consumer's event loop.

    Args:
        delta: whether an output holds what is new since the one before, or all of the answer.
    """

    def __init__(self, *, delta: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self._delta = delta
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> bool:
        """Add an output, in any thread; True if the consumer has to be woken for it."""
        with self._lock:
            waiting = self._output is not None or self._error is not None
            self._output = output if self._output is None else merge(self._output, output, delta=self._delta)
        return not waiting

    def fail(self, error: Exception) -> bool:
        """Let ``error`` follow what waits, in any thread; True if the consumer has to be woken for it."""
        with self._lock:
            waiting = self._output is not None or self._error is not None
            self._error = error
        return not waiting

    def wake(self) -> None:
        """Tell the consumer that there is something; in its event loop alone."""
        self._ready.set()

    async def get(self) -> RequestOutput:
        """All that has come since the last call, as one output; waits until there is something.

        Raises:
            Exception: what :meth:`fail` was given, once the outputs before it are taken.
        """
        while True:
            await self._ready.wait()
            self._ready.clear()
            with self._lock:
                output, self._output = self._output, None
                error = self._error
            if output is not None:
                if error is not None:
                    self._ready.set()  # it comes next, and nobody else will say so
                return output
            if error is not None:
                raise error
