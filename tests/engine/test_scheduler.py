"""Scheduling: the failures that engines are known for."""

from __future__ import annotations

import random

import pytest

from leafkv.engine.request import Status

from .rig import Rig, greedy
from .toy import VOCAB, ToyModel, reference, reference_logits


def test_a_shared_prefix_is_computed_once() -> None:
    """16 requests of 1,024 shared and 32 own tokens, together on a cold cache."""
    shared = [i * 31 % VOCAB for i in range(1024)]
    prompts = [[*shared, *((i * 7 + j * j) % VOCAB for j in range(32))] for i in range(16)]
    rig = Rig(block_size=16, num_blocks=200, max_num_batched_tokens=512)
    requests = [rig.add(prompt, greedy(2, ignore_eos=True)) for prompt in prompts]
    results = rig.run()
    assert rig.engine.stats().computed_prompt_tokens <= 1024 + 16 * (32 + 16)
    assert rig.engine.stats().cached_prompt_tokens == 15 * 1024
    for prompt, request in zip(prompts, requests, strict=True):
        assert results[request.request_id].outputs[0].token_ids == reference(prompt, 2, ignore_eos=True)


def test_a_waiter_lets_others_pass_and_outlives_its_leader() -> None:
    shared = list(range(12))
    model = ToyModel()
    rig = Rig(model)
    leader = rig.add([*shared, 1], greedy(4))
    waiter = rig.add([*shared, 2], greedy(4))
    other = rig.add([50, 51], greedy(4))
    model.before_forward = lambda batch: rig.engine.abort_request(leader.request_id)
    rig.step()
    assert rig.scheduler.waiting == [waiter]
    assert rig.running == [other], "a waiter blocks those behind it"
    model.before_forward = lambda batch: None
    rig.step()
    assert waiter in rig.running
    assert waiter.metrics.num_cached_tokens == 0, "the leader has committed nothing"
    assert rig.run()[waiter.request_id].outputs[0].token_ids == reference([*shared, 2], 4)


def test_preemption_takes_the_newest_and_the_oldest_goes_on() -> None:
    """30 requests, a pool for 3: every schedule ends, all finish, few preemptions (B43, B46, B50)."""
    rig = Rig(num_blocks=24, max_num_batched_tokens=16)
    prompts = [[i, *range(1, 12)] for i in range(30)]
    requests = [rig.add(prompt, greedy(20, ignore_eos=True)) for prompt in prompts]
    order: list[str] = []
    while rig.engine.has_unfinished_requests():
        order += [output.request_id for output in rig.step()]
    rig.check_drained()
    for prompt, request in zip(prompts, requests, strict=True):
        assert rig.results[request.request_id].outputs[0].token_ids == reference(prompt, 20, ignore_eos=True)
    assert order == [request.request_id for request in requests], "equal requests end in order of arrival"
    assert 0 < rig.engine.stats().preemptions <= 2 * len(requests)


def test_a_pool_for_one_serves_all() -> None:
    """The pool is below the need of any two requests."""
    rig = Rig(num_blocks=8, max_num_batched_tokens=64)
    prompts = [[i, *range(1, 16)] for i in range(6)]
    requests = [rig.add(prompt, greedy(16, ignore_eos=True)) for prompt in prompts]
    results = rig.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert results[request.request_id].outputs[0].token_ids == reference(prompt, 16, ignore_eos=True)
    assert rig.engine.stats().preemptions <= len(requests)


def test_cached_blocks_count_once_in_admission() -> None:
    """B55: a hit is room, but not also the room that the rest needs."""
    prefix = list(range(48))
    rig = Rig(num_blocks=16)
    rig.add(prefix, greedy(1))
    rig.run()
    assert rig.manager.stats().cached_blocks == 12
    long = rig.add([*prefix, *range(15)], greedy(1))
    rig.step()
    assert long.metrics.num_cached_tokens == 48, "12 cached and 4 free blocks are enough for 16"
    rig.run()

    # Now with 2 of the 4 free blocks taken: 12 cached + 2 free are 14, and 4 more than the hit are needed. A first
    # chunk would fit, and then be thrown out.
    rig = Rig(num_blocks=16, max_num_batched_tokens=6)
    rig.add(prefix, greedy(1))
    rig.run()
    small = rig.add([60] * 5, greedy(3, ignore_eos=True))
    rig.step()
    long = rig.add([*prefix, *range(15)], greedy(1))
    rig.step()
    assert rig.scheduler.waiting == [long]
    rig.run()
    assert rig.engine.stats().preemptions == 0
    assert small.metrics.num_preemptions == 0


def test_a_copy_of_what_others_hold_counts_in_admission() -> None:
    """A block that is hit in part takes a block for its copy, unless it is given back itself."""
    prefix = list(range(8))
    rig = Rig(num_blocks=6, max_num_batched_tokens=8, partial_hits=True)
    rig.add(prefix, greedy(4, ignore_eos=True))
    rig.step()
    # Of 5 blocks it shares one; the second is copied, and the running request keeps it: 4 more than the hit are needed,
    # and 3 are left. A first chunk would fit, and then be thrown out.
    long = rig.add([*prefix[:6], *[60] * 13], greedy(1))
    rig.step()
    assert rig.scheduler.waiting == [long]
    rig.run()
    assert long.metrics.num_cached_tokens == 6
    assert rig.engine.stats().preemptions == 0

    # The last block is written in place where nobody else has it, and a request of the size of the pool runs.
    rig = Rig(num_blocks=4, partial_hits=True)
    rig.add(list(range(12)), greedy(1))
    rig.run()
    prompt = [*range(10), *[60] * 5]
    full = rig.add(prompt, greedy(1))
    assert rig.run()[full.request_id].outputs[0].token_ids == reference(prompt, 1)
    assert full.metrics.num_cached_tokens == 10


