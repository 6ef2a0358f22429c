"""Who attends to what in a step, known to the host before the device: planned once, for all layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leafkv import _core
from leafkv.errors import InvalidInputError
from leafkv.torch import cpu, gpu
from leafkv.torch.checks import check_tensors, result_of
from leafkv.torch.transfer import is_gpu, to_device


class AttentionPlan:
    """`leafkv.AttentionPlan` for tensors on ``device``: the arrays are the host's, and are checked there.

    On a GPU, tables, starts and lengths go to the device in one copy.

    Args:
        block_tables: int32 [num_seqs, max_blocks], C-contiguous rows.
        query_starts: int32 [num_seqs + 1]; the query rows of sequence i are ``starts[i]:starts[i + 1]``.
        kv_lens: int32 [num_seqs]; tokens of KV per sequence, its new rows included.
        num_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: heads of the KV cache.
        head_dim: dimension of a head.
        block_size: tokens per block.
        num_blocks: blocks of the cache; every id used in ``block_tables`` is below it.
        num_threads: threads on CPUs, or None for all available.
        device: where queries and caches are.
        on_device: the first three arguments on ``device``, where the caller has sent them there already.

    Raises:
        InvalidInputError: an argument is malformed, or does not fit another one.
    """

    def __init__(
        self,
        block_tables: NDArray[np.int32],
        query_starts: NDArray[np.int32],
        kv_lens: NDArray[np.int32],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        num_threads: int | None = None,
        device: Any = "cpu",
        on_device: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        self.device = torch.device(device)
        # Also for a GPU: what is wrong with the arrays is found by the same checks, and ids are in bounds.
        self._core = _core.AttentionPlan(
            block_tables,
            query_starts,
            kv_lens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            num_blocks=num_blocks,
            num_threads=num_threads,
        )
        self._shape = (num_blocks, num_kv_heads, block_size, num_heads, head_dim, int(query_starts[-1]))
        self._step: dict[str, Any] | None = None
        if is_gpu(self.device):
            if on_device is None:
                tables, starts, lens = to_device((block_tables, query_starts, kv_lens), self.device)
                on_device = (tables, starts, lens)
            self._step = {
                **dict(zip(("block_tables", "query_starts", "kv_lens"), on_device, strict=True)),
                "max_query_len": int(np.diff(query_starts).max(initial=0)),
                "max_kv_len": int(kv_lens.max(initial=0)),
            }

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of every query row over its sequence's KV: options and results are those of `paged_attention`."""
        options: dict[str, Any] = {
            "scale": scale,
            "causal": causal,
            "sliding_window": sliding_window,
            "softcap": softcap,
        }
        layer: dict[str, Any] = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
        tensors: dict[str, Any] = {
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "k_scale": k_scale,
            "v_scale": v_scale,
        }
        check_tensors(layer, {**tensors, "out": out})
        if query.device.type != self.device.type or self.device.index not in (None, query.device.index):
            raise InvalidInputError(f"query: expected a tensor on {self.device}, as planned, got one on {query.device}")
        out, lse = result_of(query, out, return_lse)
        if self._step is None:
            arguments = {**layer, **tensors, **options, "out": out, "return_lse": return_lse}
            cpu.keep(self._core.attend(**cpu.as_arrays(arguments)), lse)
        else:
            self._check_shapes(query, key_cache)
            gpu.paged_attention(**layer, **self._step, out=out, lse=lse, **tensors, **options)
        return out if lse is None else (out, lse)

    def _check_shapes(self, query: Tensor, key_cache: Tensor) -> None:
        num_blocks, num_kv_heads, block_size, num_heads, head_dim, rows = self._shape
        for name, tensor, shape in (
            ("query", query, (rows, num_heads, head_dim)),
            ("key_cache", key_cache, (num_blocks, num_kv_heads, block_size, head_dim)),
        ):
            if tuple(tensor.shape) != shape:
                raise InvalidInputError(f"{name}: expected shape {list(shape)}, as planned, got {list(tensor.shape)}")
