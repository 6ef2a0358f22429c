"""Products with weights through Python: what comes in, what is refused. The arithmetic is tested in Rust."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv import InvalidInputError
from leafkv._core import Weight, embed, linear, rms_norm, silu_mul

from .arrays import F32, noise, strided

EPS = 1e-5
ROWS, COLUMNS, OUTPUTS = 5, 40, 7


MATRIX = noise(OUTPUTS, COLUMNS)


def halves(matrix: F32) -> dict[str, tuple[NDArray[Any], F32]]:
    """As each kind of float has it: the array, and what that is in float32."""
    half = matrix.astype(np.float16)
    upper = (matrix.view(np.uint32) >> 16).astype(np.uint16)
    return {
        "float32": (matrix, matrix),
        "float16": (half, half.astype(np.float32)),
        "bfloat16": (upper, (upper.astype(np.uint32) << 16).view(np.float32)),
    }


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_linear_is_a_product(kind: str) -> None:
    array, values = halves(MATRIX)[kind]
    weight = Weight([(kind, array)])
    assert (weight.shape, weight.kinds, weight.nbytes) == ((OUTPUTS, COLUMNS), (kind,), array.nbytes)
    x, bias, before = noise(ROWS, COLUMNS), noise(OUTPUTS), noise(ROWS, OUTPUTS)
    product = linear(x, weight)
    np.testing.assert_allclose(product, x.astype(np.float64) @ values.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(linear(strided(x), weight, num_threads=2), product)
    out = strided(before)
    assert linear(x, weight, bias=bias, out=out, add=True) is out
    np.testing.assert_array_equal(out, product + bias + before)
    np.testing.assert_array_equal(embed(weight, np.array([6, 0, 6])), values[[6, 0, 6]])


def test_bfloat16_is_a_dtype_or_its_bits() -> None:
    bits = halves(MATRIX)["bfloat16"][0]
    x = noise(ROWS, COLUMNS)
    typed = linear(x, Weight([("bfloat16", bits.view(ml_dtypes.bfloat16))]))
    np.testing.assert_array_equal(typed, linear(x, Weight([("bfloat16", bits)])))


def test_parts_are_rows_of_one_matrix() -> None:
    kinds = halves(MATRIX)
    weight = Weight([(kind, array) for kind, (array, _) in kinds.items()])
    assert weight.shape == (3 * OUTPUTS, COLUMNS)
    x = noise(ROWS, COLUMNS)
    apart = [linear(x, Weight([(kind, array)])) for kind, (array, _) in kinds.items()]
    np.testing.assert_array_equal(linear(x, weight), np.concatenate(apart, axis=1))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_normed_and_gated_rows(precision: Any) -> None:
    weight = Weight([("bfloat16", halves(MATRIX)["bfloat16"][0])])
    x, scale, gate_up = noise(ROWS, COLUMNS), noise(COLUMNS), noise(ROWS, 2 * COLUMNS)
    normed = linear(strided(x), weight, norm=scale, eps=EPS, precision=precision)
    np.testing.assert_array_equal(normed, linear(rms_norm(x, scale, EPS), weight, precision=precision))
    gated = linear(gate_up, weight, gated=True, precision=precision, num_threads=3)
    np.testing.assert_array_equal(gated, linear(silu_mul(gate_up), weight, precision=precision))


X = noise(ROWS, COLUMNS)
OUT = np.full((ROWS, OUTPUTS), 7, np.float32)

REFUSED: list[tuple[str, dict[str, Any]]] = [
    (r"x: got shape \[5, 39\], expected \[5, 40\]", {"x": X[:, 1:]}),
    (r"x: got shape \[5, 40\], expected \[5, 80\]", {"gated": True}),
    (r"norm: got 39 elements, expected 40", {"norm": noise(39), "eps": EPS}),
    (r"norm: got float64", {"norm": np.ones(COLUMNS), "eps": EPS}),
    (r"eps: got None and a norm, expected a number", {"norm": noise(COLUMNS)}),
    (r"eps: got 1e-5 and no norm, expected both or neither", {"eps": EPS}),
    (r"eps: got 0 in float32, expected a finite number greater than 0", {"norm": noise(COLUMNS), "eps": 1e-50}),
    (r"eps: got NaN in float32", {"norm": noise(COLUMNS), "eps": float("nan")}),
    (r"gated: got True and a norm", {"norm": noise(COLUMNS), "eps": EPS, "gated": True}),
    (r"bias: got 6 elements, expected 7", {"bias": noise(6)}),
    (r"out: got shape \[4, 7\]", {"out": OUT[:4]}),
    (r"out: .*overlaps that of bias", {"bias": OUT[0]}),
    (r"out: .*overlaps that of x", {"x": np.zeros(300, np.float32)[:200].reshape(5, 40), "out": ...}),
    (r"precision: got .int4.", {"precision": "int4"}),
    (r"precision: bfloat16 needs weights of bfloat16, got float32", {"precision": "bfloat16"}),
    (r"num_threads: got 0", {"num_threads": 0}),
]


@pytest.mark.parametrize(("problem", "options"), REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_written(problem: str, options: dict[str, Any]) -> None:
    if options.get("out") is ...:
        options = options | {"out": options["x"].reshape(-1)[: ROWS * OUTPUTS].reshape(ROWS, OUTPUTS)}
    arguments: dict[str, Any] = {"x": X, "weight": Weight([("float32", MATRIX)]), "out": OUT} | options
    with pytest.raises(InvalidInputError, match=problem):
        linear(**arguments)
    assert (OUT == 7).all()


def test_out_is_apart_from_weights() -> None:
    matrix = noise(COLUMNS, COLUMNS)
    weight, before = Weight([("float16", halves(MATRIX)["float16"][0]), ("float32", matrix[3:])]), matrix.copy()
    x = noise(3, COLUMNS)
    with pytest.raises(InvalidInputError, match="out: its memory overlaps that of weight"):
        linear(x, Weight([("float32", matrix)]), out=matrix[:3])
    with pytest.raises(InvalidInputError, match="out: its memory overlaps that of weight"):
        embed(weight, np.arange(3), out=matrix[1:4])
    embed(weight, np.arange(3), out=matrix[:3])
    np.testing.assert_array_equal(matrix[3:], before[3:])


def test_add_needs_something_to_add_to() -> None:
    with pytest.raises(InvalidInputError, match="add: got True and no out"):
        linear(X, Weight([("float32", MATRIX)]), add=True)


@pytest.mark.parametrize(
    ("problem", "parts"),
    [
        (r"parts: .*expected a non-empty sequence", []),
        (r"parts: .*expected a non-empty sequence", 3),
        (r"parts: .*expected a tuple \(kind, array\)", [MATRIX]),
        (r"parts: got the kind .q2_k., expected one of float32", [("q2_k", MATRIX)]),
        (r"parts: got float32 of shape \[7, 40\], expected float16", [("float16", MATRIX)]),
        (r"parts: got 39 columns beside 40", [("float32", MATRIX), ("float32", MATRIX[:, 1:].copy())]),
        (r"parts: got rows of 40 bytes of q8_0, expected a multiple of 34", [("q8_0", np.zeros((7, 40), np.uint8))]),
    ],
)
def test_weights_that_are_none(problem: str, parts: Any) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        Weight(parts)
