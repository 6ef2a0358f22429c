"""Paged attention from Python: right against numpy, bit-equal, in place, strict about its input."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv import InvalidInputError
from leafkv._core import AttentionPlan, copy_blocks, instruction_set, paged_attention, write_kv

from . import reference

# bfloat16: its products may be of bfloat16 (AVX-512); int8: queries and weights have 16 bits.
TOLERANCE = {"f32": 2e-6, "f16": 2e-6, "bf16": 2e-2, "int8": 2e-4}


class Batch(NamedTuple):
    query: NDArray[np.float32]
    keys: NDArray[Any]  # the rows layout
    values: NDArray[Any]
    tables: NDArray[np.int32]
    starts: NDArray[np.int32]
    lens: NDArray[np.int32]
    scales: Mapping[str, Any] = MappingProxyType({})  # of int8

    @property
    def step(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        return self.tables, self.starts, self.lens

    def attend(self, **options: Any) -> Any:
        return paged_attention(self.query, self.keys, self.values, *self.step, **{**self.scales, **options})

    def tiled(self, **options: Any) -> Any:
        keys, values = reference.tile_keys(self.keys), reference.tile_values(self.values)
        return self._replace(keys=keys, values=values).attend(**options)

    def want(self, **options: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The result and the logarithms of its sums, by the definition."""
        return reference.attention(self.query, self.keys, self.values, *self.step, **{**self.scales, **options})


