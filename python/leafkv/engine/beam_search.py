"""Beam search: the likeliest answers as a whole, not token by token. Names and rules are vLLM's.

In each step every live beam is continued by its likeliest tokens, and the ``beam_width`` best continuations of a prompt
live on. One that comes to an end-of-sequence token is put aside. At last the best of those put aside and of those still
live are the result. A beam is worth its log-probability divided by its length, prompt included and end-of-sequence
not, to the power ``length_penalty``.

:func:`search` is a pure function of what a model says. It ends early where no live beam can come among the best any
more: a log-probability never rises, so that changes no result. The beams of all prompts are asked about in one go, and
share what they have in common through the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import inf
from operator import itemgetter

import numpy as np

from leafkv.engine.request import FinishReason
from leafkv.engine.sampling_params import BeamSearchParams


@dataclass(slots=True)
class BeamSearchSequence:
    """An answer: ``tokens`` and ``text`` begin with the prompt.

    ``logprobs`` has, for each generated token, the log-probabilities of the tokens that were looked at in its place.
    ``finish_reason`` is "stop" with the end-of-sequence token as ``stop_reason``, or "length".
    """

    tokens: list[int]
    logprobs: list[Mapping[int, float]] = field(default_factory=list, repr=False)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers to a prompt, the best one first."""

    sequences: list[BeamSearchSequence]


NextLogprobs = Callable[[list[list[int]]], Sequence[Mapping[int, float]]]
"""For each of several contexts the log-probabilities of the next token: of :func:`num_candidates` tokens at least, the
likeliest ones."""


def num_candidates(params: BeamSearchParams, eos_token_ids: Collection[int]) -> int:
    """How many tokens are looked at after each beam: ``beam_width`` of them at least do not end it."""
    return params.beam_width + max(params.beam_width, len(eos_token_ids))


def search(
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    eos_token_ids: Collection[int],
    next_logprobs: NextLogprobs,
) -> list[BeamSearchOutput]:
    """The best answers to each prompt, as far as a beam search finds them."""
    eos = frozenset(() if params.ignore_eos else eos_token_ids)
    searches = [_Search(prompt, params, eos) for prompt in prompts]
    for _ in range(params.max_tokens):
        contexts = [beam.tokens for one in searches for beam in one.live]
        if not contexts:
            break
        answers = iter(next_logprobs(contexts))
        for one in searches:
            one.advance([next(answers) for _ in one.live])
    return [BeamSearchOutput(one.best()) for one in searches]


def at_temperature(logprobs: Mapping[int, float], temperature: float) -> dict[int, float]:
    """What the log-probabilities of a whole vocabulary become when the logits are divided by ``temperature``."""
    scaled = np.fromiter(logprobs.values(), np.float64, len(logprobs)) / temperature
    best = scaled.max()
    scaled -= best + np.log(np.exp(scaled - best).sum())
    return dict(zip(logprobs, scaled.tolist(), strict=True))


class _Search:
    """The search for the answers to one prompt."""

    def __init__(self, prompt: Sequence[int], params: BeamSearchParams, eos_token_ids: frozenset[int]) -> None:
        self.live = [BeamSearchSequence(list(prompt))]
        self._params = params
        self._eos = eos_token_ids
        self._count = num_candidates(params, eos_token_ids)
        self._max_length = len(prompt) + params.max_tokens
        self._ended: list[tuple[float, BeamSearchSequence]] = []
        """The best that have ended, with what they are worth, best first."""

    def advance(self, logprobs: Sequence[Mapping[int, float]]) -> None:
        """One step: continue each live beam, given what may follow it."""
        continued: list[tuple[float, int, int]] = []
        """What they are worth, which live beam, and by which token."""
        for at, (beam, following) in enumerate(zip(self.live, logprobs, strict=True)):
            for token, logprob in nlargest(self._count, following.items(), key=itemgetter(1)):
                if logprob == -inf:
                    continue
                # Rounding may leave a certain token with a little more than 0.
                cum_logprob = beam.cum_logprob + min(logprob, 0.0)
                if token not in self._eos:
                    continued.append((cum_logprob, at, token))
                    continue
                kept = (token,) if self._params.include_stop_str_in_output else ()
                ended = BeamSearchSequence([*beam.tokens, *kept], [*beam.logprobs, following], cum_logprob)
                ended.finish_reason, ended.stop_reason = "stop", token
                self._end(ended, len(beam.tokens))
        best = nlargest(self._params.beam_width, continued, key=itemgetter(0))
        self.live = [
            BeamSearchSequence([*self.live[at].tokens, token], [*self.live[at].logprobs, logprobs[at]], cum_logprob)
            for cum_logprob, at, token in best
        ]
        if self._settled():
            self.live = []

    def best(self) -> list[BeamSearchSequence]:
        """The result, once all steps are done."""
        for beam in self.live:
            beam.finish_reason = "length"
            self._end(beam, len(beam.tokens))
        return [beam for _, beam in self._ended]

    def _end(self, beam: BeamSearchSequence, length: int) -> None:
        self._ended.append((self._worth(beam, length), beam))
        # Equals stay in the order of their ends.
        self._ended = nlargest(self._params.beam_width, self._ended, key=itemgetter(0))

    def _settled(self) -> bool:
        if len(self._ended) < self._params.beam_width:
            return False
        worst, _ = self._ended[-1]
        return all(
            max(self._worth(beam, length) for length in (len(beam.tokens), self._max_length)) <= worst
            for beam in self.live
        )

    def _worth(self, beam: BeamSearchSequence, length: int) -> float:
        try:
            return beam.cum_logprob / math.pow(length, self._params.length_penalty)
        except OverflowError:  # of the power
            return 0.0
        except ZeroDivisionError:
            return -inf if beam.cum_logprob < 0 else 0.0
