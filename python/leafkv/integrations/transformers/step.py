"""One forward over a cache's blocks: where each layer writes its new keys and values, and what it reads.

Made before the first layer, from one copy of the block tables; then each layer writes, and either attends in place
(attention "leafkv": one plan for all layers) or gathers all columns into dense tensors, for any other attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leafkv.errors import InvalidInputError
from leafkv.integrations.transformers.forward import NewTokens
from leafkv.kv import KVCache
from leafkv.torch import AttentionPlan, to_device


class ForwardStep:
    """A forward's tokens in the blocks of ``kv``.

    Args:
        kv: the KV memory.
        new: the columns that the forward adds.
        past: bool [B, columns], those before.
        tables: int32 [B, max_blocks], block tables of the rows.
        slots: int64 [new real columns], where they are written.
        dtype: of the keys and values that layers hand over.
        in_place: whether the layers' attention is "leafkv".
    """

    def __init__(
        self,
        kv: KVCache,
        new: NewTokens,
        past: NDArray[np.bool_],
        tables: NDArray[np.int32],
        slots: NDArray[np.int64],
        dtype: torch.dtype,
        in_place: bool,
    ) -> None:
        self.new = new
        self.in_place = in_place
        self.real = np.concatenate([past, new.real], axis=1)
        self.counts = new.real.sum(1)
        self.written: set[int] = set()
        self._kv, self._tables, self._dtype = kv, tables, dtype
        self._plan: AttentionPlan | None = None
        self._gathered: tuple[Tensor, ...] | None = None
        (where,) = new.real.reshape(-1).nonzero()
        self._all_real = len(where) == new.real.size
        self._slots, self._where = to_device([slots, where], kv.device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store a layer's new keys and values, [B, num_kv_heads, q, head_dim] each."""
        self._check(layer, key, value)
        self._kv.write(layer, self._rows(key), self._rows(value), self._slots)
        self.written.add(layer)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
        _padding: Tensor | None = None,
    ) -> Tensor:
        """Store the new keys and values, and attend from [B, num_heads, q, head_dim] to all that the rows have.

        Where there is padding is known already: it was read when the forward began.
        """
        if options.get("sliding_window") is not None and _has_holes(self.real):
            raise InvalidInputError(
                "attention_mask: expected padding before a text or after it, got some inside, over which a sliding "
                "window cannot reach"
            )
        self.write(layer, key, value)
        batch, heads, count, dim = query.shape
        if self._plan is None:
            self._plan = self._make_plan(heads)
        keys, values = self._kv.layer(layer)
        seen = self._plan.attend(self._rows(query), keys, values, **self._kv.scales(layer), **options)
        if self._all_real:
            return seen.view(batch, count, heads, dim)
        out = query.new_zeros((batch * count, heads, dim))
        out[self._where] = seen
        return out.view(batch, count, heads, dim)

    def gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of all columns, [B, num_kv_heads, columns, head_dim] each; zero in padding."""
        if self._kv.layout != "rows":
            raise InvalidInputError(
                "attn_implementation: the pool was made for a model with 'leafkv', whose blocks no other attention "
                "reads; expected it still, or a KVPool that is made after the change"
            )
        if self._gathered is None:
            size = self._kv.block_size
            ranks = np.maximum(self.real.cumsum(1) - 1, 0)
            blocks = np.take_along_axis(self._tables, ranks // size, axis=1).astype(np.int64)
            self._gathered = tuple(to_device([blocks, ranks % size, ~self.real], self._kv.device))
        blocks, offsets, padding = self._gathered
        found = []
        for cache, scale in zip(self._kv.layer(layer), self._kv.scales(layer).values() or (None, None), strict=True):
            dense = cache[blocks, :, offsets].to(self._dtype)
            if scale is not None:
                dense *= scale[blocks, :, offsets].unsqueeze(-1)
            # Padding reads some slot, in which anything may be: NaN, too.
            dense.masked_fill_(padding[..., None, None], 0)
            found.append(dense.transpose(1, 2))
        return found[0], found[1]

    def _rows(self, tensor: Tensor) -> Tensor:
        """[B, heads, q, head_dim] as [real columns, heads, head_dim]."""
        batch, heads, count, dim = tensor.shape
        rows = tensor.detach().transpose(1, 2).reshape(batch * count, heads, dim)
        return rows if self._all_real else rows[self._where]

    def _make_plan(self, heads: int) -> AttentionPlan:
        starts = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(self.counts, out=starts[1:])
        return AttentionPlan(
            self._tables,
            starts,
            self.real.sum(1).astype(np.int32),
            num_heads=heads,
            num_kv_heads=self._kv.num_kv_heads,
            head_dim=self._kv.head_dim,
            block_size=self._kv.block_size,
            num_blocks=self._kv.num_blocks,
            device=self._kv.device,
        )

    def _check(self, layer: int, key: Tensor, value: Tensor) -> None:
        batch, count = self.new.real.shape
        expected = (batch, self._kv.num_kv_heads, count, self._kv.head_dim), self._dtype, self._kv.device
        for name, tensor in (("key_states", key), ("value_states", value)):
            got = tuple(tensor.shape), tensor.dtype, tensor.device
            if got != expected:
                raise InvalidInputError(
                    f"{name}: expected {_words(expected)}, as of the pool's model, got {_words(got)}"
                )
        if not 0 <= layer < self._kv.num_layers:
            raise InvalidInputError(f"layer_idx: expected one of {self._kv.num_layers} layers, got {layer}")
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise InvalidInputError("requires_grad: no gradient goes through a LeafCache; expected torch.no_grad()")


def _words(what: tuple[Any, ...]) -> str:
    shape, dtype, device = what
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def _has_holes(real: NDArray[np.bool_]) -> bool:
    """Whether padding follows a real column, and is followed by one."""
    begun = np.logical_or.accumulate(real, axis=1)
    goes_on = np.logical_or.accumulate(real[:, ::-1], axis=1)[:, ::-1]
    return bool((begun & goes_on & ~real).any())