def test_a_failed_admission_keeps_no_stale_hit() -> None:
    """B30: what was found when admission failed may be gone when it succeeds."""
    prefix = list(range(16))
    rig = Rig(num_blocks=10)
    rig.add(prefix, greedy(1))
    rig.run()
    rig.add([55] * 12, greedy(12, ignore_eos=True))  # 6 blocks
    rig.step()
    rig.step()
    blocked = rig.add([*prefix, *range(20)], greedy(2))  # 4 cached + 5 or 6
    rig.step()
    assert blocked.status is Status.WAITING
    assert rig.manager.evict(2) == 2
    results = rig.run()
    assert blocked.metrics.num_cached_tokens <= 8
    assert results[blocked.request_id].outputs[0].token_ids == reference([*prefix, *range(20)], 2)


def test_cached_prefixes_make_room() -> None:
    """B41: a pool full of finished prefixes takes a request of the size of the pool."""
    rig = Rig(num_blocks=16)
    for i in range(8):
        rig.add([i] * 16, greedy(1))
    rig.run()
    assert rig.manager.stats().cached_blocks == 16
    prompt = [9] * 60
    request = rig.add(prompt, greedy(4, ignore_eos=True))
    assert rig.run()[request.request_id].outputs[0].token_ids == reference(prompt, 4, ignore_eos=True)


@pytest.mark.parametrize("partial_hits", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 63, 64])
def test_a_fully_cached_prompt_computes_its_last_token_or_block(length: int, partial_hits: bool) -> None:
    """B31: as many cached tokens again and again: in blocks that are full, and one token is left to compute."""
    prompt = [i % VOCAB for i in range(length)]
    rig = Rig(partial_hits=partial_hits)
    written = (length + 2) // 4 * 4
    expected = min(length - 1, written) if partial_hits else (length - 1) // 4 * 4
    for repeat in range(3):
        request = rig.add(prompt, greedy(3, ignore_eos=True))
        result = rig.run()[request.request_id]
        assert result.num_cached_tokens == (expected if repeat else 0)
        assert result.outputs[0].token_ids == reference(prompt, 3, ignore_eos=True)


@pytest.mark.parametrize("partial_hits", [True, False])
@pytest.mark.parametrize("budget", [1, 3, 4, 5, 17])
def test_chunks_and_hits_do_not_change_the_logits(budget: int, partial_hits: bool) -> None:
    """B65, B66: chunk sizes around the block size x every cached prefix, beside a request that is decoding."""
    prompt = [i * 5 % VOCAB for i in range(18)]
    seen = []
    model = ToyModel(after_forward=lambda logits: seen.extend(logits.copy()))
    for cached in range(len(prompt) + 1):
        rig = Rig(model, max_num_batched_tokens=budget, partial_hits=partial_hits)
        rig.add([*prompt[:cached], 59, 59, 59, 59], greedy(1))
        rig.run()
        rig.add([3, 3], greedy(40, ignore_eos=True))
        rig.step()
        request = rig.add(prompt, greedy(1))
        while request.samples[0].finish_reason is None:
            seen.clear()
            rig.step()
        assert any((row == reference_logits(prompt)).all() for row in seen)
        hit = min(cached, len(prompt) - 1)
        assert request.metrics.num_cached_tokens == (hit if partial_hits else hit // 4 * 4)


def test_the_batch_does_not_change_a_request() -> None:
    """B98: alone and among 1, 3, 7, 31 others, in chunks, after preemptions."""
    prompt = [7, 1, 8, 2, 8, 1, 8, 2, 8]
    expected = reference(prompt, 30, ignore_eos=True)
    for others in (0, 1, 3, 7, 31):
        rig = Rig(num_blocks=30, max_num_batched_tokens=13)
        for i in range(others):
            rig.add([*prompt[: i % 9], i], greedy(30, ignore_eos=True))
        request = rig.add(prompt, greedy(30, ignore_eos=True))
        assert rig.run()[request.request_id].outputs[0].token_ids == expected


def test_little_memory_is_wasted() -> None:
    """Slots held but unused: under 4 % at 1,000 tokens a sequence and blocks of 16."""
    rig = Rig(num_blocks=600, block_size=16)
    requests = [rig.add([i] * 992, greedy(9, ignore_eos=True)) for i in range(8)]
    worst = 0.0
    while rig.engine.has_unfinished_requests():
        rig.step()
        if all(len(request.samples[0].tokens) >= 1000 for request in requests):
            held = rig.manager.stats().held_blocks * 16
            used = sum(rig.computed(request) for request in rig.running)
            worst = max(worst, 1 - used / held if held else 0.0)
    assert 0 < worst < 0.04


def test_leaks_nothing_under_load() -> None:
    """B03, B05, B08: mixed requests at a concurrency of 256, then every residue of the block size, cache off."""
    rng = random.Random(5)
    rig = Rig(num_blocks=2000, max_num_seqs=256, max_num_batched_tokens=512)
    for _ in range(1000):
        rig.add([rng.randrange(4) for _ in range(rng.randrange(1, 40))], greedy(rng.randrange(1, 12)))
    check, rig.check = rig.check, lambda: None  # type: ignore[method-assign]
    rig.run()
    check()
    assert len(rig.results) == 1000

    rig = Rig(num_blocks=64, enable_prefix_caching=False)
    for length in range(1, 17):
        for _ in range(20):
            rig.add([5] * length, greedy(1 + length % 3))
    rig.run()
    assert rig.manager.stats().free_blocks == 64
