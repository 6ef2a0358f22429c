"""Token ids and chats, from GGUF metadata and from Hugging Face directories."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from leafkv.errors import InvalidInputError, ModelLoadError
from leafkv.models.config_hf import config_from_hf
from leafkv.models.gguf import GGUFFile
from leafkv.models.loader import embedded_model
from leafkv.models.tokenizer import Tokenizer
from leafkv.models.tokenizer_gguf import tokenizer_from_gguf
from leafkv.models.tokenizer_hf import tokenizer_from_hf

from .tiny import CONFIGS, REFERENCES, write_hf

CONFIG = config_from_hf(CONFIGS["llama"])


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    config = dataclasses.replace(CONFIG, vocab_size=49152)
    return tokenizer_from_gguf(GGUFFile(embedded_model()).header.metadata, config)


def reference(name: str) -> Any:
    return json.loads((REFERENCES.parent / name).read_text(encoding="utf-8"))


def test_the_embedded_model(smollm2: Tokenizer) -> None:
    """Ids, texts and chats as two other implementations have them. Digits stand alone; special tokens are parsed."""
    known = reference("smollm2_tokens.json")
    assert len(known["texts"]) == 30
    for case in known["texts"]:
        assert smollm2.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert smollm2.encode(case["text"]) == case["ids"]  # the file asks for no begin-of-text token
        assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
    for chat in known["chats"]:
        assert smollm2.apply_chat_template(chat["messages"]) == chat["rendered"]
    assert smollm2.decode([1, 4093, 198, 6004, 2]) == "user\nhi"
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.vocab_size == 49152


def test_a_stream_says_what_decoding_at_once_says(smollm2: Tokenizer) -> None:
    for case in reference("smollm2_tokens.json")["texts"]:
        stream = smollm2.decode_stream(skip_special_tokens=False)
        parts = [stream.step(token_id) for token_id in case["ids"]]
        assert "".join(part or "" for part in parts) == case["decoded"]
        assert not any("\ufffd" in part for part in parts if part)


def test_sentencepiece() -> None:
    """Pieces, scores and ids from the sentencepiece library."""
    known = reference("sentencepiece.json")
    metadata = {f"tokenizer.ggml.{key}": value for key, value in known["vocabulary"].items()}
    metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    tokenizer = tokenizer_from_gguf(metadata, dataclasses.replace(CONFIG, vocab_size=600))
    for case in known["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"]) == [1, *case["ids"]]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
    assert tokenizer.encode("</s>[INST]", add_special_tokens=False) == [2, 4]
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.scores: expected one for each of 600 tokens"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.scores": [0.0]}, dataclasses.replace(CONFIG, vocab_size=600))


def byte_level(pre: str, **more: Any) -> Tokenizer:
    """A byte-level tokenizer that joins digits, and letters with the space before them."""
    from tokenizers.pre_tokenizers import ByteLevel  # noqa: PLC0415

    tokens = [*sorted(ByteLevel.alphabet()), "12", "123", "1234", "ab", "\u0120ab", "\u0120abc", "<s>"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4", "a b", "\u0120 ab"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }
    return tokenizer_from_gguf(metadata, dataclasses.replace(CONFIG, vocab_size=len(tokens)))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234", " ab", "c", ".", "\n"]),
        ("smollm", ["1", "2", "3", "4", " ab", "c", ".", "\n"]),
        # These have words that are whole tokens though no merge makes them, and add a begin-of-text token.
        ("llama-bpe", ["<s>", "123", "4", " abc", ".", "\n"]),
        ("tekken", ["<s>", "1", "2", "3", "4", " abc", ".", "\n"]),
        ("qwen2", ["1", "2", "3", "4", " ab", "c", ".", "\n"]),
    ],
)
def test_conventions_of_byte_level_tokenizers(pre: str, pieces: list[str]) -> None:
    tokenizer = byte_level(pre)
    assert [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.encode("1234 abc.\n")] == pieces
    composed = tokenizer.encode("e\u0301", add_special_tokens=False) == tokenizer.encode(
        "\u00e9", add_special_tokens=False
    )
    assert composed == (pre == "qwen2")


def test_options_of_gguf_tokenizers() -> None:
    begin = byte_level("gpt-2").vocab_size - 1
    assert byte_level("gpt-2", add_bos_token=True).encode("ab")[0] == begin
    assert byte_level("llama-bpe", add_bos_token=False).encode("ab")[0] != begin
    assert byte_level("gpt-2", add_eos_token=True, eos_token_id=begin).encode("ab")[-1] == begin
    for pre in ("default", "gpt-4o", None):
        with pytest.raises(ModelLoadError, match=rf"tokenizer.ggml.pre = {pre!r} is not supported"):
            byte_level(pre)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=r"tokenizer.ggml.model = 't5' is not supported"):
        byte_level("gpt-2", model="t5")
    with pytest.raises(ModelLoadError, match="merges do not fit"):
        byte_level("gpt-2", merges=["x y"])
    with pytest.raises(ModelLoadError, match="token_type: expected one for each"):
        byte_level("gpt-2", token_type=[1])


def test_hugging_face_directory(tmp_path: Path) -> None:
    directory = write_hf(tmp_path, CONFIGS["llama"])
    raw = json.loads((directory / "tokenizer.json").read_text())
    raw["truncation"] = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    raw["added_tokens"] = [
        {"id": 9, "content": "w9", "special": True, "normalized": False,
         "single_word": False, "lstrip": False, "rstrip": False}
    ]  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    settings = {
        "bos_token": {"content": "w1"},
        "eos_token": "w9",
        "chat_template": [{"name": "default", "template": "{{ bos_token }} {{ messages[0].content }} {{ eos_token }}"}],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_from_hf(directory, CONFIG)
    assert tokenizer.encode("w3 w4 w5") == [3, 4, 5]  # a saved truncation does not cut prompts
    assert tokenizer.eos_token_ids == (2, 9)
    assert tokenizer.special_ids == {9}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w7"}]) == "w1 w7 w9"
    (directory / "chat_template.jinja").write_text("{{ messages | length }}")
    assert tokenizer_from_hf(directory, CONFIG).apply_chat_template([{"role": "user"}]) == "1"


TEMPLATE = """\
{%- for message in messages %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{% generation %}{{ message | tojson }}{% endgeneration %}

{% endfor %}
{{ 'go' if add_generation_prompt }}{{ strftime_now('%%') }}"""


def test_chat_templates(smollm2: Tokenizer) -> None:
    from leafkv.models.chat_template import ChatTemplate  # noqa: PLC0415

    template = ChatTemplate(TEMPLATE, {})
    messages = [{"role": "user", "content": "<b>é'\""}] * 5
    line = '{"role": "user", "content": "<b>é\'\\""}\n'  # no HTML escapes; blocks leave no lines behind
    assert template.render(messages, True) == f"{line * 3}go%"
    assert template.render(messages[:1], False) == f"{line}%"
    with pytest.raises(InvalidInputError, match="the chat template refuses them: no tools here"):
        template.render([{"role": "tool"}], True)
    with pytest.raises(InvalidInputError, match="refuses them"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render(messages, True)
    for bad in ([], "hello", {"role": "user"}, [{"content": "no role"}], ["text"], None):
        with pytest.raises(InvalidInputError, match="messages: expected"):
            smollm2.apply_chat_template(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="no chat template"):
        byte_level("gpt-2").apply_chat_template(messages)


def test_bad_input(smollm2: Tokenizer) -> None:
    for bad in (None, b"bytes", 3, "\ud800"):
        with pytest.raises(InvalidInputError, match="text: "):
            smollm2.encode(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="ids: "):
        smollm2.decode([-1])
    assert smollm2.encode("") == []
    assert smollm2.decode([]) == ""
