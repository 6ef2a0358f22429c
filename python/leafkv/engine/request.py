"""A request on its way through the engine.

``tokens`` are all known ones: the prompt, then what was sampled. Of these the KV of the first
``num_computed_tokens`` is written. There is no prefill and no decode: a running request has tokens left to
compute, many or one, and is sampled from when the last known one has been computed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from leafkv.engine.detokenizer import Detokenizer
    from leafkv.engine.sampling_params import SamplingParams


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds of ``time.monotonic()``; None until it happens."""

    arrival_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


class Status(Enum):
    """Where a request is. A preempted one waits again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One request; made by the router, which has checked it and settled what ``params`` left open."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_token_ids: frozenset[int]
    """Those that end it besides the model's end-of-sequence tokens."""
    detokenizer: Detokenizer | None = None
    stream: bool = False
    """Whether every token is reported, or the finished answer alone."""

    number: int = -1
    """Order of arrival: the age of the request, and its sequence id in the KV manager. The engine sets it."""
    status: Status = Status.WAITING
    tokens: array[int] = field(init=False, repr=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __post_init__(self) -> None:
        self.tokens = array("i", self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is not written yet: at least one while the request is alive."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far, as a new list."""
        return self.tokens[len(self.prompt_token_ids) :].tolist()

    @property
    def text(self) -> str:
        """The text generated so far, in whole characters."""
        return self.detokenizer.text if self.detokenizer is not None else ""
