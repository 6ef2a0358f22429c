"""A decoder of transformers as the engine's model: their code on one flattened batch, our cache and attention.

All that a step needs on the device goes there in one copy. Of the logits, those that are wanted come back, which is
where the host waits for the device. Products with weights are PyTorch's: a row's bits may depend on the rows beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leafkv.models.hf import attention
from leafkv.models.hf.features import DecoderShape, examine, forward
from leafkv.torch import AttentionPlan, to_device

if TYPE_CHECKING:
    from leafkv.models.batch import Batch, Cache
    from leafkv.models.hf.attention import Options


class Planned:
    """A step's plan as arrays of the host: they go to the device with the rest of the batch."""

    def __init__(
        self,
        block_tables: NDArray[np.int32],
        query_starts: NDArray[np.int32],
        kv_lens: NDArray[np.int32],
        **sizes: Any,
    ) -> None:
        self.arrays = (block_tables, query_starts, kv_lens)
        self.sizes = sizes


class HFModel:
    """A `leafkv.models.batch.Model` over a causal language model of transformers.

    Args:
        model: in evaluation, with ``attn_implementation="leafkv"``, on one device.

    Raises:
        ModelLoadError: it does what the engine does not do.
    """

    plan = Planned

    def __init__(self, model: Any) -> None:
        self.config: DecoderShape = examine(model)
        self._model = model
        self._chooses_rows = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    @property
    def device(self) -> Any:
        """Where it computes."""
        return self._model.device

    def forward(self, batch: Batch, cache: Cache) -> NDArray[np.float32]:
        """Write the batch's keys and values to ``cache``, which has tensors; return logits, float32 [S, vocab_size]."""
        host: Any = batch.plan
        arrays = (batch.token_ids, batch.positions, batch.slots, batch.logit_rows, *host.arrays)
        token_ids, positions, slots, rows, *there = to_device(arrays, self.device)
        plan = AttentionPlan(*host.arrays, **host.sizes, device=self.device, on_device=tuple(there))
        options = {"logits_to_keep": rows} if self._chooses_rows else {}
        with torch.inference_mode(), _threads(batch.num_threads), attention.using(_Step(plan, cache, slots)):
            logits = forward(self._model, token_ids.long(), positions, **options)
            if not self._chooses_rows:
                logits = logits[rows]
            found: NDArray[np.float32] = logits.cpu().numpy()
        return found


@dataclass(frozen=True, slots=True)
class _Step:
    """The attention of all layers in one step."""

    plan: AttentionPlan
    cache: Any
    slots: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options, _: Tensor | None
    ) -> Tensor:
        query, key, value = map(_rows, (query, key, value))
        self.cache.write(layer, key, value, self.slots)
        keys, values = self.cache.layer(layer)
        attended: Tensor = self.plan.attend(query, keys, values, **self.cache.scales(layer), **options)
        return attended[None]


def _rows(heads: Tensor) -> Tensor:
    """[1, heads, T, head_dim] as [T, heads, head_dim], in place: a head's elements are neighbours in all likelihood."""
    rows = heads[0].transpose(0, 1)
    return rows if rows.stride(2) == 1 else rows.contiguous()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """PyTorch computes with ``count`` threads, which it knows but for the whole process; None leaves it as it is."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
