"""Options that LeafKV does not compute are refused by name; what it accepts is what transformers would compute."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest

from leafkv.errors import ModelLoadError
from leafkv.models.config_hf import config_from_hf
from leafkv.models.rope import LinearScaling, Llama3Scaling, YarnScaling

from .tiny import CONFIGS

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


REFUSED: list[tuple[str, Any, str]] = [
    ("architectures", ["GemmaForCausalLM"], "architectures = ['GemmaForCausalLM']"),
    ("architectures", ["LlamaForSequenceClassification"], "architectures = ['LlamaForSequenceClassification']"),
    ("architectures", [], "architectures = []"),
    ("model_type", "gemma", "model_type = 'gemma'"),
    ("hidden_act", "gelu", "hidden_act = 'gelu'"),
    ("alibi", True, "alibi = True"),
    ("attn_logit_softcapping", 50.0, "attn_logit_softcapping = 50.0"),
    ("final_logit_softcapping", 30.0, "final_logit_softcapping = 30.0"),
    ("attention_sink", True, "attention_sink = True"),
    ("add_swa_attention_sink_bias", True, "add_swa_attention_sink_bias = True"),
    ("attn_config", {"alibi": True}, "attn_config = {'alibi': True}"),
    ("position_embedding_type", "alibi", "position_embedding_type = 'alibi'"),
    ("kv_lora_rank", 512, "kv_lora_rank = 512"),
    ("v_head_dim", 128, "v_head_dim = 128"),
    ("partial_rotary_factor", 0.5, "partial_rotary_factor = 0.5"),
    ("quantization_config", {"quant_method": "gptq"}, "quantization_config = {'quant_method': 'gptq'}"),
    ("num_local_experts", 8, "num_local_experts = 8"),
    ("logits_scaling", 8.0, "logits_scaling = 8.0"),
    ("use_qk_norm", True, "use_qk_norm = True"),
    ("no_rope_layers", [1, 0], "no_rope_layers = [1, 0]"),
    ("sliding_window", 8, "sliding_window = 8"),  # transformers would ignore it in a Llama
    ("rope_scaling", {"type": "dynamic", "factor": 2.0}, "rope_type = 'dynamic'"),
    ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}, "rope_type = 'longrope'"),
    ("rope_scaling", {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_type = 'mrope'"),
    ("rope_scaling", {"rope_type": "default", "mrope_section": [2, 1, 1]}, "{'mrope_section': [2, 1, 1]}"),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "unheard_of": 1}, "{'unheard_of': 1}"),
    ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}, "rope_parameters: expected one set"),
    ("rope_scaling", {"type": "linear"}, "rope factor: expected a finite number greater than 0, got None"),
    ("rope_scaling", {"type": "linear", "factor": float("nan")}, "rope factor: expected a finite number"),
    ("rope_scaling", YARN | {"attention_factor": -1.0}, "attention_factor: expected a finite number"),
    ("rope_scaling", LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor: expected a finite number greater than 4"),
    ("num_attention_heads", 0, "num_attention_heads: expected an integer of at least 1, got 0"),
    ("num_attention_heads", 5, "hidden_size (32) is not a multiple of num_attention_heads (5)"),
    ("num_key_value_heads", 3, "num_heads (4) must be a multiple of num_kv_heads (3)"),
    ("num_hidden_layers", -1, "num_hidden_layers: expected an integer of at least 1, got -1"),
    ("hidden_size", "32", "hidden_size: expected an integer of at least 1, got '32'"),
    ("vocab_size", None, "vocab_size: expected an integer of at least 1, got None"),
    ("max_position_embeddings", 1 << 40, "max_position_embeddings: expected an integer"),
    ("head_dim", 7, "head_dim (7) must be even"),
    ("rms_norm_eps", 0.0, "rms_norm_eps: expected a finite number greater than 0, got 0.0"),
    ("rms_norm_eps", float("inf"), "rms_norm_eps: expected a finite number greater than 0, got inf"),
    ("rope_theta", float("nan"), "rope_theta: expected a finite number"),
    ("rope_theta", 1.0, "rope_theta: expected a finite number greater than 1, got 1.0"),
    ("attention_bias", "yes", "attention_bias: expected true or false, got 'yes'"),
    ("eos_token_id", ["2"], "eos_token_id: expected an integer of at least 0, got '2'"),
    ("eos_token_id", [2, 64], "token ids must be in [0, 64), the vocabulary; got 64"),
    ("bos_token_id", -1, "token ids must be in [0, 64), the vocabulary; got -1"),
]


@pytest.mark.parametrize(("option", "value", "message"), REFUSED)
def test_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        config_from_hf({**CONFIGS["llama"], option: value})


def test_malformed_values_never_raise_anything_else() -> None:
    scalings: list[dict[str, Any]] = [
        {"factor": "x"},
        {"beta_fast": "x"},
        {"truncate": 1},
        {"mscale": []},
        {"attention_factor": {}},
    ]
    junk: list[Any] = [None, 5, -1, 1.5, float("nan"), 10**30, "x", True, [], [1], [[1]], {}, {"type": 5}]
    junk += [{"rope_type": ["x"]}, {"partial_rotary_factor": []}, *(YARN | scaling for scaling in scalings)]
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": None}
    rope = {"rope_scaling": None, "rope_parameters": None, "original_max_position_embeddings": None}
    refused = 0
    for raw in (CONFIGS["llama"] | rope, CONFIGS["qwen2"] | rope | window):
        for option in (*raw, "head_dim", "attention_bias", "alibi", "quantization_config"):
            for value in junk:
                with contextlib.suppress(ModelLoadError):
                    config_from_hf(raw | {option: value})
                    refused -= 1
                refused += 1
    assert refused > 500


def test_layers_of_a_sliding_window() -> None:
    def windows(**options: Any) -> list[int | None]:
        raw = CONFIGS["qwen2"] | {"num_hidden_layers": 4} | options
        config = config_from_hf(raw)
        return [config.window(i) for i in range(4)]

    assert windows(sliding_window=5) == [None] * 4  # off unless use_sliding_window
    on = {"use_sliding_window": True, "sliding_window": 5}
    assert windows(**on) == [None] * 4  # from layer 28 on
    assert windows(**on, max_window_layers=0) == [5] * 4
    assert windows(**on, max_window_layers=3) == [None, None, None, 5]
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert windows(**on, layer_types=kinds) == [5, None, 5, None]
    assert windows(use_sliding_window=False, layer_types=["full_attention"] * 4) == [None] * 4
    for bad in (["chunked_attention"] * 4, kinds[:3]):
        with pytest.raises(ModelLoadError, match="layer_types"):
            windows(**on, layer_types=bad)
    with pytest.raises(ModelLoadError, match="sliding_window is not set"):
        windows(layer_types=kinds)
    mistral = config_from_hf(CONFIGS["mistral"])
    assert [mistral.window(i) for i in range(2)] == [7, 7]


def test_both_spellings_of_rope() -> None:
    def scaling(**options: Any) -> tuple[float, object]:
        raw = {key: value for key, value in CONFIGS["llama"].items() if key != "rope_theta"}
        config = config_from_hf(raw | options)
        return config.rope_theta, config.rope_scaling

    assert scaling() == (10_000.0, None)
    assert scaling(rope_theta=500.0, rope_scaling=None) == (500.0, None)
    assert scaling(rope_parameters={"rope_type": "default", "rope_theta": 500.0}) == (500.0, None)
    linear = {"rope_type": "linear", "factor": 2.0}
    assert scaling(rope_parameters=linear | {"rope_theta": 500.0}) == (500.0, LinearScaling(2.0))
    assert scaling(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0}) == (500.0, LinearScaling(2.0))
    assert scaling(rope_scaling=LLAMA3)[1] == Llama3Scaling(8.0, 1.0, 4.0, 64)
    yarn = scaling(rope_scaling=YARN | {"original_max_position_embeddings": 16, "attention_factor": 1.5})[1]
    assert yarn == YarnScaling(4.0, 16, 1.5)


def test_end_tokens_of_both_files() -> None:
    assert config_from_hf(CONFIGS["llama"] | {"eos_token_id": [2, 5]}, (7, 5)).eos_token_ids == (7, 5, 2)
