"""What a request's options make of the model's logits, before a token is picked from them.

The order is that of vLLM's V1 sampler: ``allowed_token_ids``, ``bad_words``, ``min_tokens``, ``logit_bias``, the
penalties (repetition, then frequency and presence). Then the mask of a guide, and last, as in vLLM's V0, the request's
own functions, ``logits_processors``: what those return is what is sampled from.

Nothing is kept from token to token: all of it is derived from the tokens so far, so a request that is preempted,
resumed or forked has no state here to lose. A row costs O(tokens + vocabulary), in numpy alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from leafkv.errors import InvalidInputError

if TYPE_CHECKING:
    from leafkv.engine.sampling_params import LogitsProcessor, SamplingParams

    class Mask(Protocol):
        """A guide, as far as it is needed here."""

        def mask(self, row: NDArray[np.float32]) -> None: ...  # noqa: D102

    class Encoder(Protocol):
        """A tokenizer, as far as it is needed here."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...  # noqa: D102

    class Prepared(Protocol):
        """A request, as far as it is needed here."""

        @property
        def stop_ids(self) -> Collection[int]: ...  # noqa: D102
        @property
        def bad_word_ids(self) -> Sequence[tuple[int, ...]]: ...  # noqa: D102

    class Sampled(Protocol):
        """A sequence, as far as sampling needs it."""

        @property
        def params(self) -> SamplingParams: ...  # noqa: D102
        @property
        def request(self) -> Prepared: ...  # noqa: D102
        @property
        def tokens(self) -> array[int]: ...  # noqa: D102
        @property
        def num_prompt_tokens(self) -> int: ...  # noqa: D102
        @property
        def seed(self) -> int: ...  # noqa: D102
        @property
        def guide(self) -> Mask | None: ...  # noqa: D102


def process(logits: NDArray[np.float32], sequence: Sampled) -> NDArray[np.float32]:
    """The logits to sample from, given the model's [vocabulary], which stay as they are.

    Raises:
        InvalidInputError: a logits processor returned something else than logits. What it raises is passed on.
    """
    params, request, tokens = sequence.params, sequence.request, sequence.tokens
    num_prompt_tokens = sequence.num_prompt_tokens
    row: NDArray[np.float32] = logits.copy()
    if params.allowed_ids is not None:
        keep_only(row, params.allowed_ids)
    if request.bad_word_ids:
        ban_words(row, tokens[num_prompt_tokens:], request.bad_word_ids)
    if len(tokens) - num_prompt_tokens < params.min_tokens:
        row[[token for token in request.stop_ids if token < len(row)]] = -np.inf
    # What overflows is infinite, and no distribution: the sampler says so.
    with np.errstate(over="ignore"):
        row[params.biased_ids] += params.biases
        if params.penalized:
            penalize(row, tokens, num_prompt_tokens, params)
    if sequence.guide is not None:
        sequence.guide.mask(row)
    if params.logits_processors:
        row = call(params.logits_processors, tokens[num_prompt_tokens:].tolist(), row)
    return row


def keep_only(row: NDArray[np.float32], ids: NDArray[np.intp]) -> None:
    """Forbid all tokens but ``ids``."""
    kept = row[ids]
    row.fill(-np.inf)
    row[ids] = kept


def ban_words(row: NDArray[np.float32], output: array[int], words: Sequence[tuple[int, ...]]) -> None:
    """Forbid each token that would complete one of ``words`` at the end of ``output``."""
    tail = tuple(output[-max(map(len, words)) :])
    for *start, last in words:
        # An empty start would be compared with all of the tail.
        if not start or tail[-len(start) :] == tuple(start):
            row[last] = -np.inf


def penalize(row: NDArray[np.float32], tokens: array[int], num_prompt_tokens: int, params: SamplingParams) -> None:
    """Make tokens that came before less likely, or more so.

    Once for a token anywhere in ``tokens``: a positive logit is divided by the repetition penalty, another is
    multiplied by it. Then, for a token that was generated c > 0 times, c times the frequency penalty and once the
    presence penalty are subtracted.
    """
    # A copy: while numpy looks into an array.array, nobody can append to it.
    ids = np.array(tokens, np.intp)
    if params.repetition_penalty != 1.0:
        seen = np.zeros(len(row), bool)
        seen[ids] = True
        values = row[seen].astype(np.float64)
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        counts = np.bincount(ids[num_prompt_tokens:])
        generated = counts.nonzero()[0]
        row[generated] -= params.frequency_penalty * counts[generated] + params.presence_penalty


def call(functions: Sequence[LogitsProcessor], output: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
    """What ``functions``, one after another, make of ``row`` [vocabulary]."""
    shape = row.shape
    for function in functions:
        returned = function(output, row)
        try:
            row = np.ascontiguousarray(returned, np.float32)
        except (TypeError, ValueError):
            row = np.empty(0, np.float32)
        if row.shape != shape:
            raise InvalidInputError(
                f"logits_processors: expected {function!r} to return {shape[0]} logits, got {_shown(returned)}"
            )
    return row


def bad_word_token_ids(tokenizer: Encoder, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The token ids of ``words`` as a tokenizer splits them, each with and without a space before it.

    Raises:
        InvalidInputError: a word has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, " " + bare) if bare else (word,):
            try:
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            except InvalidInputError as error:
                raise InvalidInputError(f"bad_words: {error}") from error
            if not ids:
                raise InvalidInputError(f"bad_words: expected words that have tokens, got {word!r}")
            found[ids] = None
    return list(found)


def _shown(value: object) -> str:
    return f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else repr(value)[:80]
