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


def as_arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that are tensors as arrays, the others as they are."""
    return {name: as_array(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    **options: Any,
) -> None:
    """`leafkv.paged_attention` into ``out`` and ``lse``."""
    arrays = map(as_array, (query, key_cache, value_cache, block_tables, query_starts, kv_lens))
    options |= {"out": out, "return_lse": lse is not None}
    keep(_core.paged_attention(*arrays, **as_arrays(options)), lse)


def keep(result: Any, lse: Tensor | None) -> None:
    """Put the logarithms of the sums, which a call of the core allocates, into ``lse``."""
    if lse is not None:
        lse.copy_(torch.from_numpy(result[1]))


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, **scales: Any) -> None:
    """`leafkv.write_kv`."""
    _core.write_kv(*map(as_array, (key, value, key_cache, value_cache, slots)), **as_arrays(scales))


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """`leafkv.copy_blocks`."""
    _core.copy_blocks(as_array(cache), as_array(pairs))
