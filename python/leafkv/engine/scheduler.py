"""Who computes how many tokens in the next step: continuous batching with chunked prefill.

There is no prefill and no decode here, only samples with known tokens whose KV is not computed yet. A step spends a
budget of tokens on them:

1. Where the policy is by priority: a waiting request that is more urgent than the last running one takes its place.
2. Running samples, in order of service. When blocks run out, the last running request is preempted: the blocks of all
   its samples are released, and later they compute again what the prefix cache has lost. So the first always
   progresses.
3. With what is left of the budget, and if nobody was preempted for blocks, waiting requests in the order of the policy
   (`waiting`). One is admitted if there are blocks for all its known tokens, beyond those of the running ones: a
   prefill, once begun, is not thrown out by another. One that shares a prefix which a running request is computing
   right now is parked until that one has committed it, holds nothing, lets others pass, and lends that one its place.

The first sample of a request computes the prompt; the others are forked from it then (`Running` calls that born).

Invariants: only running samples hold blocks; no work item is empty; :meth:`Scheduler.schedule` ends, since it preempts
each request at most once for blocks and at most once for a more urgent one, and is never empty-handed while there are
requests. Cost per step: one call of the KV manager's over the columns of the running samples, and one to commit; a look
at those that a more urgent request comes before; O(log waiting) for each request that is admitted, parked or refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from leafkv._core import WaitFor
from leafkv.engine.parking import Parking
from leafkv.engine.request import Status
from leafkv.engine.running import BORN, COMPUTED, KNOWN, LAST, LIMIT, NUMBER, PROMPT, Running
from leafkv.engine.waiting import AGING, Policy, Waiting, WaitingByPrefix
from leafkv.engine.work import Work
from leafkv.errors import OutOfBlocksError, UnknownSequenceError

if TYPE_CHECKING:
    from leafkv._core import KVManager
    from leafkv.engine.request import Request, Sample

LOOKS = 256
"""Waiting requests that a step asks the KV manager about, and wakes, at most: for others there is the next step."""

PROMPT_LOGPROBS_CHUNK = 128
"""Tokens a step of a prompt whose logprobs are wanted: each of them has a row of logits as wide as the vocabulary."""


class Proposer(Protocol):
    """Guesses how a sample goes on."""

    def propose(self, sample: Sample, most: int) -> list[int]:
        """At most ``most`` tokens that may come next; none is fine."""


class Scheduler:
    """Picks the work of each step, and gives and takes blocks accordingly.

    Args:
        manager: the KV manager whose sequences are the running samples.
        max_num_batched_tokens: the budget of a step.
        max_num_seqs: running samples at most.
        policy: who is admitted first, see `waiting`.
        proposer: where drafts come from; None for no speculation.
    """

    def __init__(
        self,
        manager: KVManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        policy: Policy = "fcfs",
        proposer: Proposer | None = None,
    ) -> None:
        self.manager = manager
        # Every token of a step has a slot of its own.
        self.max_num_batched_tokens = min(max_num_batched_tokens, manager.num_blocks * manager.block_size)
        self.max_num_seqs = max_num_seqs
        self.policy = policy
        self.running = Running()
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache; what a preempted request finds again does not count."""
        self._proposer = proposer
        self._step = 0
        by_prefix = policy == "prefix"
        self._queue = WaitingByPrefix(self._lookup, lambda: self._step) if by_prefix else Waiting()
        self._parking = Parking()
        self._own: dict[Request, tuple[int, int]] = {}
        """Leaders to whom a more urgent waiter has lent its place, and the rank and urgency that are their own."""
        self.forking: dict[Request, None] = {}
        """Running requests of which only the first live sample has a sequence."""
        self._untouched: dict[Request, None] = {}
        """Running requests that no step has computed for yet."""
        self.thorough: dict[Request, None] = {}
        """Running requests that compute all of their prompt, for its logprobs."""

    @property
    def waiting(self) -> list[Request]:
        """The requests that wait, in order of service. O(n log n): for looking."""
        return sorted([*self._queue, *self._parking], key=lambda request: request.order)

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue) + len(self._parking)

    def add(self, request: Request) -> None:
        """Take a new request. It must fit the pool: the router has checked that."""
        request.urgency = request.priority
        if self.policy == "priority":
            request.rank = self._step + request.priority * AGING
        elif self.policy == "prefix":
            request.rank = self._step
        self._queue.add(request)

    def finish(self, request: Request) -> None:
        """End a request, in whatever state: finish, abort and failure are this one act."""
        if request.status is Status.RUNNING:
            self._stop(request)
        elif request.status is Status.WAITING and not self._parking.discard(request):
            self._queue.remove(request)
        request.status = Status.FINISHED

    def finish_sample(self, sample: Sample) -> None:
        """End one sample of a running request that goes on with others."""
        self.running.remove_sample(sample)
        self._release(sample)

    def preempt(self, request: Request) -> None:
        """Release the blocks of a running request and let it wait again, before all that come after it."""
        self._send_back(request)
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1

    def _send_back(self, request: Request) -> None:
        self._stop(request)
        request.status = Status.WAITING
        self._queue.add(request)

    def _stop(self, request: Request) -> None:
        for sample in self.running.remove(request):
            self._release(sample)
        request.rank, request.urgency = self._own.pop(request, (request.rank, request.urgency))
        self.forking.pop(request, None)
        self.thorough.pop(request, None)
        self._untouched.pop(request, None)

    def _release(self, sample: Sample) -> None:
        sample.settle()
        self.manager.release(sample.number)

    def _is_watched(self, request: Request) -> bool:
        """Whether each token of its samples is looked at when it comes."""
        return request.watched or self._proposer is not None

    def _entrust(self, sample: Sample) -> None:
        """Leave the tokens of a sample that was begun with the KV manager until somebody looks at them."""
        if not self._is_watched(sample.request):
            sample.source = self.manager

    def schedule(self) -> Work:
        """The work of the next step. Every item has its slots reserved, and at least one token."""
        self._step += 1
        for request in self._parking.wake(self._committed, LOOKS):
            self._queue.add(request)
        if self.policy == "priority":
            if self._parking.places or self._own:
                self._lend()
            self._make_way()
        running, version = self.running, self.running.version
        wishes, drafts = self._wishes() if self._proposer is not None or self.thorough else (None, {})
        grown = self.manager.grow_running(running.columns, self.max_num_batched_tokens, wishes)
        counts, lacking, everybody, prefills = grown
        for row, sample in enumerate(running.samples) if drafts else ():
            if sample in drafts:  # as far as the budget goes
                del drafts[sample][max(0, int(counts[row]) - 1) :]
        preemptions = self.num_preemptions
        copies: list[NDArray[np.int32]] = []
        if lacking is not None:
            counts = self._reserve(counts, lacking, drafts, copies)
        if self.num_preemptions == preemptions and len(self._queue):
            counts = self._admit(counts)
        for request in [*self._untouched]:
            self._count(request, counts)
        if running.version != version:
            everybody, prefills = bool(counts.all()), True
        rows: slice | NDArray[np.int64]
        if everybody:
            rows, samples = slice(0, len(running)), running.samples
        else:
            rows = found = counts.nonzero()[0]
            samples = [running.samples[row] for row in found.tolist()]
            counts = counts[rows]
        return Work(
            samples,
            rows,
            counts,
            running.column(COMPUTED)[rows].copy(),
            running.column(KNOWN)[rows].copy(),
            running.version,
            running.plain and not (drafts or self.forking or self.thorough),
            running.greedy,
            prefills,
            drafts,
            copies,
        )

    def current(self, work: Work) -> NDArray[np.bool_] | None:
        """Which items of the work are still to be done: requests may be aborted while the model runs. None: all."""
        if work.version == self.running.version:
            return None
        work.version = self.running.version
        rows = {sample: row for row, sample in enumerate(self.running.samples)}
        found = work.rows = np.array([rows.get(sample, -1) for sample in work.samples], np.int64)
        return found >= 0

    def logits_wanted(self, work: Work) -> NDArray[np.int64]:
        """Of how many of the last tokens of each item the logits are wanted."""
        wanted = (work.computed + work.counts >= work.known).astype(np.int64)
        if work.drafts or self.thorough:
            for item, sample in enumerate(work.samples):
                wanted[item] += len(work.drafts.get(sample, ()))
                if sample.request in self.thorough:
                    wanted[item] = work.counts[item]
        return wanted

    def commit(
        self,
        work: Work,
        written: NDArray[np.int64],
        tokens: NDArray[np.int64],
        new: NDArray[np.int64],
        ends: Sequence[int],
    ) -> None:
        """The KV of ``written[i]`` tokens of each item is there; ``new[i]`` of ``tokens`` [sum(new)] are its next ones.

        The work knows then whose tokens want a look; ``ends`` are those that may be somebody's last. Nothing changes if
        anything is wrong with one of them.
        """
        rows = None if isinstance(work.rows, slice) else work.rows
        work.looks = self.manager.commit_running(self.running.columns, rows, written, tokens, new, ends)

    def drop_drafts(self, work: Work, written: NDArray[np.int64]) -> None:
        """Give back the slots of drafts that were wrong; those of ``written[i]`` tokens of each item stay."""
        if work.drafts:
            for sample, computed, n, kept in zip(
                work.samples, work.computed.tolist(), work.counts.tolist(), written.tolist(), strict=True
            ):
                if kept < n:
                    self.manager.truncate(sample.number, computed + kept)

    def bear(self, firsts: Mapping[Sample, int]) -> dict[Request, Exception]:
        """Fork the other samples of requests whose prompt has been computed, and give them their first tokens.

        Returns what went wrong, and with whom.
        """
        failed: dict[Request, Exception] = {}
        for request in [*self.forking]:
            row = self.running.row(request.live[0])
            if self.running.column(COMPUTED)[row] < request.num_prompt_tokens:
                continue
            del self.forking[request]
            try:
                for sample in request.live[1:]:
                    row += 1
                    self._fork(request.live[0], sample, row, firsts.get(sample))
            except Exception as error:
                failed[request] = error
            else:
                for sample in request.live[1:]:
                    self._entrust(sample)
        return failed

    def _fork(self, first: Sample, sample: Sample, row: int, token: int | None) -> None:
        """Let a sample share the prompt that the first one has computed, and go on from there with ``token``."""
        running, manager, length = self.running, self.manager, sample.num_prompt_tokens
        manager.fork(first.number, sample.number)
        running.column(BORN)[row] = 1
        # One that was preempted has tokens. One that has none, and gets none now, computes the prompt's last.
        written = length if token is not None or sample.num_output_tokens else length - 1
        manager.truncate(sample.number, written)
        unwritten = [*sample.tokens[written:], *(() if token is None else (token,))]
        manager.commit(sample.number, written, unwritten)
        running.column(COMPUTED)[row] = written
        running.column(KNOWN)[row] = written + len(unwritten)
        running.column(LAST)[row] = unwritten[-1]

    def _wishes(self) -> tuple[NDArray[np.int64], dict[Sample, list[int]]]:
        """How many tokens each running sample would compute, and the drafts among them."""
        running = self.running
        counts = (running.column(KNOWN) - running.column(COMPUTED)) * running.column(BORN)
        drafts: dict[Sample, list[int]] = {}
        if self._proposer is not None:
            # The last token that a sample may have is never computed, and the one after the drafts is for free.
            most = running.column(LIMIT) - running.column(KNOWN) - 1
            for row in (counts == 1).nonzero()[0].tolist():
                sample = running.samples[row]
                if most[row] > 0 and (tokens := self._proposer.propose(sample, int(most[row]))):
                    drafts[sample] = tokens
                    counts[row] += len(tokens)
        for request in [*self.thorough]:
            if request.reads_cache:  # it has what it wanted
                del self.thorough[request]
            else:
                row = running.row(request.live[0])
                counts[row] = min(counts[row], PROMPT_LOGPROBS_CHUNK)
        return counts, drafts

    def _reserve(
        self,
        counts: NDArray[np.int64],
        lacking: NDArray[np.int32],
        drafts: dict[Sample, list[int]],
        copies: list[NDArray[np.int32]],
    ) -> NDArray[np.int64]:
        """Find slots for those who lack blocks; return what is left of the counts, the last ones being preempted.

        ``copies`` gets those that had to be asked for meanwhile.
        """
        running = self.running
        for row, lacks in enumerate(lacking.tolist()) if drafts else ():
            sample = running.samples[row]
            if drafts.pop(sample, None):  # nobody lacks a block for a guess
                counts[row] = 1
                if not lacks:
                    self.manager.truncate(sample.number, int(running.column(COMPUTED)[row]) + 1)
        for row in lacking.nonzero()[0].tolist():
            if row >= len(running):
                break
            sample = running.samples[row]
            while not self._grow(sample, int(counts[row])):
                # The last one to share a block may write it once the copies of the others have been made.
                owed = self.manager.copies()
                if len(owed):
                    copies.append(owed)
                    continue
                victim = running.samples[-1].request
                self.preempt(victim)
                if victim is sample.request:
                    break
        return counts[: len(running)]

    def _admit(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Start waiting requests while there are tokens, seats and blocks; return the counts with theirs put in."""
        budget = self.max_num_batched_tokens - int(counts.sum())
        for _ in range(LOOKS):
            if budget == 0 or len(self.running) >= self.max_num_seqs:  # not worth a look at who waits
                break
            request = self._queue.peek()
            if request is None:
                break
            row = self._start(request, counts)
            if row is None:
                if request in self._parking:
                    continue
                break
            n = int(self.running.column(KNOWN)[row] - self.running.column(COMPUTED)[row])
            n = min(n, budget, PROMPT_LOGPROBS_CHUNK if request in self.thorough else budget)
            if not self._grow(request.live[0], n):
                self._send_back(request)
                break
            counts = np.insert(counts, row, [n] + [0] * (len(request.live) - 1))
            budget -= n
        return counts

    def _start(self, request: Request, counts: NDArray[np.int64] | int = 0) -> int | None:
        """Let a request run, holding its prefix hit, if it has seats and finds blocks.

        Besides those, that is, which the running samples still lack once they have ``counts`` slots more. Returns its
        row, or None: it waits on, or was parked.
        """
        samples = request.live
        if len(self.running) + len(samples) > self.max_num_seqs:
            return None
        first, manager = samples[0], self.manager
        before, promised = manager.allocatable_blocks, int(self._promises(counts).sum())
        answer = manager.begin(first.number, first.tokens, request.namespace, read_cache=request.reads_cache)
        if isinstance(answer, WaitFor):
            self._queue.remove(request)
            self._parking.add(request, answer)
            return None
        # This one's prefix hit is held from `begin` on, and so not among the allocatable blocks: where that changes
        # nothing, others have all of it, and keep it.
        cached, allocatable = answer.cached_tokens, manager.allocatable_blocks
        if self._blocks_lacking(samples, cached, shared=allocatable == before) > allocatable - promised:
            manager.release(first.number)
            return None
        self._queue.remove(request)
        request.status = Status.RUNNING
        if len(samples) > 1:
            self.forking[request] = None
        if not request.reads_cache:
            self.thorough[request] = None
        if request.metrics.first_scheduled_time is None:
            self._untouched[request] = None
        self._entrust(first)
        return self.running.insert(request, cached, watched=self._is_watched(request))

    def _count(self, request: Request, counts: NDArray[np.int64]) -> None:
        """The first step that computes for a request has come, unless others have all of it."""
        row = self.running.row(request.live[0])
        if counts[row]:
            del self._untouched[request]
            cached = min(int(self.running.column(COMPUTED)[row]), request.num_prompt_tokens)
            request.metrics.first_scheduled_time = time.monotonic()
            request.metrics.num_cached_tokens = cached
            self.num_cached_tokens += cached

    def _make_way(self) -> None:
        """Let more urgent requests run instead of the last running ones, where they lack seats or blocks.

        Who came so much earlier that the policy serves it first all the same keeps its place, see `waiting`.
        """
        for _ in range(LOOKS):
            request = self._queue.peek()
            if request is None:
                return
            weaker = self._weaker(request)
            if not weaker:
                return
            if self._start(request) is None and request not in self._parking:
                victims = self._victims(request, weaker)
                if not victims:
                    return
                for victim in victims:
                    self.preempt(victim)

    def _weaker(self, request: Request) -> list[Request]:
        """The running requests whose place another may take, the last one first: it is more urgent, and comes first."""
        weaker: dict[Request, None] = {}
        for sample in reversed(self.running.samples):
            other = sample.request
            if other.order <= request.order:
                break
            if request.urgency < other.urgency:
                weaker[other] = None
        return [*weaker]

    def _victims(self, request: Request, weaker: list[Request]) -> list[Request]:
        """As few of the weaker ones as may leave a request seats and blocks; none if all of them would not do.

        What they hold comes free, at most: it is less where they share it.
        """
        held = -(-self.running.column(COMPUTED) // self.manager.block_size)
        promises = self._promises()
        freed: dict[Request, list[int]] = {}
        for sample, blocks in zip(self.running.samples, (held + promises).tolist(), strict=True):
            freed.setdefault(sample.request, []).append(blocks)
        seats = self.max_num_seqs - len(self.running) - len(request.live)
        room = self.manager.allocatable_blocks - int(promises.sum())
        room -= self._blocks_lacking(request.live, self._lookup(request), shared=True)
        for count, other in enumerate(weaker, 1):
            seats, room = seats + len(freed[other]), room + sum(freed[other])
            if seats >= 0 and room >= 0:
                return weaker[:count]
        return []

    def _promises(self, counts: NDArray[np.int64] | int = 0) -> NDArray[np.int64]:
        """Blocks that each running sample lacks for its known tokens, once it has ``counts`` slots more."""
        size, running = self.manager.block_size, self.running
        held = -(-(running.column(COMPUTED) + counts) // size)
        if self.forking:  # those that are to be born share the whole blocks of the prompt
            held = np.where(running.column(BORN), held, running.column(PROMPT) // size)
        promises: NDArray[np.int64] = (-(-running.column(KNOWN) // size) - held).clip(0)
        return promises

    def _lend(self) -> None:
        """Give leaders the places of the most urgent ones who wait for them, and others their own back."""
        lent: dict[Request, tuple[int, int]] = {}
        for number, (rank, urgency) in self._parking.places.items():
            rows = np.flatnonzero(self.running.column(NUMBER) == number)
            if len(rows):  # otherwise it has ended, and the others wake at one of the next steps
                leader = self.running.samples[rows[0]].request
                before = lent.get(leader) or self._own.get(leader, (leader.rank, leader.urgency))
                lent[leader] = min(before[0], rank), min(before[1], urgency)
        for leader in {**self._own, **lent}:
            own = self._own.pop(leader, (leader.rank, leader.urgency))
            place = lent.get(leader, own)
            if place != own:
                self._own[leader] = own
            if place != (leader.rank, leader.urgency):
                self.running.move(leader, *place)

    def _committed(self, number: int) -> float:
        """Committed tokens of a sequence; infinitely many if it has ended."""
        try:
            return self.manager.num_committed(number)
        except UnknownSequenceError:
            return math.inf

    def _grow(self, sample: Sample, n: int) -> bool:
        try:
            self.manager.grow(sample.number, n)
        except OutOfBlocksError:
            return False
        return True

    def _lookup(self, request: Request) -> int:
        """Tokens of a request that are cached now."""
        return self.manager.lookup(request.live[0].tokens, request.namespace) if request.reads_cache else 0

    def _blocks_lacking(self, samples: list[Sample], cached: int, *, shared: bool) -> int:
        """Blocks that a request that holds a prefix hit of its first sample must be given for its known tokens.

        A block that is hit in part is copied. If nobody else has it, it is given back for the copy, or itself becomes
        the copy where that is the last block; if the hit is ``shared``, the copy takes a block of its own. The other
        samples share the whole blocks of the prompt.
        """
        first, *others = samples
        whole, rest = divmod(cached, self.manager.block_size)
        given_back = rest > 0 and not shared
        prompt = first.num_prompt_tokens // self.manager.block_size
        own = sum(self._blocks(len(sample.tokens)) - prompt for sample in others)
        return self._blocks(len(first.tokens)) - whole - given_back + own

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.manager.block_size)
