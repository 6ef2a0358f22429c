"""Streaming text: the pieces are whole characters, and together the whole text."""

from __future__ import annotations

import itertools
import random

import pytest

from leafkv import LLM, SamplingParams
from leafkv.engine.detokenizer import Detokenizer
from leafkv.models import LoadedModel

TEXTS = [
    "👩‍👩‍👧‍👦 and 🇫🇷🇯🇵",  # joined emoji, flags: many bytes a character
    "日本語と한국어、و العربية",
    "naïve cafe\u0301 Z\u0351\u036b\u0343alg\u0326o",  # combining marks
    "plain words, 12345 digits\n\tand   spaces ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_no_half_characters(loaded: LoadedModel, text: str) -> None:
    """B76: and states of two requests do not mix."""
    one, other = (Detokenizer(loaded.tokenizer) for _ in range(2))
    pieces = []
    for token in loaded.tokenizer.encode(text, add_special_tokens=False):
        pieces.append(one.push(token))
        other.push(1000 + len(pieces))
    assert "\ufffd" not in "".join(pieces)
    assert "".join([*pieces, one.flush()]) == one.text == text


def test_a_cut_character_is_given_out_once(loaded: LoadedModel) -> None:
    tokens = loaded.tokenizer.encode("ok 👩", add_special_tokens=False)
    detokenizer = Detokenizer(loaded.tokenizer)
    pieces = [detokenizer.push(token) for token in tokens[:-1]]
    assert "\ufffd" not in "".join(pieces)
    assert detokenizer.flush() == " \ufffd"  # the space shares a token with the first bytes
    assert detokenizer.flush() == ""
    assert detokenizer.text == loaded.tokenizer.decode(tokens[:-1])


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_pieces_together_are_the_text(loaded: LoadedModel, skip_special_tokens: bool) -> None:
    """Also of tokens that make no valid text."""
    rng = random.Random(3)
    for _ in range(300):
        tokens = [rng.choice([rng.randrange(49152), rng.randrange(300)]) for _ in range(rng.randrange(1, 25))]
        detokenizer = Detokenizer(loaded.tokenizer, skip_special_tokens=skip_special_tokens)
        pieces = [detokenizer.push(token) for token in tokens]
        pieces.append(detokenizer.flush())
        expected = loaded.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        assert "".join(pieces) == detokenizer.text == expected


def test_streamed_text_is_the_answers_text(loaded: LoadedModel) -> None:
    """Of the real model, at a temperature that makes it write anything."""
    llm = LLM(loaded, num_blocks=16, num_threads=1)
    params = SamplingParams(temperature=3.0, seed=7, max_tokens=40, ignore_eos=True)
    texts = [output.outputs[0].text for output in llm.stream("Emoji: 🙂", params)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    (again,) = llm.generate("Emoji: 🙂", params)
    assert texts[-1] == again.outputs[0].text == loaded.tokenizer.decode(again.outputs[0].token_ids)
