"""Logits of the real model, bit for bit: alone, batched, chunked, preempted, from the prefix cache, on any threads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv import LLM, SamplingParams
from leafkv.engine import drawing
from leafkv.engine.work import Work
from leafkv.models import LoadedModel, load_model

DATA = Path(__file__).resolve().parents[1] / "data" / "reference_greedy.json"
PROMPTS: list[list[int]] = [item["prompt_ids"] for item in json.loads(DATA.read_text())["items"]]
# Some begin alike, so that they share blocks while they are computed.
PROMPTS = [*PROMPTS[:5], PROMPTS[0] + PROMPTS[1], PROMPTS[0] + PROMPTS[2], PROMPTS[4][:-3]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

Seen = dict[tuple[int, ...], str]
"""A digest of the logits after each context."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Every context that was sampled from. Whoever finds one again finds the same logits."""
    found: Seen = {}
    draw = drawing.draw

    def record(logits: NDArray[np.float32], wanted: NDArray[np.int64], work: Work, **options: Any) -> drawing.Drawn:
        sampled = [sample for sample, n in zip(work.samples, wanted.tolist(), strict=True) if n]
        for row, sample in zip(logits, sampled, strict=True):
            digest = hashlib.sha256(row.tobytes()).hexdigest()
            assert found.setdefault(tuple(sample.tokens), digest) == digest, f"{len(sample.tokens)} tokens"
        return draw(logits, wanted, work, **options)

    monkeypatch.setattr("leafkv.engine.engine.draw", record)
    return found


WAYS: dict[str, dict[str, Any]] = {
    "together": {"num_threads": 2},
    "on three threads": {"num_threads": 3},
    "by token": {"max_num_batched_tokens": 8, "num_threads": 2},
    "in chunks": {"max_num_batched_tokens": 17, "num_threads": 1},
    "preempted": {"num_blocks": 9, "num_threads": 2},
    "in blocks of 3": {"num_blocks": 300, "block_size": 3},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_have_the_same_bits_however_they_are_computed(dtype: str, loaded: LoadedModel, seen: Seen) -> None:
    model = loaded if dtype == "float32" else load_model(dtype=dtype)
    options: dict[str, Any] = {"num_blocks": 64}
    alone = LLM(model, **options, max_num_seqs=1, num_threads=1, enable_prefix_caching=False)
    for prompt in PROMPTS:
        alone.generate([prompt], GREEDY)
    contexts = set(seen)
    assert len(contexts) == len(PROMPTS) * 8
    for name, way in WAYS.items():
        llm = LLM(model, **{**options, **way})
        for _ in range(2):  # the second time from the prefix cache
            llm.generate(PROMPTS, GREEDY)
        assert set(seen) == contexts, name
        stats = llm.stats()
        assert (stats.preemptions > 0) == (name == "preempted"), name
        assert stats.cached_prompt_tokens > 0, name
