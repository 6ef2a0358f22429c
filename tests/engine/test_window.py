"""A model with a sliding window: blocks that have left the window stay as they are, and prefixes are still found."""

from __future__ import annotations

from pathlib import Path

import pytest

from leafkv import LLM, SamplingParams
from leafkv.models import load_model

from ..models.tiny import CONFIGS, write_hf

WINDOW = 7
PROMPT = [3 + (5 * i * i) % 61 for i in range(40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [1, 5, 512])
def test_reuse_does_not_change_the_tokens(block_size: int, budget: int, tmp_path: Path) -> None:
    config = CONFIGS["mistral"]
    assert config["sliding_window"] == WINDOW
    loaded = load_model(write_hf(tmp_path, config))

    def run(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    def fresh() -> LLM:
        return LLM(loaded, num_blocks=64 // block_size * 4, block_size=block_size, max_num_batched_tokens=budget)

    edited = [*PROMPT[:30], 1, *PROMPT[31:]]  # the last turn of a chat, changed: far behind it all is reused
    expected = {tuple(prompt): run(fresh(), prompt)[0] for prompt in (PROMPT, edited)}
    llm = fresh()
    for prompt, cached in ((PROMPT, 0), (PROMPT, 39), (edited, 30), (PROMPT, 39)):
        assert run(llm, prompt) == (expected[tuple(prompt)], cached)
    unlimited = load_model(write_hf(tmp_path / "full", CONFIGS["mistral-full"]))
    other = LLM(unlimited, num_blocks=64, block_size=block_size)
    assert run(other, PROMPT)[0] != expected[tuple(PROMPT)], "the window changes nothing here: no test"
