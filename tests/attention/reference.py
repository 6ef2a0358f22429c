"""Attention as its definition reads, in numpy and float64, and the cache layouts as reshapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 16
STEP = {np.dtype(np.uint16): 2, np.dtype(np.int8): 4}
"""Neighbours that a tile keeps together: dimensions of keys, tokens of values."""


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


def quantize(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """The int8 nearest to the rows ``x`` [..., D], and their scales [...]; where a row is NaN, its scale is."""
    scales = np.abs(x).max(axis=-1) / np.float32(127)
    elements = np.rint(x / np.where(scales == 0, 1, scales)[..., None])
    return np.where(np.isnan(elements), 127, elements).astype(np.int8), scales


def load(x: NDArray[Any], scales: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
    floats = (from_bfloat16(x) if x.dtype == np.uint16 else x).astype(np.float64)
    return floats if scales is None else floats * scales[..., None]


def tile_keys(rows: NDArray[Any]) -> NDArray[Any]:
    """``[blocks, heads, tokens, D]`` to tiles ``[D][16]``, in bfloat16 ``[D/2][16][2]``, in int8 ``[D/4][16][4]``."""
    n, h, b, d = rows.shape
    step = STEP.get(rows.dtype, 1)
    tiles = rows.reshape(n, h, b // TILE, TILE, d // step, step)
    return np.ascontiguousarray(tiles.transpose(0, 1, 2, 4, 3, 5)).reshape(n, h, b * d)


def tile_values(rows: NDArray[Any]) -> NDArray[Any]:
    """Likewise: ``[16][D]``, in bfloat16 ``[8][D][2]``, in int8 ``[4][D][4]``."""
    n, h, b, d = rows.shape
    step = STEP.get(rows.dtype, 1)
    tiles = rows.reshape(n, h, b // step, step, d)
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
    softcap: float | None = None,
    alibi_slopes: NDArray[np.float32] | None = None,
    sinks: NDArray[np.float32] | None = None,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What ``paged_attention`` computes, over caches in the rows layout, and the logarithms of its sums."""
    block_size, head_dim = key_cache.shape[2:]
    heads = query.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    slopes = np.zeros(heads) if alibi_slopes is None else alibi_slopes.astype(np.float64)
    sink = np.full(heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    keys, values = load(key_cache, k_scale), load(value_cache, v_scale)
    out, lse = np.zeros(query.shape), np.zeros(query.shape[:2])
    for i, kv_len in enumerate(kv_lens.tolist()):
        start, end = query_starts[i : i + 2].tolist()
        table = block_tables[i, : -(-kv_len // block_size)]

        def gather(cache: NDArray[np.float64], table: Any = table, kv_len: int = kv_len) -> NDArray[np.float64]:
            rows = cache[table].transpose(0, 2, 1, 3).reshape(-1, cache.shape[1], head_dim)
            repeated: NDArray[np.float64] = rows[:kv_len].repeat(heads // cache.shape[1], axis=1)
            return repeated

        distance = np.arange(kv_len - (end - start), kv_len)[:, None] - np.arange(kv_len)
        visible = distance >= 0 if causal else np.ones(distance.shape, dtype=bool)
        if sliding_window is not None:
            visible = visible & (distance < sliding_window)
        scores = np.einsum("qhd,khd->hqk", query[start:end].astype(np.float64), gather(keys)) * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores = scores - slopes[:, None, None] * np.abs(distance)
        scores = np.where(visible, scores, -np.inf)
        largest = np.maximum(scores.max(axis=-1, initial=-1e300), sink[:, None])[..., None]
        weights = np.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(sink[:, None, None] - largest)
        with np.errstate(divide="ignore"):
            lse[start:end] = (largest + np.log(total))[..., 0].T
        out[start:end] = np.einsum("hqk,khd->qhd", weights / np.where(total == 0, 1, total), gather(values))
    return out, lse
