"""Guided answers: whatever the logits, what comes out has the form; and the end is allowed exactly where it may be."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from leafkv.engine.guided import COMPILED, Guide, GuideCompiler
from leafkv.engine.logprobs import token_decoder
from leafkv.engine.sampling_params import StructuredOutputsParams
from leafkv.errors import InvalidInputError, LeafKVError, MissingExtraError
from leafkv.models import LoadedModel
from leafkv.models.tokenizer import Tokenizer

from .sampled import byte_fallback_tokenizer

SURPLUS = 100
"""Logits beyond the tokenizer's tokens, as models with padded vocabularies have."""


class Rig:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.eos_token_ids[0]
        self.vocab_size = vocab_size
        self.compiler = GuideCompiler(tokenizer, vocab_size, tokenizer.eos_token_ids)
        decode = token_decoder(tokenizer)
        self.texts = [decode(token) for token in range(tokenizer.vocab_size)]
        # Random text is long words in many languages: prefer what brings an answer to its end.
        self.preferred = np.zeros(vocab_size, np.float32)
        self.preferred[[i for i, text in enumerate(self.texts) if len(text) == 1 and text.isascii()]] = 3.0
        self.preferred[[i for i, text in enumerate(self.texts) if text.strip() in set('"}],:1')]] = 7.0
        self.preferred[self.eos] = 7.0

    def guide(self, **form: Any) -> Guide:
        return self.compiler.compile(StructuredOutputsParams(**form))

    def allowed(self, guide: Guide) -> set[int]:
        row = np.zeros(self.vocab_size, np.float32)
        guide.mask(row)
        return set(np.flatnonzero(row == 0.0).tolist())

    def walk(self, guide: Guide, seed: int, look: Callable[[str, bool], None] = lambda text, may_end: None) -> str:
        """An answer of random logits. ``look`` is told the text so far, and whether it may end there."""
        rng = np.random.default_rng(seed)
        tokens: list[int] = []
        while not guide.stopped:
            assert len(tokens) < 500, "no end in sight"
            row = rng.normal(scale=3.0, size=self.vocab_size).astype(np.float32) + self.preferred
            guide.mask(row)
            look(self.tokenizer.decode(tokens), bool(row[self.eos] > -np.inf))
            assert row.max() > -np.inf
            token = int(row.argmax())
            # Else min_tokens, which forbids the end, would leave nothing.
            assert token != self.eos or np.isfinite(row).sum() > 1 or not tokens
            guide.accept(token)
            if token == self.eos:
                assert guide.stopped
                break
            tokens.append(token)
        else:
            assert self.allowed(guide) == {self.eos}
        return self.tokenizer.decode(tokens)


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def rig(request: pytest.FixtureRequest, loaded: LoadedModel) -> Rig:
    tokenizer = loaded.tokenizer if request.param == "byte level" else byte_fallback_tokenizer()
    return Rig(tokenizer, tokenizer.vocab_size + SURPLUS)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", 'b"ad', "日本"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "of": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-f]{2}$"}]},
    },
    "required": ["name", "age", "mood", "tags", "of"],
    "additionalProperties": False,
}


