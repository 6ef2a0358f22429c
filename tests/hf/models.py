"""Tiny models of transformers with random weights: of each family two layers, sharp enough to be told apart.

Weights are spread widely, so that the best logit leads the second by far more than rounding: greedy tokens of two
right implementations are equal, and those of a wrong one are not for long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB = 97
"""Tokens. 0 pads, and there is no end token: answers have the length that is asked for."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # tied ones would repeat the last token for ever
}
GROUPED: dict[str, Any] = {
    **COMMON,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WINDOW = 12
"""Of the families with sliding windows: shorter than the tests' texts."""

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=32),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, head_dim=16, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED,
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GROUPED,
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": lambda: transformers.GPT2Config(**{**COMMON, "n_positions": 512}),
    "falcon": lambda: transformers.FalconConfig(
        **COMMON, multi_query=True, alibi=False, new_decoder_architecture=False
    ),
    "falcon_alibi": lambda: transformers.FalconConfig(
        **COMMON, multi_query=False, alibi=True, new_decoder_architecture=False
    ),
    "phi3": lambda: transformers.Phi3Config(**GROUPED),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **GROUPED,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
}
"""Configurations by family."""

OWN_ATTENTION = ("falcon", "falcon_alibi")
"""Families whose attention is their own code: they take no ``attn_implementation`` but those of transformers."""


def config_of(family: str, **changes: Any) -> Any:
    """A family's configuration, with some attributes changed."""
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def build(config: Any, *, seed: int = 0, attention: str = "eager", dtype: Any = torch.float32) -> Any:
    """A causal language model of ``config``, for evaluation, with random weights that are a function of ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    # The outputs of a product are spread as its inputs are, a little more.
                    fan_in = parameter.shape[-1] if "embed" not in name and "wte" not in name else 1
                    parameter.normal_(0, 1.4 * fan_in**-0.5)
                elif name.endswith(("bias", "sinks")):
                    parameter.normal_(0, 0.3)
    return model.to(dtype).eval()


def tiny(family: str, *, seed: int = 0, attention: str = "eager", dtype: Any = torch.float32, **changes: Any) -> Any:
    """A tiny model of a family: see `build` and `config_of`."""
    return build(config_of(family, **changes), seed=seed, attention=attention, dtype=dtype)
