"""Kinds of weights and conversions between them, against ml_dtypes and the gguf library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv.errors import ModelLoadError
from leafkv.models.mapped import map_file
from leafkv.models.tensors import CHUNK, QUANTIZED, Tensor, is_mapped, summary

# More than one chunk, and the last one not whole.
SHAPE = (CHUNK // 96 + 40, 96)


def values(scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.RandomState(3).standard_normal(SHAPE) * scale).astype(np.float32)


def floats(array: NDArray[np.float32]) -> Tensor:
    return Tensor("float32", array.shape, array)


def test_bfloat16_is_the_nearest_and_of_two_the_even() -> None:
    """Every upper half of a float32 with lower halves around the tie, infinities, NaN and subnormals among them."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = upper | lower
    array = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = array.astype(ml_dtypes.bfloat16)
    found = floats(array).to("bfloat16")
    assert (found.kind, found.shape) == ("bfloat16", bits.shape)
    assert found.data.dtype == np.uint16
    nan = np.isnan(array)
    np.testing.assert_array_equal(np.isnan(found.data.view(ml_dtypes.bfloat16)), nan)
    np.testing.assert_array_equal(found.data[~nan], expected.view(np.uint16)[~nan])
    largest = Tensor("bfloat16", (2,), np.array([0x7F7F, 0xFF7F], np.uint16)).to_float32()
    beyond = floats(largest * np.float32(1.00390625)).to("bfloat16")
    assert beyond.data.tolist() == [0x7F80, 0xFF80]


def test_float32_of_every_kind_is_exact() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    halves = Tensor("float16", every.shape, every.view(np.float16))
    np.testing.assert_array_equal(halves.to_float32(), every.view(np.float16).astype(np.float32))
    brains = Tensor("bfloat16", every.shape, every)
    np.testing.assert_array_equal(brains.to_float32(), every.view(ml_dtypes.bfloat16).astype(np.float32))
    with np.errstate(invalid="ignore"):
        expected = every.view(np.float16).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(halves.to("bfloat16").to_float32(), expected)
    tensor = floats(values())
    assert tensor.to("float32") is tensor


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_quantized_as_the_gguf_library_does(kind: str, stored: str) -> None:
    dtypes: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    array = values().astype(dtypes[stored])
    tensor = Tensor(stored, SHAPE, array.view(np.uint16) if stored == "bfloat16" else array)
    found = tensor.to(kind)
    type_ = gguf.GGMLQuantizationType[kind.upper()]
    expected = gguf.quantize(array.astype(np.float32), type_)
    assert (found.kind, found.shape, found.nbytes) == (kind, SHAPE, SHAPE[0] * 3 * QUANTIZED[kind])
    np.testing.assert_array_equal(found.data, expected, strict=True)
    np.testing.assert_array_equal(found.to_float32(), gguf.dequantize(expected, type_), strict=True)
    rounded = gguf.dequantize(expected, type_).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.to("bfloat16").data, rounded.view(np.uint16))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_what_cannot_be_quantized(kind: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"shape \(3, 48\) has no rows of a multiple of 32, which {kind} needs"):
        floats(np.ones((3, 48), np.float32)).to(kind)
    for value in (np.nan, np.inf, -np.inf, 70000.0, -70000.0):
        array = values()
        array[-1, -1] = value
        with pytest.raises(ModelLoadError, match=f"values that {kind} cannot hold: NaN, infinite, or beyond 65504"):
            floats(array).to(kind)
    # Blocks of next to nothing, down to where their scale's reciprocal is infinite, are blocks of zeros.
    for scale in (1e-30, 1e-38, 1e-40, 1e-45, 0.0):
        assert (floats(values() * np.float32(scale)).to(kind).to_float32() == 0).all()


def test_bytes_are_checked_and_not_copied() -> None:
    raw = np.arange(69, dtype=np.uint8)[1:]
    tensor = Tensor.of_bytes("q8_0", (2, 32), raw)
    assert tensor.data.shape == (2, 34)
    assert np.shares_memory(tensor.data, raw)
    unaligned = Tensor.of_bytes("float32", (17,), raw)
    assert np.shares_memory(unaligned.data, raw)
    assert unaligned.data.tobytes() == raw.tobytes()
    for kind, shape in (("float32", (2, 8)), ("q4_0", (2, 32)), ("float16", (2**33, 2**31))):
        with pytest.raises(ModelLoadError, match=f"68 bytes are no {kind}"):
            Tensor.of_bytes(kind, shape, raw)


def test_summary(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4_000_000))
    file = map_file(tmp_path / "file")
    assert type(file) is np.ndarray
    assert not file.flags.writeable
    mapped = Tensor.of_bytes("float32", (1000, 1000), file)
    assert is_mapped(mapped.data)
    assert is_mapped(mapped.data[3:].T)
    assert not is_mapped(mapped.data + 1)
    assert summary([mapped]) == "float32, 4.0 MB mapped"
    brains, norm = mapped.to("bfloat16"), floats(np.ones(100_000, np.float32))
    assert summary([norm, brains, mapped]) == "float32 + bfloat16, 4.0 MB mapped, 2.0 MB in memory"
    assert summary([norm, brains]) == "bfloat16, 2.0 MB in memory"
