"""An int8 cache: answers are those of the rounded KV, whatever is shared, copied or computed again."""

from __future__ import annotations

from typing import Any

import pytest

from leafkv import LLM
from leafkv.models import LoadedModel

from .rig import greedy, make_llm
from .test_reference_greedy import ITEMS
from .toy import reference

PREFIX = [3 + (5 * i * i) % 53 for i in range(38)]
TOYS = [[*PREFIX, 1, 2], [*PREFIX, 1, 3], PREFIX[:35], [*PREFIX[:21], 9, *PREFIX[:9]], [*PREFIX, 1, 2, 4]]


def answers(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    outputs = llm.generate(prompts, greedy(count, ignore_eos=True), use_tqdm=False)
    llm.manager.check_invariants()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("partial_hits", [False, True])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(64, 4), (16, 16), (24, 4), (6, 16)])
def test_reuse_does_not_change_the_tokens(partial_hits: bool, num_blocks: int, block_size: int) -> None:
    # The toy model's sums are so short that rounding them to integers undoes what int8 rounded.
    expected = [reference(prompt, 25, ignore_eos=True) for prompt in TOYS]
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "num_blocks": num_blocks, "block_size": block_size}
    for budget in (3, 512):
        llm = make_llm(max_num_batched_tokens=budget, partial_hits=partial_hits, **options)
        for _ in range(3):
            assert answers(llm, TOYS, 25) == expected
        assert llm.stats().cached_prompt_tokens > 0
        assert (llm.stats().preemptions > 0) == (num_blocks in {24, 6})


def test_text_of_a_real_model(loaded: LoadedModel) -> None:
    # One token a step: matrix products of one row are always the same bits, so whatever differs is the cache's doing.
    options: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 1, "num_threads": 1}
    options["kv_cache_dtype"] = "int8"
    prompt, answer = ITEMS[0]["prompt_ids"], ITEMS[0]["generated_ids"]
    prompts = [prompt, [*prompt, *answer[:6], 30], [*prompt, *answer[:2], 28]]
    expected = answers(LLM(loaded, enable_prefix_caching=False, **options), prompts, 8)
    assert expected[0] == answer[:8], "far from what float32 gives"
    llm = LLM(loaded, **options)
    for _ in range(2):
        assert answers(llm, prompts, 8) == expected
    assert llm.manager.stats().partial_hit_tokens > 0
