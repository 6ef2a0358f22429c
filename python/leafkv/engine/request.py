"""A request on its way through the engine, and the samples that it asks for.

A request is what somebody asked: a prompt, parameters, a place in the queue. Its ``n`` samples are what runs: each is
a sequence of its own in the KV manager, with its own seed, text and end. They share the blocks of the prompt.

``tokens`` of a sample are all known ones: the prompt, then what was sampled. There is no prefill and no decode: a
running sample has known tokens whose KV is not computed yet, many or one, and is sampled from when the last known one
has been computed. How far that is, is in the columns of `running`, and nowhere else.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from leafkv._core import KVManager
    from leafkv.engine.detokenizer import Detokenizer
    from leafkv.engine.guided import Guide
    from leafkv.engine.logprobs import Logprob
    from leafkv.engine.sampling_params import SamplingParams


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds of ``time.monotonic()``, and counts; a time is None until it comes."""

    arrival_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache when the request was first admitted."""
    num_generated_tokens: int = 0
    """Of all samples."""
    num_earlier_tokens: int = 0
    """Those of them that another process has generated, see `LLM.resume`."""
    num_draft_tokens: int = 0
    """Tokens that speculation proposed."""
    num_accepted_tokens: int = 0
    """Those of them that were what the model would have said."""

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that computed for it."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds a token after the first, once the request has ended; of all samples together."""
        took = _between(self.first_token_time, self.finished_time)
        more = self.num_generated_tokens - self.num_earlier_tokens - 1
        return None if took is None or more < 1 else took / more


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class Status(Enum):
    """Where a request is. A preempted one waits again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sample:
    """One of the answers of a request."""

    request: Request = field(repr=False)
    index: int
    seed: int
    detokenizer: Detokenizer | None = None
    guide: Guide | None = None
    number: int = -1
    """Its sequence id in the KV manager. The engine sets it."""
    source: KVManager | None = field(default=None, repr=False)
    """Who has its next tokens, while it runs and nobody looks at each: they are fetched when somebody does."""
    _tokens: array[int] = field(init=False, repr=False)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    num_sent_tokens: int = 0
    end_is_sent: bool = False
    """What a stream of deltas has had of it."""

    def __post_init__(self) -> None:
        self._tokens = array("i", self.request.prompt_token_ids)  # that list is in others' hands, too
        if self.params.logprobs is not None:
            self.logprobs, self.cumulative_logprob = [], 0.0

    @property
    def tokens(self) -> array[int]:
        """The prompt, and what was generated so far."""
        if self.source is not None:
            self._tokens.frombytes(self.source.tokens(self.number, len(self._tokens)).tobytes())
        return self._tokens

    @property
    def params(self) -> SamplingParams:
        """The request's."""
        return self.request.params

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far, as a new list."""
        return self.tokens[self.num_prompt_tokens :].tolist()

    @property
    def text(self) -> str:
        """The text generated so far, as far as it may be shown."""
        return self.detokenizer.text if self.detokenizer is not None else ""

    def settle(self) -> None:
        """Its tokens are its own from now on: the source is about to forget it."""
        self._tokens = self.tokens
        self.source = None

    def take(self, token: int, logprobs: dict[int, Logprob] | None = None) -> FinishReason | None:
        """Take the next token; return why it ends the sample, if it does."""
        request, params = self.request, self.params
        if self.source is None:  # which has it already
            self._tokens.append(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprobs[token].logprob
        detokenizer = self.detokenizer if request.watched else None
        if token in request.stop_ids:
            if token in (params.stop_token_ids or ()):
                self.stop_reason = token
            # The token that stopped a sample is no part of its text.
            if params.include_stop_str_in_output and detokenizer is not None:
                detokenizer.push(token)
            return "stop"
        if self.guide is not None:
            self.guide.accept(token)
        if detokenizer is not None:
            self.stop_reason = detokenizer.push(token)
            if self.stop_reason is not None:
                return "stop"
        if self.guide is not None and self.guide.stopped:
            return "stop"
        return "length" if self.num_output_tokens >= request.max_tokens else None

    def end_text(self) -> None:
        """No token follows: settle what the text is."""
        if self.detokenizer is None:
            return
        if self.request.watched:  # it has had each token as it came
            stop = self.detokenizer.finish()
            if stop is not None and self.finish_reason == "length":
                self.finish_reason, self.stop_reason = "stop", stop
            return
        tokens = self.tokens[self.num_prompt_tokens :]
        if self.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            tokens.pop()
        self.detokenizer.finish_all(tokens)


@dataclass(slots=True, eq=False)
class Request:
    """One request; made by the router, which has checked it and settled what ``params`` left open."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    """Of the first sample; each next one has the next seed."""
    stop_ids: frozenset[int]
    """Tokens that end a sample: the model's end of sequence unless that is ignored, and those asked for."""
    bad_word_ids: list[tuple[int, ...]] = field(default_factory=list)
    namespace: bytes = b""
    """What must be equal for KV to be shared, see `KVManager.begin`."""
    cache_salt: str | None = field(default=None, repr=False)
    """What of the namespace is the tenant's."""
    priority: int = 0
    """Lower goes first, where the scheduler's policy is by priority."""
    recorded: bool = True
    """Whether it is for the journal, and for the bound of the queue: not what only answers a part of something else."""
    stream: bool = False
    """Whether every token is reported, or the finished answer alone."""

    samples: list[Sample] = field(init=False, repr=False)
    number: int = -1
    """Order of arrival. The engine sets it."""
    num_prompt_tokens: int = field(init=False)
    rank: int = 0
    """Lower goes first; of equals the older. The scheduler sets it."""
    urgency: int = 0
    """The priority, or that of a request that waits for this one. The scheduler sets it."""
    status: Status = Status.WAITING
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_is_sent: bool = False
    """Whether a stream of deltas has had ``prompt_logprobs``."""
    error: Exception | None = None
    """What ended it, where something did."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.metrics.num_prompt_tokens = len(self.prompt_token_ids)
        self.samples = [Sample(self, index, (self.seed + index) % 2**64) for index in range(self.params.n)]
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing comes before the first token

    @property
    def order(self) -> tuple[int, int]:
        """By this, ascending, requests are served."""
        return self.rank, self.number

    @property
    def live(self) -> list[Sample]:
        """The samples that have not ended."""
        return [sample for sample in self.samples if sample.finish_reason is None]

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return self.status is Status.FINISHED

    @property
    def watched(self) -> bool:
        """Whether each token is looked at when it comes, and not only the last one."""
        params = self.params
        looked_for = params.stop or params.stop_token_ids or params.structured_outputs
        return bool(self.stream or looked_for or params.logprobs is not None)

    @property
    def reads_cache(self) -> bool:
        """Whether a prefix hit serves it: logprobs of the prompt need all of it computed, once."""
        return self.prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt_tokens
