"""Real text from the real model: greedy tokens equal to those of independent implementations, however it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leafkv import LLM, SamplingParams
from leafkv.models import LoadedModel

DATA = Path(__file__).resolve().parents[1] / "data" / "reference_greedy.json"
ITEMS: list[dict[str, Any]] = json.loads(DATA.read_text())["items"]
# As text where the prompt is plain text; a rendered chat holds its special tokens already.
PROMPTS = [item["prompt"] if item["kind"] == "raw" else item["prompt_ids"] for item in ITEMS]
# One thread: small matrix products gain little from more, and lose much where other work shares the cores.
ONE_THREAD: dict[str, Any] = {"num_threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def drained(llm: LLM) -> bool:
    llm.manager.check_invariants()
    stats = llm.manager.stats()
    return stats.held_blocks == 0 and stats.free_blocks + stats.cached_blocks == stats.num_blocks


def check(llm: LLM, cached_in: int | None = None) -> None:
    """``cached_in``: the prefix cache has all of the prompts, and finds it in multiples of so many tokens."""
    outputs = llm.generate(PROMPTS, GREEDY)
    for item, output in zip(ITEMS, outputs, strict=True):
        assert output.prompt_token_ids == item["prompt_ids"]
        assert output.outputs[0].token_ids == item["generated_ids"], item["prompt"]
        if cached_in is not None:
            assert output.num_cached_tokens == (len(item["prompt_ids"]) - 1) // cached_in * cached_in
    assert drained(llm)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_seqs": 1}, id="one at a time"),
        *[pytest.param({"max_num_batched_tokens": n}, id=f"{n} tokens a step") for n in (1, 16, 17)],
        *[pytest.param({"block_size": n, "num_blocks": 1024 // n}, id=f"blocks of {n}") for n in (1, 8, 32)],
    ],
)
def test_tokens_equal_the_reference(loaded: LoadedModel, options: dict[str, Any]) -> None:
    check(LLM(loaded, **{"num_blocks": 64, **ONE_THREAD, **options}))


def test_all_together_and_a_second_pass_from_the_prefix_cache(loaded: LoadedModel) -> None:
    llm = LLM(loaded, num_blocks=64, max_num_batched_tokens=512, **ONE_THREAD)
    check(llm)
    check(llm, cached_in=1)


def test_hits_of_whole_blocks(loaded: LoadedModel) -> None:
    llm = LLM(loaded, num_blocks=64, partial_hits=False, **ONE_THREAD)
    check(llm)
    check(llm, cached_in=llm.manager.block_size)


def test_a_pool_too_small_preempts_and_changes_nothing(loaded: LoadedModel) -> None:
    llm = LLM(loaded, num_blocks=16, **ONE_THREAD)
    check(llm)
    assert llm.stats().preemptions > 0


def test_threads_do_not_change_the_tokens(loaded: LoadedModel) -> None:
    llm = LLM(loaded, num_blocks=16, num_threads=2)
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert output.outputs[0].token_ids == ITEMS[0]["generated_ids"][:12]


def test_the_end_of_sequence_ends_an_answer(loaded: LoadedModel) -> None:
    item = next(item for item in ITEMS if 2 in item["generated_ids"][:32])
    llm = LLM(loaded, num_blocks=16, **ONE_THREAD)
    (output,) = llm.generate({"prompt_token_ids": item["prompt_ids"]}, SamplingParams(temperature=0.0, max_tokens=64))
    answer = output.outputs[0]
    assert answer.token_ids == item["generated_ids"][: item["generated_ids"].index(2) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.text == loaded.tokenizer.decode(answer.token_ids)


def test_a_shared_prefix_is_computed_once(loaded: LoadedModel) -> None:
    """16 requests of 1,024 shared and 32 own tokens, together on a cold cache."""
    text = " ".join(item["prompt"] for item in ITEMS) * 8
    shared = loaded.tokenizer.encode(text)[:1024]
    assert len(shared) == 1024
    prompts = [[*shared, *range(1000 + 40 * i, 1032 + 40 * i)] for i in range(16)]
    llm = LLM(loaded, num_blocks=128, **ONE_THREAD)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    together = llm.generate(prompts, params)
    assert llm.stats().computed_prompt_tokens <= 1024 + 16 * (32 + 16)
    assert llm.manager.stats().max_held_blocks <= 64 + 16 * 3, "shared blocks are held once"
    (alone,) = LLM(loaded, num_blocks=128, **ONE_THREAD).generate(prompts[5], params)
    assert together[5].outputs == alone.outputs
    assert drained(llm)