def make(
    sequences: list[tuple[int, int]],  # (tokens of KV, new rows)
    dtype: str = "f32",
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 16,
) -> Batch:
    """A batch whose blocks are scattered over a cache that is NaN wherever no token is."""
    rng = np.random.default_rng([len(sequences), head_dim, block_size])
    counts = [-(-kv // block_size) for kv, _ in sequences]
    ids = rng.permutation(sum(counts) + 2).astype(np.int32)
    tables = np.full((len(sequences), max(counts, default=0)), -1, np.int32)
    shape = (len(ids), heads[1], block_size, head_dim)
    caches = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    for i, (kv_len, _) in enumerate(sequences):
        tables[i, : counts[i]], ids = ids[: counts[i]], ids[counts[i] :]
        position = np.arange(kv_len)
        blocks, offsets = tables[i][position // block_size], position % block_size
        for cache in caches:
            cache[blocks, :, offsets] = rng.standard_normal((kv_len, heads[1], head_dim))
    rows = [n for _, n in sequences]
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    query = rng.standard_normal((sum(rows), heads[0], head_dim), np.float32)
    step = (tables, starts, np.array([kv for kv, _ in sequences], np.int32))
    if dtype == "int8":
        (keys, k_scale), (values, v_scale) = map(reference.quantize, caches)
        return Batch(query, keys, values, *step, {"k_scale": k_scale, "v_scale": v_scale})
    keys, values = (reference.store(cache, dtype) for cache in caches)
    return Batch(query, keys, values, *step)


SEQUENCES = [(1, 1), (40, 7), (300, 1), (257, 20), (512, 2)]


DTYPES = ["f32", "f16", "bf16", "int8"]
CAP: dict[str, Any] = {"softcap": 1.5}
ALIBI: dict[str, Any] = {"alibi_slopes": np.array([0.5, 0.02, 0.0, -0.01], np.float32)}
SINKS: dict[str, Any] = {"sinks": np.array([0.5, -np.inf, 6.0, -30.0], np.float32)}
WINDOW: dict[str, Any] = {"sliding_window": 37}
OPTIONS = [
    *({}, {"scale": 0.5}, CAP, ALIBI, SINKS, WINDOW),
    *(CAP | ALIBI, CAP | SINKS, CAP | WINDOW, ALIBI | SINKS, ALIBI | WINDOW, SINKS | WINDOW),
    *(CAP | ALIBI | SINKS | WINDOW, CAP | ALIBI | SINKS | {"scale": -2.0}),
]
OPTIONS += [options | {"causal": False} for options in OPTIONS if "sliding_window" not in options]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_matches_the_definition_in_both_layouts(dtype: str, options: dict[str, Any]) -> None:
    batch = make(SEQUENCES, dtype)
    rows = batch.attend(**options, return_lse=True)
    tiled = batch.tiled(**options, return_lse=True)
    for got, bits, want in zip(rows, tiled, batch.want(**options), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(want).max()))
        np.testing.assert_array_equal(got.view(np.uint32), bits.view(np.uint32))
    np.testing.assert_array_equal(batch.attend(**options), rows[0])


def test_the_parts_of_a_context_add_up_by_their_log_sums() -> None:
    batch = make([(300, 1), (300, 2)], "int8")
    whole, total = batch.attend(causal=False, return_lse=True)
    first = batch._replace(tables=batch.tables[:, :10], lens=np.array([160, 160], np.int32))
    second = batch._replace(tables=batch.tables[:, 10:], lens=np.array([140, 140], np.int32))
    (a, lse_a), (b, lse_b) = (part.attend(causal=False, return_lse=True) for part in (first, second))
    lse = np.logaddexp(lse_a, lse_b)
    np.testing.assert_allclose(lse, total, rtol=0, atol=2e-6)
    merged = a * np.exp(lse_a - lse)[..., None] + b * np.exp(lse_b - lse)[..., None]
    np.testing.assert_allclose(merged, whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_are_finite(dtype: str) -> None:
    batch = make(SEQUENCES, dtype)
    for options in ({}, SINKS, ALIBI, CAP | SINKS):
        large = {**options, "scale": 1e5}
        for got, want in zip(batch.attend(**large, return_lse=True), batch.want(**large), strict=True):
            assert np.isfinite(got).all()
            if dtype != "bf16":
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-3)
    assert np.abs(batch.want(scale=1e5)[1]).max() > 1e5


@pytest.mark.parametrize("head_dim", [1, 8, 46, 72, 80, 112, 128, 256])
def test_any_head_dimension(head_dim: int) -> None:
    batch = make([(33, 3), (280, 1)], head_dim=head_dim)
    np.testing.assert_allclose(batch.tiled(), batch.want()[0], rtol=0, atol=4e-6)
    batch = make([(33, 3), (280, 1)], "int8", head_dim=head_dim)
    got = batch.attend() if head_dim % 4 else batch.tiled()
    np.testing.assert_allclose(got, batch.want()[0], rtol=0, atol=TOLERANCE["int8"])


@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("block_size", [1, 3, 32, 256])
def test_any_block_size(block_size: int, dtype: str) -> None:
    batch = make(SEQUENCES, dtype, block_size=block_size)
    np.testing.assert_allclose(batch.attend(), batch.want()[0], rtol=0, atol=TOLERANCE[dtype])


def strided(batch: Batch, kind: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """The batch's caches as views of larger arrays, as other engines hold them."""
    n, h, b, d = batch.keys.shape
    dtype = batch.keys.dtype
    keys: NDArray[Any]
    values: NDArray[Any]
    if kind == "interleaved":  # K and V of a block side by side
        both = np.empty((n, 2, h, b, d), dtype)
        keys, values = both[:, 0], both[:, 1]
    elif kind == "layers":  # one layer of many
        packed = np.empty((n, 3, 2, h, b, d), dtype)
        keys, values = packed[:, 1, 0], packed[:, 1, 1]
    elif kind == "token-major":  # [block, token, head, dim]
        keys, values = (np.empty((n, b, h, d), dtype).transpose(0, 2, 1, 3) for _ in range(2))
    elif kind == "different":  # K and V strided differently
        keys = np.empty((n, b, h, d), dtype).transpose(0, 2, 1, 3)
        values = np.empty((n, h, b, d + 3), dtype)[..., :d]
    else:  # misaligned, and blocks in reverse
        raw = np.empty(2 * batch.keys.nbytes + 1, np.uint8)[1:]
        keys, values = raw.view(dtype).reshape(2, n, h, b, d)[:, ::-1]
    keys[...], values[...] = batch.keys, batch.values
    return keys, values


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["interleaved", "layers", "token-major", "different", "misaligned"])
def test_strided_views_are_read_in_place(kind: str, dtype: str) -> None:
    batch = make(SEQUENCES, dtype)
    keys, values = strided(batch, kind)
    view = batch._replace(keys=keys, values=values)
    np.testing.assert_array_equal(view.attend(), batch.attend())
    values[...] = 0
    assert not view.attend().any()


@pytest.mark.parametrize("kind", ["layers", "different", "misaligned"])
def test_strided_scales_are_read_and_written_in_place(kind: str) -> None:
    batch = make(SEQUENCES, "int8")
    n, h, b, _ = batch.keys.shape
    packed = np.zeros((n, 3, h, 2, b + 1), np.float32)
    k_scale, v_scale = packed[:, 1, :, 0, :b], packed[:, 1, :, 1, 1:]
    if kind == "different":
        k_scale = np.zeros((h, n, b), np.float32).swapaxes(0, 1)
    elif kind == "misaligned":  # and in reverse
        raw = np.zeros(k_scale.size * 4 + 1, np.uint8)[1:]
        v_scale = raw.view(np.float32).reshape(n, h, b)[::-1]
    k_scale[...], v_scale[...] = batch.scales["k_scale"], batch.scales["v_scale"]
    view = batch._replace(scales={"k_scale": k_scale, "v_scale": v_scale})
    np.testing.assert_array_equal(view.attend(), batch.attend())

    key, value = np.random.default_rng(0).standard_normal((2, n * b, h, 16), np.float32)
    write_kv(key, value, batch.keys, batch.values, np.arange(n * b), **view.scales)
    for scales, new in zip((k_scale, v_scale), (key, value), strict=True):
        np.testing.assert_array_equal(scales, reference.quantize(new)[1].reshape(n, b, h).swapaxes(1, 2))
    assert not packed[:, [0, 2]].any()
    np.testing.assert_allclose(view.attend(), view.want()[0], rtol=0, atol=TOLERANCE["int8"])
    v_scale[...] = 0
    assert not view.attend().any()


def test_strided_query_and_tables() -> None:
    batch = make(SEQUENCES)
    fused = np.repeat(batch.query, 2, axis=1)
    wide = np.repeat(batch.tables, 2, axis=1)[:, ::2]
    out = paged_attention(fused[:, ::2], batch.keys, batch.values, wide, *batch.step[1:])
    np.testing.assert_array_equal(out, batch.attend())


@pytest.mark.parametrize(("dtype", "options"), [("bf16", {}), ("int8", {}), ("int8", CAP | ALIBI | SINKS | WINDOW)])
def test_a_row_is_bit_equal_alone_in_a_batch_and_with_any_threads(dtype: str, options: dict[str, Any]) -> None:
    batch = make([(900, 1), (900, 30), (64, 64)], dtype, heads=(4, 2), head_dim=64)
    together, lse = batch.tiled(num_threads=1, return_lse=True, **options)
    for threads in (1, 2, 5, None):
        for got, want in zip(
            batch.attend(num_threads=threads, return_lse=True, **options), (together, lse), strict=True
        ):
            np.testing.assert_array_equal(got, want)
    for i, (start, end) in enumerate(zip(batch.starts[:-1], batch.starts[1:], strict=True)):
        for row in range(start, end):
            one = batch._replace(
                query=batch.query[row : row + 1],
                tables=batch.tables[i : i + 1],
                starts=np.array([0, 1], np.int32),
                lens=np.array([batch.lens[i] - (end - 1 - row)], np.int32),
            )
            alone, sums = one.attend(return_lse=True, **options)
            np.testing.assert_array_equal(alone[0], together[row])
            np.testing.assert_array_equal(sums[0], lse[row])


HALVES = ["f16", "bf16"]


def fused(data: NDArray[Any]) -> NDArray[Any]:
    """The same heads as a misaligned part of an array that has others around them, as a projection has."""
    tokens, heads, dim = data.shape
    raw = np.empty(tokens * 3 * heads * dim * data.itemsize + 1, np.uint8)[1:]
    part = raw.view(data.dtype).reshape(tokens, 3 * heads, dim)[:, heads : 2 * heads]
    part[...] = data
    return part


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", HALVES)
def test_queries_and_outputs_in_halves_are_widened_first_and_rounded_last(half: str, dtype: str) -> None:
    batch = make(SEQUENCES, dtype, head_dim=20)
    halves = reference.store(batch.query, half)
    assert (reference.load(halves) != batch.query).any()
    batch = batch._replace(query=reference.load(halves).astype(np.float32))
    wide, lse = batch.attend(return_lse=True, **CAP)
    rounded = reference.store(wide, half)
    for view in (batch, batch._replace(query=halves), batch._replace(query=fused(halves))):
        for attend in (view.attend, view.tiled):
            for want in (wide, rounded):
                out = fused(np.zeros_like(want))
                got, sums = attend(return_lse=True, out=out, **CAP)
                assert got is out
                np.testing.assert_array_equal(out, want)
                np.testing.assert_array_equal(sums, lse)
        options: dict[str, Any] = {**CAP, **view.scales}
        got = plan_of(view).attend(view.query, view.keys, view.values, **options)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", HALVES)
def test_halves_are_stored_as_they_would_be_in_float32(half: str, dtype: str) -> None:
    data = np.random.default_rng(0).standard_normal((2, 7, 2, 20), np.float32)
    halves = [reference.store(side, half) for side in data]
    assert (reference.load(halves[0]) != data[0]).any()
    slots = np.array([33, -1, 0, 47, 16, 15, 2], np.int64)
    cache = np.int8 if dtype == "int8" else reference.store(data[0], dtype).dtype
    for shape in ((3, 2, 16, 20), (3, 2, 320)):
        filled = []
        for key, value in (
            [reference.load(side).astype(np.float32) for side in halves],
            halves,
            [fused(side) for side in halves],
        ):
            keys, values = np.zeros(shape, cache), np.zeros(shape, cache)
            scales = {name: np.zeros((*shape[:2], 16), np.float32) for name in ("k_scale", "v_scale")}
            write_kv(key, value, keys, values, slots, **(scales if dtype == "int8" else {}))
            filled.append([keys, values, *scales.values()])
        assert all(array.any() for array in filled[0][:2])
        for want, *others in zip(*filled, strict=True):
            for got in others:
                np.testing.assert_array_equal(got, want)


def test_bfloat16_is_that_of_ml_dtypes_or_its_bits() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    batch = make(SEQUENCES)
    bits = reference.store(batch.query, "bf16")
    want = batch._replace(query=bits).attend()
    out = np.zeros(bits.shape, bfloat16)
    batch._replace(query=bits.view(bfloat16)).attend(out=out)
    np.testing.assert_array_equal(out, want.astype(bfloat16))
    caches = [np.zeros((2, 2, 16, 16), np.float32) for _ in "kvkv"]
    new = bits[:3, :2]
    write_kv(new, new.view(bfloat16), caches[0], caches[1], np.arange(3))
    np.testing.assert_array_equal(caches[0], caches[1])
    np.testing.assert_array_equal(caches[0][0, :, :3], new.view(bfloat16).astype(np.float32).swapaxes(0, 1))


def plan_of(batch: Batch, **kwargs: Any) -> AttentionPlan:
    sizes: dict[str, Any] = {
        "num_heads": batch.query.shape[1],
        "num_kv_heads": batch.keys.shape[1],
        "head_dim": batch.query.shape[2],
        "block_size": batch.keys.shape[2],
        "num_blocks": batch.keys.shape[0],
    }
    return AttentionPlan(*batch.step, **(sizes | kwargs))


def test_a_plan_serves_every_layer_and_mask_and_owns_what_it_needs() -> None:
    batch = make(SEQUENCES)
    tables, starts, lens = (array.copy() for array in batch.step)
    plan = plan_of(batch._replace(tables=tables, starts=starts, lens=lens))
    for array in (tables, starts, lens):
        array.fill(-7)
    masks: list[dict[str, Any]] = [{}, {"sliding_window": 5}, {"causal": False}, CAP | ALIBI | SINKS, {}]
    for options in masks:
        got = plan.attend(batch.query, batch.keys, batch.values, **options)
        np.testing.assert_array_equal(got, batch.attend(**options))
    layer = batch._replace(keys=batch.values, values=batch.keys)
    np.testing.assert_array_equal(plan.attend(layer.query, layer.keys, layer.values), layer.attend())


def test_out_is_written_and_returned() -> None:
    batch = make(SEQUENCES)
    out = np.full((len(batch.query), 3, 4, 16), np.nan, np.float32)
    view = out[:, 1]
    assert batch.attend(out=view) is view
    np.testing.assert_array_equal(view, batch.attend())
    assert np.isnan(out[:, [0, 2]]).all()
    assert plan_of(batch).attend(batch.query, batch.keys, batch.values, out=view, return_lse=True)[0] is view


def test_rows_that_see_no_key_are_zero() -> None:
    batch = make([(0, 2), (3, 5)])
    out, lse = batch.attend(causal=False, return_lse=True)
    assert not out[:2].any()
    assert (lse[:2] == -np.inf).all()
    np.testing.assert_allclose(out, batch.want(causal=False)[0], rtol=0, atol=2e-6)
    out, lse = batch.attend(causal=False, return_lse=True, **SINKS)
    assert not out[:2].any()
    np.testing.assert_array_equal(lse[:2], [SINKS["sinks"]] * 2)


def test_an_empty_batch_is_empty() -> None:
    assert make([(5, 0), (0, 0)]).attend().shape == (0, 4, 16)
    assert make([]).attend().shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_write_kv_fills_both_layouts(dtype: str) -> None:
    key, value = np.random.default_rng(0).standard_normal((2, 5, 2, 8), np.float32)
    slots = np.array([33, -1, 0, 47, 16], np.int64)
    blank = reference.store(np.zeros((3, 2, 16, 8), np.float32), dtype)
    rows, tiled = [blank.copy(), blank.copy()], [blank.copy().reshape(3, 2, -1) for _ in range(2)]
    write_kv(key, value, rows[0], rows[1], slots)
    write_kv(key, value, tiled[0], tiled[1], slots)
    for new, cache in zip((key, value), rows, strict=True):
        want = blank.copy()
        for row, slot in zip(reference.store(new, dtype), slots, strict=True):
            if slot >= 0:
                want[slot // 16, :, slot % 16] = row
        np.testing.assert_array_equal(cache, want)
    np.testing.assert_array_equal(tiled[0], reference.tile_keys(rows[0]))
    np.testing.assert_array_equal(tiled[1], reference.tile_values(rows[1]))


def test_write_kv_quantizes_each_token_and_head() -> None:
    key, value = np.random.default_rng(0).standard_normal((2, 6, 2, 8), np.float32)
    key[0, 1], key[1, 0, 3], key[2, 0, 5], key[4] = 0, np.inf, np.nan, 1e-42
    slots = np.array([33, 1, 0, 47, 16, -1], np.int64)
    rows, tiled = [np.zeros((3, 2, 16, 8), np.int8) for _ in "kv"], [np.zeros((3, 2, 128), np.int8) for _ in "kv"]
    scales, same = ({name: np.full((3, 2, 16), -7, np.float32) for name in ("k_scale", "v_scale")} for _ in "rt")
    write_kv(key, value, rows[0], rows[1], slots, **scales)
    write_kv(key, value, tiled[0], tiled[1], slots, **same)
    np.testing.assert_array_equal(tiled[0], reference.tile_keys(rows[0]))
    np.testing.assert_array_equal(tiled[1], reference.tile_values(rows[1]))
    for new, cache, name in zip((key, value), rows, scales, strict=True):
        np.testing.assert_array_equal(same[name], scales[name])
        for row, slot in zip(new, slots, strict=True):
            if slot < 0:
                continue
            elements, scale = cache[slot // 16, :, slot % 16], scales[name][slot // 16, :, slot % 16]
            finite = np.isfinite(row).all(axis=-1)
            np.testing.assert_array_equal(scale, np.where(finite, np.abs(row).max(axis=-1) / np.float32(127), np.nan))
            normal = finite & (scale > 1e-30)
            quotients = row[normal] / scale[normal, None]
            np.testing.assert_allclose(elements[normal], quotients, rtol=0, atol=0.50001)
            assert not elements[~normal & finite].any()
        assert (scales[name] == -7).sum() == (48 - 5) * 2


def test_write_kv_reads_and_writes_views_in_place() -> None:
    pool = np.zeros((3, 4, 2, 2, 16 * 8), np.float32)  # [block, layer, head, K or V, elements]
    fused = np.random.default_rng(0).standard_normal((5, 6, 8), np.float32)
    write_kv(fused[:, 2:4], fused[:, 4:], pool[:, 1, :, 0], pool[:, 1, :, 1], np.arange(30, 35))
    assert not pool[:, [0, 2, 3]].any()
    np.testing.assert_array_equal(pool[1, 1, 0, 0].reshape(8, 16)[:, 14], fused[0, 2])
    np.testing.assert_array_equal(pool[2, 1, 1, 1].reshape(16, 8)[2], fused[4, 5])


def test_bfloat16_is_known_by_name() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    batch = make(SEQUENCES, "bf16")
    named = batch._replace(keys=batch.keys.view(bfloat16), values=batch.values.view(bfloat16))
    np.testing.assert_array_equal(named.attend(), batch.attend())


def test_copy_blocks() -> None:
    cache = np.arange(5 * 6, dtype=np.int16).reshape(5, 2, 3)
    before = cache.copy()
    copy_blocks(cache, np.array([[0, 1], [1, 0], [1, 4], [3, 3]], np.int32))
    np.testing.assert_array_equal(cache, before[[1, 0, 2, 3, 1]])
    copy_blocks(cache, np.empty((0, 2), np.int32))
    for pairs in ([[0, 1], [2, 1]], [[0, 5]], [[-1, 0]], [[0, 1, 2]]):
        with pytest.raises(InvalidInputError, match=r"^pairs: "):
            copy_blocks(cache, np.array(pairs, np.int32))
    one = np.array([[0, 1]], np.int32)
    overlapping = np.lib.stride_tricks.as_strided(cache, (3, 6), (4, 2))
    objects = np.full((2, 1), None, object)  # bytes alone would leave their reference counts wrong
    for bad in (cache[:, :, :2], overlapping, read_only(cache), objects, np.array(1)):
        with pytest.raises(InvalidInputError, match=r"^cache: "):
            copy_blocks(bad, one)
    np.testing.assert_array_equal(cache, before[[1, 0, 2, 3, 1]])


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    view: NDArray[Any] = array.view()
    view.flags.writeable = False
    return view


BATCH, INT8 = make([(40, 3), (20, 1)]), make([(40, 3), (20, 1)], "int8")
AS_INT8: dict[str, Any] = {"keys": INT8.keys, "values": INT8.values, "scales": INT8.scales}
FOUR = np.ones(4, np.float32)


def with_scale(name: str, scale: Any) -> dict[str, Any]:
    return AS_INT8 | {"scales": {**INT8.scales, name: scale}}


BAD_CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("query", {"query": BATCH.query.astype(np.float64)}, {}),
    *[("query", {"query": np.zeros_like(BATCH.query, dtype)}, {}) for dtype in (">f4", ">f2", "i2", "u1", "c8")],
    ("query", {"query": BATCH.query[0]}, {}),
    ("query", {"query": BATCH.query[..., ::2]}, {}),
    ("query", {"query": BATCH.query[:3]}, {}),
    ("query", {"query": BATCH.query.tolist()}, {}),
    ("query", {"starts": np.array([0, 3, 5], np.int32)}, {}),
    ("key_cache", {"keys": np.zeros_like(BATCH.keys, np.uint8)}, {}),
    ("value_cache", {"keys": np.zeros_like(BATCH.keys, np.int8)}, {}),
    ("value_cache", {"values": np.ones((*BATCH.values.shape[:3], 8), np.float32)}, {}),
    ("key_cache", {"keys": BATCH.keys.astype(">f4"), "values": BATCH.values.astype(">f4")}, {}),
    ("key_cache", {"keys": BATCH.keys[0, 0]}, {}),
    ("key_cache", {"keys": BATCH.keys[..., :8], "values": BATCH.values[..., :8]}, {}),
    ("key_cache", {"keys": BATCH.keys[..., ::-1]}, {}),
    ("key_cache", {"keys": BATCH.keys[:0], "values": BATCH.values[:0]}, {}),
    ("value_cache", {"keys": BATCH.keys[0]}, {}),
    ("value_cache", {"values": BATCH.values.astype(np.float16)}, {}),
    ("value_cache", {"values": BATCH.values[1:]}, {}),
    ("num_heads", {"query": np.ascontiguousarray(BATCH.query[:, :3])}, {}),
    ("block_tables", {"tables": BATCH.tables.astype(np.int64)}, {}),
    ("block_tables", {"tables": BATCH.tables[:1]}, {}),
    ("block_tables", {"tables": BATCH.tables[:, :2]}, {}),
    ("block_tables", {"tables": BATCH.tables - 9}, {}),
    ("block_tables", {"tables": BATCH.tables + 9}, {}),
    ("block_tables", {"tables": BATCH.tables[0]}, {}),
    ("query_starts", {"starts": BATCH.starts + 1}, {}),
    ("query_starts", {"starts": np.array([0, 4, 3], np.int32)}, {}),
    ("query_starts", {"starts": BATCH.starts[:2]}, {}),
    ("kv_lens", {"lens": np.array([40, 0], np.int32)}, {}),
    ("kv_lens", {"lens": np.array([-1, 20], np.int32)}, {}),
    ("kv_lens", {"lens": BATCH.lens.astype(np.float32)}, {}),
    ("scale", {}, {"scale": float("nan")}),
    ("sliding_window", {}, {"sliding_window": 0}),
    ("sliding_window", {}, {"sliding_window": -1}),
    ("sliding_window", {}, {"sliding_window": 2.5}),
    ("sliding_window", {}, {"sliding_window": 3, "causal": False}),
    *[("softcap", {}, {"softcap": cap}) for cap in (0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-60)],
    *[
        (name, {}, {name: bad})
        for name in ("alibi_slopes", "sinks")
        for bad in (
            *([1.0] * 4, 1.0, FOUR.astype(np.float64), FOUR[:3], FOUR[None], np.ones(9, np.float32)),
            *(FOUR * np.float32(np.nan), FOUR * np.float32(np.inf)),
        )
    ],
    ("alibi_slopes", {}, {"alibi_slopes": -FOUR * np.float32(np.inf)}),
    ("k_scale", {}, dict(INT8.scales)),
    ("v_scale", {}, {"v_scale": INT8.scales["v_scale"]}),
    ("k_scale", AS_INT8 | {"scales": {}}, {}),
    ("v_scale", AS_INT8 | {"scales": {"v_scale": INT8.scales["v_scale"]}}, {}),
    *[
        (name, with_scale(name, bad), {})
        for name in INT8.scales
        for scale in [INT8.scales[name]]
        for bad in (
            *(scale.tolist(), 0.5, scale.astype(np.float64), scale.astype(np.float16), scale[0], scale[1:]),
            *(scale[:, :1], scale[..., ::-1], np.repeat(scale, 2, axis=2)[..., ::2], scale[..., None]),
        )
    ],
    ("out", AS_INT8, {"out": np.lib.stride_tricks.as_strided(INT8.scales["k_scale"], (4, 4, 16), (64, 64 * 4, 4))}),
    ("num_threads", {}, {"num_threads": 0}),
    ("num_threads", {}, {"num_threads": 10**6}),
    ("out", {}, {"out": np.empty((4, 4, 15), np.float32)}),
    *[("out", {}, {"out": np.empty((4, 4, 16), dtype)}) for dtype in (np.float64, ">f2", np.int16, np.uint8)],
    ("out", {}, {"out": read_only(np.empty((4, 4, 16), np.float32))}),
    ("out", {}, {"out": np.lib.stride_tricks.as_strided(np.empty(64, np.float32), (4, 4, 16), (0, 64, 4))}),
    ("out", {}, {"out": np.lib.stride_tricks.as_strided(np.empty(64, np.float32), (4, 4, 16), (64, 64, 4))}),
    ("out", {}, {"out": np.lib.stride_tricks.as_strided(np.empty(64, np.float32), (4, 4, 16), (4, 16, 4))}),
    ("out", {}, {"out": np.lib.stride_tricks.as_strided(np.empty(256, np.float16), (4, 4, 16), (64, 32, 2))}),
    ("out", {}, {"out": BATCH.query}),
    ("out", {}, {"out": BATCH.query.view(np.float16)[..., :16]}),
    ("out", {}, {"out": BATCH.keys[0].reshape(-1)[16:272].reshape(4, 4, 16)}),
]


@pytest.mark.parametrize(
    ("argument", "changes", "options"), BAD_CALLS, ids=[f"{i}-{bad[0]}" for i, bad in enumerate(BAD_CALLS)]
)
def test_bad_input_is_refused_by_name(argument: str, changes: dict[str, Any], options: dict[str, Any]) -> None:
    before = [array.copy() for array in BATCH[:6]]
    with pytest.raises(InvalidInputError, match=rf"^{argument}: "):
        BATCH._replace(**changes).attend(**options)
    for array, was in zip(BATCH[:6], before, strict=True):
        np.testing.assert_array_equal(array, was)


def test_values_of_another_size_than_keys_are_refused_plainly() -> None:
    wide = BATCH._replace(values=np.repeat(BATCH.values, 2, axis=-1))
    for attend in (wide.attend, wide.tiled):
        with pytest.raises(InvalidInputError, match=r"^value_cache: .*another head_dim than .*MLA.* not supported"):
            attend()


def test_tiles_of_int8_need_four_dimensions_each() -> None:
    odd = make([(20, 1)], "int8", head_dim=6)
    flat = [cache.reshape(*cache.shape[:2], -1) for cache in (odd.keys, odd.values)]
    with pytest.raises(InvalidInputError, match=r"^key_cache: .*int8.* multiple of 4, got 6"):
        odd._replace(keys=flat[0], values=flat[1]).attend()


def test_eight_bit_floats_are_refused() -> None:
    float8 = pytest.importorskip("ml_dtypes").float8_e4m3fn
    with pytest.raises(InvalidInputError, match=r"^key_cache: got float8_e4m3fn"):
        INT8._replace(keys=INT8.keys.view(float8), values=INT8.values.view(float8)).attend()
    eight = np.zeros_like(BATCH.query, float8)
    with pytest.raises(InvalidInputError, match=r"^query: got float8_e4m3fn"):
        BATCH._replace(query=eight).attend()
    with pytest.raises(InvalidInputError, match=r"^out: got float8_e4m3fn"):
        BATCH.attend(out=eight)
    with pytest.raises(InvalidInputError, match=r"^key: got float8_e4m3fn"):
        write_kv(eight[:, :2], eight[:, :2], BATCH.keys, BATCH.values, np.arange(4))


@pytest.mark.parametrize("option", ["window", "mask", "logits_soft_cap", "kv_scale"])
def test_options_that_do_not_exist_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        BATCH.attend(**{option: None})
    unknown: dict[str, Any] = {option: None}
    with pytest.raises(TypeError, match=option):
        plan_of(BATCH).attend(BATCH.query, BATCH.keys, BATCH.values, **unknown)


@pytest.mark.parametrize("option", ["sliding_window", "num_threads"])
@pytest.mark.parametrize("name", ["query", "key_cache", "block_tables"])
def test_an_index_that_resizes_an_array_is_harmless(name: str, option: str) -> None:
    batch = make([(40, 3), (20, 1)])
    arrays = {"query": batch.query, "key_cache": batch.keys, "block_tables": batch.tables}
    victim = arrays[name] = arrays[name].copy()

    class Shrink:
        def __index__(self) -> int:
            victim.resize((0,), refcheck=False)
            return 1

    batch = batch._replace(query=arrays["query"], keys=arrays["key_cache"], tables=arrays["block_tables"])
    with pytest.raises(InvalidInputError, match=rf"^{name}: got .*(1 dim|shape \[0\])"):
        batch.attend(**{option: Shrink()})


def test_a_plan_refuses_other_shapes() -> None:
    plan = plan_of(BATCH)
    with pytest.raises(InvalidInputError, match=r"^key_cache: "):
        plan.attend(BATCH.query, BATCH.keys[1:], BATCH.values[1:])
    with pytest.raises(InvalidInputError, match=r"^query: "):
        plan.attend(BATCH.query[:2], BATCH.keys, BATCH.values)
    for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "num_blocks", "num_threads"):
        for bad in (0, -1, 1.5, True, "2", 2**70):
            with pytest.raises(InvalidInputError, match=rf"^{name}: "):
                plan_of(BATCH, **{name: bad})


@pytest.mark.parametrize("slot", [-2, 9 * 16, 2**40])
def test_write_kv_refuses_slots_outside_the_cache_before_writing(slot: int) -> None:
    keys, values = (np.zeros((9, 2, 256), np.float32) for _ in range(2))
    data = np.ones((2, 2, 16), np.float32)
    with pytest.raises(InvalidInputError, match=r"^slots: entry 1"):
        write_kv(data, data, keys, values, np.array([0, slot], np.int64))
    assert not keys.any()
    assert not values.any()


def test_write_kv_refuses_malformed_arrays() -> None:
    keys, values = (np.zeros((9, 2, 256), np.float32) for _ in range(2))
    data, slots = np.ones((2, 2, 16), np.float32), np.arange(2)
    bad: list[tuple[str, tuple[Any, ...]]] = [
        ("key", (data[0], data, keys, values, slots)),
        ("value", (data, data[:1], keys, values, slots)),
        ("value", (data, data.astype(np.float16), keys, values, slots)),
        ("value", (data.astype(np.float16), data, keys, values, slots)),
        ("value", (data.astype(np.float16), data.astype(np.uint16), keys, values, slots)),
        ("key", (data.astype(np.float64), data, keys, values, slots)),
        ("key", (data.astype(np.int16), data, keys, values, slots)),
        ("key", (data[:, :1], data[:, :1], keys, values, slots)),
        ("key", (data, data, keys, values, slots[:1])),
        ("key_cache", (data[..., :15].copy(), data[..., :15].copy(), keys, values, slots)),
        ("key_cache", (data, data, read_only(keys), values, slots)),
        ("key_cache", (keys[:2, :, :16], data, keys, values, slots)),
        ("value_cache", (data, data, keys, keys, slots)),
        ("slots", (data, data, keys, values, slots.astype(np.int32))),
    ]
    for argument, arguments in bad:
        with pytest.raises(InvalidInputError, match=rf"^{argument}: "):
            write_kv(*arguments)
    assert not keys.any()
    assert not values.any()

    int8 = [np.zeros((9, 2, 256), np.int8) for _ in range(2)]
    scale, other = (np.zeros((9, 2, 16), np.float32) for _ in range(2))
    scales: list[tuple[str, Any, Any]] = [
        ("k_scale", None, None),
        ("k_scale", scale, None),
        ("v_scale", None, other),
        ("k_scale", scale.tolist(), other),
        ("k_scale", read_only(scale), other),
        ("v_scale", scale, read_only(other)),
        ("v_scale", scale, other[:8]),
        ("v_scale", scale, scale),
        ("v_scale", scale, np.lib.stride_tricks.as_strided(data, (9, 2, 16), (0, 0, 4))),
    ]
    for argument, k_scale, v_scale in scales:
        with pytest.raises(InvalidInputError, match=rf"^{argument}: "):
            write_kv(data, data, int8[0], int8[1], slots, k_scale=k_scale, v_scale=v_scale)
    with pytest.raises(InvalidInputError, match=r"^k_scale: .*float32 has no scales"):
        write_kv(data, data, keys, values, slots, k_scale=scale, v_scale=other)
    everything: list[NDArray[Any]] = [*int8, scale, other, keys, values]
    for array in everything:
        assert not array.any()


def test_calls_of_one_plan_at_the_same_time_agree() -> None:
    batch = make([(1500, 600)], heads=(8, 2), head_dim=64)
    want, plan = batch.tiled(), plan_of(batch)
    keys, values = reference.tile_keys(batch.keys), reference.tile_values(batch.values)
    outs = [np.zeros_like(want) for _ in range(4)]
    threads = [
        threading.Thread(target=plan.attend, args=(batch.query, keys, values), kwargs={"out": out}) for out in outs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in outs:
        np.testing.assert_array_equal(out, want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_attention_works_in_a_forked_child() -> None:
    batch = make([(1500, 300)], heads=(8, 2), head_dim=64)
    plan = plan_of(batch, num_threads=2)
    want = plan.attend(batch.query, batch.keys, batch.values)
    if (child := os.fork()) == 0:
        equal = np.array_equal(plan.attend(batch.query, batch.keys, batch.values), want)
        os._exit(0 if equal else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_results_do_not_keep_inputs_alive() -> None:
    batch = make([(40, 3)])
    keys = batch.keys.copy()
    ref = weakref.ref(keys)
    out = paged_attention(batch.query, keys, batch.values, *batch.step)
    del keys
    gc.collect()
    assert ref() is None
    assert out.flags.owndata


def with_isa(name: str) -> subprocess.CompletedProcess[str]:
    code = "from leafkv._core import instruction_set; print(instruction_set())"
    environment = os.environ | {"LEAFKV_ISA": name}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_an_instruction_set_can_be_forced() -> None:
    assert with_isa("scalar").stdout == "scalar\n"
    assert with_isa(instruction_set()).stdout == f"{instruction_set()}\n"
    for wrong in ("sse9", "avx2" if instruction_set() == "neon" else "neon"):
        failed = with_isa(wrong)
        assert failed.returncode != 0
        assert "InvalidInputError: LEAFKV_ISA: " in failed.stderr
        assert wrong in failed.stderr
