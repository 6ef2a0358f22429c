"""Who waits, and who is next: the policies of the scheduler.

* ``fcfs``: by arrival.
* ``priority``: by priority and age. A level of priority is worth `AGING` steps of waiting: whoever arrived that much
  earlier goes before one who is a level more urgent. Since all who wait grow older alike, that is one number, fixed at
  arrival: the order never changes, nobody starves, and two requests never take the place from each other by turns.
* ``prefix``: the longest cached prefix first, but nobody is passed for more than `PATIENCE` steps.

A request that waits for the prefix which a running one computes is parked, by what it waits for: it is not asked about
again before that has come. So the cost of a step does not grow with the number of those who wait: O(log waiting) for
each one that is looked at.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from leafkv.engine.request import Request

Policy = Literal["fcfs", "priority", "prefix"]

POLICIES = get_args(Policy)

AGING = 1000
"""Steps of waiting that are worth a level of priority."""

PATIENCE = 1000
"""Steps after which a request goes first, whatever is cached of others."""

GLANCES = 32
"""Requests of which a step looks up anew how much is cached."""


SLACK = 64
"""Entries of requests that have left, besides as many as there are of others: then they are thrown out."""


class Waiting:
    """Requests in the order in which they are to be admitted: by `Request.order`."""

    def __init__(self) -> None:
        # Who leaves stays in the heap until it comes up there, as a number alone: a request holds on to much more, its
        # error to the frames of whoever was told of it. It may come back meanwhile: then under another number.
        self._heap: list[tuple[tuple[int, int], int]] = []
        self._entered: dict[Request, int] = {}
        self._requests: dict[int, Request] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entered)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._entered)

    def add(self, request: Request) -> None:
        """Take a request."""
        self._entered[request] = number = next(self._numbers)
        self._requests[number] = request
        heapq.heappush(self._heap, (request.order, number))
        self._tidy()

    def remove(self, request: Request) -> None:
        """Let go of a request."""
        del self._requests[self._entered.pop(request)]
        self._tidy()

    def peek(self) -> Request | None:
        """Who is next; it stays."""
        while self._heap:
            request = self._requests.get(self._heap[0][-1])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def _tidy(self) -> None:
        """Throw the entries of those who have left out, if there are too many of them."""
        if len(self._heap) > self._most_entries():
            self._heap = [entry for entry in self._heap if entry[-1] in self._requests]
            heapq.heapify(self._heap)

    def _most_entries(self) -> int:
        return 2 * len(self._entered) + SLACK


class WaitingByPrefix(Waiting):
    """The same, with the longest cached prefix first.

    How much is cached is looked up when a request comes, of `GLANCES` requests a step in turn, and of those who seem to
    be next, as many at most; only while there is a seat. So what others have cached or lost meanwhile is seen late
    where many wait, but a step has so many lookups at most.

    `Request.rank` is the step in which a request arrived.
    """

    def __init__(self, lookup: Callable[[Request], int], now: Callable[[], int]) -> None:
        super().__init__()
        self._lookup = lookup
        self._now = now
        # Those who wait, by the number under which they entered: how much of them is cached.
        self._cached: dict[int, int] = {}
        self._by_cached: list[tuple[int, tuple[int, int], int]] = []
        self._turns: deque[int] = deque()
        self._glanced = -1

    def add(self, request: Request) -> None:
        """Take a request."""
        super().add(request)
        number = self._entered[request]
        self._turns.append(number)
        self._look(number)

    def remove(self, request: Request) -> None:
        """Let go of a request."""
        del self._cached[self._entered[request]]
        super().remove(request)

    def peek(self) -> Request | None:
        """Who is next; it stays."""
        oldest = super().peek()
        if oldest is None or self._now() - oldest.rank > PATIENCE:
            return oldest
        if self._glanced != self._now():
            self._glanced = self._now()
            self._glance()
        looks = GLANCES
        while True:
            cached, _, number = self._by_cached[0]
            if self._cached.get(number) == -cached:
                looks -= 1
                if looks == 0 or self._look(number) == -cached:
                    return self._requests[number]
            else:
                heapq.heappop(self._by_cached)

    def _glance(self) -> None:
        for _ in range(min(GLANCES, len(self._turns))):
            number = self._turns.popleft()
            if number in self._cached:
                self._look(number)
                self._turns.append(number)

    def _look(self, number: int) -> int:
        """Look up how much of a request is cached, and enter it where that has changed."""
        request = self._requests[number]
        cached = self._lookup(request)
        if self._cached.get(number) != cached:
            self._cached[number] = cached
            heapq.heappush(self._by_cached, (-cached, request.order, number))
            self._tidy()
        return cached

    def _tidy(self) -> None:
        super()._tidy()
        if len(self._turns) > self._most_entries():
            self._turns = deque(self._requests)
        if len(self._by_cached) > self._most_entries():
            self._by_cached = [entry for entry in self._by_cached if self._cached.get(entry[-1]) == -entry[0]]
            heapq.heapify(self._by_cached)
