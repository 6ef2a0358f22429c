"""What LeafCache cannot hold, or cannot tell, is refused with its name; never computed otherwise."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

import leafkv
from leafkv.integrations.transformers import KVPool, LeafCache
from tests.hf.leaf import KEYWORD, answer, check_idle, model_of, prompts, step
from tests.hf.models import GROUPED, build, tiny

REFUSED: dict[str, tuple[str, Any]] = {
    "encoder and decoder": (
        "encoder",
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
    ),
    "states": (
        "MambaModel",
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)
        ),
    ),
    "states beside keys and values": (
        "linear_attention",
        lambda: transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3NextConfig(
                **GROUPED,
                layer_types=["linear_attention", "full_attention"],
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
            )
        ),
    ),
    "latent attention": (
        "latent attention",
        lambda: transformers.AutoModelForCausalLM.from_config(
            transformers.DeepseekV2Config(
                **{**GROUPED, "num_key_value_heads": 4},
                first_k_dense_replace=2,
                q_lora_rank=None,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=12,
            ),
            attn_implementation="eager",
        ),
    ),
    "layers without KV": (
        "KV of their own",
        lambda: build(
            transformers.Gemma3nTextConfig(
                **{**GROUPED, "num_hidden_layers": 4, "intermediate_size": [96] * 4},
                head_dim=16,
                num_kv_shared_layers=2,
                layer_types=["sliding_attention", "full_attention"] * 2,
                activation_sparsity_pattern=[0.0] * 4,
                hidden_size_per_layer_input=8,
                laurel_rank=8,
                vocab_size_per_layer_input=97,
            )
        ),
    ),
    "both directions": ("use_bidirectional_attention", lambda: tiny("gemma3", use_bidirectional_attention=True)),
    "attention of its own": ("attn_implementation|mask", lambda: switched("falcon")),
}


def switched(family: str) -> Any:
    """A model that says that its attention is LeafKV's."""
    model = tiny(family)
    model.config._attn_implementation = "leafkv"
    return model


@pytest.mark.parametrize("what", REFUSED)
def test_models(what: str) -> None:
    words, make = REFUSED[what]
    model = make()
    with pytest.raises(leafkv.InvalidInputError, match=words):
        KVPool(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_is_no_model() -> None:
    with pytest.raises(leafkv.InvalidInputError, match="model: expected a model of transformers"):
        LeafCache("gpt2")
    with pytest.raises(leafkv.InvalidInputError, match="dtype: expected one of"):
        KVPool(model_of("llama"), kv_cache_dtype="fp8")


def test_prompts() -> None:
    ids, mask = prompts(2, 8)
    with KVPool(model_of("llama"), 8, block_size=4) as pool:
        for arguments, words in (
            ((None, mask), "attention_mask: expected input_ids, too"),
            ((ids[0],), "input_ids: expected a tensor of ids"),
            ((ids.float(),), "input_ids: expected a tensor of ids"),
            ((ids, mask[:, :5]), "attention_mask: expected"),
        ):
            with pytest.raises(leafkv.InvalidInputError, match=words):
                LeafCache(pool, *arguments)
        check_idle(pool)


def test_forwards() -> None:
    """Masks that do not go with what is cached, other batches, other models, gradients, other dtypes."""
    model = model_of("llama")
    ids, mask = prompts(2, 12, seed=1, pads=(0, 3))
    with KVPool(model, 16, block_size=4) as pool, LeafCache(pool) as kv:
        step(model, ids[:, :8], kv, attention_mask=mask[:, :8])
        flipped = mask.clone()
        flipped[1, 0] = 1
        three = torch.cat([ids, ids[:1]])
        for arguments, words in (
            ({"attention_mask": None}, "masked as when they were computed"),
            ({"attention_mask": flipped}, "masked as when they were computed"),
            ({"attention_mask": mask[:, 8:]}, "attention_mask: expected"),
            ({"attention_mask": torch.ones(2, 1, 4, 12)}, "masked as when they were computed"),
            ({"input_ids": three[:, 8:], "attention_mask": None}, "expected 2 rows, or a multiple"),
        ):
            with pytest.raises(leafkv.InvalidInputError, match=words), torch.no_grad():
                model(**({"input_ids": ids[:, 8:]} | arguments), **{KEYWORD: kv})
        with pytest.raises(leafkv.InvalidInputError, match="expected rows of 2"):
            kv.reorder_cache(torch.tensor([0, 2]))
        with pytest.raises(leafkv.InvalidInputError, match="requires_grad"):
            model(ids[:, 8:], attention_mask=mask, **{KEYWORD: kv})
        with pytest.raises(leafkv.InvalidInputError, match="another model"):
            step(tiny("llama"), ids[:, 8:], kv, attention_mask=mask)
        other = tiny("qwen2")
        with KVPool(other, 4), pytest.raises(leafkv.InvalidInputError, match="another model"):
            step(other, ids[:, 8:], kv, attention_mask=mask)
        pool.manager.check_invariants()
        # None of it did anything.
        got = step(model, ids[:, 8:], kv, attention_mask=mask, position_ids=(mask.cumsum(1) - 1)[:, 8:])
        expected = step(model_of("llama", "eager"), ids, None, attention_mask=mask, position_ids=None)
        torch.testing.assert_close(got[0], expected[0, 8:], atol=1e-4, rtol=1e-4)
    with pytest.raises(leafkv.InvalidInputError, match="closed"):
        step(model, ids, kv)


def test_padding_inside_a_window() -> None:
    model = model_of("mistral")
    ids, mask = prompts(1, 12, seed=2)
    mask[0, 5] = 0
    with KVPool(model, 16, block_size=4) as pool:
        with LeafCache(pool) as kv, pytest.raises(leafkv.InvalidInputError, match="sliding window cannot reach"):
            step(model, ids, kv, attention_mask=mask)
        check_idle(pool)


def test_dtypes_that_change() -> None:
    model = tiny("llama", attention="leafkv")
    ids, _ = prompts(1, 6, seed=3)
    with KVPool(model, 8, block_size=4) as pool, LeafCache(pool) as kv:
        step(model, ids, kv)
        model.to(torch.bfloat16)
        with pytest.raises(leafkv.InvalidInputError, match=r"key_states: expected float32 .* got bfloat16"):
            step(model, ids[:, :1], kv)
        model.to(torch.float32)
        pool.manager.check_invariants()


def test_attention_that_changes() -> None:
    """Another attention does not read tiled blocks; a pool that is made after the change has plain rows."""
    model = tiny("llama", attention="leafkv")
    ids, _ = prompts(1, 6, seed=4)
    expected = answer(model, ids)
    with KVPool(model, 8, block_size=16) as pool:
        assert pool.kv.layout == "tiled"
        model.set_attn_implementation("eager")
        with LeafCache(pool) as kv, pytest.raises(leafkv.InvalidInputError, match="attn_implementation"):
            step(model, ids, kv)
    with KVPool(model, 8, block_size=16) as pool:
        assert torch.equal(answer(model, ids, kv=LeafCache(pool)), expected)
        model.set_attn_implementation("leafkv")
        assert torch.equal(answer(model, ids, kv=LeafCache(pool)), expected)
