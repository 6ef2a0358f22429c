"""Beam search: against everything there is, where that can be listed, and else against the plain rules."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from leafkv import LLM, BeamSearchParams, BeamSearchSequence, InvalidInputError, SamplingParams
from leafkv.engine.beam_search import at_temperature, num_candidates, search

from .rig import make_llm
from .toy import EOS, ToyTokenizer, reference_logits

Found = tuple[tuple[int, ...], float, int | None]
"""The tokens, with the end-of-sequence token if there is one, their log-probability, and that token."""


class Chances:
    """A model of ``vocabulary`` tokens that says something random, and always the same, after each context."""

    def __init__(self, seed: int, vocabulary: int, *, forbids: float = 0.0) -> None:
        self._seed, self._vocabulary, self._forbids = seed, vocabulary, forbids
        self.asked: list[list[int]] = []

    def after(self, context: Sequence[int]) -> dict[int, float]:
        rng = random.Random(f"{self._seed} {context}")
        weights = [rng.expovariate(1.0) * (rng.random() >= self._forbids) for _ in range(self._vocabulary)]
        weights[rng.randrange(self._vocabulary)] = 1.0  # something may follow
        return {token: math.log(w / sum(weights)) if w else -math.inf for token, w in enumerate(weights)}

    def __call__(self, contexts: list[list[int]]) -> list[Mapping[int, float]]:
        self.asked += contexts
        return [self.after(context) for context in contexts]


def worth(found: Found, params: BeamSearchParams) -> float:
    tokens, logprob, eos = found
    length = float(len(tokens) - (eos is not None))
    return logprob / math.pow(length, params.length_penalty)


def everything(prompt: Sequence[int], params: BeamSearchParams, eos: set[int], model: Chances) -> list[Found]:
    """All answers that there are."""
    live, ended = [(tuple(prompt), 0.0)], list[Found]()
    for _ in range(params.max_tokens):
        longer = [
            ((*tokens, token), total + logprob)
            for tokens, total in live
            for token, logprob in model.after(list(tokens)).items()
            if logprob > -math.inf
        ]
        ended += [(tokens, total, tokens[-1]) for tokens, total in longer if tokens[-1] in eos]
        live = [(tokens, total) for tokens, total in longer if tokens[-1] not in eos]
    return ended + [(tokens, total, None) for tokens, total in live]


def plainly(prompt: Sequence[int], params: BeamSearchParams, eos: set[int], model: Chances) -> list[Found]:
    """The rules, with nothing left out and no early end."""
    live, ended = [(tuple(prompt), 0.0)], list[Found]()
    for _ in range(params.max_tokens):
        longer = []
        for tokens, total in live:
            order = sorted(model.after(list(tokens)).items(), key=lambda item: -item[1])
            for token, logprob in order[: num_candidates(params, eos)]:
                if logprob > -math.inf:
                    longer.append(((*tokens, token), total + logprob))
        ended += [(tokens, total, tokens[-1]) for tokens, total in longer if tokens[-1] in eos]
        live = [(tokens, total) for tokens, total in longer if tokens[-1] not in eos]
        live = sorted(live, key=lambda beam: -beam[1])[: params.beam_width]
    return best(ended + [(tokens, total, None) for tokens, total in live], params)


def best(found: list[Found], params: BeamSearchParams) -> list[Found]:
    return sorted(found, key=lambda each: -worth(each, params))[: params.beam_width]


def check(sequences: list[BeamSearchSequence], expected: list[Found], params: BeamSearchParams, start: int) -> None:
    assert len(sequences) == len(expected)
    for sequence, (tokens, logprob, eos) in zip(sequences, expected, strict=True):
        shown = tokens if eos is None or params.include_stop_str_in_output else tokens[:-1]
        assert tuple(sequence.tokens) == shown
        assert sequence.cum_logprob == pytest.approx(logprob, abs=1e-12)
        assert (sequence.finish_reason, sequence.stop_reason) == ("length" if eos is None else "stop", eos)
        steps = zip(sequence.logprobs, tokens[start:], strict=True)
        assert sequence.cum_logprob == pytest.approx(sum(step[token] for step, token in steps))


@pytest.mark.parametrize("seed", range(60))
def test_it_is_what_the_rules_say(seed: int) -> None:
    """Several prompts at once, some of them equal; any width, also beyond the vocabulary; any eos, also all tokens."""
    rng = random.Random(seed)
    vocabulary = rng.randrange(1, 7)
    model = Chances(seed, vocabulary, forbids=rng.choice((0.0, 0.5)))
    eos = set(rng.sample(range(vocabulary), rng.randrange(vocabulary + 1)))
    params = BeamSearchParams(
        beam_width=rng.choice((1, 2, 3, 5, 10)),
        max_tokens=rng.choice((1, 2, 4, 7)),
        ignore_eos=rng.random() < 0.2,
        length_penalty=rng.choice((1.0, 0.0, 2.0, -1.0, 0.5)),
        include_stop_str_in_output=rng.random() < 0.5,
    )
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randrange(1, 4))] for _ in range(rng.randrange(4))]
    prompts += prompts[:1]
    outputs = search(prompts, params, eos, model)
    assert len(outputs) == len(prompts)
    ends = set[int]() if params.ignore_eos else eos
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output.sequences, plainly(prompt, params, ends, model), params, len(prompt))


@pytest.mark.parametrize("seed", range(20))
def test_wide_enough_it_finds_the_best_there_are(seed: int) -> None:
    rng = random.Random(seed)
    model = Chances(seed, 3)
    params = BeamSearchParams(beam_width=81, max_tokens=4, length_penalty=rng.choice((1.0, 0.0, 1.7)))
    eos = {rng.randrange(3)} if seed % 4 else set[int]()
    (output,) = search([[1, 2]], params, eos, model)
    check(output.sequences, best(everything([1, 2], params, eos, model), params), params, 2)


def test_it_ends_when_nothing_better_can_come() -> None:
    """After the first step one answer of probability 0.9 has ended; no other can be worth as much."""

    def next_logprobs(contexts: list[list[int]]) -> list[dict[int, float]]:
        asked.append(contexts)
        return [{0: math.log(0.9), 1: math.log(0.1)} for _ in contexts]

    for length_penalty, steps in ((0.0, 1), (1.0, 21), (-1.0, 1)):
        asked: list[list[list[int]]] = []
        params = BeamSearchParams(beam_width=1, max_tokens=100, length_penalty=length_penalty)
        (output,) = search([[5]], params, {0}, next_logprobs)
        assert output.sequences[0].tokens == [5]
        assert output.sequences[0].stop_reason == 0
        # With a length penalty of 1 a longer one could be, until its log(0.1) a step outweigh a length of 101.
        expected = next(n for n in itertools.count(1) if n * math.log(0.1) / 101**length_penalty <= math.log(0.9))
        assert len(asked) == (expected if length_penalty == 1.0 else steps)


def test_a_shorter_answer_may_still_come_to_be_worth_more() -> None:
    """With a negative penalty: the live beam is the better one if it ends at once, and only then."""

    def next_logprobs(contexts: list[list[int]]) -> list[dict[int, float]]:
        return [{0: 0.0} if 1 in context else {0: -1.0, 1: math.log(1 - math.exp(-1.0))} for context in contexts]

    params = BeamSearchParams(beam_width=1, max_tokens=10, length_penalty=-1.0)
    (output,) = search([[5]], params, {0}, next_logprobs)
    assert output.sequences[0].tokens == [5, 1]


@pytest.mark.parametrize("length_penalty", [1e308, -1e308, 400.0, -400.0])
def test_extreme_penalties(length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=3, length_penalty=length_penalty)
    (output,) = search([[1, 2]], params, {0}, Chances(1, 3))
    assert len(output.sequences) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("beam_width", "max_tokens") for value in (0, -1, 1.0, "1", None, True)],
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, "1", None)],
        *[("length_penalty", value) for value in (math.nan, math.inf, "1", None)],
        *[(name, 1) for name in ("ignore_eos", "include_stop_str_in_output")],
    ],
)
def test_bad_params_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name}: expected"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, name: value})


def log_softmax(logits: Any) -> Any:
    return logits - np.logaddexp.reduce(logits)


def toy_logprobs(context: Sequence[int], temperature: float = 1.0) -> dict[int, float]:
    return dict(enumerate(log_softmax(reference_logits(context).astype(np.float64) / temperature).tolist()))


def test_a_temperature_divides_the_logits() -> None:
    for temperature in (0.3, 2.0, 17.0):
        got = at_temperature(toy_logprobs([1, 2]), temperature)
        assert got == pytest.approx(toy_logprobs([1, 2], temperature), abs=1e-12)


class Toy(Chances):
    def __init__(self, temperature: float) -> None:
        self._temperature = temperature or 1.0

    def after(self, context: Sequence[int]) -> dict[int, float]:
        return toy_logprobs(context, self._temperature)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    llm = make_llm()
    if "logprobs" not in {field.name for field in fields(SamplingParams)}:

        def answers(contexts: list[list[int]], count: int) -> list[dict[int, float]]:
            """In place of one-token requests, as long as these have no log-probabilities."""
            each = [sorted(toy_logprobs(context).items(), key=lambda item: -item[1]) for context in contexts]
            return [dict(items if count == -1 else items[:count]) for items in each]

        monkeypatch.setattr(llm, "_next_logprobs", answers)
    return llm


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.4])
@pytest.mark.parametrize("width", [1, 4, 100])  # 100: more than there are tokens
def test_the_answers_of_a_model(llm: LLM, width: int, temperature: float) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=6, temperature=temperature, include_stop_str_in_output=True)
    prompts: list[Any] = ["HELLO", [1, 2, 3], "HELLO"]
    outputs = llm.beam_search(prompts, params)
    assert outputs[0] == outputs[2]
    for prompt, output in zip(([7, 4, 11, 11, 14], [1, 2, 3]), outputs, strict=False):
        expected = plainly(prompt, params, {EOS}, Toy(temperature))
        for sequence, (tokens, logprob, _) in zip(output.sequences, expected, strict=True):
            assert tuple(sequence.tokens) == tokens
            assert sequence.cum_logprob == pytest.approx(logprob, rel=1e-5)
            assert sequence.text == ToyTokenizer().decode(tokens, skip_special_tokens=False)
    llm.manager.check_invariants()
    assert llm.manager.stats().held_blocks == 0


@pytest.mark.skipif(
    "logprobs" not in {field.name for field in fields(SamplingParams)}, reason="requests have no logprobs yet"
)
def test_beams_share_what_they_have_in_common() -> None:
    llm = make_llm(num_blocks=200)
    llm.beam_search([[3] * 40], BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
    # A cold prompt is computed once; after that a beam computes what of it lies in no full block.
    assert llm.stats().computed_prompt_tokens <= 40 + 5 * 4 * llm.manager.block_size


def test_what_can_never_fit_fails_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="257, but"):
        llm.beam_search([[1] * 250], BeamSearchParams(beam_width=2, max_tokens=7))
    with pytest.raises(InvalidInputError, match="prompt"):
        llm.beam_search(["A", ""], BeamSearchParams(beam_width=2, max_tokens=7))
    with pytest.raises(InvalidInputError, match="params: expected BeamSearchParams"):
        llm.beam_search([[1]], SamplingParams())  # type: ignore[arg-type]
    assert llm.beam_search([], BeamSearchParams(beam_width=2, max_tokens=7)) == []
    assert llm.stats().steps == 0


def test_tenants_search_apart_from_each_other() -> None:
    """And the queue's bound is for requests, not for what a search is made of."""
    llm = make_llm(num_blocks=256, max_waiting=2)
    prompt = list(range(20))
    params = BeamSearchParams(beam_width=4, max_tokens=3)
    prompts: list[Any] = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "b", "a")]
    one, two, three = llm.beam_search([*prompts[:2], prompts[2]], params)
    assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in two.sequences]
    assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in three.sequences]
    for asked, cached in ((prompt, 0), (prompts[0], 19), ({"prompt_token_ids": prompt, "cache_salt": "c"}, 0)):
        llm.manager.clear(b"")
        (output,) = llm.generate([asked], SamplingParams(temperature=0.0, max_tokens=1))
        assert output.num_cached_tokens == cached
