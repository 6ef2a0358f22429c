"""From logits to tokens: one row per sequence, and nothing of a row depends on the others.

The order is that of vLLM's V1 sampler. Log-probabilities are of the model's logits as they are. Then the options that
also change what is greedy (`logits`: allowed tokens, bad words, min_tokens, biases, penalties, guide, the request's own
functions). Of the result, the likeliest token is taken, or one is drawn after temperature, min-p, top-k and top-p. Each
of the last three only drops tokens, by a threshold on the probability (for top-k, on the logit), so that equal ones are
kept or dropped together.

Randomness is a function of (seed, position) alone, and everything else of the tokens so far, so a request samples the
same whatever the batch, the chunks and the preemptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leafkv._core import argmax, top_k
from leafkv.engine.logits import process
from leafkv.engine.logprobs import Logprob, token_logprobs

if TYPE_CHECKING:
    from leafkv.engine.logits import Sampled
    from leafkv.engine.sampling_params import SamplingParams

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
        token = draw(processed, params, sequence.seed, len(sequence.tokens))
    if token == INVALID or params.logprobs is None:
        return Pick(token)
    return Pick(token, token_logprobs(logits, token, params.logprobs))


def _likeliest(logits: NDArray[np.float32]) -> int:
    return int(argmax(logits[None], num_threads=1)[0])


def draw(logits: NDArray[np.float32], params: SamplingParams, seed: int, position: int) -> int:
    """Draw one token from ``logits`` [vocabulary]."""
    tokens, weights = likelihoods(logits, params)
    cumulative = weights.cumsum()
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
    # uniform < 1, so the product rounds to less than the sum; side="right" passes over weights of zero.
    return int(tokens[cumulative.searchsorted(uniform * cumulative[-1], side="right")])


def likelihoods(logits: NDArray[np.float32], params: SamplingParams) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Tokens, ascending, and their unnormalised probabilities relative to the likeliest one's, 0 for dropped ones."""
    tokens = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        tokens = np.flatnonzero(logits >= largest(logits, params.top_k)[-1])
        logits = logits[tokens]
    best = logits.max()

    def weigh(logits: NDArray[np.float32]) -> NDArray[np.float64]:
        weights = logits.astype(np.float64)
        weights -= best
        weights /= params.temperature
        np.exp(weights, out=weights)
        weights[weights < params.min_p] = 0.0
        return weights

    weights = weigh(logits)
    if params.top_p < 1.0:
        # The likeliest tokens up to the one that reaches top_p: seldom more than a few, so that all are seldom sorted.
        target = params.top_p * weights.sum()
        for count in (HEAD, len(logits)):
            descending = weigh(largest(logits, count))
            mass = descending.cumsum()
            if mass[-1] >= target:
                weights[weights < descending[mass.searchsorted(target)]] = 0.0
                break
    return tokens, weights


HEAD = 1024
"""Tokens that top-p looks at first."""


def largest(logits: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """The ``count`` largest logits, or all, in descending order."""
    values: NDArray[np.float32] = top_k(logits[None], min(count, len(logits)), num_threads=1)[0][0]
    return values
