"""The configuration of a model: what its arrays look like, and which options of the family it uses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leafkv.errors import ModelLoadError

if TYPE_CHECKING:
    from leafkv.models.rope import RopeScaling

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures that LeafKV computes."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and options of a decoder of the Llama family, checked on construction.

    Raises:
        ModelLoadError: a value is missing, not a number, out of range, or does not fit another one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Tokens of context the model is made for."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    """The embedding is also the output matrix."""
    attention_bias: bool = False
    """Queries, keys and values have a bias."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head, before RoPE."""
    sliding_window: int | None = None
    """A token sees at most this many last ones, itself included."""
    full_attention_layers: frozenset[int] = frozenset()
    """Layers that the sliding window does not apply to."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a text."""

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelLoadError(
                f"architecture {self.architecture!r} is not supported (supported: {', '.join(ARCHITECTURES)})"
            )
        for name in _SIZES:
            check_int(name, getattr(self, name))
        if self.sliding_window is not None:
            check_int("sliding_window", self.sliding_window)
        check_positive("rms_norm_eps", self.rms_norm_eps)
        check_positive("rope_theta", self.rope_theta, above=1.0)
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim ({self.head_dim}) must be even: RoPE turns pairs of dimensions")
        for token in (self.bos_token_id, *self.eos_token_ids):
            if token is not None and not (_is_int(token) and 0 <= token < self.vocab_size):
                raise ModelLoadError(
                    f"bos and eos token ids must be in [0, {self.vocab_size}), the vocabulary; got {token!r}"
                )

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer, None if it sees everything before it."""
        return None if layer in self.full_attention_layers else self.sliding_window


def check_int(name: str, value: object, *, least: int = 1) -> int:
    """``value`` as an int in ``[least, 2**31)``, or a `ModelLoadError` naming ``name``."""
    if not _is_int(value) or not least <= value < 2**31:  # type: ignore[operator]
        raise ModelLoadError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return value  # type: ignore[return-value]


def check_positive(name: str, value: object, *, above: float = 0.0) -> float:
    """``value`` as a finite float greater than ``above``, or a `ModelLoadError` naming ``name``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= above:
        raise ModelLoadError(f"{name}: expected a finite number greater than {above:g}, got {value!r}")
    return float(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
