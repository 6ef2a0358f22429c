"""`Tokenizer` from the metadata of a GGUF file.

The file has the vocabulary, and either merges (``tokenizer.ggml.model`` = "gpt2": byte-level BPE) or scores
("llama": SentencePiece BPE). How text is cut into words before BPE is not in it, only the name of a convention
(``tokenizer.ggml.pre``): a name that is not known here is refused, for guessing gives wrong ids without a
sign. That includes "default", which a converter writes when it did not recognise the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leafkv._extras import require
from leafkv.errors import ModelLoadError
from leafkv.models.chat_template import ChatTemplate
from leafkv.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from leafkv.models.config import ModelConfig

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
_KEY = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class _Convention:
    """How a family of byte-level tokenizers cuts text into words."""

    patterns: tuple[str, ...] = ()
    """Regular expressions, applied in turn to the pieces that the one before left; a match is a piece."""
    gpt2_words: bool = False
    """Cut by GPT-2's expression after these."""
    whole_words_first: bool = False
    """A word that is in the vocabulary is one token, whatever the merges."""
    add_bos: bool = False
    """The default of ``add_bos_token``."""
    compose: bool = False
    """Normalise to Unicode NFC first."""


def _gpt4_words(numbers: str) -> str:
    contraction, word = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{contraction}|{word}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _tekken_words() -> str:
    start, upper, lower = (
        r"[^\r\n\p{L}\p{N}]?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    )
    words = rf"{start}{upper}*{lower}+|{start}{upper}+{lower}*"
    return rf"{words}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_LLAMA3 = _Convention((_gpt4_words(r"\p{N}{1,3}"),), whole_words_first=True, add_bos=True)
_QWEN2 = _Convention((_gpt4_words(r"\p{N}"),), compose=True)
_CONVENTIONS = {
    "gpt-2": _Convention(gpt2_words=True),
    "smollm": _Convention((r"\p{N}",), gpt2_words=True),  # digits one by one
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": _Convention((_tekken_words(),), whole_words_first=True, add_bos=True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], config: ModelConfig) -> Tokenizer:
    """Rebuild the tokenizer.

    Raises:
        ModelLoadError: the kind of tokenizer is not supported, or a part of it is missing or malformed.
    """
    tokens = _strings(metadata, "tokens")
    kinds = metadata.get(f"{_KEY}token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ModelLoadError(f"{_KEY}token_type: expected one for each of {len(tokens)} tokens")
    if len(tokens) > config.vocab_size:
        raise ModelLoadError(f"there are {len(tokens)} tokens, but the vocabulary has {config.vocab_size}")
    model = metadata.get(f"{_KEY}model")
    if model == "gpt2":
        backend, add_bos = _byte_level(metadata, tokens)
    elif model == "llama":
        backend, add_bos = _sentencepiece(metadata, tokens, kinds), True
    else:
        raise ModelLoadError(f"{_KEY}model = {model!r} is not supported (supported: 'gpt2', 'llama')")

    added = require("tokenizers", "models").AddedToken
    marked = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in {_CONTROL, _USER_DEFINED}]
    # All are found in text as they stand; "special" only says that decoding may skip them.
    backend.add_tokens([added(token, special=kind == _CONTROL, normalized=False) for token, kind in marked])
    _surround(metadata, tokens, backend, add_bos)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(f"tokenizer.chat_template is a {type(template).__name__}, not a string")
    return Tokenizer(
        backend,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        chat_template=None if template is None else ChatTemplate(template, _template_tokens(metadata, tokens)),
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Any, bool]:
    """A byte-level BPE tokenizer, and whether it adds a begin-of-text token by default."""
    tk = require("tokenizers", "models")
    name = metadata.get(f"{_KEY}pre")
    convention = _CONVENTIONS.get(name) if isinstance(name, str) else None
    if convention is None:
        raise ModelLoadError(f"{_KEY}pre = {name!r} is not supported (supported: {', '.join(_CONVENTIONS)})")
    if metadata.get(f"{_KEY}add_space_prefix", False):
        raise ModelLoadError(f"{_KEY}add_space_prefix is not supported in a byte-level tokenizer")
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(metadata, "merges")]
    try:
        model = tk.models.BPE(
            {token: i for i, token in enumerate(tokens)}, merges, ignore_merges=convention.whole_words_first
        )
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"{_KEY}merges do not fit {_KEY}tokens: {error}") from error
    backend = tk.Tokenizer(model)
    if convention.compose:
        backend.normalizer = tk.normalizers.NFC()
    splits = [tk.pre_tokenizers.Split(tk.Regex(pattern), "isolated") for pattern in convention.patterns]
    byte_level = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=convention.gpt2_words)
    backend.pre_tokenizer = tk.pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = tk.decoders.ByteLevel()
    return backend, convention.add_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Any:
    """A SentencePiece BPE tokenizer with byte fallback.

    SentencePiece joins the neighbours that make the piece of the highest score. As merges, that is every split
    of every piece into two others, in falling order of the piece's score. A text that follows a special token gets
    a space prefix of its own, as llama.cpp has it.
    """
    tk = require("tokenizers", "models")
    scores = metadata.get(f"{_KEY}scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError(f"{_KEY}scores: expected one for each of {len(tokens)} tokens")
    for option in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(f"{_KEY}{option}"):
            raise ModelLoadError(f"{_KEY}{option} is not supported")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pieces = {token: i for token, i in vocabulary.items() if kinds[i] == _NORMAL}
    merges = [
        (scores[i], len(left), len(right), left, right)
        for piece, i in pieces.items()
        for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        if left in pieces and right in pieces
    ]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    pairs = [(left, right) for *_, left, right in merges]
    model = tk.models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in kinds)
    backend = tk.Tokenizer(model)
    replace = tk.normalizers.Replace(" ", _SPACE)
    decoders = [tk.decoders.Replace(_SPACE, " "), tk.decoders.ByteFallback(), tk.decoders.Fuse()]
    backend.normalizer = replace
    if metadata.get(f"{_KEY}add_space_prefix", True):
        backend.normalizer = tk.normalizers.Sequence([tk.normalizers.Prepend(_SPACE), replace])
        decoders.append(tk.decoders.Strip(" ", 1, 0))
    backend.decoder = tk.decoders.Sequence(decoders)
    return backend


def _surround(metadata: Mapping[str, Any], tokens: list[str], backend: Any, add_bos: bool) -> None:
    """Have ``add_special_tokens`` put begin- and end-of-text tokens around a text, as the file asks."""
    tk = require("tokenizers", "models")
    around = {}
    for name, default in (("bos", add_bos), ("eos", False)):
        if metadata.get(f"{_KEY}add_{name}_token", default):
            token_id = metadata.get(f"{_KEY}{name}_token_id")
            if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
                raise ModelLoadError(f"{_KEY}add_{name}_token needs {_KEY}{name}_token_id, which is {token_id!r}")
            around[name] = (tokens[token_id], token_id)
    if around:
        template = [*([around["bos"][0]] if "bos" in around else []), "$A"]
        template += [around["eos"][0]] if "eos" in around else []
        backend.post_processor = tk.processors.TemplateProcessing(
            single=template, special_tokens=list(dict.fromkeys(around.values()))
        )


def _template_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """The special tokens that chat templates name, such as ``bos_token``."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {f"{theirs}_token": metadata.get(f"{_KEY}{ours}_token_id") for ours, theirs in names.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and i < len(tokens)}


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(_KEY + name)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelLoadError(f"{_KEY}{name} is missing or not a list of strings")
    return value
