"""What is asked of tensors before a kernel sees them: an error names the argument, what came and what was expected.

CPU tensors are checked by the core as well, contents included. Of what is on a GPU, shapes, dtypes and strides are all
that is known without waiting for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from math import isfinite
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from leafkv._checks import check_bool, check_integer, check_number
from leafkv.errors import InvalidInputError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Of queries, keys and values, and results."""

CACHES = (*FLOATS, torch.int8)


def check_tensors(needed: Mapping[str, Any], optional: Mapping[str, Any] = MappingProxyType({})) -> None:
    """All are tensors on one device, that of the first, and none wants a gradient; optional ones may be None."""
    first, grad = next(iter(needed)), torch.is_grad_enabled()
    device = getattr(needed[first], "device", None)
    for name, tensor in chain(needed.items(), optional.items()):
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device != device:
            raise InvalidInputError(f"{name}: expected a tensor on {device}, as {first} is, got one on {tensor.device}")
        if grad and tensor.requires_grad:
            raise InvalidInputError(
                f"{name}: it requires a gradient, and there is no backward pass: detach() it, or use torch.no_grad()"
            )


def result_of(query: Tensor, out: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """``out``, or a new one, and a tensor for the logarithms of the sums where they are wanted."""
    if query.ndim != 3:
        raise wrong("query", query, f"{_names(FLOATS)} [T, num_heads, head_dim]")
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) if return_lse else None
    return out, lse


def wrong(name: str, tensor: Tensor, expected: str) -> InvalidInputError:
    """An error: the tensor is not what was ``expected``, in words."""
    what = f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}, strides {list(tensor.stride())}"
    return InvalidInputError(f"{name}: got {what}, expected {expected}")


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    scale: float | None,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """The arguments of paged attention over a cache of rows, as the GPU's kernels take them."""
    vectors = f"{_names(FLOATS)} [T, num_heads, head_dim], head_dim contiguous"
    _expect("query", query, FLOATS, 3, vectors)
    heads, head_dim = query.shape[1:]
    kv_heads = check_cache(key_cache, value_cache, head_dim, k_scale, v_scale)
    if heads % kv_heads:
        raise InvalidInputError(f"num_heads: expected a multiple of num_kv_heads, {kv_heads}, got {heads}")
    _expect("block_tables", block_tables, (torch.int32,), 2, "int32 [num_seqs, max_blocks], max_blocks contiguous")
    num_seqs = block_tables.shape[0]
    for name, tensor, length in (("query_starts", query_starts, num_seqs + 1), ("kv_lens", kv_lens, num_seqs)):
        _expect(name, tensor, (torch.int32,), 1, f"int32 [{length}], contiguous", (length,))
    _expect("out", out, (query.dtype,), 3, f"{_name(query.dtype)} of the query's shape", tuple(query.shape))
    if lse is not None:
        _expect("lse", lse, (torch.float32,), 2, "float32 [T, num_heads]", tuple(query.shape[:2]))
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if per_head is not None:
            _expect(name, per_head, (torch.float32,), 1, f"float32 [{heads}], one a query head", (heads,))
    check_options(scale=scale, causal=causal, sliding_window=sliding_window, softcap=softcap)


def check_options(*, scale: float | None, causal: bool, sliding_window: int | None, softcap: float | None) -> None:
    """The options of attention that are no tensors."""
    check_bool("causal", causal)
    if scale is not None:
        check_number("scale", scale, "a finite number", isfinite)
    if softcap is not None:
        check_number("softcap", softcap, "a finite number above 0", lambda cap: 1e-37 < cap < 3e38)
    if sliding_window is not None:
        check_integer("sliding_window", sliding_window, 1)
        if not causal:
            raise InvalidInputError("sliding_window: it needs causal attention")


def check_cache(
    key_cache: Tensor, value_cache: Tensor, head_dim: int, k_scale: Tensor | None, v_scale: Tensor | None
) -> int:
    """A layer's cache of rows, and the scales of int8; its number of heads."""
    expected = f"{_names(CACHES)} [num_blocks, num_kv_heads, block_size, head_dim], head_dim contiguous"
    if key_cache.ndim == 3:
        raise wrong("key_cache", key_cache, f"{expected}: the tiled layout is for CPUs")
    _expect("key_cache", key_cache, CACHES, 4, expected)
    _, kv_heads, _, dim = key_cache.shape
    if dim != head_dim or not min(key_cache.shape):
        raise wrong("key_cache", key_cache, f"head_dim {head_dim}, and no dimension of 0")
    shape = tuple(key_cache.shape)
    _expect("value_cache", value_cache, (key_cache.dtype,), 4, f"{_name(key_cache.dtype)} {list(shape)}", shape)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is None) == (key_cache.dtype == torch.int8):
            raise InvalidInputError(f"{name}: a cache of int8 needs scales, and no other has any")
        if scale is not None:
            _expect(name, scale, (torch.float32,), 3, f"float32 {list(shape[:3])}, one a token and head", shape[:3])
    return int(kv_heads)


def check_store(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """The arguments of writing to a cache of rows."""
    _expect("key", key, FLOATS, 3, f"{_names(FLOATS)} [T, num_kv_heads, head_dim], head_dim contiguous")
    tokens, heads, head_dim = key.shape
    _expect("value", value, (key.dtype,), 3, f"{_name(key.dtype)} {list(key.shape)}, as key", tuple(key.shape))
    kv_heads = check_cache(key_cache, value_cache, head_dim, k_scale, v_scale)
    if heads != kv_heads:
        raise wrong("key", key, f"num_kv_heads {kv_heads}, as key_cache has")
    _expect("slots", slots, (torch.int64,), 1, f"int64 [{tokens}], contiguous", (tokens,))


def check_blocks(cache: Tensor, pairs: Tensor) -> None:
    """The arguments of copying blocks."""
    if not cache.ndim or (cache.numel() and not cache[0].is_contiguous()):
        raise wrong("cache", cache, "blocks along the first axis, each contiguous")
    if cache.numel() and cache.shape[0] > 1 and cache.stride(0) < cache[0].numel():
        raise wrong("cache", cache, "blocks that do not overlap")
    _expect("pairs", pairs, (torch.int32,), 2, "int32 [N, 2]")
    if pairs.shape[1] != 2:
        raise wrong("pairs", pairs, "int32 [N, 2]")


def _expect(
    name: str, tensor: Tensor, dtypes: tuple[Any, ...], ndim: int, expected: str, shape: tuple[int, ...] | None = None
) -> None:
    if (
        tensor.dtype not in dtypes
        or tensor.ndim != ndim
        or (shape is not None and tuple(tensor.shape) != shape)
        or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1)
    ):
        raise wrong(name, tensor, expected)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[Any, ...]) -> str:
    names = [_name(dtype) for dtype in dtypes]
    return f"{', '.join(names[:-1])} or {names[-1]}"
