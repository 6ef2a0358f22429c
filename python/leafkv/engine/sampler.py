"""From logits to tokens: one row per request, and nothing of a row depends on the others.

The order is vLLM's: temperature, min-p, top-k, top-p. Each of the last three only drops tokens, by a threshold on
the probability, so that tokens of equal probability are kept or dropped together. Randomness is a function of
(seed, position) alone, so a request samples the same whatever the batch, the chunks and the preemptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from leafkv._core import argmax

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
    weights = likelihoods(logits, params)
    cumulative = weights.cumsum()
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
    # uniform < 1, so the product rounds to less than the sum; side="right" passes over weights of zero.
    return int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))


def likelihoods(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Unnormalised probabilities [vocabulary] relative to the likeliest token, 0 for dropped ones."""
    weights = logits.astype(np.float64)
    weights -= weights.max()
    weights /= params.temperature
    np.exp(weights, out=weights)
    threshold = float(params.min_p)
    if 0 < params.top_k < len(weights):
        threshold = max(threshold, float(np.partition(weights, -params.top_k)[-params.top_k]))
    weights[weights < threshold] = 0.0
    if params.top_p < 1.0:
        descending = np.sort(weights[weights > 0.0])[::-1]
        mass = descending.cumsum()
        # The likeliest tokens up to the one that reaches top_p. There is one: top_p < 1.
        weights[weights < descending[mass.searchsorted(params.top_p * mass[-1])]] = 0.0
    return weights
