"""GGUF files: the same models as in Hugging Face directories, and files that are cut, damaged or incomplete."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv._core import Weight, embed
from leafkv.errors import ModelLoadError
from leafkv.models import load_model
from leafkv.models.config_hf import config_from_hf
from leafkv.models.gguf import GGUFFile
from leafkv.models.mapped import Place
from leafkv.models.parameters import as_weights, read_tensors
from leafkv.models.rope import Llama3Scaling
from leafkv.models.tensors import is_mapped

from .paged import run
from .tiny import CONFIGS, as_gguf_config, sequences, tensors, write_gguf, write_hf


@pytest.fixture(autouse=True)
def _no_weights_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAFKV_CACHE_MAX_BYTES", "0")


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "mistral-full"])
def test_equals_the_hugging_face_directory(name: str, tmp_path: Path) -> None:
    ours = load_model(write_gguf(tmp_path / "model.gguf", CONFIGS[name]))
    theirs = load_model(write_hf(tmp_path / "hf", CONFIGS[name]))
    assert ours.config.eos_token_ids == theirs.config.eos_token_ids == (2,)
    for left, right in zip(run(ours.model, sequences(), [9]), run(theirs.model, sequences(), [9]), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)


def test_rope_scalings(tmp_path: Path) -> None:
    """Linear and YaRN are options of the file; Llama 3.1's is a tensor of divisors."""
    scaled = {
        "llama-linear": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        "llama-yarn": {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 16,
        },
    }
    for name, options in scaled.items():
        model = load_model(write_gguf(tmp_path / f"{name}.gguf", CONFIGS["llama"], extra=options))
        expected = as_gguf_config(config_from_hf(CONFIGS[name]))
        assert model.config.rope_scaling == expected.rope_scaling, name

    scaling = config_from_hf(CONFIGS["llama-llama3"]).rope_scaling
    assert isinstance(scaling, Llama3Scaling)
    plain = 100.0 ** (-np.arange(0, 8, 2) / 8)
    divisors = {"rope_freqs.weight": (plain / scaling.scale(plain, 100.0)).astype(np.float32)}
    path = write_gguf(tmp_path / "llama3.gguf", CONFIGS["llama"], more=divisors)
    ours = run(load_model(path).model, sequences(), [9])
    theirs = run(load_model(write_hf(tmp_path / "hf", CONFIGS["llama-llama3"])).model, sequences(), [9])
    for left, right in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


# Rows of 32 and 64: whole quantization blocks; more of them than are dequantized at a time.
WHOLE_BLOCKS: dict[str, Any] = {"intermediate_size": 64, "vocab_size": 3000}
MAPPED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1"}


def stored(values: NDArray[np.float32], type_: str) -> NDArray[np.float32]:
    """What a type makes of values, by the library alone."""
    kind = gguf.GGMLQuantizationType[type_]
    found: NDArray[np.float32] = gguf.dequantize(gguf.quantize(values, kind), kind)
    return found


def decoded(weight: Any) -> NDArray[np.float32]:
    values: NDArray[np.float32] = embed(weight, np.arange(weight.shape[0], dtype=np.int32))
    return values


@pytest.mark.parametrize("type_", [*MAPPED, "Q5_0", "Q5_1"])
def test_matrices_are_mapped_as_they_are_stored(type_: str, tmp_path: Path) -> None:
    raw = CONFIGS["qwen2"] | WHOLE_BLOCKS
    values, config = tensors(raw), config_from_hf(raw)
    path = write_gguf(tmp_path / "model.gguf", raw, matrices=type_)
    file = GGUFFile(path)
    found = read_tensors(file, config)
    weights = as_weights(config, found)
    assert set(found) == set(values)
    for name, tensor in found.items():
        of = type_ if values[name].ndim == 2 else "F32"
        assert tensor.kind == MAPPED.get(of, "float32")
        assert is_mapped(tensor.data) == (of in MAPPED)
        np.testing.assert_array_equal(tensor.to_float32(), stored(values[name], of), strict=True)
    names = {"embedding": ["embed_tokens"], "layers.1.down": ["layers.1.mlp.down_proj"]}
    names |= {"layers.0.qkv": [f"layers.0.self_attn.{x}_proj" for x in "qkv"]}
    for name, parts in names.items():
        expected = np.concatenate([stored(values[f"model.{part}.weight"], type_) for part in parts])
        np.testing.assert_array_equal(decoded(weights[name]), expected, strict=True)
    # Whatever happens to the file happens to the weights, if they are the file's memory.
    before = decoded(weights["layers.1.down"])
    with path.open("r+b") as writable:
        writable.seek(file.places["model.layers.1.mlp.down_proj.weight"].offset)
        writable.write(bytes([writable.read(1)[0] ^ 1]))  # the byte after it
    assert (decoded(weights["layers.1.down"]) != before).any() == (type_ in MAPPED)


