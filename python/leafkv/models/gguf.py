"""The tensors of a GGUF file, mapped into memory, under their Hugging Face names.

Llama's queries and keys are stored with the pairs of RoPE interleaved; `GGUFFile.read` puts them back in
half-rotation order, in which Hugging Face files have them: they are the only ones that are copied, in whatever type
they are. Qwen's are stored as they are.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from leafkv.errors import ModelLoadError
from leafkv.models.gguf_header import GGUFHeader, read_header
from leafkv.models.gguf_types import read_tensor
from leafkv.models.mapped import map_file
from leafkv.models.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from leafkv.models.mapped import Place

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


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; the name itself if there is none."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return name


def digest(path: Path) -> str:
    """SHA-256 of a whole file, in hex: some 1.5 GB/s where the CPU has instructions for it."""
    sha = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()


class GGUFFile:
    """A GGUF file, mapped into memory.

    Args:
        path: the file.
        header: what `read_header` has found in it before; None parses it.

    Raises:
        ModelLoadError: it is not a GGUF file, or a cut or damaged one, or ``header`` is another file's.
    """

    def __init__(self, path: Path, header: GGUFHeader | None = None) -> None:
        self.header = read_header(path) if header is None else header
        self._file = map_file(path)
        for name, place in self.header.places.items():
            if not 0 <= place.offset <= len(self._file) - place.nbytes:
                raise ModelLoadError(
                    f"cut file: tensor {name!r} takes {place.nbytes} bytes from {place.offset}, "
                    f"the file has {len(self._file)}"
                )
        self._labels = {hf_name(name): name for name in self.header.places}
        self._interleaved = self.header.metadata.get("general.architecture") == "llama"

    @property
    def places(self) -> Mapping[str, Place]:
        """Every tensor's type, shape and place, by Hugging Face name."""
        return {name: self.header.places[label] for name, label in self._labels.items()}

    def label(self, name: str) -> str:
        """What the file calls a tensor."""
        if name in self._labels:
            return self._labels[name]
        match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
        names = {theirs: ours for ours, theirs in (_GLOBAL_NAMES | _LAYER_NAMES).items()}
        if match is None or match[2] not in names:
            return name
        prefix = f"blk.{match[1]}." if match[1] else ""
        return f"{prefix}{names[match[2]]}.{match[3]}"

    def read(self, name: str) -> Tensor:
        """A tensor, in half-rotation order: mapped where its type and its order allow."""
        label = self._labels[name]
        tensor = read_tensor(self._file, self.header.places[label], label)
        if self._interleaved and ".self_attn." in name and (".q_proj." in name or ".k_proj." in name):
            key = "head_count" if ".q_proj." in name else "head_count_kv"
            metadata = self.header.metadata
            heads = metadata.get(f"llama.attention.{key}", metadata["llama.attention.head_count"])
            return _in_halves(tensor, heads)
        return tensor


def _in_halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows that belong to interleaved pairs, in half-rotation order: whole rows change places, whatever their kind."""
    if len(tensor.shape) == 1:  # a bias: its elements are the rows, and may share blocks
        tensor = tensor.to("float32")
    # Row 2 i + j of a head is the j-th of pair i; half-rotation has it at row j * (head_dim / 2) + i.
    pairs = tensor.data.reshape(heads, -1, 2, *tensor.data.shape[1:])
    return Tensor(tensor.kind, tensor.shape, pairs.swapaxes(1, 2).reshape(tensor.data.shape))