def check_person(value: Any) -> None:
    assert list(value) == ["name", "age", "mood", "tags", "of"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 150
    assert value["mood"] in {"good", 'b"ad', "日本"}
    assert 1 <= len(value["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in value["tags"])
    assert value["of"] is None or re.fullmatch("[a-f]{2}", value["of"])


@pytest.mark.parametrize("as_text", [False, True])
def test_json_answers_are_of_the_schema(rig: Rig, as_text: bool) -> None:
    for seed in range(10):
        guide = rig.guide(json=json.dumps(PERSON) if as_text else PERSON)
        check_person(json.loads(rig.walk(guide, seed)))


def test_json_may_end_where_it_is_whole(rig: Rig) -> None:
    def look(text: str, may_end: bool) -> None:
        try:
            whole = isinstance(json.loads(text), int)
        except ValueError:
            whole = False
        assert may_end == whole, text

    for seed in range(10):
        rig.walk(rig.guide(json={"type": "integer", "minimum": -500, "maximum": 5000}), seed, look)


@pytest.mark.parametrize(
    "regex",
    [
        r"[a-z]{1,3}",
        r"(ab|a)*c?",
        r"\(?[0-9]{3}\)? - ([A-F]+|/x)\.",
        r"(日本|é👩)+ ok",
        r"(yes|no)(, (yes|no)){0,2}",
        r"[^a-z]{1,4}",
        "a\nb|a\n",
        r"",
    ],
)
def test_answers_match_the_expression_and_end_where_it_does(rig: Rig, regex: str) -> None:
    def look(text: str, may_end: bool) -> None:
        # Half a character is no answer.
        assert may_end == (re.fullmatch(regex, text) is not None and not text.endswith("\ufffd")), text

    for seed in range(8):
        text = rig.walk(rig.guide(regex=regex), seed, look)
        assert re.fullmatch(regex, text), text


CHOICES = ["yes", "no", "nothing", 'q"uo\\te\n/x\x01', "12:30", "ab a ab", "日本"]


def test_answers_are_choices(rig: Rig) -> None:
    found = {rig.walk(rig.guide(choice=CHOICES), seed) for seed in range(60)}
    assert found <= set(CHOICES)
    assert len(found) >= 5


def test_all_that_can_follow_is_allowed(rig: Rig) -> None:
    """Every token of the vocabulary, against trying all choices. Where the next character is given, as the tokenizer
    splits what is given."""
    choices = [choice for choice in CHOICES if choice.isascii()]
    rng = random.Random(1)
    pieces = {
        token: piece
        for token, piece in enumerate(rig.texts)
        if piece and token not in rig.tokenizer.special_ids and any(piece in choice for choice in choices)
    }
    for _ in range(12):
        guide, text = rig.guide(choice=choices), ""
        while True:
            expected = {
                token for token, piece in pieces.items() if any(choice.startswith(text + piece) for choice in choices)
            }
            expected |= {rig.eos} if text in choices else set()
            allowed = rig.allowed(guide)
            given = {choice[len(text) :][:1] for choice in choices if choice.startswith(text)}
            assert allowed == expected or (len(given) == len(allowed) == 1 and allowed < expected), text
            token = rng.choice(sorted(allowed))
            guide.accept(token)
            if token == rig.eos:
                break
            text += rig.texts[token]


def test_the_tokens_so_far_are_all_that_counts(rig: Rig) -> None:
    """A guide that only accepted them, as after a restart, and one that was forked allow what the first one allows."""
    rng = random.Random(2)
    for form in ({"json": PERSON}, {"choice": CHOICES}, {"regex": "(ab|a 12)*(ok)?"}):
        for _ in range(3):
            guide = rig.guide(**form)
            tokens: list[int] = []
            for _ in range(25):
                if guide.stopped:
                    break
                allowed = rig.allowed(guide)
                again = rig.guide(**form)
                for token in tokens:
                    again.accept(token)
                assert rig.allowed(again) == rig.allowed(guide.fork()) == rig.allowed(guide) == allowed
                tokens.append(rng.choice(sorted(allowed)))
                guide.accept(tokens[-1])


def test_no_special_token_is_text(rig: Rig) -> None:
    guide = rig.guide(regex="(.|\n)*")
    allowed = rig.allowed(guide)
    assert allowed & rig.tokenizer.special_ids == {rig.eos}
    assert max(allowed) < rig.tokenizer.vocab_size, "a token that the tokenizer does not have"
    assert len(allowed) > 0.75 * rig.tokenizer.vocab_size


def test_a_fork_goes_its_own_way(rig: Rig) -> None:
    parent = rig.guide(regex="aa|ab")
    a, b = (rig.texts.index(letter) for letter in "ab")
    parent.accept(a)
    child = parent.fork()
    parent.accept(a)
    assert parent.stopped
    assert not child.stopped
    child.accept(b)
    assert child.stopped
    assert not rig.guide(regex="aa|ab").stopped


def test_what_cannot_follow_is_not_accepted(rig: Rig) -> None:
    guide = rig.guide(regex="ab")
    with pytest.raises(LeafKVError, match=r"^structured_outputs: ") as caught:
        guide.accept(rig.texts.index("b"))
    assert "<state>" not in str(caught.value)
    with pytest.raises(LeafKVError, match=r"^structured_outputs: "):
        guide.mask(np.zeros(rig.vocab_size, np.float32))
    guide = rig.guide(regex="a")
    guide.accept(rig.texts.index("a"))
    guide.accept(rig.eos)
    with pytest.raises(LeafKVError, match=r"^structured_outputs: "):
        guide.accept(rig.texts.index("a"))


def test_ends_are_those_of_the_model(loaded: LoadedModel) -> None:
    """Several, none of the tokenizer's own, or none at all; and logits of fewer tokens than the tokenizer has."""
    tokenizer = loaded.tokenizer
    a = tokenizer.encode("a", add_special_tokens=False)[0]
    form = StructuredOutputsParams(regex="a{0,2}")
    pieces = {a, tokenizer.encode("aa", add_special_tokens=False)[0]}
    for ends, vocab_size in (([2, 0], 49152), ([5], 40_000), ([], 49152), ([2, 45_000, 10**6], 40_000)):
        row = np.zeros(vocab_size, np.float32)
        GuideCompiler(tokenizer, vocab_size, ends).compile(form).mask(row)
        assert set(np.flatnonzero(row == 0.0)) == pieces | {end for end in ends if end < vocab_size}


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ({"json": {"type": "strin"}}, "json: .*strin"),
        ({"json": {"not": {}}}, "json: .*not"),
        ({"json": "5"}, "json: "),
        ({"json": {"$ref": "#/nowhere"}}, "json: .*nowhere"),
        ({"json": {"type": "string", "pattern": "("}}, "json: "),
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"regex": "(?=a)a"}, "regex: .*look-ahead"),
        ({"regex": r"(a)\1"}, "regex: .*backreferences"),
        ({"regex": "\ud800"}, "regex: "),
        ({"choice": ["a", "\ud800"]}, "choice: "),
    ],
)
def test_wrong_forms_are_named(rig: Rig, form: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"(?s)^structured_outputs\.{what}"):
        rig.guide(**form)


def test_forms_are_compiled_once_and_forgotten_in_the_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GuideCompiler(rig.tokenizer, rig.vocab_size, rig.tokenizer.eos_token_ids)
    made: list[str] = []
    make = compiler._make

    def counted(params: StructuredOutputsParams) -> Guide:
        made.append(str(params.regex))
        return make(params)

    monkeypatch.setattr(compiler, "_make", counted)
    for regex in ["x", "x", *map(str, range(COMPILED - 1)), "x", "last", "x", "0"]:
        compiler.compile(StructuredOutputsParams(regex=regex))
    assert made == ["x", *map(str, range(COMPILED - 1)), "last", "0"]
    assert len(compiler._compiled) == COMPILED


def test_what_is_missing_is_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        vocab_size = 5

    with pytest.raises(InvalidInputError, match=r"^structured_outputs: "):
        GuideCompiler(Plain(), 5, [1]).compile(StructuredOutputsParams(regex="a"))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"leafkv\[guided\]"):
        GuideCompiler(rig.tokenizer, rig.vocab_size, [2]).compile(StructuredOutputsParams(regex="a"))
