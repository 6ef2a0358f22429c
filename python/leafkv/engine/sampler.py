"""From logits to tokens: one row per sample, and nothing of a row depends on the others.

The order is that of vLLM's V1 sampler. Log-probabilities are of the model's logits as they are. Then the options that
also change what is greedy (`logits`: allowed tokens, bad words, min_tokens, biases, penalties, guide, the request's own
functions). Of the result, the likeliest token is taken, or one is drawn after temperature, min-p, top-k and top-p: see
`leafkv._core.draw`.

Randomness is a function of (seed, position) alone, and everything else of the tokens so far, so a request samples the
same whatever the batch, the chunks and the preemptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leafkv._core import argmax, draw
from leafkv.engine.logits import process
from leafkv.engine.logprobs import Logprob, token_logprobs

if TYPE_CHECKING:
    from leafkv.engine.logits import Sampled

INVALID = -1
"""In place of a token: the row is not a distribution (NaN, +inf, or nothing but -inf)."""


class Pick(NamedTuple):
    """The next token of a sequence, or INVALID, and how likely it and others were, if that is wanted."""

    token: int
    logprobs: dict[int, Logprob] | None = None


def greedy(logits: NDArray[np.float32], num_threads: int | None = None) -> NDArray[np.int64]:
    """The likeliest token of each row of ``logits`` [R, vocabulary]: the lowest id among equals, INVALID for none.

    It is all that a sequence whose parameters are ``plain`` needs.
    """
    return argmax(logits, num_threads=num_threads)


def pick(logits: NDArray[np.float32], sequence: Sampled) -> Pick:
    """Pick the next token of ``sequence`` from ``logits`` [vocabulary]; neither of them is changed.

    The token is INVALID where the logits are no distribution, or where the options leave no token.

    Raises:
        InvalidInputError: a logits processor returned something else than logits. What it raises is passed on.
    """
    params = sequence.params
    token = _likeliest(logits)
    if token == INVALID:
        return Pick(INVALID)
    if not params.unchanged or sequence.guide is not None:
        processed = process(logits, sequence)
        token = _likeliest(processed)
    else:
        processed = logits
    if token != INVALID and not params.greedy:
        position = len(sequence.tokens)
        token = int(draw(processed[None], [params.draw(sequence.seed, position)], num_threads=1)[0])
    if token == INVALID or params.logprobs is None:
        return Pick(token)
    return Pick(token, token_logprobs(logits, token, params.logprobs))


def _likeliest(logits: NDArray[np.float32]) -> int:
    return int(argmax(logits[None], num_threads=1)[0])
