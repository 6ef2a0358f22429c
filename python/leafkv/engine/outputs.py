"""What a request gives back. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from leafkv.engine.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from leafkv.engine.logprobs import Logprob
    from leafkv.engine.request import FinishReason, Request, RequestMetrics, Sample


@dataclass(slots=True)
class CompletionOutput:
    """One sample of the answer so far, or what is new of it (``output_kind`` DELTA).

    ``finish_reason`` is None while the sample runs, then "stop" (a stop token or string), "length" (``max_tokens``),
    "abort" or "error". ``stop_reason`` is the stop string, or the stop token of ``SamplingParams.stop_token_ids``, that
    ended it, None for end-of-sequence. ``cumulative_logprob`` is of all tokens so far, where ``logprobs`` are wanted.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether there is no more to come."""
        return self.finish_reason is not None

    @classmethod
    def of(cls, sample: Sample) -> CompletionOutput:
        """The state of ``sample`` now; what it has of it by then counts as sent."""
        delta = sample.params.output_kind is RequestOutputKind.DELTA
        tokens = sample.num_sent_tokens if delta else 0
        sample.num_sent_tokens = sample.num_output_tokens
        sample.end_is_sent = sample.finish_reason is not None
        return cls(
            index=sample.index,
            text=sample.detokenizer.delta() if delta and sample.detokenizer is not None else sample.text,
            token_ids=sample.tokens[sample.num_prompt_tokens + tokens :].tolist(),
            cumulative_logprob=sample.cumulative_logprob,
            logprobs=None if sample.logprobs is None else sample.logprobs[tokens:],
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers so far; ``finished`` says whether that is all of them.

    ``outputs`` are its samples; of a stream of deltas those that have something new. ``num_cached_tokens`` of the
    prompt's tokens came from the prefix cache when the request was first admitted. ``prompt_logprobs`` has an entry a
    prompt token, None for the first. ``metrics`` are those of now, whenever they are read. ``error`` is what ended it,
    with ``finish_reason`` "error", or "abort" if it was handed over: `LLM` and `AsyncEngine` raise it where the answer
    is awaited, after the tokens that came before it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: Exception | None = field(default=None, repr=False)

    @classmethod
    def of(cls, request: Request) -> RequestOutput:
        """The state of ``request`` now."""
        samples, delta = request.samples, request.params.output_kind is RequestOutputKind.DELTA
        if delta:
            samples = [sample for sample in samples if has_news(sample)]
        request.metrics.num_generated_tokens = sum(sample.num_output_tokens for sample in request.samples)
        prompt_logprobs = request.prompt_logprobs
        if delta and prompt_logprobs is not None:  # in whole, once
            whole = len(prompt_logprobs) == request.num_prompt_tokens or request.finished
            prompt_logprobs = prompt_logprobs if whole and not request.prompt_is_sent else None
            request.prompt_is_sent |= whole
        return cls(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[CompletionOutput.of(sample) for sample in samples],
            finished=request.finished,
            num_cached_tokens=request.metrics.num_cached_tokens,
            metrics=request.metrics,
            prompt_logprobs=None if prompt_logprobs is None else prompt_logprobs.copy(),
            error=request.error,
        )


def has_news(sample: Sample) -> bool:
    """Whether a stream of deltas has not had all of it."""
    ended = sample.finish_reason is not None
    return ended != sample.end_is_sent or sample.num_output_tokens > sample.num_sent_tokens


def merge(earlier: RequestOutput, later: RequestOutput, *, delta: bool) -> RequestOutput:
    """One output in place of two. Either may hold some of the samples alone."""
    answers = {answer.index: answer for answer in earlier.outputs}
    for answer in later.outputs:
        before = answers.get(answer.index) if delta else None
        answers[answer.index] = answer if before is None else _join(before, answer)
    prompt_logprobs = earlier.prompt_logprobs if later.prompt_logprobs is None else later.prompt_logprobs
    return replace(later, outputs=[answers[index] for index in sorted(answers)], prompt_logprobs=prompt_logprobs)


def _join(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    logprobs = None if earlier.logprobs is None else earlier.logprobs + (later.logprobs or [])
    text, token_ids = earlier.text + later.text, earlier.token_ids + later.token_ids
    return replace(later, text=text, token_ids=token_ids, logprobs=logprobs)


class Told:
    """What somebody has been told of a request: of one that has failed, the last tokens come before the error.

    Args:
        delta: whether an output holds what is new since the one before, or all of the answer.
    """

    def __init__(self, *, delta: bool) -> None:
        self._delta = delta
        self._tokens = 0

    def news(self, output: RequestOutput) -> bool:
        """Whether an output tells anything besides an error."""
        before, tokens = self._tokens, sum(len(answer.token_ids) for answer in output.outputs)
        self._tokens = 0 if self._delta else tokens
        return output.error is None or tokens > before
