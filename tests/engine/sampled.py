"""What sampling sees of a sequence, without an engine; and a tokenizer that spells unknown characters in bytes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from leafkv import SamplingParams
from leafkv.models.tokenizer import Tokenizer

SPACE = "\u2581"


@dataclass
class FakeRequest:
    stop_ids: frozenset[int] = frozenset()
    bad_word_ids: list[tuple[int, ...]] = field(default_factory=list)


@dataclass
class FakeSequence:
    params: SamplingParams
    prompt: Sequence[int] = (1,)
    output: Sequence[int] = ()
    seed: int = 0
    guide: Any = None
    request: FakeRequest = field(default_factory=FakeRequest)

    def __post_init__(self) -> None:
        self.tokens = array("i", [*self.prompt, *self.output])
        self.num_prompt_tokens = len(self.prompt)


def byte_fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models have it: 0 unknown, 1 begin, 2 end, then 256 bytes, characters and a few pieces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [SPACE, *map(chr, range(33, 127)), "ab", f"{SPACE}a", f"{SPACE}ab", '":', "12"]
    merges = [("a", "b"), (SPACE, "a"), (SPACE, "ab"), ('"', ":"), ("1", "2")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    return Tokenizer(backend, bos_token_id=1, eos_token_ids=(2,))
