"""Streamed text: whole characters, whole added tokens, stop strings, and together what decoding all at once gives."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from leafkv import LLM, SamplingParams
from leafkv.engine.detokenizer import Detokenizer, decode_all
from leafkv.models import LoadedModel
from leafkv.models.tokenizer import Tokenizer

TEXTS = [
    "👩‍👩‍👧‍👦 and 🇫🇷🇯🇵",  # joined emoji, flags: many bytes a character
    "日本語と한국어、و العربية",
    "naïve cafe\u0301 Z\u0351\u036b\u0343alg\u0326o",  # combining marks
    "plain words, 12345 digits\r\n\tand   spaces ",
    "\ufffd is a character, too: \ufffd\ufffd",
]
BYTE = re.compile("<0x(..)>")


def build(vocabulary: Iterable[str], decoder: Any, **options: Any) -> Tokenizer:
    """With two added tokens of which one is special, and a few ids that stand for nothing."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    backend: Any = tokenizers.Tokenizer(models.BPE(ids, [], unk_token="<unk>", **options))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_tokens([AddedToken("<s>", special=True), AddedToken("</think>", special=False)])
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=())
    tokenizer.vocab_size += 3
    return tokenizer


def byte_level() -> Tokenizer:
    """Tokens are bytes: all single ones, words, and pieces that begin or end within characters."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = dict(zip(range(256), byte_characters(), strict=True))
    words = ["ab", " a", " think", "日", " \ufffd", "\ufffd", "e\u0301"]
    pieces = [b" \xf0\x9f", b"\x98\x80", b"\x98\x80 \xe6", b"\x97\xa5", b"k\xcc", b"\xbf\xbd", b"\xff\xfe"]
    raw = [word.encode() for word in words] + pieces
    tokenizer = build(
        ["<unk>", *alphabet.values(), *("".join(alphabet[b] for b in token) for token in raw)], decoders.ByteLevel()
    )
    tokenizer._backend.pre_tokenizer = split
    return tokenizer


def byte_characters() -> Iterator[str]:
    """How byte-level vocabularies write the bytes 0 to 255."""
    visible = {ord(c) for c in pre_tokenizers.ByteLevel.alphabet() if ord(c) < 256}
    others = iter(range(256, 512))
    return (chr(b if b in visible else next(others)) for b in range(256))


def byte_fallback(*more: Any) -> Tokenizer:
    """As SentencePiece has it: pieces of text, and bytes for what they lack."""
    words = [*"abknitx<>/.▁", "▁a", "▁think", "▁▁", "ab", "日", "e", "\u0301", "\ufffd", "▁\ufffd", "\ufffda"]
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    return build(vocabulary, decoders.Sequence(parts), byte_fallback=True)


WORDS = ["<unk>", *"abknitx>.", "ab", "##b", "a</w>", "b</w>", "</w>", "▁a", "▁", "'", "n't", "日", "\ufffd", "a\ufffd"]
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "byte-fallback that drops the first space": lambda: byte_fallback(decoders.Strip(" ", 1, 0)),
    "no decoder": lambda: build(WORDS, None),
    "word-piece": lambda: build(WORDS, decoders.WordPiece("##", cleanup=True)),
    "word ends": lambda: build(WORDS, decoders.BPEDecoder("</w>")),
    "metaspace": lambda: build(WORDS, decoders.Metaspace()),
}
BUILT = {kind: build_it() for kind, build_it in KINDS.items()}
EVERY_KIND = pytest.mark.parametrize("tokenizer", BUILT.values(), ids=BUILT)


def naive_text(tokenizer: Tokenizer, tokens: Iterable[int], skip: bool) -> str:
    """All at once. Byte tokens are first made valid UTF-8, as the library would replace every byte of a run."""
    token_of = tokenizer._backend.id_to_token
    known = [i for i in tokens if token_of(i) is not None and not (skip and i in tokenizer.special_ids)]
    mended: list[int] = []
    for is_byte, run in itertools.groupby(known, lambda i: BYTE.fullmatch(token_of(i)) is not None):
        if is_byte:
            raw = bytes(int(token_of(i)[3:5], 16) for i in run)
            valid = raw.decode("utf-8", "replace").encode()
            mended += (tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in valid)
        else:
            mended += run
    return tokenizer.decode(mended, skip_special_tokens=skip)


def naive_stop(text: str, exempt: int, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The text before the first stop string that is complete; of several, the longest."""
    for end in range(exempt, len(text) + 1):
        complete = [stop for stop in stops if text[exempt:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def naive_shown(text: str, exempt: int, added: list[tuple[int, int]], stops: Sequence[str]) -> str:
    """What may be shown of ``text``: not the beginning of a stop string, nor of an added token."""
    limit = len(text) - max(
        (n for stop in stops for n in range(1, len(stop)) if text[exempt:].endswith(stop[:n])), default=0
    )
    return text[: min([limit, *(start for start, end in added if start < limit < end)])]


def byte_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens of the bytes 0 to 255, if there are such."""
    ids = tokenizer._backend.get_vocab()
    tokens = [ids.get(f"<0x{byte:02X}>", ids.get(char)) for byte, char in enumerate(byte_characters())]
    return [] if None in tokens else tokens


def common_prefix(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len)
    return next((shortest[:n] for n, chars in enumerate(zip(*texts, strict=False)) if len(set(chars)) > 1), shortest)


def random_tokens(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Characters in single bytes, whole and cut, among tokens of all kinds."""
    bytes_of = byte_tokens(tokenizer)
    tokens: list[int] = []
    for _ in range(rng.randrange(1, 12)):
        if rng.random() < 0.4 and bytes_of:
            raw = rng.choice(["👩", "日", "é", "\u0301", " ", "a", "\ufffd"]).encode()
            cut = rng.choice([0, 0, 0, 1])
            tokens += (bytes_of[byte] for byte in raw[: len(raw) - cut])
        elif rng.random() < 0.2:
            tokens.append(rng.choice(sorted(tokenizer.added_ids)))
        elif rng.random() < 0.7:
            tokens.append(rng.randrange(max(0, tokenizer.vocab_size - 40), tokenizer.vocab_size))
        else:
            tokens.append(rng.randrange(tokenizer.vocab_size))
    return tokens


def random_stops(rng: random.Random, text: str) -> list[str]:
    """Some that are in the text, some that begin like what is, and none that are empty."""
    stops = []
    for _ in range(rng.randrange(4)):
        start = rng.randrange(len(text) + 1)
        stop = text[start : start + rng.randrange(1, 9)] + rng.choice(["", "", "x", "a"])
        stops.append(stop or "k>x")
    return stops


@EVERY_KIND
def test_deltas_together_are_the_text(tokenizer: Tokenizer) -> None:
    """B73: whatever the tokens, the stop strings and where they fall; each delta as early as it may come."""
    rng = random.Random(7)
    ends: dict[str, int] = dict.fromkeys(["stop", "finish", "stop in what was held"], 0)
    for _ in range(1500):
        tokens, skip, include = random_tokens(rng, tokenizer), rng.random() < 0.5, rng.random() < 0.5
        whole = naive_text(tokenizer, tokens, skip)
        stops, min_tokens = random_stops(rng, whole), rng.choice([0, 0, rng.randrange(len(tokens) + 2)])
        exempt = len(naive_text(tokenizer, tokens[:min_tokens], skip))
        expected, expected_stop = naive_stop(whole, exempt, stops, include)

        def make(
            skip: bool = skip, stops: list[str] = stops, include: bool = include, min_tokens: int = min_tokens
        ) -> Detokenizer:
            return Detokenizer(
                tokenizer,
                skip_special_tokens=skip,
                stop=stops,
                include_stop_str_in_output=include,
                min_tokens=min_tokens,
            )

        detokenizer, stream = make(), tokenizer.decode_stream(skip)
        deltas, known, added = list[str](), "", list[tuple[int, int]]()
        stop = None
        for token in tokens:
            stop = detokenizer.push(token)
            deltas.append(detokenizer.delta())
            if stop is not None:
                ends["stop"] += 1
                break
            start, known = len(known), known + stream.step(token)
            if token in tokenizer.added_ids:
                added.append((start, len(known)))
            assert detokenizer.text == naive_shown(known, min(exempt, len(known)), added, stops)
        else:
            stop = detokenizer.finish()
            deltas.append(detokenizer.delta())
            ends["finish" if stop is None else "stop in what was held"] += 1
        assert (detokenizer.text, stop) == (expected, expected_stop)
        assert "".join(deltas) == expected
        detokenizer.push(1)
        assert detokenizer.finish() is None
        assert detokenizer.text == expected  # nothing after the end

        at_once = make()
        assert at_once.finish_all(tokens) == stop
        assert at_once.text == at_once.delta() == expected
        assert decode_all(tokenizer, tokens, skip) == whole
    assert ends["stop"] > 200
    assert ends["finish"] > 200


@EVERY_KIND
def test_text_comes_as_soon_as_it_is_whole(tokenizer: Tokenizer) -> None:
    """Of what it is certain that more tokens do not change it, nothing is held back."""
    rng = random.Random(8)
    rest = [token for token in byte_tokens(tokenizer)[0x80:0x81] for _ in range(2)]  # to complete what is begun
    for _ in range(100):
        tokens = random_tokens(rng, tokenizer)
        stream = tokenizer.decode_stream(False)
        known = "".join(stream.step(token) for token in tokens)
        following = [naive_text(tokenizer, [*tokens, i, *rest], False) for i in range(1, tokenizer.vocab_size)]
        certain = common_prefix(following)
        whole = naive_text(tokenizer, tokens, False)
        assert whole.startswith(known)
        assert known.startswith(common_prefix([certain, whole]))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", [None, "byte-level", "byte-fallback"])
def test_no_half_characters(loaded: LoadedModel, kind: str | None, text: str) -> None:
    """B76: and states of two samples do not mix. A character comes with its last byte, and waits for no token more."""
    tokenizer = loaded.tokenizer if kind is None else BUILT[kind]
    one, other = (Detokenizer(tokenizer) for _ in range(2))
    pieces = []
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) > 9
    for i, token in enumerate(tokens):
        one.push(token)
        pieces.append(one.delta())
        other.push(tokens[-i])
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == one.text == text
    one.finish()
    assert one.text == text


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_cut_character_is_given_out_once(kind: str) -> None:
    tokenizer = BUILT[kind]
    tokens = tokenizer.encode("ab👩", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, stop=["b\ufffd\ufffd"])
    for token in tokens[:-1]:
        detokenizer.push(token)
    assert detokenizer.text == "a"
    detokenizer.finish()
    assert detokenizer.text == "ab\ufffd" == decode_all(tokenizer, tokens[:-1])
    detokenizer.finish()
    assert detokenizer.text == "ab\ufffd"
    stream = tokenizer.decode_stream()
    assert [stream.step(token) for token in tokens[:-1]][:2] == ["a", "b"]
    assert [stream.held(), stream.finish(), stream.finish(), stream.held()] == ["\ufffd", "\ufffd", "", ""]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_a_real_vocabulary(loaded: LoadedModel, skip_special_tokens: bool) -> None:
    """Also of tokens that make no valid text."""
    rng = random.Random(3)
    for _ in range(300):
        tokens = [rng.choice([rng.randrange(49160), rng.randrange(300)]) for _ in range(rng.randrange(1, 25))]
        detokenizer = Detokenizer(loaded.tokenizer, skip_special_tokens=skip_special_tokens)
        for token in tokens:
            detokenizer.push(token)
        detokenizer.finish()
        assert detokenizer.text == loaded.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        assert detokenizer.text == decode_all(loaded.tokenizer, tokens, skip_special_tokens)


@pytest.mark.parametrize("kind", BUILT)
def test_added_tokens_come_whole(kind: str) -> None:
    """B75: a stop string that begins within one does not have it shown in two."""
    tokenizer = BUILT[kind]
    think, special, letter = (tokenizer._backend.token_to_id(token) for token in ("</think>", "<s>", "a"))
    for stops in (["k>x"], [">xxxxxxxxxxxxxxxxxxxxxxx", "hink>?"], ["</think></think>x"], ["s>", "k>x"]):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, stop=stops)
        deltas = []
        for token in [letter, think, special, think, letter, think]:
            assert detokenizer.push(token) is None
            deltas.append(detokenizer.delta())
        detokenizer.finish()
        deltas.append(detokenizer.delta())
        assert "".join(deltas) == naive_text(tokenizer, [letter, think, think, letter, think], True)
        assert sum(delta.count("</think>") for delta in deltas) == 3


