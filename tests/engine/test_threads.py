"""Several threads over one engine and a tiny pool: answers, dropped streams, and nothing left behind."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import pytest

from leafkv import LLM

from .rig import greedy, make_llm
from .toy import reference


@pytest.mark.parametrize("seed", range(40))
def test_every_thread_gets_its_own_answers(seed: int) -> None:
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice(((1, 8), (1, 20), (2, 3), (3, 5), (4, 2), (8, 3), (16, 1)))
    capacity = num_blocks * block_size
    llm = make_llm(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=rng.choice((1, 2, block_size, block_size + 1, 3 * block_size + 5)),
        max_num_seqs=rng.choice((1, 2, 256)),
        enable_prefix_caching=rng.random() < 0.8,
        partial_hits=rng.random() < 0.8,
    )
    shared = [rng.randrange(3) for _ in range(capacity)]
    failures: list[BaseException] = []

    def work(own: random.Random) -> None:
        try:
            for _ in range(3):
                _ask(llm, own, shared)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(random.Random(rng.random()),), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"no end in sight: {llm.stats()} {llm.manager.stats()}"
    if failures:
        raise failures[0]

    gc.collect()  # streams that were dropped halfway
    stats = llm.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    blocks = llm.manager.stats()
    assert (blocks.held_blocks, blocks.sequences) == (0, 0)
    assert blocks.free_blocks + blocks.cached_blocks == num_blocks
    llm.manager.check_invariants()


def _ask(llm: LLM, rng: random.Random, shared: list[int]) -> None:
    """Ask for whole answers, or follow some streams in turns and drop a few of them; compare all that came."""
    prompts, params, expected = [], [], []
    for _ in range(rng.randrange(1, 5)):
        prompt = shared[: rng.randrange(1, len(shared))]
        if rng.random() < 0.5:
            prompt[-1] = 3
        n = rng.randrange(1, len(shared) - len(prompt) + 1)
        prompts.append(prompt)
        params.append(greedy(n, ignore_eos=True))
        expected.append(reference(prompt, n, ignore_eos=True))
    if rng.random() < 0.5:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        return
    streams: dict[int, Any] = {i: llm.stream(prompt, params[i]) for i, prompt in enumerate(prompts)}
    while streams:
        i = rng.choice(list(streams))
        if rng.random() < 0.1:
            del streams[i]
            continue
        output = next(streams[i])
        tokens = output.outputs[0].token_ids
        assert tokens == expected[i][: len(tokens)]
        if output.finished:
            assert tokens == expected[i]
            del streams[i]
