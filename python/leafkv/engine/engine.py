"""One step of the engine: schedule, compute, draw, commit, report.

A request that fails ends with finish reason "error", its blocks released; the others go on. What fails in one request
(its sampling parameters, its logits, its text) is that one's error alone; what fails in the step (the model, the
kernel) is the error of all requests of the step. Not safe for use by several threads, nor for an interrupt halfway
through: its faces, `LLM` and `AsyncEngine`, see to that.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from leafkv.engine.batch_builder import BatchBuilder
from leafkv.engine.drawing import Drawn, draw
from leafkv.engine.outputs import RequestOutput
from leafkv.engine.recorder import Recorder, copies
from leafkv.engine.running import PROMPT
from leafkv.engine.scheduler import Scheduler
from leafkv.engine.work import Work
from leafkv.errors import (
    HandedOverError,
    InvalidInputError,
    InvariantError,
    JournalError,
    LeafKVError,
    QueueFullError,
    QueueTimeoutError,
)

if TYPE_CHECKING:
    from leafkv.engine.journal import Journal
    from leafkv.engine.request import FinishReason, Request, Sample
    from leafkv.engine.scheduler import Proposer
    from leafkv.engine.waiting import Policy
    from leafkv.kv import KVCache, KVManager
    from leafkv.models.batch import Model


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started, and the requests it has now.

    A prompt token is computed each time the model runs over it: again after a preemption, never after a prefix hit.
    """

    steps: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0


