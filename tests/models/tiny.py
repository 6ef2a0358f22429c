"""Tiny models with random weights, one for each option of the family, and the files they come in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leafkv.models import ModelConfig
from leafkv.models.config_hf import config_from_hf
from leafkv.models.parameters import parameters

Tensors = dict[str, NDArray[np.float32]]

VOCAB_SIZE = 64
REFERENCES = Path(__file__).parents[1] / "data" / "models" / "references.npz"

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN2 = _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
_MISTRAL = _LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-tied": _LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama-biases": _LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-head-dim": _LLAMA | {"head_dim": 10, "num_key_value_heads": 1},
    "llama-linear": _LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-llama3": _LLAMA | {"rope_scaling": _LLAMA3},
    "llama-yarn": _LLAMA | {"rope_scaling": _YARN},
    "llama-yarn-options": _LLAMA
    | {"rope_scaling": _YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 0.3}},
    "qwen2": _QWEN2,
    "qwen2-window": _QWEN2 | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": _QWEN3,
    "mistral": _MISTRAL | {"sliding_window": 7},
    "mistral-full": _MISTRAL | {"sliding_window": None},
}


def tensors(raw: dict[str, Any]) -> Tensors:
    """Random weights, the same on every machine: `RandomState` streams never change."""
    random = np.random.RandomState(7)
    config = config_from_hf(raw)
    found = {}
    for parameter in parameters(config):
        for name, shape in parameter.tensors:
            values = random.standard_normal(shape)
            # Norms around 1, matrices that keep the scale of what they multiply.
            scale = 0.3 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1])
            found[name] = (values * scale + ("norm" in name)).astype(np.float32)
    return found


def sequences() -> list[list[int]]:
    """Token ids to compare with, longer than any window and than the original context of scaled RoPE."""
    random = np.random.RandomState(11)
    return [random.randint(3, VOCAB_SIZE, length).tolist() for length in (40, 13)]


def write_hf(directory: Path, raw: dict[str, Any], weights: Mapping[str, NDArray[Any]] | None = None) -> Path:
    """A Hugging Face directory, with a tokenizer of as many words as the vocabulary has."""
    from safetensors.numpy import save_file  # noqa: PLC0415
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors(raw) if weights is None else dict(weights), directory / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def write_gguf(
    path: Path,
    raw: dict[str, Any],
    weights: Tensors | None = None,
    *,
    matrices: str = "F32",
    types: Mapping[str, str] | None = None,
    alignment: int = 32,
    extra: dict[str, Any] | None = None,
    more: dict[str, NDArray[Any]] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """A GGUF file as llama.cpp's converter writes it: Llama's queries and keys have their rows interleaved.

    ``matrices`` is their type, ``types`` that of single tensors by their Hugging Face names. ``extra`` are options,
    ``more`` tensors under their GGUF names, ``without`` names of tensors to leave out.
    """
    import gguf  # noqa: PLC0415

    config = config_from_hf(raw)
    architecture = "llama" if config.architecture == "mistral" else config.architecture
    writer = gguf.GGUFWriter(path, architecture)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    pieces = [*(chr(ord("A") + i) for i in range(VOCAB_SIZE - 4)), "AB"]
    writer.add_token_list(["<unk>", "<s>", "</s>", *pieces])
    writer.add_token_types([3, 3, 3] + [1] * len(pieces))
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for name, values in (tensors(raw) if weights is None else weights).items():
        stored = values
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
            halves = values.reshape(heads, 2, config.head_dim // 2, *values.shape[1:])
            stored = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        gguf_name = _gguf_name(name)
        if gguf_name in without:
            continue
        kind = gguf.GGMLQuantizationType[(types or {}).get(name, matrices if values.ndim == 2 else "F32")]
        writer.add_tensor(gguf_name, gguf.quantize(stored, kind), raw_dtype=kind)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    # The library's own table of names: independent of the one under test.
    import gguf  # noqa: PLC0415

    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 8)
    found: str | None = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None
    return found


def as_gguf_config(config: ModelConfig) -> ModelConfig:
    """What a GGUF file can say of a configuration: float32 where JSON has float64."""
    import dataclasses  # noqa: PLC0415

    return dataclasses.replace(config, rms_norm_eps=float(np.float32(config.rms_norm_eps)))
