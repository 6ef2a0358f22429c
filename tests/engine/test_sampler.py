"""Sampling: what is kept, in which order, and that nothing but (logits, parameters, seed, tokens so far) enters."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv import SamplingParams
from leafkv._core import draw
from leafkv.engine.logprobs import token_logprobs
from leafkv.engine.sampler import INVALID, Pick, greedy, pick

from .rig import Rig
from .sampled import FakeRequest, FakeSequence
from .test_logits import NAMES, Only, random_logits, random_sequence
from .test_logits import by_definition as changed_by_definition
from .toy import ToyModel

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32))


def drawn(logits: NDArray[np.float32], params: SamplingParams, n: int, seed: int = 11) -> NDArray[np.int64]:
    """The tokens at the first ``n`` positions, from the same logits."""
    rows = np.broadcast_to(logits, (n, len(logits)))
    return draw(rows, [params.draw(seed, position) for position in range(n)])


def kept(logits: NDArray[np.float32] = LOGITS, **options: Any) -> list[int]:
    """Those of a few tokens that are drawn at all."""
    return sorted(set(drawn(logits, SamplingParams(**options), 500).tolist()))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 0}, [0, 1, 2, 3, 4]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.66}, [1, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.45}, [1, 3, 4]),
        ({"min_p": 1.0}, [1]),
        # top-p is of what top-k and min-p have left: 0.4 of 0.65 is 0.62.
        ({"top_k": 2, "top_p": 0.61}, [1]),
        ({"top_k": 2, "top_p": 0.63}, [1, 3]),
        ({"min_p": 0.6, "top_p": 0.61}, [1]),
        # The temperature comes first: at 0.5 the ratios are squared.
        ({"temperature": 0.5, "min_p": 0.45}, [1]),
        ({"temperature": 2.0, "min_p": 0.45}, [1, 2, 3, 4]),
    ],
)
def test_what_is_kept(options: dict[str, Any], expected: list[int]) -> None:
    assert kept(**options) == expected


def test_equals_are_kept_together() -> None:
    tie = np.array([1.0, 2.0, 2.0, 0.0], np.float32)
    assert kept(tie, top_k=1) == [1, 2]
    assert kept(tie, top_p=0.2) == [1, 2]


def by_definition(logits: NDArray[Any], params: SamplingParams) -> list[int]:
    """What is kept, by sorting all of it."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    keep = weights >= params.min_p
    if params.top_k > 0:
        keep &= logits >= np.sort(logits)[::-1][: params.top_k][-1]
    weights[~keep] = 0.0
    if params.top_p == 1.0:  # sums are rounded
        return list(np.flatnonzero(weights > 0.0))
    descending = np.sort(weights)[::-1]
    mass = descending.cumsum() / weights.sum()
    return list(np.flatnonzero((weights > 0.0) & (weights >= descending[np.argmax(mass >= params.top_p)])))


@pytest.mark.parametrize("top_k", [0, 1, 40, 2_000, 3_000])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
@pytest.mark.parametrize("temperature", [0.7, 4.0])
def test_tokens_are_drawn_as_by_definition(top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    logits = np.random.default_rng(3).normal(scale=3.0, size=5_000).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    weights[~np.isin(np.arange(len(logits)), by_definition(logits, params))] = 0.0
    mass = weights.cumsum()
    uniforms = [np.random.Generator(np.random.Philox(key=11, counter=i)).random() for i in range(300)]
    expected = mass.searchsorted(np.array(uniforms) * mass[-1], side="right")
    assert (drawn(logits, params, 300) == expected).all()


def test_frequencies_are_the_probabilities() -> None:
    params = SamplingParams(temperature=0.7, top_k=4, top_p=0.95)
    expected = np.exp(LOGITS.astype(np.float64) / 0.7)
    expected[~np.isin(np.arange(5), by_definition(LOGITS, params))] = 0.0
    expected /= expected.sum()
    n = 20_000
    counts = np.bincount(drawn(LOGITS, params, n), minlength=5)
    # Five standard deviations; the draws are the same in every run.
    assert (abs(counts - n * expected) <= 5 * np.sqrt(n * expected * (1 - expected))).all()
    assert counts[0] == 0


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e30])
def test_extreme_logits(temperature: float) -> None:
    logits = np.full(50, -np.inf, np.float32)
    logits[[7, 9]] = [3e38, -3e38]
    assert set(drawn(logits, SamplingParams(temperature=temperature, top_p=0.9), 100).tolist()) == {7}


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.array([[0, 3, 3, 1], [5, 5, 5, 5]], np.float32)
    assert greedy(logits).tolist() == [1, 0]
    assert [pick(row, FakeSequence(SamplingParams(temperature=0.0))).token for row in logits] == [1, 0]


def test_rows_that_are_no_distribution() -> None:
    """Also where an option would hide it: the model has failed all the same."""
    rows = np.zeros((4, 3), np.float32)
    rows[0, 1], rows[1, 2], rows[2, :] = np.nan, np.inf, -np.inf
    assert greedy(rows).tolist() == [INVALID] * 3 + [0]
    for temperature in (0.0, 1.0):
        changes: list[dict[str, Any]] = [
            {},
            {"allowed_token_ids": [0]},
            {"logits_processors": [lambda output, row: row * 0]},
        ]
        for options in changes:
            sequence = FakeSequence(SamplingParams(temperature=temperature, logprobs=2, **options))
            picks = [pick(row, sequence) for row in rows]
            assert picks[:3] == [Pick(INVALID, None)] * 3
            assert picks[3].token != INVALID
            assert picks[3].logprobs is not None


