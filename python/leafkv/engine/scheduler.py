"""Who computes how many tokens in the next step: continuous batching with chunked prefill.

There is no prefill and no decode here, only requests with known tokens whose KV is not computed yet. A step
spends a budget of tokens on them:

1. Running requests, oldest first. When blocks run out, the newest running request is preempted: its blocks are
   released, and later it computes again what the prefix cache has lost. So the oldest always progresses.
2. With what is left of the budget, and if nobody was preempted, waiting requests in order of arrival. One is
   admitted if there are blocks for all its known tokens, beyond those of the running ones: a prefill, once begun,
   is not thrown out by another. One that shares a prefix which a running request is computing right now waits for
   that one to commit it, holds nothing, and lets others pass.

Invariants: ``running`` and ``waiting`` are in order of arrival; only running requests hold blocks; no work item
is empty; :meth:`Scheduler.schedule` ends, since it preempts each request at most once, and is never empty-handed
while there are requests. Cost per step: O(requests it looks at); per-token work is the KV manager's.
"""

from __future__ import annotations

import time
from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from leafkv._core import WaitFor
from leafkv.engine.request import Request, Status
from leafkv.errors import OutOfBlocksError

if TYPE_CHECKING:
    from leafkv._core import KVManager

WorkItem: TypeAlias = tuple[Request, int]
"""A request, and how many of its uncomputed tokens to compute."""

by_age = attrgetter("number")


class Scheduler:
    """Picks the work of each step, and gives and takes blocks accordingly.

    Args:
        manager: the KV manager whose sequences are the running requests.
        max_num_batched_tokens: the budget of a step.
        max_num_seqs: running requests at most.
    """

    def __init__(self, manager: KVManager, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache; what a preempted request finds again does not count."""

    def add(self, request: Request) -> None:
        """Take a new request. It must fit the pool: the router has checked that."""
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """End a request, in whatever state: finish, abort and failure are this one act."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.manager.release(request.number)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def preempt(self, request: Request) -> None:
        """Release a running request's blocks and let it wait again, before all that came after it."""
        self.running.remove(request)
        self._release(request)
        request.status = Status.WAITING
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=by_age)

    def schedule(self) -> list[WorkItem]:
        """The work of the next step. Every item has its slots reserved, and at least one token."""
        preemptions = self.num_preemptions
        work: list[WorkItem] = []
        budget = self.max_num_batched_tokens
        for request in self.running:  # may lose requests at its end meanwhile, all newer than this one
            if budget == 0:
                break
            n = min(request.num_uncomputed_tokens, budget)
            if self._reserve(request, n):
                work.append((request, n))
                budget -= n
        if self.num_preemptions == preemptions:
            self._admit(work, budget)
        return work

    def _reserve(self, request: Request, n: int) -> bool:
        """Reserve slots for ``n`` more tokens, preempting from the newest; False if ``request`` was the newest."""
        while not self._grow(request, n):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _admit(self, work: list[WorkItem], budget: int) -> None:
        """Start waiting requests while there are tokens, seats and blocks."""
        for request in tuple(self.waiting):
            if budget == 0 or len(self.running) == self.max_num_seqs:
                return
            before = self.manager.allocatable_blocks
            answer = self.manager.begin(request.number, request.tokens)
            if isinstance(answer, WaitFor):
                # Budget is left, so the leader's whole prompt is in this step: asking again in the next one is soon
                # enough, and not too early.
                continue
            request.num_computed_tokens = answer.cached_tokens
            n = min(request.num_uncomputed_tokens, budget)
            # Nor do the running ones lack blocks: each has slots for all its known tokens. This one's prefix hit is
            # held from `begin` on, and so not among the allocatable blocks: where that changes nothing, others have
            # all of it, and keep it.
            allocatable = self.manager.allocatable_blocks
            fits = self._blocks_lacking(request, shared=allocatable == before) <= allocatable
            if not fits or not self._grow(request, n):
                self._release(request)
                return
            self._start(request)
            work.append((request, n))
            budget -= n

    def _start(self, request: Request) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=by_age)
        request.status = Status.RUNNING
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = request.num_computed_tokens
            self.num_cached_tokens += request.num_cached_tokens

    def _grow(self, request: Request, n: int) -> bool:
        try:
            self.manager.grow(request.number, n)
        except OutOfBlocksError:
            return False
        return True

    def _release(self, request: Request) -> None:
        self.manager.release(request.number)
        request.num_computed_tokens = 0

    def _blocks_lacking(self, request: Request, *, shared: bool) -> int:
        """Blocks that a request which holds its prefix hit alone must still be given for its known tokens.

        A block that is hit in part is copied. If nobody else has it, it is given back for the copy, or itself becomes
        the copy where that is the last block; if the hit is ``shared``, the copy takes a block of its own.
        """
        whole, rest = divmod(request.num_computed_tokens, self.manager.block_size)
        given_back = rest > 0 and not shared
        return self._blocks(len(request.tokens)) - whole - given_back

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.manager.block_size)
