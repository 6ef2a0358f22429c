"""CPU tensors: seen as numpy arrays, of which no element is touched, and handed to the core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leafkv import _core


def as_array(tensor: Tensor) -> Any:
    """The tensor's memory as a numpy array; bfloat16, which numpy lacks, as its bits in uint16."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.detach().numpy()


def as_arrays(tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    """Those that are tensors, as arrays."""
    return {name: None if tensor is None else as_array(tensor) for name, tensor in tensors.items()}


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **options: Any,
) -> None:
    """`leafkv.paged_attention` into ``out`` and ``lse``."""
    arrays = map(as_array, (query, key_cache, value_cache, block_tables, query_starts, kv_lens))
    per_head = as_arrays({"alibi_slopes": alibi_slopes, "sinks": sinks})
    scales = as_arrays({"k_scale": k_scale, "v_scale": v_scale})
    options |= {**per_head, **scales, "out": as_array(out), "return_lse": lse is not None}
    keep(_core.paged_attention(*arrays, **options), lse)


def keep(result: Any, lse: Tensor | None) -> None:
    """Put the logarithms of the sums, which a call of the core allocates, into ``lse``."""
    if lse is not None:
        lse.copy_(torch.from_numpy(result[1]))


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`leafkv.write_kv`."""
    arrays = map(as_array, (key, value, key_cache, value_cache, slots))
    _core.write_kv(*arrays, **as_arrays({"k_scale": k_scale, "v_scale": v_scale}))


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """`leafkv.copy_blocks`."""
    _core.copy_blocks(as_array(cache), as_array(pairs))
