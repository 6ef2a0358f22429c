"""Log-probabilities of tokens: of those that were picked, of the likeliest ones, of a prompt's.

They are of the model's logits as they are: temperature, penalties, masks and the like do not enter (vLLM's "raw
logprobs"). A row is summed up in double precision, relative to its largest logit, by itself: the figures do not
depend on the other rows. A row costs O(vocabulary + k); only the k entries that are asked for are Python objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from leafkv._core import argmax, top_k
from leafkv.errors import LeafKVError

if TYPE_CHECKING:

    class Decoder(Protocol):
        """A tokenizer, as far as it is needed here."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...  # noqa: D102
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...  # noqa: D102


Decode: TypeAlias = Callable[[int], str]
"""The text of one token."""


@dataclass(slots=True)
class Logprob:
    """How likely a token was.

    ``rank`` is its place among all tokens by probability, from 1; of equals the one of the lower id comes first.
    ``decoded_token`` is its text, where there is a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def token_logprobs(logits: NDArray[np.float32], token: int, k: int, decode: Decode | None = None) -> dict[int, Logprob]:
    """By token id: ``token``, then the ``k`` likeliest ones (-1: all) of ``logits`` [vocabulary], a distribution."""
    best = float(logits.max())
    shifted = logits.astype(np.float64)
    shifted -= best
    offset = best + float(np.log(np.exp(shifted, out=shifted).sum()))
    value = logits[token]
    rank = 1 + int((logits > value).sum()) + int((logits[:token] == value).sum())
    entries = {token: Logprob(float(value) - offset, rank)}
    count = len(logits) if k == -1 else min(k, len(logits))
    if count:
        values, ids = top_k(logits[None], count, num_threads=1)
        places = range(1, count + 1)
        for other, logit, place in zip(ids[0].tolist(), values[0].tolist(), places, strict=True):
            if other != token:
                entries[other] = Logprob(logit - offset, place)
    if decode is not None:
        decode_tokens(entries, decode)
    return entries


def prompt_logprobs(
    logits: NDArray[np.float32], next_tokens: Sequence[int], k: int, decode: Decode | None = None
) -> list[dict[int, Logprob]]:
    """:func:`token_logprobs` of many rows: of ``next_tokens[i]`` in ``logits[i]``, for ``logits`` [R, vocabulary].

    Raises:
        LeafKVError: a row is no distribution.
    """
    invalid = np.flatnonzero(argmax(logits, num_threads=1) < 0)
    if len(invalid):
        raise LeafKVError(f"the logits of row {invalid[0]} are not a distribution (NaN, infinite, or all -inf)")
    return [token_logprobs(row, int(token), k, decode) for row, token in zip(logits, next_tokens, strict=True)]


def decode_tokens(entries: dict[int, Logprob], decode: Decode) -> None:
    """Fill in the text of each token."""
    for token, entry in entries.items():
        entry.decoded_token = decode(token)


def token_decoder(tokenizer: Decoder) -> Decode:
    """The text that a token adds to what is before it; special tokens have theirs, parts of a character U+FFFD.

    Decoded alone, a token of many tokenizers would lose the space that it begins with.
    """

    @cache
    def context() -> tuple[list[int], str]:
        before = tokenizer.encode("a", add_special_tokens=False)
        return before, tokenizer.decode(before, skip_special_tokens=False)

    @cache
    def decode(token: int) -> str:
        before, prefix = context()
        text = tokenizer.decode([*before, token], skip_special_tokens=False)
        return text[len(prefix) :] if text.startswith(prefix) else tokenizer.decode([token], False)

    return decode
