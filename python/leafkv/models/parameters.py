"""The parameters of a model: what the files call them, how they are stacked, and their shapes.

Queries, keys and values are one matrix, as are gate and up: fewer, larger products. A matrix is a `Weight` over the
tensors it is stacked of, wherever they are and of whatever kinds: nothing is copied for it. A vector (a norm, a bias)
is a float32 array of its own. File tensors go by their Hugging Face names here; readers of other formats translate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from leafkv._core import Weight
from leafkv.errors import ModelLoadError
from leafkv.models.conversion import Conversion

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from leafkv.models.config import ModelConfig
    from leafkv.models.mapped import Place
    from leafkv.models.tensors import Tensor

Progress = Callable[[int, int, str], None]
"""Called as work proceeds with bytes done, bytes in total, and what is being done."""

Weights = Mapping[str, "Weight | NDArray[np.float32]"]
"""A model's parameters by name: matrices and vectors."""

_AS_STORED = Conversion()


class TensorSource(Protocol):
    """Tensors of a model file (or several), under their Hugging Face names."""

    @property
    def places(self) -> Mapping[str, Place]:
        """Every tensor's type, shape and place, by name."""

    def read(self, name: str) -> Tensor:
        """A tensor, mapped where that is possible."""

    def label(self, name: str) -> str:
        """What the file itself calls a tensor, for messages."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One matrix or vector of the model: file tensors ``(name, shape)`` stacked along the first axis."""

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, and not a vector."""
        return len(self.tensors[0][1]) == 2


def parameters(config: ModelConfig) -> list[Parameter]:
    """Every parameter that a model of this configuration has, in the order in which they are used.

    Where embeddings are tied there is no ``lm_head``: it is the embedding.
    """
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


def check_tensors(source: TensorSource, config: ModelConfig, conversion: Conversion = _AS_STORED) -> None:
    """Compare the file's tensors with what the configuration asks for: before anything is read or converted.

    Raises:
        ModelLoadError: a tensor is missing, has another shape, cannot be converted, or is one that the model would
            not use.
    """
    places = source.places
    if config.num_layers > len(places):
        raise ModelLoadError(f"the configuration has {config.num_layers} layers, but there are {len(places)} tensors")
    expected = set()
    for parameter in parameters(config):
        for name, shape in parameter.tensors:
            expected.add(name)
            label, found = source.label(name), places.get(name)
            if found is None:
                raise ModelLoadError(f"tensor {label!r} is missing")
            if found.shape != shape:
                raise ModelLoadError(f"tensor {label!r} has shape {found.shape}, the configuration gives {shape}")
            if parameter.is_matrix:
                conversion.check(label, found)
    for name in places:
        # Recomputed from the configuration, or the embedding under a second name.
        harmless = name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)
        if name not in expected and not harmless:
            raise ModelLoadError(f"tensor {source.label(name)!r} is not one that a {config.architecture} model has")


def read_tensors(
    source: TensorSource,
    config: ModelConfig,
    conversion: Conversion = _AS_STORED,
    progress: Progress | None = None,
    converted: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Every tensor that the model uses, matrices converted. They must have passed `check_tensors`.

    ``converted`` are tensors that were read and converted before, in the same way: they are taken as they are.

    Raises:
        ModelLoadError: a tensor is of a type that cannot be read, or holds what its new kind cannot.
    """
    places, done_before = source.places, converted or {}
    wanted = [(name, parameter.is_matrix) for parameter in parameters(config) for name, _ in parameter.tensors]
    done, total = 0, sum(places[name].nbytes for name, _ in wanted)
    tensors = {}
    for name, is_matrix in wanted:
        tensor = done_before.get(name)
        if tensor is None:
            tensor = source.read(name)
            try:
                tensor = tensor.to(conversion.kind_of(tensor.kind)) if is_matrix else tensor
            except ModelLoadError as error:
                raise ModelLoadError(f"tensor {source.label(name)!r}: {error}") from error
        tensors[name] = tensor
        done += places[name].nbytes
        if progress is not None:
            progress(done, total, "reading weights")
    return tensors


def as_weights(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Weights:
    """A model's parameters out of its tensors, which matrices keep and vectors are copied from."""
    weights: dict[str, Weight | NDArray[np.float32]] = {}
    for parameter in parameters(config):
        parts = [tensors[name] for name, _ in parameter.tensors]
        if parameter.is_matrix:
            weights[parameter.name] = Weight([(part.kind, part.data) for part in parts])
        else:
            weights[parameter.name] = np.concatenate([part.to_float32() for part in parts])
    return weights
