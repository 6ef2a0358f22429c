"""A real model, SmolLM2 by transformers, gives the tokens of the reference: in the engine, and in `generate`."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from leafkv import LLM, SamplingParams  # noqa: E402
from leafkv.integrations.transformers import KVPool, LeafCache  # noqa: E402
from leafkv.models import load_model  # noqa: E402
from leafkv.models.gguf import GGUFFile  # noqa: E402
from leafkv.models.loader import embedded_model  # noqa: E402

from ..engine.test_reference_greedy import GREEDY, ITEMS, PROMPTS, drained  # noqa: E402
from .leaf import answer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # other people's
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """The embedded model as transformers has it, weights widened exactly."""
    config, file = load_model().config, GGUFFile(embedded_model())
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=config.tie_word_embeddings,
                bos_token_id=config.bos_token_id,
                eos_token_id=[*config.eos_token_ids],
            )
        )
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    weights = {name: torch.from_numpy(file.read(name).to_float32().copy()) for name in file.places}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model


def test_the_engine_gives_the_tokens_of_the_reference(smollm2: Any) -> None:
    tokenizer = load_model().tokenizer
    llm = LLM(smollm2, backend="transformers", num_blocks=64, tokenizer=tokenizer)
    for item, output in zip(ITEMS, llm.generate(PROMPTS, GREEDY), strict=True):
        assert output.prompt_token_ids == item["prompt_ids"]
        assert output.outputs[0].token_ids == item["generated_ids"], item["prompt"]
        assert output.outputs[0].text == tokenizer.decode(item["generated_ids"])
    assert drained(llm)
    for item, output in zip(ITEMS, llm.generate(PROMPTS, SHORT), strict=True):  # from the prefix cache
        assert output.num_cached_tokens == len(item["prompt_ids"]) - 1
        assert output.outputs[0].token_ids == item["generated_ids"][:12]
    assert drained(llm)


def test_generate_gives_the_tokens_of_the_reference(smollm2: Any) -> None:
    """In one batch, padded on the left; then each prompt alone, all but its last token found."""
    smollm2.set_attn_implementation("leafkv")
    pool = KVPool(smollm2, num_blocks=128)
    longest = max(len(item["prompt_ids"]) for item in ITEMS)
    rows = [[0] * (longest - len(item["prompt_ids"])) + item["prompt_ids"] for item in ITEMS]
    masks = [[0] * (longest - len(item["prompt_ids"])) + [1] * len(item["prompt_ids"]) for item in ITEMS]
    options = {"eos_token_id": None, "pad_token_id": 0}
    with LeafCache(pool) as cache:
        got = answer(smollm2, torch.tensor(rows), torch.tensor(masks), cache, max_new_tokens=24, **options)
    assert got[:, longest:].tolist() == [item["generated_ids"][:24] for item in ITEMS]
    for item in ITEMS[:3]:
        ids = torch.tensor([item["prompt_ids"]])
        with LeafCache(pool, ids) as cache:
            assert cache.num_cached_tokens == ids.shape[1] - 1
            got = answer(smollm2, ids, None, cache, max_new_tokens=12, **options)
        assert got[0, ids.shape[1] :].tolist() == item["generated_ids"][:12]
    stats = pool.manager.stats()
    assert stats.held_blocks == 0
    pool.manager.check_invariants()
    pool.close()
