"""What the engine does not do for a model of transformers is refused when it is loaded, by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from leafkv import LLM  # noqa: E402
from leafkv.errors import ModelLoadError  # noqa: E402
from leafkv.models.hf import attention  # noqa: E402
from leafkv.models.hf.features import context_of, examine  # noqa: E402

from .models import COMMON, GROUPED, build, config_of, tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # other people's
attention.register()
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
}

CONFIGS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("its own attention", "FalconConfig", {**COMMON, "alibi": False}, "FalconForCausalLM computes attention"),
    ("ALiBi", "FalconConfig", {**COMMON, "alibi": True}, "alibi = True"),
    ("ALiBi of its own", "BloomConfig", {}, "BloomForCausalLM computes attention"),
    ("an encoder", "T5Config", {}, "is_encoder_decoder = True"),
    ("chunks", "Llama4TextConfig", {}, "attention_chunk_size = 8192"),
    ("latent attention", "DeepseekV3Config", {}, "kv_lora_rank = 512"),
    ("shared layers", "Gemma3nTextConfig", {}, "num_kv_shared_layers = 15"),
    ("linear attention", "Qwen3NextConfig", {}, "layer_types: linear_attention"),
    ("a state", "MambaConfig", {}, r"layer_types: (linear_attention|mamba):"),
    ("later tokens", "LlamaConfig", {**GROUPED, "is_causal": False}, "is_causal = False"),
    ("later tokens of Gemma", "Gemma3TextConfig", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("axes", "LlamaConfig", {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                           "mrope_section": [2, 3, 3]}}, "mrope_section"),
    ("no context", "LlamaConfig", {**GROUPED, "max_position_embeddings": 0}, "max_position_embeddings: expected an"),
    ("no causal model", "ViTConfig", {}, "max_position|'vit'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "message"), [case[1:] for case in CONFIGS], ids=[case[0] for case in CONFIGS]
)
def test_a_configuration_is_refused_before_weights_are_read(
    kind: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    getattr(transformers, kind)(**options).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=message) as refused:  # there are no weights that could be read
        LLM(tmp_path, backend="transformers")
    assert str(refused.value).startswith(str(tmp_path))


class Shift(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A product that also looks at the token before, as recurrent and convolutional layers do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x + 0.5 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


def shifted(model: Any) -> None:
    model.model.layers[1].mlp = Shift(model.model.layers[1].mlp)


def biased(model: Any) -> None:
    """Its own attention has a bias that the attention function is not told of."""
    inner = model.model.layers[0].self_attn.forward

    def forward(*args: Any, **options: Any) -> Any:
        out, weights = inner(*args, **options)
        return (out + 0.3 if model.config._attn_implementation == "eager" else out), weights

    model.model.layers[0].self_attn.forward = forward


def twice(model: Any) -> None:
    inner = model.model.layers[0].self_attn.forward

    def forward(*args: Any, **options: Any) -> Any:
        inner(*args, **options)
        return inner(*args, **options)

    model.model.layers[0].self_attn.forward = forward


def keyword(model: Any) -> None:
    inner = model.model.layers[0].self_attn.forward
    model.model.layers[0].self_attn.forward = lambda *args, **options: inner(*args, **options, indexer=3)


def wider(model: Any) -> None:
    other = build(config_of("llama", num_key_value_heads=4), attention=attention.NAME)
    model.model.layers[1].self_attn = other.model.layers[1].self_attn
    model.model.layers[1].self_attn.config = model.config


def renamed(model: Any) -> None:
    model.model.layers[1].self_attn.layer_idx = 0


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (shifted, "two sequences in one batch differ from each alone"),
        (biased, "two sequences in one batch differ from each alone"),
        (twice, r"expected each of 2 layers to attend once, in order, got \[0, 0, 1\]"),
        (renamed, r"expected each of 2 layers to attend once, in order, got \[0, 0\]"),
        (keyword, "indexer: an option of attention that LeafKV does not know"),
        (wider, r"head_dim: expected the same in all layers, got \(4, 2, 16\), \(4, 4, 16\)"),
    ],
)
def test_what_a_model_does_and_the_engine_does_not_is_found_when_it_is_tried(plant: Any, message: str) -> None:
    model = tiny("llama", attention=attention.NAME)
    examine(model)
    plant(model)
    with pytest.raises(ModelLoadError, match=message):
        examine(model)
    assert model.config._attn_implementation == attention.NAME


def test_positions_that_are_not_counted_from_zero_are_refused() -> None:
    """RoBERTa and its like count from the padding token on."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.CamembertConfig(vocab_size=97, is_decoder=True, max_position_embeddings=64, **sizes)
    with pytest.raises(ModelLoadError, match="CamembertForCausalLM: two sequences in one batch differ"):
        examine(build(config, attention=attention.NAME))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_rounding_of_narrow_dtypes_is_no_reason_to_refuse_a_model(family: str, dtype: Any) -> None:
    assert examine(tiny(family, attention=attention.NAME, dtype=dtype)).head_dim == 16


def test_the_context_ends_where_longer_sequences_would_change_the_keys_of_shorter_ones() -> None:
    sizes = {**GROUPED, "head_dim": 16}
    config = transformers.Phi3Config(**sizes, original_max_position_embeddings=32, rope_parameters=LONG)
    assert context_of(config) == 32
    llm = LLM(build(config), backend="transformers", num_blocks=16)
    assert llm._router.max_model_len == 32
    assert context_of(transformers.GPT2Config(n_positions=77)) == 77
