"""`ModelConfig` from the metadata of a GGUF file.

Every key under the architecture's prefix is either read here, or known to change nothing, or refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from leafkv.errors import ModelLoadError
from leafkv.models.config import ModelConfig, check_int, check_positive
from leafkv.models.rope import FrequencyFactors, LinearScaling, YarnScaling, yarn_attention_factor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from leafkv.models.gguf_header import GGUFHeader
    from leafkv.models.rope import RopeScaling

# As GGUF names them: Mistral models are "llama" there.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Values of options that LeafKV does not compute which leave the arithmetic as it is.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "embedding_scale": (1.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
# Notes about the training, which say nothing about the arithmetic.
_NOTES = {"rope.scaling.finetuned"}


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the configuration. Biases and untied outputs are told by the names of the tensors.

    Raises:
        ModelLoadError: the architecture or an option is not supported, or a value is missing or malformed.
    """
    metadata, tensors = header.metadata, header.tensor_names
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelLoadError(
            f"general.architecture = {architecture!r} is not supported (supported: {', '.join(_ARCHITECTURES)})"
        )
    prefix = f"{architecture}."
    options = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}

    def integer(name: str, default: int | None = None) -> int:
        return check_int(prefix + name, options.pop(name, default))

    num_heads = integer("attention.head_count")
    hidden = integer("embedding_length")
    positions = integer("context_length")
    head_dim = integer("attention.key_length", hidden // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := integer(name, head_dim)) != head_dim:
            raise ModelLoadError(f"{prefix}{name} = {size} is not supported: it must be {head_dim}, the head size")
    window = options.pop("attention.sliding_window", None)
    theta = check_positive(f"{prefix}rope.freq_base", options.pop("rope.freq_base", 10_000.0))
    eps = check_positive(
        f"{prefix}attention.layer_norm_rms_epsilon", options.pop("attention.layer_norm_rms_epsilon", None)
    )
    scaling = _rope_scaling(prefix, options, positions, head_dim, header.rope_factors)
    tokens = metadata.get("tokenizer.ggml.tokens")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=integer("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        hidden_size=hidden,
        intermediate_size=integer("feed_forward_length"),
        num_layers=integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=eps,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_window=window or None,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=end_token_ids(metadata),
    )
    for name, value in options.items():
        if name not in _NOTES and value not in _NEUTRAL.get(name, ()):
            raise ModelLoadError(f"option {prefix}{name} = {value!r} is not supported")
    return config


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text, a turn or a message."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(check_int(key, metadata[key], least=0) for key in keys if key in metadata))


def _rope_scaling(
    prefix: str,
    options: dict[str, Any],
    positions: int,
    head_dim: int,
    rope_factors: list[float] | None,
) -> RopeScaling | None:
    kind = options.pop("rope.scaling.type", "none")
    original = check_int(
        f"{prefix}rope.scaling.original_context_length",
        options.pop("rope.scaling.original_context_length", positions),
    )
    factor = options.pop("rope.scaling.factor", options.pop("rope.scale_linear", None))
    if rope_factors is not None:
        if kind != "none":
            raise ModelLoadError(
                f"{prefix}rope.scaling.type = {kind!r} is not supported together with rope_freqs.weight"
            )
        factors = np.asarray(rope_factors)
        if factors.shape != (head_dim // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
            raise ModelLoadError(
                f"rope_freqs.weight: expected {head_dim // 2} finite positive factors, got shape {factors.shape}"
            )
        return FrequencyFactors(tuple(rope_factors))
    if kind == "none" or factor == 1.0:
        return None
    factor = check_positive(f"{prefix}rope.scaling.factor", factor)
    if kind == "linear":
        return LinearScaling(factor)
    if kind != "yarn":
        raise ModelLoadError(f"{prefix}rope.scaling.type = {kind!r} is not supported (supported: linear, yarn)")
    # The file's factor comes on top of the one that follows from the extension.
    extra = options.pop("rope.scaling.yarn_attn_factor", options.pop("rope.scaling.attn_factor", 1.0))
    return YarnScaling(
        factor,
        original,
        yarn_attention_factor(factor) * check_positive(f"{prefix}rope.scaling.attn_factor", extra),
        beta_fast=check_positive("yarn_beta_fast", options.pop("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=check_positive("yarn_beta_slow", options.pop("rope.scaling.yarn_beta_slow", 1.0)),
    )