@pytest.mark.parametrize("type_", [*MAPPED, "Q5_0"])
def test_only_interleaved_rows_are_copied(type_: str, tmp_path: Path) -> None:
    raw = CONFIGS["llama-biases"] | WHOLE_BLOCKS
    values, config = tensors(raw), config_from_hf(raw)
    found = read_tensors(GGUFFile(write_gguf(tmp_path / "model.gguf", raw, matrices=type_)), config)
    for name, tensor in found.items():
        of = type_ if values[name].ndim == 2 else "F32"
        interleaved = "q_proj" in name or "k_proj" in name
        assert is_mapped(tensor.data) == (of in MAPPED and not interleaved)
        assert tensor.kind == MAPPED.get(of, "float32")
        np.testing.assert_array_equal(tensor.to_float32(), stored(values[name], of), strict=True)


def test_each_tensor_has_a_type_of_its_own_and_any_alignment(tmp_path: Path) -> None:
    raw = CONFIGS["llama-biases"] | {"intermediate_size": 64}
    values, config = tensors(raw), config_from_hf(raw)
    attention = "model.layers.0.self_attn"
    types = {f"{attention}.q_proj.weight": "Q4_1", f"{attention}.k_proj.weight": "F16"}
    # Vectors, too, and those whose elements change places.
    types |= {f"{attention}.q_proj.bias": "Q8_0", f"{attention}.v_proj.bias": "BF16", "model.norm.weight": "Q8_0"}
    odd = {"general.name": "an odd length"}
    paths = [
        write_gguf(tmp_path / f"{n}.gguf", raw, matrices="Q8_0", types=types, alignment=n, extra=odd) for n in (1, 32)
    ]
    assert {place.offset % 4 for place in GGUFFile(paths[0]).places.values()} == {1, 3}
    weights = as_weights(config, read_tensors(GGUFFile(paths[0]), config))
    qkv = weights["layers.0.qkv"]
    assert isinstance(qkv, Weight)
    assert qkv.kinds == ("q4_1", "float16", "q8_0")
    for suffix, found in (("weight", decoded(qkv)), ("bias", weights["layers.0.qkv_bias"])):
        names = [f"{attention}.{x}_proj.{suffix}" for x in "qkv"]
        of = [types.get(name, "Q8_0" if suffix == "weight" else "F32") for name in names]
        expected = np.concatenate([stored(values[name], kind) for name, kind in zip(names, of, strict=True)])
        np.testing.assert_array_equal(found, expected, strict=True)
    np.testing.assert_array_equal(weights["norm"], stored(values["model.norm.weight"], "Q8_0"), strict=True)
    ids = [[int(token) for token in range(20, 40)]]
    for left, right in zip(*(run(load_model(path).model, ids, [9]) for path in paths), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_type_that_cannot_be_dequantized(tmp_path: Path) -> None:
    norm = {"output_norm.weight": np.ones(32)}
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"], more=norm, without=tuple(norm))
    with pytest.raises(ModelLoadError, match=r"'output_norm.weight' is of type F64"):
        load_model(path)


def test_a_tensor_that_the_model_would_not_use(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"], more={"blk.0.attn_sinks": np.ones(4, np.float32)})
    with pytest.raises(ModelLoadError, match=r"'blk.0.attn_sinks' is not one that a llama model has"):
        load_model(path)


def test_a_cut_file_is_an_error_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", CONFIGS["llama"]).read_bytes()
    cut = tmp_path / "cut.gguf"
    header = whole.index(b"blk.0.attn_norm")
    load_model(tmp_path / "whole.gguf")
    # The writer pads the last tensor, by less than 32 bytes.
    offsets = {*range(header, len(whole) - 32, 611), *range(0, header, 37), 1, 4, 8, 16, 23, 24, len(whole) - 32}
    for size in sorted(offsets):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf: (the file is empty|not a GGUF|cut or damaged)"):
            load_model(cut)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_tensor_lies_within_the_data(tmp_path: Path) -> None:
    """The library notices what ends beyond the file, but not what an overflow puts into the header."""
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"])
    reader = gguf.GGUFReader(path)
    field = next(tensor.field for tensor in reader.tensors if tensor.name == "blk.0.attn_norm.weight")
    at = field.offset + sum(part.nbytes for part in field.parts[:-1])
    data = bytearray(path.read_bytes())
    for offset, message in ((len(data), "cut or damaged file, or"), ((1 << 64) - 256, "takes 128 bytes from")):
        data[at : at + 8] = offset.to_bytes(8, "little")
        path.write_bytes(data)
        with pytest.raises(ModelLoadError, match=message):
            load_model(path)


def test_a_header_that_is_known_is_checked_against_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"])
    header = GGUFFile(path).header
    assert GGUFFile(path, header).places == GGUFFile(path).places
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelLoadError, match=r"cut file: tensor 'output.weight' takes 8192 bytes from \d+, the file"):
        GGUFFile(path, header)
    path.write_bytes(whole)
    for place in (Place("F32", (32,), -1, 128), Place("F32", (32,), len(whole), 128)):
        with pytest.raises(ModelLoadError, match="cut file"):
            GGUFFile(path, header._replace(places={**header.places, "output_norm.weight": place}))
    shorter = header._replace(places={**header.places, "output_norm.weight": Place("F32", (32,), 64, 64)})
    with pytest.raises(ModelLoadError, match=r"64 bytes are no float32 of shape \(32,\)"):
        GGUFFile(path, shorter).read("model.norm.weight")


def test_versions(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"])
    data = path.read_bytes()
    for version in (1, 4, 3 << 24):  # the last is how a big-endian file has its 3
        path.write_bytes(data[:4] + version.to_bytes(4, "little") + data[8:])
        with pytest.raises(ModelLoadError, match=f"GGUF version {version} is not supported"):
            load_model(path)


def test_a_damaged_header_never_raises_anything_else(tmp_path: Path) -> None:
    """Whatever byte is damaged, but for the length of the one array of numbers: the library believes it."""
    whole = write_gguf(tmp_path / "whole.gguf", CONFIGS["llama"]).read_bytes()
    header = whole.index(b"output_norm.weight") + 60
    types = b"tokenizer.ggml.token_type"
    length = whole.index(types) + len(types) + 8
    offsets = [*range(length), *range(length + 8, header)]
    damaged = tmp_path / "damaged.gguf"
    rng = random.Random(5)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.choice(offsets)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        damaged.write_bytes(data)
        try:
            load_model(damaged)
        except ModelLoadError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("blk.1.attn_k.weight", "tensor 'blk.1.attn_k.weight' is missing"),
        ("token_embd.weight", "tensor 'token_embd.weight' is missing"),
        ("blk.0.ffn_norm.weight", "tensor 'blk.0.ffn_norm.weight' is missing"),
    ],
)
def test_a_missing_tensor_is_named(tensor: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(write_gguf(tmp_path / "model.gguf", CONFIGS["llama"], without=(tensor,)))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping = 50.0"),
        ({"llama.attention.max_alibi_bias": 8.0}, "llama.attention.max_alibi_bias = 8.0"),
        ({"llama.attention.causal": False}, "llama.attention.causal = False"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count = 4"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
        ({"llama.attention.sliding_window_pattern": 2}, "llama.attention.sliding_window_pattern = 2"),
        ({"llama.something_new": 1}, "llama.something_new = 1"),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix"),
    ],
)
def test_an_unsupported_option_is_refused_by_name(extra: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(write_gguf(tmp_path / "model.gguf", CONFIGS["llama"], extra=extra))


def test_neutral_options_and_notes_are_accepted(tmp_path: Path) -> None:
    extra = {"llama.expert_count": 0, "llama.attention.causal": True, "llama.rope.scaling.finetuned": False}
    load_model(write_gguf(tmp_path / "model.gguf", CONFIGS["llama"], extra=extra))


def test_sliding_window(tmp_path: Path) -> None:
    extra = {"llama.attention.sliding_window": 7}
    ours = load_model(write_gguf(tmp_path / "model.gguf", CONFIGS["mistral"], extra=extra)).model
    theirs = load_model(write_hf(tmp_path / "hf", CONFIGS["mistral"])).model
    for left, right in zip(run(ours, sequences(), [9]), run(theirs, sequences(), [9]), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)
