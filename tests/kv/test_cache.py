"""The KV memory: one array, seen by numpy and by Rust at the same addresses."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv import _core
from leafkv.errors import InvalidInputError, MissingExtraError
from leafkv.kv import KVCache
from leafkv.kv.storage import DTYPES

BLOCKS, LAYERS, HEADS, DIM = 5, 3, 2, 8
KINDS = [
    (dtype, layout, block_size)
    for dtype, layout, block_size in product(DTYPES, ("rows", "tiled"), (1, 8, 16, 32))
    if layout == "rows" or block_size % 16 == 0
]


STEP = {"bfloat16": 2, "int8": 4}
ELEMENTS = LAYERS * HEADS * 2 * DIM  # of a token


def to_float(stored: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def elements(cache: KVCache) -> NDArray[Any]:
    """[blocks, layers, heads, 2, block_size * head_dim], by the words of `KVCache`."""
    array: NDArray[Any] = cache.array
    if cache.dtype == "int8":
        array = array[:, : ELEMENTS * cache.block_size].reshape(cache.num_blocks, LAYERS, HEADS, 2, -1)
    return array


def scales(cache: KVCache) -> NDArray[np.float32]:
    """[blocks, layers, heads, 2, block_size], likewise: they come after the elements."""
    flat = np.ascontiguousarray(cache.array[:, ELEMENTS * cache.block_size :]).view(np.float32)
    return flat.reshape(cache.num_blocks, LAYERS, HEADS, 2, cache.block_size)


def as_rows(cache: KVCache, layer: int, kv: int) -> NDArray[np.float32]:
    """One layer's keys (kv=0) or values (1) as plain rows [blocks, heads, block_size, dim], by the layouts' words."""
    flat = to_float(elements(cache)[:, layer, :, kv], cache.dtype)
    b, d, step = cache.block_size, cache.head_dim, STEP.get(cache.dtype, 1)
    shape = (cache.num_blocks, HEADS, b, d)
    if cache.layout == "rows":
        rows = flat.reshape(shape)
    elif kv == 0:
        rows = flat.reshape(*shape[:2], b // 16, d // step, 16, step).swapaxes(-2, -3).reshape(shape)
    else:
        rows = flat.reshape(*shape[:2], b // step, d, step).swapaxes(-1, -2).reshape(shape)
    return rows * scales(cache)[:, layer, :, kv, :, None] if cache.dtype == "int8" else rows


@pytest.mark.parametrize(("dtype", "layout", "block_size"), KINDS)
def test_what_is_written_is_where_the_layout_says(dtype: str, layout: Any, block_size: int) -> None:
    cache = KVCache(BLOCKS, LAYERS, HEADS, DIM, block_size, dtype, layout)
    rng = np.random.default_rng(0)
    slots = rng.permutation(BLOCKS * block_size)[: BLOCKS * block_size // 2].astype(np.int64)
    # Small integers are exact in every dtype: in int8, where the largest is 127.
    key, value = rng.integers(-99, 99, (2, len(slots), HEADS, DIM)).astype(np.float32)
    key[..., 0] = value[..., -1] = 127
    cache.write(1, key, value, slots)
    for kv, rows in enumerate((key, value)):
        expected = np.zeros((BLOCKS, HEADS, block_size, DIM), np.float32)
        expected[slots // block_size, :, slots % block_size] = rows
        np.testing.assert_array_equal(as_rows(cache, 1, kv), expected)
    assert not elements(cache)[:, [0, 2]].any(), "other layers were touched"
    if dtype == "int8":
        assert not scales(cache)[:, [0, 2]].any()
        assert (scales(cache)[:, 1] == 1).sum() == HEADS * 2 * len(slots)


@pytest.mark.parametrize(("dtype", "layout", "block_size"), KINDS)
def test_rust_and_numpy_share_the_memory(dtype: str, layout: Any, block_size: int) -> None:
    cache = KVCache(BLOCKS, LAYERS, HEADS, DIM, block_size, dtype, layout)
    base = cache.array.__array_interface__["data"][0]
    for layer in range(LAYERS):
        for kv, view in enumerate(cache.layer(layer)):
            offset = (layer * HEADS * 2 + kv) * block_size * DIM * view.itemsize
            assert view.__array_interface__["data"][0] == base + offset
    assert all(np.shares_memory(scale, cache.array) for scale in cache.scales(1).values())
    assert set(cache.scales(1)) == ({"k_scale", "v_scale"} if dtype == "int8" else set())
    # Rust's write is seen by numpy through the array ...
    ones = np.ones((1, HEADS, DIM), np.float32)
    cache.write(2, ones, 2 * ones, np.array([0], np.int64))
    assert np.count_nonzero(elements(cache)) == 2 * HEADS * DIM
    # ... and numpy's write is read by Rust: one visible token makes its value the output.
    cache.layer(2)[1][0] = {"float32": 7.0, "float16": 7.0, "bfloat16": 0x40E0, "int8": 14}[dtype]
    for scale in cache.scales(2).values():
        scale[0] = 0.5
    tables, starts, lens = (np.array(x, np.int32) for x in ([[0]], [0, 1], [1]))
    out = _core.paged_attention(ones, *cache.layer(2), tables, starts, lens, **cache.scales(2))
    np.testing.assert_allclose(out, 7.0, rtol=3e-5 if dtype == "int8" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_one_contiguous_piece_and_copies_as_one(dtype: str) -> None:
    cache = KVCache(4, LAYERS, HEADS, DIM, dtype=dtype)
    assert cache.array[0].flags.c_contiguous
    assert cache.array[0].nbytes == cache.block_nbytes == cache.nbytes // 4
    rows = np.arange(4 * 16 * HEADS * DIM, dtype=np.float32).reshape(-1, HEADS, DIM)
    for layer in range(LAYERS):
        cache.write(layer, rows, -rows, np.arange(64))
    before = cache.array.copy()
    cache.copy_blocks(np.array([[0, 1], [1, 0], [3, 2]], np.int32))
    np.testing.assert_array_equal(cache.array, before[[1, 0, 3, 3]])


def test_scales_of_int8_are_aligned_whatever_the_shape() -> None:
    for head_dim, block_size in product((1, 5, 7, 8), (1, 3)):
        cache = KVCache(3, 1, 1, head_dim, block_size, "int8")
        data = 2 * block_size * head_dim
        assert cache.block_nbytes == data + -data % 4 + 2 * block_size * 4
        assert all(scale.flags.aligned for scale in cache.scales(0).values())
        slots, rows = np.arange(3 * block_size), np.ones((3 * block_size, 1, head_dim), np.float32)
        cache.write(0, rows, 2 * rows, slots)
        for view, scale, x in zip(cache.layer(0), cache.scales(0).values(), (1, 2), strict=True):
            assert (view == 127).all()
            np.testing.assert_array_equal(scale, np.float32(x) / np.float32(127))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": True}, "num_blocks"),
        ({"head_dim": -1}, "head_dim"),
        ({"block_size": 2.5}, "block_size"),
        ({"dtype": "int3"}, "dtype: expected one of float32, float16, bfloat16, int8, got 'int3'"),
        ({"dtype": ["float32"]}, "dtype"),
        ({"layout": "columns"}, "layout"),
        ({"layout": "tiled", "block_size": 8}, "multiple of 16"),
        ({"layout": "tiled", "head_dim": 7, "dtype": "bfloat16"}, "multiple of 2 in bfloat16"),
        ({"layout": "tiled", "head_dim": 6, "dtype": "int8"}, "of 4 in int8"),
    ],
)
def test_bad_shapes_are_refused(arguments: dict[str, Any], message: str) -> None:
    shape: dict[str, Any] = {"num_blocks": 2, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(InvalidInputError, match=message):
        KVCache(**(shape | arguments))


def test_the_default_layout_is_tiled_where_it_applies() -> None:
    assert KVCache(1, 1, 1, 8, 16).layout == "tiled"
    assert KVCache(1, 1, 1, 8, 8).layout == "rows"
    assert KVCache(1, 1, 1, 7, 16, "bfloat16").layout == "rows"
    assert KVCache(1, 1, 1, 7, 16, "float16").layout == "tiled"
    assert KVCache(1, 1, 1, 6, 16, "int8").layout == "rows"
    assert KVCache(1, 1, 1, 8, 16, "int8").layout == "tiled"


def test_without_pytorch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"leafkv\[torch\]"):
        KVCache(2, 1, 1, 8, backend="torch")
