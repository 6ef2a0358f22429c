"""What a forward of the decoder is given: which tokens, and whether their KV is a function of them alone.

Columns are those of transformers: the positions in its tensors, padding included. A column is *real* where the
attention mask is not 0, and only real columns are stored. The rank of a real column is the number of real ones before
it: where a token's position is its rank, its KV can be shared with every sequence that begins with the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from leafkv.errors import InvalidInputError

READ = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "past_key_values"}
WITHOUT_EFFECT = {"cache_position", "logits_to_keep", "labels"}
"""Arguments that change no KV. Any other tensor may."""


@dataclass(frozen=True)
class NewTokens:
    """The columns that a forward adds.

    Attributes:
        real: bool [B, q].
        tokens: int64 [B, q], or None where only embeddings are given.
        shareable: bool [B], whether a row's new KV is a function of its real tokens, in order.
        begins_again: the tokens are at positions from 0 on, where the cache has tokens: the text begins anew. So do
            transformers' assisted decoding, and chunked prefill before 5.24, over a cache with a part of the prompt.
    """

    real: NDArray[np.bool_]
    tokens: NDArray[np.int64] | None
    shareable: NDArray[np.bool_]
    begins_again: bool


def batch_of(arguments: Mapping[str, Any]) -> int:
    """Rows of a forward."""
    return int(_inputs(arguments).shape[0])


def read(arguments: Mapping[str, Any], past: NDArray[np.bool_], length_limit: int | None) -> NewTokens:
    """Read the arguments of a forward over a cache whose columns are ``past``, bool [B, columns].

    Raises:
        InvalidInputError: the attention mask does not go with the columns of the cache.
    """
    batch, count = _inputs(arguments).shape[:2]
    mask = arguments.get("attention_mask")
    padding_only = mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)
    mask = mask if padding_only else None
    positions = arguments.get("position_ids")
    given = None if positions is None else positions.detach().cpu().numpy()
    begins_again = given is not None and _begins_again(mask, given, past)
    if begins_again:
        past = past[:, :0]
    columns = past.shape[1]
    real = _read_mask(mask, past, int(count))
    ranks = past.sum(1)[:, None] + real.cumsum(1) - 1
    given = np.arange(columns, columns + count) if given is None else given
    shareable = ((given == ranks) | ~real).reshape(-1, batch, count).all((0, 2))
    if length_limit is not None and given.max(initial=-1) + 1 >= length_limit:
        shareable[:] = False
    ids = arguments.get("input_ids")
    others = any(
        isinstance(value, torch.Tensor | dict | list | tuple)
        for name, value in arguments.items()
        if name not in READ and name not in WITHOUT_EFFECT
    )
    if ids is None or others or not padding_only:
        shareable[:] = False
    tokens = None if ids is None else ids.detach().cpu().numpy().astype(np.int64)
    return NewTokens(real, tokens, shareable, begins_again)


def as_mask(name: str, mask: Any, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """A padding mask [B, columns] as bools: 0 is padding."""
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != shape:
        got = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InvalidInputError(
            f"{name}: expected [batch, tokens] {shape}, those of the cache and the new ones, got {got}"
        )
    found: NDArray[np.bool_] = mask.detach().bool().cpu().numpy()
    return found


def _inputs(arguments: Mapping[str, Any]) -> Any:
    ids = arguments.get("input_ids")
    found = arguments.get("inputs_embeds") if ids is None else ids
    if found is None:
        raise InvalidInputError("input_ids: expected a forward of token ids or of inputs_embeds, got neither")
    return found


def _begins_again(mask: Any, given: NDArray[np.int64], past: NDArray[np.bool_]) -> bool:
    """Whether the rows that have tokens get new ones from position 0 on."""
    count = given.shape[-1]
    real = np.ones((len(past), count), np.bool_) if mask is None else mask[:, -count:].detach().bool().cpu().numpy()
    if real.shape != (len(past), count):
        return False
    going_on = past.any(1) & real.any(1)
    firsts = np.broadcast_to(given, (*given.shape[:-2], *real.shape))[..., np.arange(len(past)), real.argmax(1)]
    return bool(going_on.any() and not firsts[..., going_on].any())


def _read_mask(mask: Any, past: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    batch, columns = past.shape
    if mask is None:
        known = np.ones((batch, columns + count), np.bool_)
    else:
        known = as_mask("attention_mask", mask, (batch, columns + count))
    if not np.array_equal(known[:, :columns], past):
        raise InvalidInputError(
            "attention_mask: expected the cached tokens masked as when they were computed, got another mask, or none: "
            "padding is not stored, and cannot be seen any more"
        )
    return known[:, columns:]
