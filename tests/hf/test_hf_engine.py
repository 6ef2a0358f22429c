"""The engine over models of transformers gives the greedy tokens that `generate` gives, however it is run.

Products of PyTorch give a row other bits in another batch, so tokens are compared where the likeliest leads by more
than rounding may change; past one that does not, on the reference's own text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from leafkv import LLM, InvalidInputError, KVCache, SamplingParams  # noqa: E402
from leafkv.models import Batch  # noqa: E402
from leafkv.models.hf import attention  # noqa: E402
from leafkv.models.hf.model import HFModel  # noqa: E402

from .models import VOCAB, WINDOW, tiny  # noqa: E402
from .test_hf_attention import FAMILIES, texts  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # other people's
NEW = 20
MARGIN = 1e-3
GREEDY = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "one at a time": {"max_num_seqs": 1},
    "in chunks": {"max_num_batched_tokens": 7},
    "preempted": {"num_blocks": 26},
    "in blocks of 16": {"block_size": 16, "num_threads": 1},
    "whole blocks": {"partial_hits": False, "block_size": 3},
}


def prompts() -> list[list[int]]:
    """Of all lengths around the window's, two with a prefix in common."""
    rows = texts(WINDOW + 19, 3, WINDOW, 2 * WINDOW)
    return [*rows, [*rows[0][:-4], *rows[1]]]


def reference(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The greedy tokens of transformers, and by how much each led the next best."""
    with torch.no_grad():
        answer = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(answer.logits).topk(2).values
    return answer.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def check(llm: LLM, expected: list[tuple[list[int], list[float]]], margin: float = MARGIN) -> None:
    rest = [(prompt, tokens, margins) for prompt, (tokens, margins) in zip(prompts(), expected, strict=True)]
    while rest:
        outputs = llm.generate(
            [prompt for prompt, _, _ in rest],
            [SamplingParams(max_tokens=len(tokens), **GREEDY) for _, tokens, _ in rest],  # type: ignore[arg-type]
        )
        again = []
        for output, (prompt, tokens, margins) in zip(outputs, rest, strict=True):
            got = output.outputs[0].token_ids
            same = next((i for i, pair in enumerate(zip(got, tokens, strict=True)) if pair[0] != pair[1]), len(tokens))
            assert same == len(tokens) or margins[same] <= margin, (got, tokens, margins[same])
            if same + 1 < len(tokens):
                again.append(([*prompt, *tokens[: same + 1]], tokens[same + 1 :], margins[same + 1 :]))
        rest = again
    llm.manager.check_invariants()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    theirs, ours = tiny(family), tiny(family, attention=attention.NAME)
    expected = [reference(theirs, prompt) for prompt in prompts()]
    assert sum(margin <= MARGIN for _, margins in expected for margin in margins) < NEW // 2, "nothing is compared"
    for name, way in WAYS.items():
        llm = LLM(ours, backend="transformers", **{"num_blocks": 128, "block_size": 4, **way})
        check(llm, expected)
        stats = llm.stats()
        assert (stats.preemptions > 0) == (name == "preempted")
        check(llm, expected)  # from the prefix cache
        assert llm.stats().cached_prompt_tokens > stats.cached_prompt_tokens, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_models_have_a_cache_of_their_dtype(dtype: str) -> None:
    theirs = tiny("gemma2", dtype=getattr(torch, dtype))
    expected = [reference(theirs, prompt) for prompt in prompts()]
    llm = LLM(tiny("gemma2", dtype=getattr(torch, dtype)), backend="transformers", num_blocks=64, block_size=16)
    assert llm.cache.dtype == dtype
    assert llm.cache.layer(0)[0].dtype == getattr(torch, dtype)
    check(llm, expected, margin=1.0)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "float16", "bfloat16"])
def test_keys_and_values_may_be_narrower_than_the_model(kv_cache_dtype: str) -> None:
    expected = [reference(tiny("llama"), prompt) for prompt in prompts()]
    llm = LLM(tiny("llama"), backend="transformers", num_blocks=64, kv_cache_dtype=kv_cache_dtype)
    assert llm.cache.dtype == kv_cache_dtype
    check(llm, expected, margin=1.0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_only_the_logits_that_are_wanted_come_back(family: str) -> None:
    """Row by row what a forward of transformers has, the cap on logits of Gemma 2 included."""
    model = HFModel(tiny(family, attention=attention.NAME))
    shape, (tokens,) = model.config, texts(9)
    cache = KVCache(3, shape.num_layers, shape.num_kv_heads, shape.head_dim, 4, backend="torch")
    steps = np.arange(9)
    plan: Any = model.plan(
        np.array([[2, 0, 1]], np.int32),
        np.array([0, 9], np.int32),
        np.array([9], np.int32),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=4,
        num_blocks=3,
    )
    slots = np.array([8, 9, 10, 11, 0, 1, 2, 3, 4])
    batch = Batch(np.array(tokens, np.int32), steps, slots, plan, logit_rows=np.array([7, 1]))
    with torch.no_grad():
        expected = tiny(family)(torch.tensor([tokens])).logits[0].numpy()
    wanted = model.forward(batch, cache)
    assert wanted.dtype == np.float32
    np.testing.assert_allclose(wanted, expected[[7, 1]], rtol=1e-4, atol=1e-4)
    batch.logit_rows = np.array([], np.int64)
    assert model.forward(batch, cache).shape == (0, VOCAB)


def test_learned_positions_end_where_they_were_learned() -> None:
    model = tiny("gpt2", n_positions=24)
    llm = LLM(model, backend="transformers", num_blocks=16)
    (output,) = llm.generate([texts(20)[0]], SamplingParams(max_tokens=None, **GREEDY))  # type: ignore[arg-type]
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(InvalidInputError, match="max_model_len: 25 is beyond the model's context of 24"):
        LLM(model, backend="transformers", max_model_len=25)


def test_threads_of_pytorch_are_as_they_were_after_a_step() -> None:
    before = torch.get_num_threads()
    seen = []
    model = tiny("llama")
    llm = LLM(model, backend="transformers", num_blocks=16, num_threads=before + 1)
    model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, **GREEDY))  # type: ignore[arg-type]
    assert seen == [before + 1] * 2
    assert torch.get_num_threads() == before
