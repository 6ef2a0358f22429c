"""Log-probabilities and ranks, against sorting everything and exact sums."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv.engine.logprobs import Logprob, decode_tokens, prompt_logprobs, token_decoder, token_logprobs
from leafkv.errors import LeafKVError
from leafkv.models import LoadedModel

from .sampled import byte_fallback_tokenizer
from .toy import ToyTokenizer


def by_definition(logits: NDArray[np.float32], token: int, k: int) -> dict[int, tuple[float, int]]:
    x = [float(value) for value in logits]
    total = math.log(math.fsum(math.exp(value - max(x)) for value in x)) + max(x)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    wanted = dict.fromkeys([token, *(order if k == -1 else order[:k])])
    return {i: (x[i] - total, order.index(i) + 1) for i in wanted}


def random_row(rng: random.Random, vocabulary: int) -> NDArray[np.float32]:
    """With equal logits, and some of -inf."""
    values = [rng.choice([rng.gauss(0, 5), rng.randrange(3)]) for _ in range(vocabulary)]
    if rng.random() < 0.5:
        values[: vocabulary // 2] = [-math.inf] * (vocabulary // 2)
    rng.shuffle(values)
    return np.array(values, np.float32)


def check(entries: dict[int, Logprob], expected: dict[int, tuple[float, int]]) -> None:
    assert list(entries) == list(expected), "the sampled token comes first, then the likeliest"
    assert [entry.rank for entry in entries.values()] == [rank for _, rank in expected.values()]
    got = [entry.logprob for entry in entries.values()]
    np.testing.assert_allclose(got, [logprob for logprob, _ in expected.values()], rtol=1e-12, atol=1e-12)


def test_logprobs_are_as_by_definition() -> None:
    rng = random.Random(1)
    for _ in range(400):
        row = random_row(rng, rng.choice([1, 2, 7, 30]))
        token, k = rng.randrange(len(row)), rng.choice([-1, 0, 1, 3, 29, 30, 100])
        before = row.copy()
        check(token_logprobs(row, token, k), by_definition(row, token, k))
        assert np.array_equal(row, before)


@pytest.mark.parametrize("scale", [1.0, 1e4, 3e38])
def test_large_logits(scale: float) -> None:
    row = np.array([1.0, 1.0, -1.0, 0.5], np.float32) * np.float32(scale)
    entries = token_logprobs(row, 2, -1)
    check(entries, by_definition(row, 2, -1))
    assert all(entry.logprob <= 0.0 for entry in entries.values())


def test_a_prompts_rows_are_as_each_alone() -> None:
    rng = random.Random(2)
    rows = np.stack([random_row(rng, 50) for _ in range(20)])
    tokens = [rng.randrange(50) for _ in rows]
    expected = [token_logprobs(row, token, 5) for row, token in zip(rows, tokens, strict=True)]
    assert prompt_logprobs(rows, tokens, 5) == prompt_logprobs(rows, np.array(tokens), 5) == expected  # type: ignore[arg-type]
    assert prompt_logprobs(rows[:0], [], 5) == []
    rows[7, 3] = np.nan
    with pytest.raises(LeafKVError, match="row 7 are not a distribution"):
        prompt_logprobs(rows, tokens, 5)


def test_tokens_have_their_text(loaded: LoadedModel) -> None:
    text = 'The "quick"  brown\n\tfox, 123!'
    for tokenizer in (loaded.tokenizer, byte_fallback_tokenizer()):
        decode = token_decoder(tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        # SentencePiece puts a space in front.
        assert "".join(map(decode, ids)).removeprefix(" ") == text
        assert [decode(token) for token in ids] == [decode(token) for token in ids]
        assert decode(tokenizer.eos_token_ids[0]) in {"</s>", "<|im_end|>"}
        parts = tokenizer.encode("👩", add_special_tokens=False)
        assert "\ufffd" in decode(parts[-1])
    assert token_decoder(ToyTokenizer())(3) == "D"
    entries = token_logprobs(np.zeros(4, np.float32), 2, 1)
    assert [entry.decoded_token for entry in entries.values()] == [None, None]
    decode_tokens(entries, str)
    assert entries == token_logprobs(np.zeros(4, np.float32), 2, 1, decode=str)
    assert {token: entry.decoded_token for token, entry in entries.items()} == {2: "2", 0: "0"}