def no_token(output: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.full_like(logits, -np.inf)


def not_a_number(output: list[int], logits: NDArray[np.float32]) -> Any:
    return logits * np.float32(np.nan)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_that_leave_no_token(temperature: float) -> None:
    logits = np.array([1.0, 2.0, -np.inf, 0.0], np.float32)
    for sequence in (
        FakeSequence(SamplingParams(temperature=temperature, allowed_token_ids=[2])),
        FakeSequence(
            SamplingParams(temperature=temperature, allowed_token_ids=[1, 3], bad_words=["those of the request"]),
            request=FakeRequest(bad_word_ids=[(1,), (3,)]),
        ),
        FakeSequence(SamplingParams(temperature=temperature, min_tokens=1), request=FakeRequest(frozenset([0, 1, 3]))),
        FakeSequence(SamplingParams(temperature=temperature, allowed_token_ids=[1]), guide=Only([0])),
        FakeSequence(SamplingParams(temperature=temperature, logits_processors=[no_token])),
        FakeSequence(SamplingParams(temperature=temperature, logits_processors=[not_a_number])),
    ):
        assert pick(logits, sequence) == Pick(INVALID, None)


def naive_pick(logits: NDArray[np.float32], sequence: FakeSequence) -> int:
    """Everything in double precision, by sorting all of it."""
    params, x = sequence.params, np.array(changed_by_definition(logits, sequence))
    if not (x > -np.inf).any():
        return INVALID
    if params.temperature == 0.0:
        return int(x.argmax())
    weights = np.where(
        np.isin(np.arange(len(x)), by_definition(x, params)), np.exp((x - x.max()) / params.temperature), 0
    )
    uniform = np.random.Generator(np.random.Philox(key=sequence.seed, counter=len(sequence.tokens))).random()
    mass = 0.0
    for token, weight in enumerate(weights.tolist()):
        mass += weight
        if mass > uniform * weights.sum():
            return token
    raise AssertionError


def test_picks_are_as_by_definition() -> None:
    """All options, alone and together. The log-probabilities are those of the model's logits."""
    rng = random.Random(9)
    invalid = 0
    for _ in range(3_000):
        names = [name for name in NAMES if rng.random() < rng.choice([0.1, 0.5])]
        options: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.5, 1.0, 3.0]),
            "top_k": rng.choice([0, 0, 1, 5]),
            "top_p": rng.choice([1.0, 1.0, 0.4, 0.9]),
            "min_p": rng.choice([0.0, 0.0, 0.3]),
            "logprobs": rng.choice([None, 0, 3]),
        }
        sequence, logits = random_sequence(rng, names, 20, **options), random_logits(rng, 20)
        before, tokens = logits.copy(), sequence.tokens.tolist()
        picked = pick(logits, sequence)
        assert picked.token == naive_pick(logits, sequence), (names, options)
        assert picked == pick(logits, sequence), "the same seed and position, another token"
        assert np.array_equal(logits, before)
        assert sequence.tokens.tolist() == tokens
        invalid += picked.token == INVALID
        if picked.token != INVALID and options["logprobs"] is not None:
            assert picked.logprobs == token_logprobs(logits, picked.token, options["logprobs"])
        else:
            assert picked.logprobs is None
        if sequence.params.plain and sequence.params.greedy and sequence.guide is None:
            assert picked.token == greedy(logits[None])[0]
    assert 0 < invalid < 1_000


def test_positions_and_seeds_draw_differently() -> None:
    logits = np.zeros(1_000, np.float32)
    by_seed = [pick(logits, FakeSequence(SamplingParams(), seed=seed)).token for seed in range(40)]
    by_position = [pick(logits, FakeSequence(SamplingParams(), output=[1] * n, seed=3)).token for n in range(40)]
    assert len(set(by_seed)) > 30
    assert len(set(by_position)) > 30


def test_a_sample_depends_on_seed_and_position_alone() -> None:
    """Alone, in a batch, in chunks and after preemptions; other seeds differ."""
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=42, max_tokens=20, ignore_eos=True)
    prompt = list(range(10))

    def run(others: int, **options: Any) -> tuple[list[int], Rig]:
        rig = Rig(ToyModel(), **options)
        for i in range(others):
            rig.add([i] * 9, SamplingParams(max_tokens=20, ignore_eos=True))
        request = rig.add(prompt, params)
        return rig.run()[request.request_id].outputs[0].token_ids, rig

    alone, _ = run(0)
    assert run(7)[0] == alone
    assert run(3, max_num_batched_tokens=3)[0] == alone
    squeezed, rig = run(5, num_blocks=12)
    assert squeezed == alone
    assert rig.engine.stats().preemptions > 0
    rig = Rig(ToyModel())
    unseeded = [rig.add(prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for _ in range(2)]
    results = rig.run()
    first, second = (results[request.request_id].outputs[0].token_ids for request in unseeded)
    assert first != second