def test_min_tokens_exempts_their_text() -> None:
    """A stop string counts only if it lies in what follows, wholly."""
    tokenizer = BUILT["byte-fallback"]
    a, b, ab = (tokenizer._backend.token_to_id(token) for token in ("a", "b", "ab"))
    for min_tokens, text in ((0, "a"), (1, "abaa"), (2, "abaa"), (3, "abaabab")):
        detokenizer = Detokenizer(tokenizer, stop=["ba"], min_tokens=min_tokens)
        for token in [ab, a, ab, ab]:
            if detokenizer.push(token) is not None:
                break
        detokenizer.finish()
        assert detokenizer.text == text
    first, *rest = tokenizer.encode("é", add_special_tokens=False)
    assert len(rest) == 1
    detokenizer = Detokenizer(tokenizer, stop=["é"], min_tokens=1)
    assert [detokenizer.push(token) for token in [first, *rest, b, first, *rest]] == [None, None, None, None, "é"]
    assert detokenizer.text == "éb"


class Counting(Tokenizer):
    """Counts the ids that it decodes."""

    decoded = 0

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        ids = list(ids)
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("tokens", [["<0xFF>"], ["<0xF0>", "<0x9F>"], ["<s>"], ["\ufffd"], ["a"], ["a", "<0xE6>"]])
def test_a_token_costs_what_it_has_of_text(tokens: list[str]) -> None:
    """However long the text: also of bytes that never make sense, and of tokens that stand for nothing."""
    backend = BUILT["byte-fallback"]._backend
    tokenizer = Counting(backend, bos_token_id=None, eos_token_ids=())
    ids = [backend.token_to_id(token) for token in tokens] * (2000 // len(tokens))
    detokenizer = Detokenizer(tokenizer, stop=["a\ufffd" * 3 + "b", "\ufffd" * 5 + "b"])
    num_shown = 0
    for i, token in enumerate(ids):
        assert detokenizer.push(token) is None
        num_shown += len(detokenizer.delta())
        if tokens[0] != "<s>":
            assert num_shown >= i // len(tokens) - 10  # and none of it waits for an end that never comes
    assert tokenizer.decoded <= 4 * len(ids) + tokenizer.vocab_size
    detokenizer.finish()
    assert detokenizer.text == naive_text(tokenizer, ids, True)


def test_a_decoder_that_takes_text_back() -> None:
    """A stream cannot: but nothing is lost nor doubled, and text at once is what a stream gives."""
    spaces = decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", "."), decoders.Replace("bb", "")])
    tokenizer = build(["<unk>", "a", "b", " ", ".", "c"], spaces)
    assert not tokenizer.decodes_in_order
    rng = random.Random(5)
    for _ in range(500):
        tokens = rng.choices(range(1, 6), k=rng.randrange(12))
        detokenizer = Detokenizer(tokenizer)
        for token in tokens:
            detokenizer.push(token)
        detokenizer.finish()
        raw = "".join("?ab .c"[token] for token in tokens)
        if "bb" not in raw:
            assert detokenizer.text.replace(" ", "") == raw.replace(" ", "")
        assert detokenizer.text == decode_all(tokenizer, tokens)
        stream = tokenizer.decode_stream()
        assert "".join([*map(stream.step, tokens), stream.finish(), stream.finish()]) == detokenizer.text


def test_streamed_text_is_the_answers_text(loaded: LoadedModel) -> None:
    """Of the real model, at a temperature that makes it write anything."""
    llm = LLM(loaded, num_blocks=16, num_threads=1)
    params = SamplingParams(temperature=3.0, seed=7, max_tokens=40, ignore_eos=True)
    texts = [output.outputs[0].text for output in llm.stream("Emoji: 🙂", params)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    (again,) = llm.generate("Emoji: 🙂", params)
    assert texts[-1] == again.outputs[0].text == loaded.tokenizer.decode(again.outputs[0].token_ids)
