"""What options make of logits, against the formulas written out token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv import SamplingParams
from leafkv.engine.logits import bad_word_token_ids, process
from leafkv.errors import InvalidInputError
from leafkv.models import LoadedModel

from .sampled import FakeRequest, FakeSequence, byte_fallback_tokenizer

VOCAB = 12


class Only:
    """A guide that allows some tokens."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self.allowed = list(allowed)

    def mask(self, row: NDArray[np.float32]) -> None:
        row[[token for token in range(len(row)) if token not in self.allowed]] = -np.inf


def by_length(output: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Depends on what was generated, changes its argument, and allows what was forbidden."""
    logits[len(output) % len(logits)] = 3.0
    return logits


def doubled(output: list[int], logits: NDArray[np.float32]) -> Any:
    """Does not keep the dtype."""
    return logits.astype(np.float64) * 2.0


def by_definition(logits: NDArray[np.float32], sequence: FakeSequence) -> list[float]:
    params, prompt, output = sequence.params, list(sequence.prompt), list(sequence.output)
    x = [float(value) for value in logits]
    for token in range(len(x)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -math.inf
    for word in sequence.request.bad_word_ids:
        if tuple([*output, word[-1]][-len(word) :]) == word:
            x[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in sequence.request.stop_ids:
            if token < len(x):
                x[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(prompt + output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty
    if sequence.guide is not None:
        x = [value if token in sequence.guide.allowed else -math.inf for token, value in enumerate(x)]
    for function in params.logits_processors or ():
        if function is by_length:
            x[len(output) % len(x)] = 3.0
        else:
            x = [2.0 * value for value in x]
    return x


def random_sequence(rng: random.Random, names: Sequence[str], vocabulary: int = VOCAB, **options: Any) -> FakeSequence:
    """A sequence for which the options of these names, and only they, say something."""

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randrange(low, high))]

    values: dict[str, Any] = {
        "allowed_token_ids": tokens(1, vocabulary),
        "min_tokens": rng.randrange(1, 6),
        "logit_bias": {token: rng.uniform(-4, 4) for token in tokens(0, 6)},
        "repetition_penalty": rng.choice([0.5, 1.3, 2.0]),
        "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "bad_words": ["those of the request"],
        "logits_processors": rng.choice([[by_length], [by_length, doubled], [doubled, by_length]]),
    }
    request = FakeRequest(frozenset([*tokens(0, 3), vocabulary + 3]))
    if "bad_words" in names:
        request.bad_word_ids = [tuple(tokens(1, 4)) for _ in range(rng.randrange(1, 8))]
    return FakeSequence(
        SamplingParams(**{name: values[name] for name in names if name in values}, **options),
        prompt=tokens(1, 8),
        output=tokens(0, 8),
        seed=rng.getrandbits(64),
        guide=Only(tokens(1, vocabulary)) if "guide" in names else None,
        request=request,
    )


def random_logits(rng: random.Random, vocabulary: int = VOCAB) -> NDArray[np.float32]:
    logits = np.array([rng.gauss(0, 3) for _ in range(vocabulary)], np.float32)
    for _ in range(rng.randrange(3)):
        logits[rng.randrange(vocabulary)] = -np.inf
    return logits


NAMES = [
    *["allowed_token_ids", "bad_words", "min_tokens", "logit_bias", "repetition_penalty", "frequency_penalty"],
    *["presence_penalty", "guide", "logits_processors"],
]


def check(rng: random.Random, names: Sequence[str]) -> bool:
    """Whether the options changed anything, and as they should."""
    sequence, logits = random_sequence(rng, names), random_logits(rng)
    before, tokens = logits.copy(), sequence.tokens.tolist()
    processed = process(logits, sequence)
    assert processed.dtype == np.float32
    np.testing.assert_allclose(processed, by_definition(logits, sequence), rtol=1e-5, atol=1e-5)
    assert np.array_equal(logits, before), "the model's logits were changed"
    assert sequence.tokens.tolist() == tokens
    sequence.tokens.append(1)  # nobody looks into it any more
    return not np.array_equal(processed, before)


@pytest.mark.parametrize("name", NAMES)
def test_each_option_alone(name: str) -> None:
    rng = random.Random(name)
    assert sum(check(rng, [name]) for _ in range(200)) > 40


def test_options_together() -> None:
    rng = random.Random(1)
    for _ in range(2_000):
        check(rng, [name for name in NAMES if rng.random() < 0.5])


def test_extreme_penalties_and_biases_do_not_warn() -> None:
    logits = np.array([-3e38, 3e38, 0.0, -np.inf], np.float32)
    for penalty in (1e-300, 1e300):
        params = SamplingParams(repetition_penalty=penalty, logit_bias={0: -3e38, 1: 3e38, 3: 3e38})
        processed = process(logits, FakeSequence(params, output=[0, 1, 2, 3]))
        assert processed[2] == 0.0
        assert processed[3] == -np.inf
        assert not np.isnan(processed).any()


def test_processors_are_told_what_was_generated() -> None:
    seen: list[Any] = []

    def look(output: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append((output, logits.copy()))
        return logits

    logits = random_logits(random.Random(2))
    process(logits, FakeSequence(SamplingParams(logits_processors=[look]), prompt=[1, 2, 3], output=[4, 5]))
    ((output, given),) = seen
    assert output == [4, 5]
    assert np.array_equal(given, logits)


@pytest.mark.parametrize("returned", [None, "x", np.zeros(VOCAB + 1), np.zeros((1, VOCAB)), 5.0])
def test_a_processor_that_returns_something_else(returned: Any) -> None:
    params = SamplingParams(logits_processors=[lambda output, logits: returned])
    with pytest.raises(InvalidInputError, match=rf"^logits_processors: .* {VOCAB} logits, got "):
        process(np.zeros(VOCAB, np.float32), FakeSequence(params))


def test_a_processor_that_fails() -> None:
    def fail(output: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        process(np.zeros(VOCAB, np.float32), FakeSequence(SamplingParams(logits_processors=[fail])))


def test_bad_words_in_tokens(loaded: LoadedModel) -> None:
    """With and without a space before: also where one is a token and the other is several."""
    tokenizer = loaded.tokenizer
    for word in ("cat", "quagmirish", "two words", "日本", " dog"):
        found = bad_word_token_ids(tokenizer, [word])
        texts = [tokenizer.decode(ids) for ids in found]
        assert texts == [word.strip(), " " + word.strip()]
    assert [tokenizer.decode(ids) for ids in bad_word_token_ids(tokenizer, ["\n", " "])] == ["\n", " \n", " "]
    spelt = byte_fallback_tokenizer()
    assert [spelt.decode([97 - 33 + 260, *ids])[1:] for ids in bad_word_token_ids(spelt, ["ab"])] == [" ab", "  ab"]
    assert bad_word_token_ids(tokenizer, []) == []


def test_words_without_tokens_are_refused(loaded: LoadedModel) -> None:
    class Deaf:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return []

    with pytest.raises(InvalidInputError, match=r"^bad_words: expected words that have tokens, got 'x'"):
        bad_word_token_ids(Deaf(), ["x"])
    with pytest.raises(InvalidInputError, match=r"^bad_words: "):
        bad_word_token_ids(loaded.tokenizer, ["\ud800"])