class Engine:
    """Runs requests over one model and one KV memory, many at a time.

    Args:
        model: what computes the logits.
        manager: bookkeeping of ``cache``.
        cache: the KV memory.
        eos_token_ids: tokens that end a sample.
        max_num_batched_tokens: tokens per step at most.
        max_num_seqs: running samples at most.
        max_model_len: tokens per sample at most, its answer included.
        num_threads: threads for attention and matrix products; None for all.
        policy: who is admitted first, see `waiting`.
        max_waiting: requests that wait at most; None for any number.
        queue_timeout: seconds that a request waits at most to be first admitted; None for ever.
        proposer: guesses tokens that are then checked several at a time; None for no speculation.
        decode: the text of one token, for logprobs.
        journal: where every request is written, so that it survives this process; None for nowhere.
    """

    def __init__(
        self,
        model: Model,
        manager: KVManager,
        cache: KVCache,
        *,
        eos_token_ids: frozenset[int],
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        num_threads: int | None = None,
        policy: Policy = "fcfs",
        max_waiting: int | None = None,
        queue_timeout: float | None = None,
        proposer: Proposer | None = None,
        decode: Callable[[int], str] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.model = model
        self.manager = manager
        self.cache = cache
        self.scheduler = Scheduler(
            manager,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            policy=policy,
            proposer=proposer,
        )
        self._builder = BatchBuilder(
            manager,
            model,
            max_tokens=max_num_batched_tokens,
            max_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_threads=num_threads,
        )
        self._num_threads = num_threads
        self._eos_token_ids = sorted(eos_token_ids)
        self._max_waiting = max_waiting
        self._queue_timeout = queue_timeout
        self._decode = decode
        self._recorder = None if journal is None else Recorder(journal)
        self._requests: dict[str, Request] = {}
        self._queued: OrderedDict[Request, None] = OrderedDict()
        """Requests that were never admitted, oldest first, where they may wait but for a while."""
        self._news: dict[Request, None] = {}
        """Requests of which the step, or an abort before it, has something to report."""
        self._arrivals = 0
        self._now = 0.0
        self._steps = 0
        self._computed_prompt_tokens = 0
        self._generated_tokens = 0
        self._draft_tokens = 0
        self._accepted_tokens = 0

    def add_request(self, request: Request, *, journaled: bool = False) -> None:
        """Queue a request that the router has made, or that has come back from the journal (``journaled``).

        Raises:
            QueueFullError: ``max_waiting`` requests wait already.
            InvalidInputError: an unfinished request has the same id.
            JournalError: the request could not be written, and so is not taken.
        """
        if request.request_id in self._requests:
            raise InvalidInputError(f"request_id: {request.request_id!r} belongs to a request not finished yet")
        waiting = self.scheduler.num_waiting
        most = self._max_waiting if request.recorded and not journaled else None
        if most is not None and waiting >= most:
            raise QueueFullError(f"{waiting} requests are waiting, which is as many as may (max_waiting)")
        if self._recorder is not None and request.recorded and not journaled:
            self._recorder.admit(request)
        request.number = self._arrivals
        for sample in request.samples:
            sample.number = self._arrivals
            self._arrivals += 1
        request.metrics.arrival_time = time.monotonic()
        self._requests[request.request_id] = request
        if self._queue_timeout is not None and not journaled:
            self._queued[request] = None
        self.scheduler.add(request)
        if journaled:  # it has tokens that nobody here has heard of
            self._news[request] = None

    def abort_request(self, request_id: str) -> None:
        """End a request in whatever state, and free its blocks at once; the next step reports it.

        Nothing happens if there is no such request, or no longer.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")
            with suppress(JournalError):  # the next step tries again, and says so
                self._record()

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do or to report."""
        return bool(self._requests or self._news)

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def stats(self) -> EngineStats:
        """The counters now."""
        return EngineStats(
            steps=self._steps,
            computed_prompt_tokens=self._computed_prompt_tokens,
            cached_prompt_tokens=self.scheduler.num_cached_tokens,
            generated_tokens=self._generated_tokens,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            preemptions=self.scheduler.num_preemptions,
            running=self.scheduler.running.num_requests,
            waiting=self.scheduler.num_waiting,
        )

    def step(self) -> list[RequestOutput]:
        """Compute the next tokens of some requests; return what became known since the last step.

        Raises:
            JournalError: what became known could not be written, and is not told. The next step tries again.
        """
        self._record()
        self._expire()
        work = self.scheduler.schedule()
        if len(work):
            self._run(work)
        elif self._requests:
            raise InvariantError(f"{len(self._requests)} requests, and nothing to do for any of them")
        self._record()
        news, self._news = self._news, {}
        return [RequestOutput.of(request) for request in news]

    def checkpoint(self, opened: Callable[[], Journal] | None = None) -> int:
        """Hand all unfinished requests over to whoever opens the journal: here they end with a `HandedOverError`.

        Args:
            opened: opens the journal that they go to, which is closed in the end; by default it is the engine's own,
                which takes no more requests then.

        Returns:
            How many requests were handed over. Those that have ended stay where they are.

        Raises:
            InvalidInputError: there is no journal, or a request cannot be written down.
            JournalError: they could not be written; nothing has changed.
        """
        own = self._recorder
        requests = [request for request in self._requests.values() if request.recorded]
        if opened is not None:
            admitted, tokens, ended = copies(requests)
            with opened() as journal:
                journal.write(admitted=admitted, tokens=tokens, ended=ended)
        elif own is not None:
            own.flush()
            self._recorder = None  # that they end here is not what the journal says
        else:
            raise InvalidInputError("path: expected where to, as the engine has no journal")
        for request in [*self._requests.values()]:
            error = HandedOverError(f"request {request.request_id} was handed over, by a checkpoint")
            self._finish(request, "abort", error)
        self._recorder = own
        if opened is None:
            self.close()
        else:
            with suppress(JournalError):  # the next step tries again, and says so
                self._record()
        return len(requests)

    def close(self) -> None:
        """Write what is left, and let go of the journal. Unfinished requests stay in it."""
        if self._recorder is not None:
            try:
                self._record()
            finally:
                self._recorder.journal.close()

    def _record(self) -> None:
        if self._recorder is not None:
            self._recorder.flush()

    def _expire(self) -> None:
        """End requests that have waited for too long."""
        limit = self._queue_timeout
        while limit is not None and self._queued:
            request = next(iter(self._queued))
            if request.metrics.first_scheduled_time is not None:
                del self._queued[request]
                continue
            waited = time.monotonic() - (request.metrics.arrival_time or 0.0)
            if waited < limit:
                return
            what = f"request {request.request_id} has waited for {waited:.1f} s, and may for {limit:g} (queue_timeout)"
            self._finish(request, "error", QueueTimeoutError(what))

    def _run(self, work: Work) -> None:
        self._steps += 1
        try:
            logits, wanted = self._compute(work)
            drawn = draw(
                logits,
                wanted,
                work,
                forking=self.scheduler.forking,
                thorough=self.scheduler.thorough,
                num_threads=self._num_threads,
                decode=self._decode,
            )
            self._account(work, drawn)
        except BaseException as error:
            # What the step has written is not committed, or taken back: nobody has heard of it.
            for request in _requests_of(work.samples):
                self._take_back(work, request)
                if isinstance(error, Exception):
                    self._finish(request, "error", error)
                else:  # Ctrl-C: computed again, if somebody goes on
                    self.scheduler.preempt(request)
            if not isinstance(error, Exception):
                raise

    def _compute(self, work: Work) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Run the model; return logits, and how many rows of them each item has: of its last tokens."""
        for pairs in (*work.copies, self.manager.copies()):
            if len(pairs):
                self.cache.copy_blocks(pairs)
        wanted = self.scheduler.logits_wanted(work)
        batch = self._builder.build(work, self.scheduler.running, wanted)
        logits: NDArray[np.float32] = self.model.forward(batch, self.cache)
        expected = (int(wanted.sum()), self.model.config.vocab_size)
        if logits.shape != expected:
            raise LeafKVError(f"the model gave logits of shape {logits.shape}, expected {expected}")
        return logits, wanted

    def _account(self, work: Work, drawn: Drawn) -> None:
        """The work is done: its KV becomes findable, its tokens known, and whoever has all of them ends."""
        if work.drafts:
            drafts = sum(map(len, work.drafts.values()))
            self._draft_tokens += drafts
            self._accepted_tokens += drafts - int(drawn.rejected.sum())
        for request, error in drawn.failed.items():
            self._finish(request, "error", error)
        scheduler = self.scheduler
        work, drawn = self._still_here(work, drawn)
        written = work.counts - drawn.rejected
        try:
            scheduler.commit(work, written, drawn.tokens, drawn.new, self._eos_token_ids)
        except Exception:  # whatever it is, it may be one request's alone
            self._commit_each(work, drawn, written)
            work, drawn = self._still_here(work, drawn)
            written = work.counts - drawn.rejected
        scheduler.drop_drafts(work, written)
        if work.prefills:
            prompts = scheduler.running.column(PROMPT)[work.rows]
            ends = np.minimum(work.computed + written, prompts) - np.minimum(work.computed, prompts)
            self._computed_prompt_tokens += int(ends.sum())
        self._now = time.monotonic()
        for request, error in scheduler.bear(drawn.firsts).items():
            self._take_back(work, request)
            self._finish(request, "error", error)
        work, drawn = self._still_here(work, drawn)
        self._take_all(work, drawn)

    def _still_here(self, work: Work, drawn: Drawn) -> tuple[Work, Drawn]:
        """What of a step is not of requests that have ended: they failed just now, or were aborted meanwhile."""
        here = self.scheduler.current(work)
        return (work, drawn) if here is None else (work.only(here), drawn.only(here))

    def _take_all(self, work: Work, drawn: Drawn) -> None:
        """Look at the new tokens that want it; most wait with the KV manager until somebody asks for them."""
        assert work.looks is not None
        self._generated_tokens += len(drawn.tokens)
        if self._recorder is not None:
            self._note_unseen(work, drawn, work.looks)
        looked_at = work.looks.nonzero()[0].tolist()
        if looked_at:
            known = work.known - self.scheduler.running.column(PROMPT)[work.rows]
            ends = drawn.new.cumsum()
            for item in looked_at:
                tokens = drawn.tokens[ends[item] - drawn.new[item] : ends[item]]
                self._take(work.samples[item], int(known[item]), tokens.tolist(), drawn)
        for sample, token in drawn.firsts.items():
            if sample.finish_reason is None:
                self._generated_tokens += 1
                self._take(sample, 0, [token], drawn)

    def _take(self, sample: Sample, known: int, tokens: list[int], drawn: Drawn) -> None:
        """Give a sample tokens after the ``known`` generated ones, one after another, until one ends it."""
        request = sample.request
        if sample.finish_reason is not None:  # what failed in another sample has ended it just now
            return
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = self._now
        reason = failed = None
        try:
            for token, logprobs in itertools.zip_longest(tokens, drawn.logprobs.get(sample, ())):
                if reason is not None:
                    self._generated_tokens -= 1
                    continue
                reason = sample.take(token, logprobs)
        except Exception as error:  # whatever it is, it is this request's alone
            failed = error
        finally:
            self._note_tokens(sample, known)
        if failed is not None:
            self._finish(request, "error", failed)
            return
        if reason is not None:
            self._finish_sample(sample, reason)
        if request.stream:
            self._news[request] = None

    def _take_back(self, work: Work, request: Request) -> None:
        """What a step has committed of a request, and nobody has looked at, is as if it had not been drawn."""
        for sample, known in zip(work.samples, work.known.tolist(), strict=True):
            if sample.request is request and sample.source is not None:
                sample.settle()
                del sample.tokens[known:]
                if self._recorder is not None:
                    self._recorder.forget(sample)

    def _note_tokens(self, sample: Sample, known: int) -> None:
        """The journal gets the tokens of a sample after the first ``known`` generated ones."""
        if self._recorder is not None and sample.request.recorded:
            for position, token in enumerate(sample.output_token_ids[known:], known):
                self._recorder.token(sample, position, token)

    def _note_unseen(self, work: Work, drawn: Drawn, looks: NDArray[np.bool_]) -> None:
        """The journal gets the tokens that nobody looks at."""
        tokens = iter(drawn.tokens.tolist())
        columns = (work.samples, work.known.tolist(), drawn.new.tolist(), looks.tolist())
        for sample, known, new, is_looked_at in zip(*columns, strict=True):
            for token in itertools.islice(tokens, new):
                if not is_looked_at and self._recorder is not None and sample.request.recorded:
                    self._recorder.token(sample, known - sample.num_prompt_tokens, token)

    def _finish_sample(self, sample: Sample, reason: FinishReason) -> None:
        """End one sample, and the request with the last one."""
        sample.finish_reason = reason
        self._end(sample)
        if sample.request.live:
            self.scheduler.finish_sample(sample)
        else:
            self._finish(sample.request, reason)

    def _finish(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request with all its samples, unless it has ended."""
        if request.finished:
            return
        self.scheduler.finish(request)
        del self._requests[request.request_id]
        self._queued.pop(request, None)
        request.error = error or request.error
        for sample in request.live:
            sample.finish_reason = reason
            self._end(sample)
        request.metrics.finished_time = time.monotonic()
        self._news[request] = None

    def _end(self, sample: Sample) -> None:
        """A sample has its last token."""
        try:
            sample.end_text()
        except Exception as error:  # the sample has ended all the same, and somebody waits to hear of it
            sample.finish_reason = "error"
            sample.request.error = sample.request.error or error
        request = sample.request
        if self._recorder is not None and request.recorded:
            self._recorder.end(sample)

    def _commit_each(self, work: Work, drawn: Drawn, written: NDArray[np.int64]) -> None:
        """Commit item by item; requests of which one cannot be end."""
        work.looks = np.zeros(len(work), bool)
        for item, sample in enumerate(work.samples):
            only = np.arange(len(work)) == item
            one, its = self._still_here(work.only(only), drawn.only(only))
            if not len(one):  # another sample of its request has failed
                continue
            try:
                self.scheduler.commit(one, written[only], its.tokens, its.new, self._eos_token_ids)
            except Exception as error:
                self._take_back(work, sample.request)
                self._finish(sample.request, "error", error)
            else:
                work.looks[only] = one.looks


def _requests_of(samples: Iterable[Sample]) -> list[Request]:
    """The requests of samples that have not ended, each once."""
    return [*dict.fromkeys(sample.request for sample in samples if not sample.request.finished)]
