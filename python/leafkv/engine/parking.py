"""Requests that wait for the prefix which a running one, their leader, is computing right now.

They hold nothing and are not asked about again before what they wait for has come, or their leader has ended: so a
thousand of them cost a step nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leafkv._core import WaitFor
    from leafkv.engine.request import Request


class Parking:
    """Who waits for whom. Leaders are known by the sequence ids of their samples."""

    def __init__(self) -> None:
        self._leaders: dict[Request, int] = {}
        self._waiters: dict[int, list[tuple[int, int, Request]]] = {}
        """By leader, a heap: how many tokens it must have committed, and who waits for that."""
        self.places: dict[int, tuple[int, int]] = {}
        """By leader: rank and urgency of the most urgent ones that wait, or have waited, for it."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._leaders)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._leaders)

    def __contains__(self, request: Request) -> bool:
        return request in self._leaders

    def add(self, request: Request, answer: WaitFor) -> None:
        """Let a request wait for what the KV manager has named."""
        self._leaders[request] = answer.leader
        entry = (answer.tokens, next(self._numbers), request)
        heapq.heappush(self._waiters.setdefault(answer.leader, []), entry)
        rank, urgency = self.places.get(answer.leader, (request.rank, request.urgency))
        self.places[answer.leader] = min(rank, request.rank), min(urgency, request.urgency)

    def discard(self, request: Request) -> bool:
        """Let a request go, if it is here; whether it was."""
        return self._leaders.pop(request, None) is not None

    def wake(self, committed: Callable[[int], float], most: int) -> Iterator[Request]:
        """Let those go whose leader has ``committed`` enough tokens, ``most`` of them at most."""
        for leader in [*self._waiters]:
            waiters, reached = self._waiters[leader], committed(leader)
            while waiters and waiters[0][0] <= reached and most:
                request = heapq.heappop(waiters)[2]
                if self._leaders.get(request) == leader:  # otherwise it has left, and perhaps come back
                    del self._leaders[request]
                    most -= 1
                    yield request
            if not waiters:
                del self._waiters[leader], self.places[leader]
