"""Norms, activations, rotations and the best logits from Python: right against numpy, in place, strict about input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from leafkv import InvalidInputError
from leafkv._core import argmax, draw, rms_norm, rope_write_kv, silu_mul, top_k, write_kv

from .arrays import F32, noise, strided

EPS = 1e-5
NAN, INF = np.nan, np.inf


def norm(x: F32, weight: F32) -> F32:
    x = x.astype(np.float64)
    result: F32 = (x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + EPS) * weight).astype(np.float32)
    return result


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 576])
def test_rms_norm(columns: int) -> None:
    x, weight = noise(40, columns), noise(columns)
    result = rms_norm(x, weight, EPS)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, norm(x, weight), rtol=1e-6)
    np.testing.assert_array_equal(rms_norm(strided(x), weight, EPS, num_threads=3), result)
    for out in (np.zeros_like(x), strided(0 * x)):
        assert rms_norm(x, weight, EPS, out=out) is out
        np.testing.assert_array_equal(out, result)
    for array in (x.copy(), strided(x)):
        assert rms_norm(array, weight, EPS, out=array) is array
        np.testing.assert_array_equal(array, result)


def test_rms_norm_of_no_rows_is_empty() -> None:
    assert rms_norm(noise(0, 3), noise(3), EPS).shape == (0, 3)


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 1536])
def test_silu_mul(columns: int) -> None:
    gate_up = 4 * noise(40, 2 * columns)
    gate, up = gate_up.astype(np.float64)[:, :columns], gate_up[:, columns:]
    result = silu_mul(gate_up)
    np.testing.assert_allclose(result, gate / (1 + np.exp(-gate)) * up, rtol=2e-6)
    out = strided(noise(40, columns))
    assert silu_mul(strided(gate_up), out=out, num_threads=2) is out
    np.testing.assert_array_equal(out, result)


def test_silu_is_zero_at_minus_infinity() -> None:
    gate_up = np.array([[-INF, INF, NAN, -1e38, 1, 1, 1, 1]], np.float32)
    np.testing.assert_array_equal(silu_mul(gate_up), [[-0.0, INF, NAN, -0.0]])


def best(row: F32, k: int) -> NDArray[np.int64]:
    if np.isnan(row).any() or row.max() == INF or row.max() == -INF:
        return np.full(k, -1)
    return np.argsort(-row, kind="stable")[:k]


@pytest.mark.parametrize("columns", [1, 17, 64, 1000])
def test_argmax_and_top_k(columns: int) -> None:
    logits = (8 * noise(12, columns)).round()
    logits[1, -1], logits[2, 0], logits[3], logits[4, ::3], logits[5] = NAN, INF, -INF, -INF, 0.0
    logits[5, ::2] = -0.0
    for array in (logits, strided(logits)):
        ids = argmax(array, num_threads=2)
        assert ids.dtype == np.int64
        np.testing.assert_array_equal(ids, [best(row, 1)[0] for row in logits])
        for k in {1, 5, columns} & set(range(columns + 1)):
            values, ids = top_k(array, k)
            assert values.dtype == np.float32
            assert ids.dtype == np.int64
            np.testing.assert_array_equal(ids, [best(row, k) for row in logits])
            want = np.where(ids < 0, NAN, np.take_along_axis(logits, ids, axis=1))
            np.testing.assert_array_equal(values, want)


def test_argmax_of_nothing() -> None:
    np.testing.assert_array_equal(argmax(noise(2, 0)), [-1, -1])
    assert argmax(noise(0, 5)).shape == (0,)
    assert [array.shape for array in top_k(noise(0, 5), 2)] == [(0, 2), (0, 2)]


HEADS, KV_HEADS, DIM = 3, 2, 8


def caches(dtype: str, layout: str) -> list[NDArray[Any]]:
    """Keys and values of 4 blocks of 16 tokens, and the scales of int8."""
    shape = (4, KV_HEADS, 16, DIM) if layout == "rows" else (4, KV_HEADS, 16 * DIM)
    arrays: list[NDArray[Any]] = [np.ones(shape, dtype), np.ones(shape, dtype)]
    if dtype == "int8":
        arrays += [np.ones((4, KV_HEADS, 16), np.float32) for _ in "kv"]
    return arrays


def scales(arrays: list[NDArray[Any]]) -> dict[str, Any]:
    return dict(zip(("k_scale", "v_scale"), arrays[2:], strict=False))


def rotated(x: F32, cos: F32, sin: F32) -> F32:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("layout", ["rows", "tiled"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16", "int8"])
def test_rope_write_kv_is_a_rotation_and_write_kv(dtype: str, layout: str, normed: bool) -> None:
    tokens = 30
    qkv, angles = noise(tokens, (HEADS + 2 * KV_HEADS) * DIM), 10 * noise(tokens, DIM // 2)
    cos, sin = np.cos(angles), np.sin(angles)
    slots = np.random.default_rng(0).permutation(64)[:tokens].astype(np.int64)
    slots[5], slots[20] = -1, slots[7]
    weights = {"q_norm": noise(DIM), "k_norm": noise(2, DIM)[1]} if normed else {}

    query, key, value = np.split(qkv.reshape(tokens, -1, DIM), (HEADS, HEADS + KV_HEADS), axis=1)
    if normed:
        query = rms_norm(query.reshape(-1, DIM), weights["q_norm"], EPS).reshape(query.shape)
        key = rms_norm(key.reshape(-1, DIM), weights["k_norm"], EPS).reshape(key.shape)
    query, key = rotated(query, cos, sin), rotated(key, cos, sin)
    want = caches(dtype, layout)
    write_kv(key, value, want[0], want[1], slots, **scales(want))

    options: dict[str, Any] = {"num_heads": HEADS, **weights, **({"eps": EPS} if normed else {})}
    out = np.zeros((tokens, HEADS + 1, DIM), np.float32)[:, 1:]
    outs: list[dict[str, Any]] = [{}, {"out": out, "num_threads": 2}]
    for more in outs:
        got = caches(dtype, layout)
        more.update(options, **scales(got))
        result = rope_write_kv(strided(qkv), strided(cos), sin[:, None], got[0], got[1], slots, **more)
        np.testing.assert_array_equal(result, query)
        for array, wanted in zip(got, want, strict=True):
            np.testing.assert_array_equal(array, wanted)
    assert result is out


def read_only(array: F32) -> F32:
    view: F32 = array.view()
    view.flags.writeable = False
    return view


def overlapping(rows: int, columns: int) -> F32:
    return np.asarray(as_strided(noise(rows + columns), (rows, columns), (4, 4)), np.float32)


def test_rows_that_do_not_fit_are_refused() -> None:
    x, weight, out = noise(4, 6), noise(6), np.zeros((4, 6), np.float32)
    buffer = np.zeros((5, 6), np.float32)
    bad: list[tuple[str, Any, dict[str, Any]]] = [
        (r"x: got float64 of shape \[4, 6\], expected float32 of shape \[rows, columns\]", x.astype(float), {}),
        (r"x: got float32 of shape \[6\], expected float32 of shape \[rows, columns\]", weight, {}),
        (r"x: got .*, expected a numpy array", x.tolist(), {}),
        (r"x: got strides \[4, 16\] .* to be contiguous", noise(6, 4).T, {}),
        (r"weight: got 5 elements, expected 6", x, {"weight": weight[:5]}),
        (r"weight: got float32 of shape \[4, 6\], expected float32 of shape \[n\]", x, {"weight": x}),
        (r"weight: got strides \[8\] .* to be contiguous", x, {"weight": noise(12)[::2]}),
        (r"out: got shape \[3, 6\], expected \[4, 6\]", x, {"out": out[:3]}),
        (r"out: got a read-only array", x, {"out": read_only(out)}),
        (r"out: strides \[4, 4\] of shape \[4, 6\] put rows onto each other", x, {"out": overlapping(4, 6)}),
        (r"out: its memory overlaps that of x", buffer[1:], {"out": buffer[:4]}),
        (r"out: its memory overlaps that of weight", x, {"weight": buffer[2], "out": buffer[:4]}),
        (r"eps: got 0 in float32, expected a finite number greater than 0", x, {"eps": 1e-50}),
        (r"num_threads: got 0 \(int\), expected an int of at least 1", x, {"num_threads": 0}),
    ]
    for message, rows, options in bad:
        with pytest.raises(InvalidInputError, match=f"^{message}"):
            rms_norm(rows, **{"weight": weight, "eps": EPS, "out": out, **options})
    assert not out.any()
    assert not buffer.any()

    with pytest.raises(InvalidInputError, match=r"^gate_up: got 5 columns, expected as many of gate as of up"):
        silu_mul(noise(2, 5))
    with pytest.raises(InvalidInputError, match=r"^out: got shape \[4, 6\], expected \[4, 3\]"):
        silu_mul(x, out=out)
    with pytest.raises(InvalidInputError, match=r"^out: its memory overlaps that of gate_up"):
        silu_mul(x, out=x[:, :3])
    with pytest.raises(InvalidInputError, match=r"^logits: got float16"):
        argmax(x.astype(np.float16))
    for k, message in [(7, "got 7, expected 1 to 6"), (2**62, "got 4611686018427387904, expected 1 to 6")]:
        with pytest.raises(InvalidInputError, match=f"^k: {message}, the columns of logits"):
            top_k(x, k)
    with pytest.raises(InvalidInputError, match=r"^k: got 0 \(int\), expected an int of at least 1"):
        top_k(x, 0)
    with pytest.raises(InvalidInputError, match=r"^k: got 1, expected 1 to 0"):
        top_k(noise(2, 0), 1)
    with pytest.raises(InvalidInputError, match=r"^draws: got 1, expected one for each of 2 rows"):
        draw(noise(2, 5), [(1, 2, 1.0, 0, 1.0, 0.0)])
    malformed: list[Any] = [
        None,
        [None],
        [(1, 2, 1.0, 0, 1.0)],
        [(-1, 2, 1.0, 0, 1.0, 0.0)],
        [(1, 2, 1.0, 2**64, 1.0, 0.0)],
    ]
    for draws in malformed:
        with pytest.raises(InvalidInputError, match=r"^draws: .*, expected \(seed, position"):
            draw(noise(1, 5), draws)
    with pytest.raises(InvalidInputError, match=r"^temperature: got 0 for row 0"):
        draw(noise(1, 5), [(1, 2, 0.0, 0, 1.0, 0.0)])


def test_rope_write_kv_refuses_what_does_not_fit_before_writing() -> None:
    qkv, cos = noise(2, 56), noise(2, 4)
    keys, values = caches("float32", "tiled")
    rows = caches("float32", "rows")
    out, weight = np.zeros((2, HEADS, DIM), np.float32), noise(DIM)
    good: dict[str, Any] = {
        "qkv": qkv,
        "cos": cos,
        "sin": noise(2, 1, 4),
        "key_cache": keys,
        "value_cache": values,
        "slots": np.arange(2),
        "num_heads": HEADS,
        "out": out,
    }
    bad: list[tuple[str, dict[str, Any]]] = [
        (r"qkv: got 55 columns, expected a multiple of 7: 3 heads of queries, 2 of keys", {"qkv": qkv[:, 1:]}),
        (r"qkv: got 56 columns, expected a multiple of 6", {"num_heads": 2}),
        (r"qkv: got 56 columns, expected a multiple of 18446744073709551615", {"num_heads": 2**64 - 1}),
        (r"num_heads: got 0 \(int\), expected an int of at least 1", {"num_heads": 0}),
        (r"cos: got shape \[1, 4\], expected \[2, 4\]", {"cos": cos[:1]}),
        (r"cos: got float32 of shape \[2, 2, 2\], expected float32 of shape \[T, head_dim", {"cos": noise(2, 2, 2)}),
        (r"sin: got float64", {"sin": cos.astype(float)}),
        (r"key_cache: got 2 dimensions, expected 4 \(rows\) or 3 \(tiled\)", {"key_cache": keys[0]}),
        (r"key_cache: got head_dim 4 .*, expected 8", {"key_cache": rows[0][..., :4], "value_cache": rows[1][..., :4]}),
        (r"key_cache: got a read-only array", {"key_cache": read_only(keys)}),
        (r"value_cache: it is the memory of key_cache", {"value_cache": keys}),
        (r"key_cache: its memory overlaps that of sin", {"sin": keys[0, :, :4]}),
        (r"slots: got int32", {"slots": np.arange(2, dtype=np.int32)}),
        (r"slots: got 3 entries, expected one a token, 2", {"slots": np.arange(3)}),
        (r"slots: entry 1 is 64, expected -1 or 0 to 63", {"slots": np.array([0, 64])}),
        (
            r"out: got float32 of shape \[2, 8, 3\], expected float32 of shape \[2, 3, 8\]",
            {"out": out.reshape(2, 8, 3)},
        ),
        (r"out: its memory overlaps that of qkv", {"out": qkv[:, :24].reshape(2, 3, 8)}),
        (r"out: its memory overlaps that of value_cache", {"out": values[:2].reshape(2, -1, 8)[:, :3]}),
        (r"out: its memory overlaps that of k_norm", {"q_norm": weight, "k_norm": out[1, 1], "eps": EPS}),
        (r"q_norm: came without another one of q_norm, k_norm and eps", {"q_norm": weight}),
        (r"eps: got inf in float32", {"q_norm": weight, "k_norm": weight, "eps": float("inf")}),
        (r"q_norm: got 7 elements, expected 8", {"q_norm": weight[1:], "k_norm": weight, "eps": EPS}),
        (r"k_norm: got float32 of shape \[2, 4\]", {"q_norm": weight, "k_norm": cos, "eps": EPS}),
        (r"k_scale: came alone", {"k_scale": noise(4, KV_HEADS, 16)}),
    ]
    for message, change in bad:
        with pytest.raises(InvalidInputError, match=f"^{message}"):
            rope_write_kv(**{**good, **change})
    assert not out.any()
    for array in (keys, values, *rows):
        assert (array == 1).all()
    odd = [np.ones((1, 1, 16, 7), np.float32) for _ in "kv"]
    with pytest.raises(InvalidInputError, match=r"^key_cache: got head_dim 7, expected pairs of elements"):
        rope_write_kv(noise(2, 21), cos, cos, odd[0], odd[1], np.arange(2), num_heads=1)
    assert rope_write_kv(**good) is out
    assert out.all()
