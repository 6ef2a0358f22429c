"""One step of the engine: schedule, compute, sample, commit, report.

A request that fails (an error of the model in its step, logits that are no distribution) ends with finish reason
"error" and its blocks released; the others go on. Not safe for use by several threads: :class:`LLM` adds a lock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leafkv.engine.batch_builder import BatchBuilder
from leafkv.engine.outputs import RequestOutput
from leafkv.engine.sampler import INVALID, sample
from leafkv.engine.scheduler import Scheduler, WorkItem
from leafkv.errors import InvalidInputError, InvariantError, LeafKVError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from leafkv.engine.request import FinishReason, Request
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
    preemptions: int = 0
    running: int = 0
    waiting: int = 0


class Engine:
    """Runs requests over one model and one KV memory, many at a time.

    Args:
        model: what computes the logits.
        manager: bookkeeping of ``cache``.
        cache: the KV memory.
        eos_token_ids: tokens that end a request.
        max_num_batched_tokens: tokens per step at most.
        max_num_seqs: running requests at most.
        max_model_len: tokens per request at most, its answer included.
        num_threads: threads for attention and matrix products; None for all.
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
    ) -> None:
        self.model = model
        self.manager = manager
        self.cache = cache
        self.scheduler = Scheduler(manager, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        self._builder = BatchBuilder(
            manager,
            model.config,
            max_tokens=max_num_batched_tokens,
            max_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_threads=num_threads,
        )
        self._num_threads = num_threads
        self._eos_token_ids = eos_token_ids
        self._requests: dict[str, Request] = {}
        self._outputs: list[RequestOutput] = []
        """What the step, or an abort before it, has to report."""
        self._arrivals = 0
        self._steps = 0
        self._computed_prompt_tokens = 0
        self._generated_tokens = 0

    def add_request(self, request: Request) -> None:
        """Queue a request that the router has made."""
        if request.request_id in self._requests:
            raise InvalidInputError(f"request_id: {request.request_id!r} belongs to a request not finished yet")
        request.number = self._arrivals
        request.metrics.arrival_time = time.monotonic()
        self._arrivals += 1
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def abort_request(self, request_id: str) -> None:
        """End a request in whatever state, and free its blocks at once; the next step reports it.

        Nothing happens if there is no such request, or no longer.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do or to report."""
        return bool(self._requests or self._outputs)

    def stats(self) -> EngineStats:
        """The counters now."""
        return EngineStats(
            steps=self._steps,
            computed_prompt_tokens=self._computed_prompt_tokens,
            cached_prompt_tokens=self.scheduler.num_cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self.scheduler.num_preemptions,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
        )

    def step(self) -> list[RequestOutput]:
        """Compute the next tokens of some requests; return what became known since the last step."""
        work = self.scheduler.schedule()
        if work:
            self._run(work)
        elif self._requests:
            raise InvariantError(f"{len(self._requests)} requests, and nothing to do for any of them")
        outputs, self._outputs = self._outputs, []
        return outputs

    def _run(self, work: list[WorkItem]) -> None:
        self._steps += 1
        try:
            tokens = self._compute(work)
            for request, n in work:
                if request.finish_reason is None:  # it may have been aborted while the model ran
                    self._advance(request, n, tokens.get(request))
        except Exception as error:
            # What the step has written is not committed: nobody will find it.
            for request, _ in work:
                if request.finish_reason is None:
                    self._finish(request, "error", error)
        except BaseException:  # Ctrl-C: the step is taken back, and computed again if somebody goes on
            for request, _ in work:
                if request.finish_reason is None:
                    self.scheduler.preempt(request)
            raise

    def _compute(self, work: list[WorkItem]) -> dict[Request, int]:
        """Run the model; return the next token of each request whose known tokens are all computed then."""
        copies = self.manager.copies()
        if len(copies):
            self.cache.copy_blocks(copies)
        batch = self._builder.build(work)
        logits: NDArray[np.float32] = self.model.forward(batch, self.cache)
        sampled = [request for request, n in work if request.num_uncomputed_tokens == n]
        expected = (len(sampled), self.model.config.vocab_size)
        if logits.shape != expected:
            raise LeafKVError(f"the model gave logits of shape {logits.shape}, expected {expected}")
        return dict(zip(sampled, sample(logits, sampled, self._num_threads), strict=True))

    def _advance(self, request: Request, n: int, token: int | None) -> None:
        """Account for ``n`` computed tokens and, if there is one, the next token."""
        if token == INVALID:
            what = f"request {request.request_id}: the logits after {len(request.tokens)} tokens are not a distribution"
            self._finish(request, "error", LeafKVError(f"{what} (NaN, infinite, or all -inf)"))
            return
        try:
            done = request.num_computed_tokens
            self.manager.commit(request.number, done + n, () if token is None else (token,))
            request.num_computed_tokens = done + n
            self._computed_prompt_tokens += max(0, min(done + n, len(request.prompt_token_ids)) - done)
            if token is not None:
                self._append(request, token)
        except Exception as error:  # whatever it is, it is this request's alone
            self._finish(request, "error", error)

    def _append(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        self._generated_tokens += 1
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = time.monotonic()
        reason = self._reason_to_end(request, token)
        # The token that stopped a request is no part of its text.
        if request.detokenizer is not None and reason != "stop":
            request.detokenizer.push(token)
        if reason is not None:
            self._finish(request, reason)
        elif request.stream:
            self._outputs.append(RequestOutput.of(request))

    def _reason_to_end(self, request: Request, token: int) -> FinishReason | None:
        if token in self._eos_token_ids and not request.params.ignore_eos:
            return "stop"
        if token in request.stop_token_ids:
            request.stop_reason = token
            return "stop"
        return "length" if request.num_output_tokens == request.max_tokens else None

    def _finish(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        self.scheduler.finish(request)
        del self._requests[request.request_id]
        request.finish_reason = reason
        request.metrics.finished_time = time.monotonic()
        try:
            if request.detokenizer is not None:
                request.detokenizer.flush()
        except Exception as flush_error:  # the request has ended all the same, and somebody waits to hear of it
            request.finish_reason, error = "error", error or flush_error
        self._outputs.append(RequestOutput.of(request, error))
