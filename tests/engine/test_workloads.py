"""Random workloads of everything that a request may ask for: each answer is what the request gives alone.

And what other engines are known to have got wrong under load, one by one.
"""

from __future__ import annotations

import pytest

from leafkv import InvalidInputError
from leafkv.engine.request import Request

from .rig import Rig, greedy
from .toy import VOCAB, reference
from .workload import Workload


@pytest.mark.parametrize("seed", range(64))
def test_any_workload_gives_each_request_its_own_answer(seed: int) -> None:
    """B33, and the pool whole again after each (B03, B05, B08). `tests/soak.py` has many more of them."""
    work = Workload(seed)
    work.run(arrivals=30)
    work.check()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
def test_where_nothing_goes_wrong_all_end_by_themselves(policy: str) -> None:
    work = Workload(7, faults=False, scheduling_policy=policy)
    work.run(arrivals=40)
    work.check()
    reasons = {answer.finish_reason for output in work.told.values() for answer in output.outputs}
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
def test_one_long_answer_gives_all_back(length: int, caching: bool) -> None:
    """B03: in chunks of a block, at each place in a block; nothing is freed twice, nothing is kept."""
    rig = Rig(num_blocks=60, max_num_batched_tokens=4, enable_prefix_caching=caching)
    request = rig.add([*range(length)], greedy(200, ignore_eos=True))
    assert rig.run()[request.request_id].outputs[0].token_ids == reference(range(length), 200, ignore_eos=True)
    stats = rig.manager.stats()
    assert stats.cached_blocks == (length + 199) // 4 * caching
    assert stats.free_blocks == 60 - stats.cached_blocks


def test_a_step_preempts_no_more_than_it_needs() -> None:
    """B45: nobody goes while a block is left, and what comes free serves in the same step."""
    rig = Rig(num_blocks=24, max_num_batched_tokens=64, enable_prefix_caching=False)
    requests = [rig.add([i, 1, 2, 3], greedy(30, ignore_eos=True)) for i in range(12)]
    preempt = rig.scheduler.preempt

    def watched(request: Request) -> None:
        assert rig.manager.allocatable_blocks == 0
        preempt(request)
        assert rig.manager.allocatable_blocks > 0

    rig.scheduler.preempt = watched  # type: ignore[method-assign]
    while rig.engine.has_unfinished_requests():
        rig.step()
        assert rig.work, "a step for nobody"
    rig.check_drained()
    assert rig.engine.stats().preemptions > 0
    for i, request in enumerate(requests):
        assert rig.results[request.request_id].outputs[0].token_ids == reference([i, 1, 2, 3], 30, ignore_eos=True)


def test_tenants_share_nothing_and_do_not_wait_for_each_other() -> None:
    """B120: who could tell by the time, or by the count, that somebody else has asked the same?"""
    prompt = [i % VOCAB for i in range(40)]
    rig = Rig(num_blocks=100)

    def ask(salt: str | None) -> Request:
        asked = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
        return rig.add(asked, greedy(2, ignore_eos=True))

    tenants: list[str | None] = [None, "a", "b", "ab"]
    together = [ask(salt) for salt in tenants]
    rig.step()
    assert rig.running == together, "one waits for what another computes"
    rig.run()
    assert [request.metrics.num_cached_tokens for request in together] == [0] * 4
    late = [ask(salt) for salt in [*tenants, "c"]]
    rig.run()
    assert [request.metrics.num_cached_tokens for request in late] == [39] * 4 + [0]
    for request in (*together, *late):
        assert rig.results[request.request_id].outputs[0].token_ids == reference(prompt, 2, ignore_eos=True)
    for salt in ("", 7, b"a"):
        with pytest.raises(InvalidInputError, match=r"^cache_salt: "):
            rig.add({"prompt_token_ids": prompt, "cache_salt": salt}, greedy(1))


@pytest.mark.parametrize("num_blocks", [26, 64])
def test_who_reads_no_cache_is_computed_in_chunks_all_the_same(num_blocks: int) -> None:
    """B53: 20 chunks of a prompt that is in the cache, beside others, on a pool for it alone, too."""
    prompt = [i * 3 % VOCAB for i in range(100)]
    rig = Rig(num_blocks=num_blocks, max_num_batched_tokens=5)
    rig.add(prompt, greedy(1))
    rig.run()
    computed = rig.engine.stats().computed_prompt_tokens
    thorough = rig.add(prompt, greedy(3, ignore_eos=True, prompt_logprobs=0))
    others = [rig.add([i], greedy(3, ignore_eos=True)) for i in range(3)]
    results = rig.run()
    assert rig.engine.stats().computed_prompt_tokens - computed == 100 + 3
    assert thorough.metrics.num_cached_tokens == 0
    for request, asked in zip((thorough, *others), (prompt, [0], [1], [2]), strict=True):
        assert results[request.request_id].outputs[0].token_ids == reference(asked, 3, ignore_eos=True)
