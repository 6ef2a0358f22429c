"""`ModelConfig` from a Hugging Face ``config.json``.

An option that changes the arithmetic is computed, or refused by name. Both spellings of RoPE are read: the
``rope_theta`` and ``rope_scaling`` of older files, and the ``rope_parameters`` of newer ones.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from leafkv.errors import ModelLoadError
from leafkv.models.config import ModelConfig, check_int, check_positive
from leafkv.models.rope import LinearScaling, Llama3Scaling, YarnScaling, yarn_attention_factor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from leafkv.models.rope import RopeScaling

_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Options of models akin to these, which LeafKV does not compute, and the values that switch each of them off.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "add_full_attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "alibi": (False,),
    "attn_config": (),
    "attention_chunk_size": (),
    "attention_multiplier": (1.0,),
    "attention_sink": (False,),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False, 0),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "kv_lora_rank": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "no_rope_layers": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "partial_rotary_factor": (1.0,),
    "position_embedding_type": ("rope", "rotary"),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "rotary_pct": (1.0,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "v_head_dim": (),
}


def config_from_hf(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """Read a ``config.json``; ``eos_token_ids`` go before those that it names.

    Raises:
        ModelLoadError: the architecture or an option is not supported, or a value is missing or malformed.
    """
    architecture = _architecture(raw)
    for option, neutral in _UNSUPPORTED.items():
        value = raw.get(option)
        if value is not None and value not in neutral:
            raise ModelLoadError(f"option {option} = {value!r} is not supported")
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelLoadError(f"option hidden_act = {activation!r} is not supported (only 'silu')")

    num_heads = check_int("num_attention_heads", raw.get("num_attention_heads"))
    hidden = check_int("hidden_size", raw.get("hidden_size"))
    num_layers = check_int("num_hidden_layers", raw.get("num_hidden_layers"))
    positions = check_int("max_position_embeddings", raw.get("max_position_embeddings"))
    head_dim = raw.get("head_dim")
    if head_dim is None:
        # Transformers gives every Qwen3 heads of 128; the others share out the hidden size.
        if architecture != "qwen3" and hidden % num_heads:
            raise ModelLoadError(f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({num_heads})")
        head_dim = 128 if architecture == "qwen3" else hidden // num_heads
    theta, scaling = _rope(raw, positions)
    window, full_layers = _window(raw, architecture, num_layers)
    biased = architecture == "qwen2" or _flag(raw, "attention_bias", False)
    kv_heads = raw.get("num_key_value_heads")
    return ModelConfig(
        architecture=architecture,
        vocab_size=check_int("vocab_size", raw.get("vocab_size")),
        hidden_size=hidden,
        intermediate_size=check_int("intermediate_size", raw.get("intermediate_size")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=check_positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=_flag(raw, "tie_word_embeddings", False),
        attention_bias=biased,
        attention_out_bias=biased and architecture != "qwen2",
        mlp_bias=_flag(raw, "mlp_bias", False),
        qk_norm=architecture == "qwen3",
        sliding_window=window,
        full_attention_layers=full_layers,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys((*eos_token_ids, *token_ids(raw.get("eos_token_id"))))),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ModelLoadError: the file is missing or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path.name} is missing") from error
    except ValueError as error:
        raise ModelLoadError(f"{path.name} is cut or not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name}: expected a JSON object, got {type(value).__name__}")
    return value


def token_ids(value: object) -> tuple[int, ...]:
    """An ``eos_token_id`` of a JSON file: absent, one id, or a list of them."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(check_int("eos_token_id", token_id, least=0) for token_id in ids)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if names not in [[name] for name in _CLASSES]:
        raise ModelLoadError(f"architectures = {names!r} is not supported (supported: {', '.join(_CLASSES)})")
    architecture = _CLASSES[raw["architectures"][0]]
    if (model_type := raw.get("model_type", architecture)) != architecture:
        raise ModelLoadError(f"model_type = {model_type!r} does not fit architectures = {names!r}")
    return architecture


def _flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise ModelLoadError(f"{name}: expected true or false, got {value!r}")
    return value


