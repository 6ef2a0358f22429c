"""The parameters of a model: what the files call them, how they are stacked, and their shapes.

Queries, keys and values are one matrix, as are gate and up: fewer, larger products. File tensors go by their
Hugging Face names here; readers of other formats translate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from leafkv.errors import ModelLoadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from leafkv.models.config import ModelConfig

Progress = Callable[[int, int, str], None]
"""Called as work proceeds with bytes done, bytes in total, and what is being done."""

Weights = Mapping[str, "NDArray[np.float32]"]
"""A model's parameters by name, float32."""


class TensorSource(Protocol):
    """Tensors of a model file (or several), under their Hugging Face names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape, by name."""

    def read(self, name: str, out: NDArray[np.float32]) -> None:
        """Fill ``out``, which has the tensor's shape, with its values."""

    def label(self, name: str) -> str:
        """What the file itself calls a tensor, for messages."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One array of the model: file tensors ``(name, shape)`` stacked along the first axis."""

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The stacked shape."""
        rows = sum(shape[0] for _, shape in self.tensors)
        return (rows, *self.tensors[0][1][1:])

    @property
    def nbytes(self) -> int:
        """Bytes in float32."""
        return 4 * int(np.prod(self.shape, dtype=np.int64))


def parameters(config: ModelConfig) -> list[Parameter]:
    """Every parameter that a model of this configuration has, in the order in which they are used."""
    c = config
    hidden, inner = c.hidden_size, c.intermediate_size
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    found: list[Parameter] = []

    def add(name: str, *tensors: tuple[str, tuple[int, ...]]) -> None:
        found.append(Parameter(name, tensors))

    add("embedding", ("model.embed_tokens.weight", (c.vocab_size, hidden)))
    for i in range(c.num_layers):
        prefix, layer = f"model.layers.{i}.", f"layers.{i}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = (
            (f"{attention}q_proj", q_size),
            (f"{attention}k_proj", kv_size),
            (f"{attention}v_proj", kv_size),
        )
        gate_up = ((f"{mlp}gate_proj", inner), (f"{mlp}up_proj", inner))
        add(f"{layer}attention_norm", (f"{prefix}input_layernorm.weight", (hidden,)))
        add(f"{layer}qkv", *((f"{name}.weight", (rows, hidden)) for name, rows in qkv))
        if c.attention_bias:
            add(f"{layer}qkv_bias", *((f"{name}.bias", (rows,)) for name, rows in qkv))
        if c.qk_norm:
            add(f"{layer}q_norm", (f"{attention}q_norm.weight", (c.head_dim,)))
            add(f"{layer}k_norm", (f"{attention}k_norm.weight", (c.head_dim,)))
        add(f"{layer}attention_out", (f"{attention}o_proj.weight", (hidden, q_size)))
        if c.attention_out_bias:
            add(f"{layer}attention_out_bias", (f"{attention}o_proj.bias", (hidden,)))
        add(f"{layer}mlp_norm", (f"{prefix}post_attention_layernorm.weight", (hidden,)))
        add(f"{layer}gate_up", *((f"{name}.weight", (rows, hidden)) for name, rows in gate_up))
        add(f"{layer}down", (f"{mlp}down_proj.weight", (hidden, inner)))
        if c.mlp_bias:
            add(f"{layer}gate_up_bias", *((f"{name}.bias", (rows,)) for name, rows in gate_up))
            add(f"{layer}down_bias", (f"{mlp}down_proj.bias", (hidden,)))
    add("norm", ("model.norm.weight", (hidden,)))
    if not c.tie_word_embeddings:
        add("lm_head", ("lm_head.weight", (c.vocab_size, hidden)))
    return found


def check_tensors(source: TensorSource, config: ModelConfig) -> None:
    """Compare the file's tensors with what the configuration asks for: before anything is allocated.

    Raises:
        ModelLoadError: a tensor is missing, has another shape, or is one that the model would not use.
    """
    if config.num_layers > len(source.shapes):
        raise ModelLoadError(
            f"the configuration has {config.num_layers} layers, but there are {len(source.shapes)} tensors"
        )
    expected = {name: shape for parameter in parameters(config) for name, shape in parameter.tensors}
    for name, shape in expected.items():
        found = source.shapes.get(name)
        if found is None:
            raise ModelLoadError(f"tensor {source.label(name)!r} is missing")
        if found != shape:
            raise ModelLoadError(f"tensor {source.label(name)!r} has shape {found}, the configuration gives {shape}")
    for name in source.shapes:
        # Recomputed from the configuration, or the embedding under a second name.
        harmless = name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)
        if name not in expected and not harmless:
            raise ModelLoadError(f"tensor {source.label(name)!r} is not one that a {config.architecture} model has")


def read_weights(source: TensorSource, config: ModelConfig, progress: Progress | None = None) -> Weights:
    """Read every parameter as float32. The tensors must have passed `check_tensors`."""
    wanted = parameters(config)
    total = sum(parameter.nbytes for parameter in wanted)
    done = 0
    weights = {}
    for parameter in wanted:
        array = np.empty(parameter.shape, dtype=np.float32)
        row = 0
        for name, shape in parameter.tensors:
            source.read(name, array[row : row + shape[0]])
            row += shape[0]
        weights[parameter.name] = array
        done += parameter.nbytes
        if progress is not None:
            progress(done, total, "reading weights")
    return weights
