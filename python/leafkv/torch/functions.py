"""The functions that are called: they allocate results, and hand on to the operations that PyTorch knows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from leafkv.torch import ops
from leafkv.torch.checks import check_tensors, result_of


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
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
    num_threads: int | None = None,
) -> Any:
    """Attention over a paged KV cache, see `leafkv.paged_attention`; all tensors are on one device.

    Args:
        query: float32, float16 or bfloat16 [T, num_heads, head_dim].
        key_cache: one layer's keys: *rows* [num_blocks, num_kv_heads, block_size, head_dim], innermost dimension
            contiguous, any other strides; on CPUs also *tiled* [num_blocks, num_kv_heads, block_size * head_dim].
            float32, float16, bfloat16, or int8, which needs the scales.
        value_cache: likewise, of the same dtype and shape.
        block_tables: int32 [num_seqs, max_blocks]. On GPUs its ids are not checked.
        query_starts: int32 [num_seqs + 1]. On GPUs it is not checked.
        kv_lens: int32 [num_seqs], new tokens included. On GPUs it is not checked.
        scale: this and the following up to ``v_scale`` are the options of `leafkv.paged_attention`.
        causal: likewise.
        sliding_window: likewise.
        softcap: likewise.
        alibi_slopes: likewise.
        sinks: likewise.
        k_scale: likewise.
        v_scale: likewise.
        out: [T, num_heads, head_dim] to write to, of the query's dtype; a new tensor by default.
        return_lse: also return the logarithms of the sums, float32 [T, num_heads].
        num_threads: threads on CPUs, None for all available.

    Returns:
        ``out``, or a pair of it and the logarithms.

    Raises:
        InvalidInputError: a tensor is malformed, on another device, does not fit another one, or wants a gradient:
            there is no backward pass.
    """
    check_tensors(
        {
            "query": query,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_tables": block_tables,
            "query_starts": query_starts,
            "kv_lens": kv_lens,
        },
        {"alibi_slopes": alibi_slopes, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "out": out},
    )
    out, lse = result_of(query, out, return_lse)
    ops.paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        kv_lens,
        out,
        lse,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        num_threads=num_threads,
    )
    return out if lse is None else (out, lse)


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
    """Store new keys and values at ``slots``, see `leafkv.write_kv`; all tensors are on one device.

    Args:
        key: float32, float16 or bfloat16 [T, num_kv_heads, head_dim].
        value: likewise, of the same dtype.
        key_cache: a cache as `paged_attention` takes it.
        value_cache: likewise.
        slots: int64 [T]; slot -1 is skipped. On GPUs they are not checked.
        k_scale: of int8, float32 [num_blocks, num_kv_heads, block_size].
        v_scale: likewise.

    Raises:
        InvalidInputError: a tensor is malformed, on another device, does not fit another one, or wants a gradient.
    """
    check_tensors(
        {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slots": slots},
        {"k_scale": k_scale, "v_scale": v_scale},
    )
    ops.write_kv(key, value, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale)


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks of ``cache`` by ``(source, destination)`` rows of ``pairs``, int32 [N, 2], on the same device.

    The first axis of ``cache`` is that of blocks, each contiguous. All sources are read before any destination is
    written; destinations are unique. On GPUs ``pairs`` are not checked.

    Raises:
        InvalidInputError: a tensor is malformed or on another device.
    """
    check_tensors({"cache": cache, "pairs": pairs})
    ops.copy_blocks(cache, pairs)