def _window(raw: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, frozenset[int]]:
    """The sliding window, and the layers that it does not apply to."""
    window = raw.get("sliding_window")
    kinds = raw.get("layer_types")
    if architecture.startswith("qwen") and not _flag(raw, "use_sliding_window", False):
        window = None
    elif architecture == "llama" and window is not None:
        raise ModelLoadError(f"option sliding_window = {window!r} is not supported in a llama model")
    if kinds is None:
        first = check_int("max_window_layers", raw.get("max_window_layers", 28), least=0)
        full = range(min(first, num_layers)) if architecture.startswith("qwen") else range(0)
        return window, frozenset(full) if window is not None else frozenset()
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ModelLoadError(
            f"layer_types: expected 'full_attention' or 'sliding_attention' for each of {num_layers} layers, "
            f"got {kinds!r}"
        )
    if "sliding_attention" not in kinds:
        return None, frozenset()
    if window is None:
        raise ModelLoadError("layer_types has 'sliding_attention', but sliding_window is not set")
    return window, frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")


def _rope(raw: Mapping[str, Any], positions: int) -> tuple[float, RopeScaling | None]:
    """``rope_theta`` and the scaling."""
    options: dict[str, Any] = {}
    for source in ("rope_scaling", "rope_parameters"):
        value = raw.get(source)
        if value is None:
            continue
        if not isinstance(value, dict) or any(isinstance(inner, dict) for inner in value.values()):
            raise ModelLoadError(f"{source}: expected one set of options for all layers, got {value!r}")
        options |= value
    theta = check_positive("rope_theta", options.pop("rope_theta", raw.get("rope_theta", 10_000.0)))
    if (partial := options.pop("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise ModelLoadError(f"option partial_rotary_factor = {partial!r} is not supported")
    old_kind = options.pop("type", None)
    kind = options.pop("rope_type", None) or old_kind or "default"
    if kind == "default":
        _refuse_rest(kind, options)
        return theta, None
    original = options.pop("original_max_position_embeddings", None)
    original = raw.get("original_max_position_embeddings") or original or positions
    original = check_int("original_max_position_embeddings", original)
    factor = options.pop("factor", None)
    if factor is None and kind == "yarn":
        factor = positions / original
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelLoadError(f"rope_type = {kind!r} is not supported (supported: linear, llama3, yarn)")
    factor = check_positive("rope factor", factor)
    scaling: RopeScaling
    if kind == "linear":
        scaling = LinearScaling(factor)
    elif kind == "llama3":
        low = check_positive("low_freq_factor", options.pop("low_freq_factor", None))
        high = check_positive("high_freq_factor", options.pop("high_freq_factor", None), above=low)
        scaling = Llama3Scaling(factor, low, high, original)
    else:
        scaling = _yarn(options, factor, original)
    _refuse_rest(kind, options)
    return theta, scaling


def _yarn(options: dict[str, Any], factor: float, original: int) -> YarnScaling:
    mscale, mscale_all = options.pop("mscale", None), options.pop("mscale_all_dim", None)
    attention_factor = options.pop("attention_factor", None)
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor)
        if mscale and mscale_all:
            numerator = yarn_attention_factor(factor, check_positive("mscale", mscale))
            divisor = yarn_attention_factor(factor, check_positive("mscale_all_dim", mscale_all))
            attention_factor = numerator / divisor
    return YarnScaling(
        factor,
        original,
        check_positive("attention_factor", attention_factor),
        beta_fast=check_positive("beta_fast", options.pop("beta_fast", None) or 32.0),
        beta_slow=check_positive("beta_slow", options.pop("beta_slow", None) or 1.0),
        truncate=_flag({"truncate": options.pop("truncate", True)}, "truncate", True),
    )


def _refuse_rest(kind: str, options: Mapping[str, Any]) -> None:
    rest = {name: value for name, value in options.items() if value is not None}
    # Written by some exporters whatever the type; it says nothing on its own.
    rest.pop("original_max_position_embeddings", None)
    if rest:
        raise ModelLoadError(f"rope options {rest!r} are not supported with rope_type = {kind!r}")
