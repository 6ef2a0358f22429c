"""What a request gives back. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leafkv.engine.request import FinishReason, Request, RequestMetrics


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The answer so far.

    ``finish_reason`` is None while the request runs, then "stop" (a stop token), "length" (``max_tokens``), "abort"
    or "error". ``stop_reason`` is the stop token of ``SamplingParams.stop_token_ids`` that ended it, None for
    end-of-sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    def finished(self) -> bool:
        """Whether there is no more to come."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its answer so far; ``finished`` says whether that is all of it.

    ``num_cached_tokens`` of the prompt's tokens came from the prefix cache when the request was first admitted.
    ``error`` is what ended it, with ``finish_reason`` "error": `LLM` raises it where the answer is awaited.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    error: Exception | None = field(default=None, repr=False)

    @classmethod
    def of(cls, request: Request, error: Exception | None = None) -> RequestOutput:
        """The state of ``request`` now."""
        completion = CompletionOutput(
            index=0,
            text=request.text,
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return cls(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=request.finish_reason is not None,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.metrics,
            error=error,
        )
