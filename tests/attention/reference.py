"""Attention as its definition reads, in numpy and float64, and the cache layouts as reshapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 16


def to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def from_bfloat16(x: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (x.astype(np.uint32) << 16).view(np.float32)


def store(x: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """As an array of a cache: "f32", "f16", or "bf16" as uint16."""
    return to_bfloat16(x) if dtype == "bf16" else x.astype({"f32": np.float32, "f16": np.float16}[dtype])


def load(x: NDArray[Any]) -> NDArray[np.float64]:
    return (from_bfloat16(x) if x.dtype == np.uint16 else x).astype(np.float64)


def tile_keys(rows: NDArray[Any]) -> NDArray[Any]:
    """``[blocks, heads, block_size, D]`` to tiles: ``[D][16]``, in bfloat16 ``[D/2][16][2]``."""
    n, h, b, d = rows.shape
    pair = 2 if rows.dtype == np.uint16 else 1
    tiles = rows.reshape(n, h, b // TILE, TILE, d // pair, pair)
    return np.ascontiguousarray(tiles.transpose(0, 1, 2, 4, 3, 5)).reshape(n, h, b * d)


def tile_values(rows: NDArray[Any]) -> NDArray[Any]:
    """Likewise: ``[16][D]``, in bfloat16 ``[8][D][2]``."""
    n, h, b, d = rows.shape
    pair = 2 if rows.dtype == np.uint16 else 1
    tiles = rows.reshape(n, h, b // pair, pair, d)
    return np.ascontiguousarray(tiles.transpose(0, 1, 2, 4, 3)).reshape(n, h, b * d)


def attention(
    query: NDArray[np.float32],
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    block_tables: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    kv_lens: NDArray[np.int32],
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
) -> NDArray[np.float64]:
    """What ``paged_attention`` computes, over caches in the rows layout."""
    block_size, head_dim = key_cache.shape[2:]
    group = query.shape[1] // key_cache.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    out = np.zeros(query.shape)
    for i, kv_len in enumerate(kv_lens.tolist()):
        start, end = query_starts[i : i + 2].tolist()
        table = block_tables[i, : -(-kv_len // block_size)]

        def gather(cache: NDArray[Any], table: Any = table, kv_len: int = kv_len) -> NDArray[np.float64]:
            rows = load(cache[table]).transpose(0, 2, 1, 3).reshape(-1, cache.shape[1], head_dim)
            heads: NDArray[np.float64] = rows[:kv_len].repeat(group, axis=1)
            return heads

        positions = np.arange(kv_len - (end - start), kv_len)[:, None]
        keys = np.arange(kv_len)
        visible = keys <= positions if causal else np.ones((end - start, kv_len), dtype=bool)
        if sliding_window is not None:
            visible = visible & (keys > positions - sliding_window)
        scores = np.einsum("qhd,khd->hqk", query[start:end].astype(np.float64), gather(key_cache)) * scale
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, initial=-1e300, keepdims=True))
        total = weights.sum(axis=-1, keepdims=True)
        weights /= np.where(total == 0, 1, total)
        out[start:end] = np.einsum("hqk,khd->qhd", weights, gather(value_cache))
    return out
