"""Reading GGUF files: metadata, and tensors of every type that the ``gguf`` library can dequantize.

`gguf.GGUFReader` parses the header. It takes some two seconds for a vocabulary of 50,000 tokens, so the weights
cache keeps what loading needs of it, the `GGUFHeader`: a warm start does not parse the file at all. A model that
is too large for the cache pays every time.

The library trusts the lengths that it finds. Wherever a file is cut, it runs into the end, which is a
`ModelLoadError`; that every tensor lies within the file's data is checked here. Nothing stops it, however, when
the length of an array of numbers is damaged: it then takes that many steps, and memory for each.

Llama's queries and keys are stored with the pairs of RoPE interleaved; `GGUFFile.read` puts them back in
half-rotation order, in which Hugging Face files have them. Qwen's are stored as they are.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from leafkv._extras import require
from leafkv.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Elements dequantized at a time: the library's temporaries then stay in the CPU's cache (3x faster).
_CHUNK = 1 << 16

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; the name itself if there is none."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return name


class GGUFHeader(NamedTuple):
    """What loading needs to know of a file besides its weights. JSON has room for every value in it."""

    metadata: dict[str, Any]
    tensor_names: list[str]
    """The tensors, as the file names them."""
    rope_factors: list[float] | None
    """The tensor ``rope_freqs.weight``, if there is one."""


def digest(path: Path) -> str:
    """SHA-256 of a whole file, in hex: some 1.5 GB/s where the CPU has instructions for it."""
    sha = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()


class GGUFFile:
    """A GGUF file, mapped into memory.

    Raises:
        ModelLoadError: it is not a GGUF file, or a cut or damaged one.
    """

    def __init__(self, path: Path) -> None:
        _check_start(path)
        gguf = require("gguf", "models")
        try:
            reader = gguf.GGUFReader(path)
            metadata = {key: field.contents() for key, field in reader.fields.items()}
        except Exception as error:  # whatever the library comes upon in a place where it expects something else
            raise ModelLoadError(f"cut or damaged file, or newer than the gguf library: {error!r}") from error
        for tensor in reader.tensors:
            if not reader.data_offset <= tensor.data_offset <= len(reader.data) - tensor.n_bytes:
                raise ModelLoadError(
                    f"cut or damaged file: tensor {tensor.name!r} takes {tensor.n_bytes} bytes from "
                    f"{tensor.data_offset}, the file has data from {reader.data_offset} to {len(reader.data)}"
                )
        self._tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors}
        self._interleaved = metadata.get("general.architecture") == "llama"
        rope_factors = None
        if factors := self._tensors.pop(ROPE_FACTORS, None):
            values = np.empty(_shape(factors), dtype=np.float32)
            _dequantize(factors, values)
            rope_factors = values.tolist()
        self.header = GGUFHeader(metadata, [tensor.name for tensor in self._tensors.values()], rope_factors)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape, by Hugging Face name."""
        return {name: _shape(tensor) for name, tensor in self._tensors.items()}

    def label(self, name: str) -> str:
        """What the file calls a tensor."""
        if name in self._tensors:
            return str(self._tensors[name].name)
        match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
        names = {theirs: ours for ours, theirs in (_GLOBAL_NAMES | _LAYER_NAMES).items()}
        if match is None or match[2] not in names:
            return name
        prefix = f"blk.{match[1]}." if match[1] else ""
        return f"{prefix}{names[match[2]]}.{match[3]}"

    def read(self, name: str, out: NDArray[np.float32]) -> None:
        """Fill ``out`` with a tensor in float32, in half-rotation order."""
        _dequantize(self._tensors[name], out)
        if self._interleaved and ".self_attn." in name and (".q_proj." in name or ".k_proj." in name):
            key = "head_count" if ".q_proj." in name else "head_count_kv"
            metadata = self.header.metadata
            heads = metadata.get(f"llama.attention.{key}", metadata["llama.attention.head_count"])
            # Row 2 i + j of a head is the j-th of pair i; half-rotation has it at row j * (head_dim / 2) + i.
            pairs = out.reshape(heads, -1, 2, *out.shape[1:])
            out[...] = pairs.swapaxes(1, 2).reshape(out.shape)


def _check_start(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    if not start:
        raise ModelLoadError("the file is empty")
    if start[:4] != _MAGIC:
        raise ModelLoadError(f"not a GGUF file: it starts with {start[:4]!r}, not {_MAGIC!r}")
    version = int.from_bytes(start[4:], "little")
    if len(start) == 8 and version not in _VERSIONS:
        raise ModelLoadError(f"GGUF version {version} is not supported (supported: 2 and 3, little-endian)")


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape[::-1].tolist())  # the file has the innermost first


def _dequantize(tensor: Any, out: NDArray[np.float32]) -> None:
    gguf = require("gguf", "models")
    kind = tensor.tensor_type
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.asarray(tensor.data).reshape(-1).view(np.uint8)
    flat = out.reshape(-1)
    step = max(1, _CHUNK // per_block)
    for start in range(0, tensor.n_bytes // block_bytes, step):
        blocks = raw[start * block_bytes : (start + step) * block_bytes]
        try:
            values = gguf.dequantize(blocks.reshape(1, -1), kind)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"tensor {tensor.name!r} is of type {kind.name}, which the gguf library cannot dequantize"
            ) from error
        flat[start * per_block : (start + step) * per_block] = values.reshape(-1)
