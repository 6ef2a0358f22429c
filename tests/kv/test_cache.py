"""The KV memory: one array, seen by numpy and by Rust at the same addresses."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv import _core
from leafkv.errors import InvalidInputError
from leafkv.kv import KVCache

BLOCKS, LAYERS, HEADS, DIM = 5, 3, 2, 8
KINDS = [
    (dtype, layout, block_size)
    for dtype, layout, block_size in product(("float32", "float16", "bfloat16"), ("rows", "tiled"), (1, 8, 16, 32))
    if layout == "rows" or block_size % 16 == 0
]


def to_float(stored: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def as_rows(cache: KVCache, layer: int, kv: int) -> NDArray[np.float32]:
    """One layer's keys (kv=0) or values (1) as plain rows [blocks, heads, block_size, dim], by the layouts' words."""
    flat = to_float(cache.array[:, layer, :, kv], cache.dtype)
    b, d = cache.block_size, cache.head_dim
    if cache.layout == "rows":
        return flat.reshape(cache.num_blocks, HEADS, b, d)
    tiles = (cache.num_blocks, HEADS, b // 16)
    if cache.dtype != "bfloat16":
        split = flat.reshape(*tiles, d, 16).swapaxes(-1, -2) if kv == 0 else flat.reshape(*tiles, 16, d)
    elif kv == 0:
        split = flat.reshape(*tiles, d // 2, 16, 2).transpose(0, 1, 2, 4, 3, 5)
    else:
        split = flat.reshape(*tiles, 8, d, 2).swapaxes(-1, -2)
    return np.ascontiguousarray(split).reshape(cache.num_blocks, HEADS, b, d)


@pytest.mark.parametrize(("dtype", "layout", "block_size"), KINDS)
def test_what_is_written_is_where_the_layout_says(dtype: str, layout: Any, block_size: int) -> None:
    cache = KVCache(BLOCKS, LAYERS, HEADS, DIM, block_size, dtype, layout)
    rng = np.random.default_rng(0)
    slots = rng.permutation(BLOCKS * block_size)[: BLOCKS * block_size // 2].astype(np.int64)
    # Small integers are exact in every dtype.
    key, value = rng.integers(-99, 99, (2, len(slots), HEADS, DIM)).astype(np.float32)
    cache.write(1, key, value, slots)
    for kv, rows in enumerate((key, value)):
        expected = np.zeros((BLOCKS, HEADS, block_size, DIM), np.float32)
        expected[slots // block_size, :, slots % block_size] = rows
        np.testing.assert_array_equal(as_rows(cache, 1, kv), expected)
    assert not cache.array[:, [0, 2]].any(), "other layers were touched"


@pytest.mark.parametrize(("dtype", "layout", "block_size"), KINDS)
def test_rust_and_numpy_share_the_memory(dtype: str, layout: Any, block_size: int) -> None:
    cache = KVCache(BLOCKS, LAYERS, HEADS, DIM, block_size, dtype, layout)
    base = cache.array.__array_interface__["data"][0]
    for layer in range(LAYERS):
        for kv, view in enumerate(cache.layer(layer)):
            offset = (layer * HEADS * 2 + kv) * block_size * DIM * view.itemsize
            assert view.__array_interface__["data"][0] == base + offset
    # Rust's write is seen by numpy through the array ...
    ones = np.ones((1, HEADS, DIM), np.float32)
    cache.write(2, ones, 2 * ones, np.array([0], np.int64))
    assert np.count_nonzero(cache.array) == 2 * HEADS * DIM
    # ... and numpy's write is read by Rust: one visible token makes its value the output.
    seven = {"float32": 7.0, "float16": 7.0, "bfloat16": 0x40E0}[dtype]
    cache.layer(2)[1][0] = seven
    tables, starts, lens = (np.array(x, np.int32) for x in ([[0]], [0, 1], [1]))
    out = _core.paged_attention(ones, *cache.layer(2), tables, starts, lens)
    np.testing.assert_array_equal(out, 7.0)


def test_a_block_is_one_contiguous_piece_and_copies_as_one() -> None:
    cache = KVCache(4, LAYERS, HEADS, DIM)
    assert cache.array[0].flags.c_contiguous
    assert cache.array[0].nbytes == cache.block_nbytes == cache.nbytes // 4
    cache.array[:] = np.arange(4)[:, None, None, None, None]
    cache.copy_blocks(np.array([[0, 1], [1, 0], [3, 2]], np.int32))
    for block, content in enumerate((1, 0, 3, 3)):
        assert (cache.array[block] == content).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": True}, "num_blocks"),
        ({"head_dim": -1}, "head_dim"),
        ({"block_size": 2.5}, "block_size"),
        ({"dtype": "int3"}, "dtype: expected one of float32, float16, bfloat16, got 'int3'"),
        ({"dtype": ["float32"]}, "dtype"),
        ({"layout": "columns"}, "layout"),
        ({"layout": "tiled", "block_size": 8}, "multiple of 16"),
        ({"layout": "tiled", "head_dim": 7, "dtype": "bfloat16"}, "even head_dim"),
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
