"""From logits to tokens: one row per request, and nothing of a row depends on the others.

The order is vLLM's: temperature, min-p, top-k, top-p. Each of the last three only drops tokens, by a threshold on
the probability (for top-k, on the logit), so that equal ones are kept or dropped together. Randomness is a function of
(seed, position) alone, so a request samples the same whatever the batch, the chunks and the preemptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from leafkv._core import argmax, top_k

if TYPE_CHECKING:
    from leafkv.engine.request import Request
    from leafkv.engine.sampling_params import SamplingParams

INVALID = -1
"""In place of a token: the row is not a distribution (NaN, +inf, or nothing but -inf)."""


def sample(logits: NDArray[np.float32], requests: Sequence[Request], num_threads: int | None = None) -> list[int]:
    """Pick the next token of each request from its row of ``logits`` [len(requests), vocabulary]."""
    # The lowest id among equals; INVALID where there is none.
    tokens: list[int] = argmax(logits, num_threads=num_threads).tolist()
    for row, request in enumerate(requests):
        if tokens[row] != INVALID and not request.params.greedy:
            tokens[row] = draw(logits[row], request.params, request.seed, len(request.tokens))
    return tokens


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
    values: NDArray[np.float32] = top_k(logits[None], min(count, len(logits)))[0][0]
    return values
