"""Safetensors files: floats of every size, mapped as they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from leafkv._core import embed
from leafkv.errors import ModelLoadError
from leafkv.models import load_model
from leafkv.models.config_hf import config_from_hf
from leafkv.models.parameters import as_weights, read_tensors
from leafkv.models.safetensors import SafetensorsFiles
from leafkv.models.tensors import is_mapped

from .paged import run
from .tiny import CONFIGS, sequences, tensors, write_hf

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("kind", DTYPES)
def test_tensors_are_mapped_as_they_are_stored(kind: str, tmp_path: Path) -> None:
    raw = CONFIGS["qwen2"]
    values = {name: array.astype(DTYPES[kind]) for name, array in tensors(raw).items()}
    found = read_tensors(SafetensorsFiles(write_hf(tmp_path, raw, values)), config_from_hf(raw))
    assert set(found) == set(values)
    for name, tensor in found.items():
        assert tensor.kind == kind
        assert is_mapped(tensor.data)
        np.testing.assert_array_equal(tensor.to_float32(), values[name].astype(np.float32), strict=True)
    weights: Any = as_weights(config_from_hf(raw), found)
    assert weights["layers.1.gate_up"].kinds == (kind, kind)
    rows = [values[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    gate_up = embed(weights["layers.1.gate_up"], np.arange(96, dtype=np.int32))
    np.testing.assert_array_equal(gate_up, np.concatenate(rows).astype(np.float32), strict=True)
    bias = [values[f"model.layers.0.self_attn.{x}_proj.bias"] for x in "qkv"]
    np.testing.assert_array_equal(weights["layers.0.qkv_bias"], np.concatenate(bias).astype(np.float32), strict=True)
    # What is computed is what float32 weights of these values give, to the bit.
    exact = {name: array.astype(np.float32) for name, array in values.items()}
    ours, theirs = (load_model(path).model for path in (tmp_path, write_hf(tmp_path / "exact", raw, exact)))
    for left, right in zip(run(ours, sequences(), [9]), run(theirs, sequences(), [9]), strict=True):
        np.testing.assert_array_equal(left, right, strict=True)


def test_float64_is_rounded_to_float32(tmp_path: Path) -> None:
    raw, name = CONFIGS["qwen2"], "model.layers.0.mlp.up_proj.weight"
    values: dict[str, Any] = dict(tensors(raw))
    values[name] = values[name].astype(np.float64) / 3
    found = read_tensors(SafetensorsFiles(write_hf(tmp_path, raw, values)), config_from_hf(raw))
    assert found[name].kind == "float32"
    np.testing.assert_array_equal(found[name].data, values[name].astype(np.float32), strict=True)


def test_a_dtype_that_is_no_float(tmp_path: Path) -> None:
    raw, name = CONFIGS["qwen2"], "model.layers.0.mlp.up_proj.weight"
    path = write_hf(tmp_path, raw, {**tensors(raw), name: np.ones((48, 32), np.int8)})
    with pytest.raises(ModelLoadError, match=rf"'{name}' has dtype I8, which is not supported \(supported: F64, F32"):
        load_model(path)
