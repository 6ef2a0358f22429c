"""Who goes first: urgent requests at once, those with a cached prefix, and nobody never."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from leafkv import InvalidInputError, QueueFullError, QueueTimeoutError, SamplingParams
from leafkv.engine import scheduler, waiting
from leafkv.engine.request import Request

from .rig import Rig, greedy, make_llm
from .toy import VOCAB, reference


def long_answer(n: int = 30) -> SamplingParams:
    return greedy(n, ignore_eos=True)


def finish_order(rig: Rig) -> list[str]:
    """Request ids in the order in which they end."""
    order = []
    while rig.engine.has_unfinished_requests():
        order += [output.request_id for output in rig.step() if output.finished]
    rig.check_drained()
    return order


@pytest.mark.parametrize("tight", ["seats", "blocks"])
def test_an_urgent_request_runs_at_the_next_step(tight: str) -> None:
    """B48: also where all seats, or all blocks, are taken by others."""
    options: dict[str, Any] = {"max_num_seqs": 2} if tight == "seats" else {"num_blocks": 16, "block_size": 4}
    rig = Rig(scheduling_policy="priority", **options)
    low = [rig.add([i] * 20, long_answer(), priority=5) for i in (1, 2)]
    while len(rig.running) < 2:
        rig.step()
    for _ in range(3):
        rig.step()
    high = rig.add([3] * 20, long_answer(10), priority=1)
    rig.step()
    assert high in rig.running
    assert rig.running[0] is high
    assert low[1].metrics.num_preemptions == 1, "the newest of the least urgent makes way"
    assert low[0].metrics.num_preemptions == 0
    assert finish_order(rig) == [high.request_id, low[0].request_id, low[1].request_id]
    for request, token in (*zip(low, (1, 2), strict=True), (high, 3)):
        expected = reference([token] * 20, request.max_tokens, ignore_eos=True)
        assert rig.results[request.request_id].outputs[0].token_ids == expected


def test_a_request_is_scheduled_when_a_step_computes_for_it() -> None:
    """Not when it takes a seat, while others have all of the budget; nor when it is admitted anew."""
    rig = Rig(scheduling_policy="priority", max_num_batched_tokens=4, max_num_seqs=3)
    weak = [rig.add([i] * 4, long_answer(), priority=5) for i in range(3)]
    while len(rig.running) < 3:
        rig.step()
    first = rig.add(list(range(8)), long_answer(2), priority=0)
    second = rig.add(list(range(20, 28)), long_answer(2), priority=1)
    rig.step()
    assert rig.running[:2] == [first, second]
    assert second.metrics.first_scheduled_time is None
    while rig.computed(second) == 0:
        rig.step()
    assert second.metrics.first_scheduled_time is not None
    assert second.metrics.num_cached_tokens == 0
    rig.scheduler.preempt(second)
    rig.run()
    assert second.metrics.num_cached_tokens == 0
    assert all(request.metrics.num_cached_tokens == 0 for request in weak)


def test_nobody_makes_way_for_an_equal() -> None:
    """B48: not even for one that is older, and was preempted."""
    rig = Rig(scheduling_policy="priority", max_num_seqs=2)
    requests = [rig.add([i] * 5, long_answer(), priority=3) for i in range(6)]
    order = finish_order(rig)
    assert order == [request.request_id for request in requests]
    assert rig.engine.stats().preemptions == 0


def test_nobody_makes_way_in_vain() -> None:
    """One that does not fit even if all weaker ones are gone leaves them alone."""
    rig = Rig(scheduling_policy="priority", num_blocks=16, block_size=4)
    strong = rig.add([1] * 40, long_answer(20), priority=1)
    weak = rig.add([2] * 4, long_answer(4), priority=5)
    rig.step()
    high = rig.add([3] * 30, long_answer(10), priority=0)
    middle = rig.add([4] * 40, long_answer(4), priority=2)
    rig.step()
    assert high in rig.running
    assert weak.metrics.num_preemptions + strong.metrics.num_preemptions > 0
    before = rig.engine.stats().preemptions
    rig.step()
    assert rig.engine.stats().preemptions == before
    rig.run()
    assert middle.metrics.num_preemptions == 0


def test_a_request_grows_urgent_with_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a stream of urgent requests that never ends, the one that is not gets its turn, once, and keeps it."""
    monkeypatch.setattr(waiting, "AGING", 10)
    monkeypatch.setattr("leafkv.engine.scheduler.AGING", 10)
    rig = Rig(scheduling_policy="priority", max_num_seqs=1)
    low = rig.add([9] * 3, long_answer(30), priority=2)
    steps = 0
    while not low.finished:
        if steps % 3 == 0:
            rig.add([steps % VOCAB, 5], long_answer(4), priority=0)
        rig.step()
        steps += 1
        assert steps < 200, "it starves"
    assert low.metrics.num_preemptions <= 1
    rig.run()


def test_many_priorities_and_little_room_give_the_right_tokens() -> None:
    rng = random.Random(3)
    rig = Rig(scheduling_policy="priority", num_blocks=12, max_num_seqs=4)
    expected = {}
    for i in range(60):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        request = rig.add(prompt, long_answer(rng.randint(1, 20)), priority=rng.randrange(4))
        expected[request.request_id] = reference(prompt, request.max_tokens, ignore_eos=True)
        if i % 3 == 0:
            rig.step()
    results = rig.run()
    assert {name: output.outputs[0].token_ids for name, output in results.items()} == expected
    assert 0 < rig.engine.stats().preemptions < 200


def test_a_waiter_lends_its_place_to_its_leader() -> None:
    """An urgent request that waits for a prefix of another is not held up by those in between."""
    shared = [i % VOCAB for i in range(40)]
    rig = Rig(scheduling_policy="priority", max_num_batched_tokens=8, max_num_seqs=8)
    leader = rig.add([*shared, 1], long_answer(20), priority=5)
    rig.step()
    between = rig.add([2] * 60, long_answer(2), priority=3)
    urgent = rig.add([*shared, 3], long_answer(2), priority=1)
    rig.step()
    assert urgent in rig.scheduler.waiting
    assert rig.computed(leader) == 8, "that step was given away before anybody knew"
    rig.step()
    assert rig.running[0] is leader
    while urgent in rig.scheduler.waiting:
        rig.step()
    assert rig.computed(leader) >= 40
    assert rig.computed(between) < 16, "what the leader has left over, and no step of its own"
    rig.step()
    assert rig.running.index(between) < rig.running.index(leader), "it has its own place back"
    order = finish_order(rig)
    assert order[-1] == leader.request_id
    assert urgent.metrics.num_cached_tokens == 40


def test_the_longest_cached_prefix_goes_first() -> None:
    rig = Rig(scheduling_policy="prefix", max_num_seqs=1, num_blocks=128)
    prefixes = {n: [n] * n for n in (4, 8, 16, 32)}
    for prefix in prefixes.values():
        rig.add(prefix, greedy(1))
    rig.run()
    busy = rig.add([60], long_answer(5))
    rig.step()
    waiters = [rig.add([*prefixes[n], 59, i], greedy(1)) for i, n in enumerate((4, 32, 8, 16))]
    fresh = rig.add([58, 57], greedy(1))
    order = finish_order(rig)
    first, second, third, fourth = waiters
    expected = [busy, second, fourth, third, first, fresh]
    assert order == [request.request_id for request in expected]


def test_nobody_is_passed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has waited for so many steps is next, whatever is cached of others."""
    monkeypatch.setattr(waiting, "PATIENCE", 12)
    rig = Rig(scheduling_policy="prefix", max_num_seqs=1, num_blocks=128)
    prefix = list(range(32))
    rig.add(prefix, greedy(1))
    rig.run()
    rig.add([*prefix, 60], long_answer(4))
    rig.step()
    unlucky = rig.add([58, 57], greedy(1))
    steps = 0
    while not unlucky.finished:
        rig.add([*prefix, steps % VOCAB], long_answer(3))
        rig.step()
        steps += 1
        assert steps < 30
    assert steps >= 12
    rig.run()


class Counting:
    """A KV manager that counts some of its calls."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.calls = {"begin": 0, "lookup": 0, "num_committed": 0}

    def __getattr__(self, name: str) -> Any:
        if name in self.calls:
            self.calls[name] += 1
        return getattr(self.manager, name)

    def taken(self) -> int:
        total = sum(self.calls.values())
        self.calls = dict.fromkeys(self.calls, 0)
        return total


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
@pytest.mark.parametrize("alike", [True, False])
def test_a_step_costs_the_same_however_many_wait(policy: str, alike: bool) -> None:
    """10,000 that share a prefix which one is computing, or that share nothing."""
    llm = make_llm(scheduling_policy=policy, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16)
    engine = llm.engine
    engine.scheduler.manager = counting = Counting(engine.scheduler.manager)  # type: ignore[assignment]
    shared = list(range(60))
    params = long_answer(40)
    for i in range(10_000):
        prompt = [*shared, i % VOCAB, i // VOCAB % VOCAB] if alike else [i % VOCAB, i // VOCAB % VOCAB, 5]
        engine.add_request(llm._router.prepare(prompt, params))
    engine.step()
    counting.taken()
    most = 0
    for _ in range(40):
        engine.step()
        # All are asked when their leader has got so far, once, as far as there are seats.
        most = max(most, counting.taken())
    assert most <= 3 * scheduler.LOOKS + waiting.GLANCES + 10
    assert engine.stats().waiting >= 9_900


@pytest.mark.parametrize("end", ["finishes", "is aborted"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_leader_may_end_with_more_waiters_than_a_step_wakes(
    policy: Any, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "PROMPT_LOGPROBS_CHUNK", 16)  # so that it takes its time, and leaves some to others
    rig = Rig(scheduling_policy=policy, num_blocks=512, max_num_seqs=64, max_num_batched_tokens=64)
    rig.check = lambda: None  # type: ignore[method-assign]
    urgent, shared = int(policy == "priority"), [i % VOCAB for i in range(160)]
    leader = rig.add([*shared, 1], greedy(1, prompt_logprobs=0), priority=5 * urgent)
    rig.engine.step()
    waiters = [rig.add([*shared, i % VOCAB, i // VOCAB], greedy(1), priority=urgent) for i in range(602)]
    while len(rig.scheduler._parking) < 602:
        rig.engine.step()
    if end == "is aborted":
        for request in (*waiters[:500], leader):
            rig.engine.abort_request(request.request_id)
    results = rig.run()
    assert len(results) == 603
    for request in waiters[500:]:
        assert results[request.request_id].outputs[0].token_ids == reference(request.prompt_token_ids, 1)


def mentions(value: Any, request: Request) -> bool:
    """Whether a request is somewhere in these containers."""
    if isinstance(value, dict):
        return mentions([*value.keys(), *value.values()], request)
    if isinstance(value, (list, tuple, deque)):
        return any(mentions(item, request) for item in value)
    return value is request


@pytest.mark.parametrize("at_once", [1, 3000])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
def test_who_has_left_the_queue_is_forgotten(policy: Any, at_once: int) -> None:
    """Also while others wait on, and where thousands come and go: one by one, or all together."""
    rig = Rig(scheduling_policy=policy, max_num_seqs=1)
    rig.add([1, 2], long_answer(200))
    rig.step()
    kept = [rig.add([3, i], greedy(1)) for i in range(5)]
    for i in range(0, 3000, at_once):
        late = [
            rig.add([1, 2, 3, j % VOCAB], greedy(1), priority=9 * (policy == "priority")) for j in range(i, i + at_once)
        ]
        for request in late:
            rig.engine.abort_request(request.request_id)
    held = {name: len(value) for name, value in vars(rig.scheduler._queue).items() if hasattr(value, "__len__")}
    assert max(held.values()) <= 2 * len(kept) + waiting.SLACK + 1, held
    # Of some there is a number left, no more: an error would hold on to the frames of whoever was told of it.
    assert mentions(vars(rig.scheduler._queue), kept[-1])
    assert not mentions(vars(rig.scheduler._queue), late[-1])
    rig.engine.step()
    rig.results.clear()
    assert rig.engine.num_unfinished_requests == 6


@pytest.mark.parametrize("policy", ["fcfs", "prefix"])
def test_who_has_left_is_forgotten_under_a_load_that_never_ends(policy: str) -> None:
    """B128: under a load that never ends, too, where those who stay are always served first."""
    rig = Rig(scheduling_policy=policy, max_num_seqs=1)
    rig.check = lambda: None  # type: ignore[method-assign]
    warm = [*range(8)]
    rig.add(warm, greedy(1))
    rig.run()
    for turn in range(600):
        while rig.scheduler.num_waiting < 3:
            rig.add([*warm, 1, turn % 60], greedy(2, ignore_eos=True))
        cold = rig.add([9, turn % 60, turn // 60], greedy(2, ignore_eos=True))
        rig.engine.step()
        rig.engine.abort_request(cold.request_id)
    for name, value in vars(rig.scheduler._queue).items():
        assert not isinstance(value, (dict, list, deque)) or len(value) < 100, name


def test_a_cleared_cache_costs_the_next_step_no_more() -> None:
    llm = make_llm(scheduling_policy="prefix", num_blocks=64, max_num_seqs=1, max_num_batched_tokens=64)
    engine = llm.engine
    prefix = list(range(40))
    llm.generate(prefix, greedy(1))
    engine.add_request(llm._router.prepare([60], long_answer(4)))
    engine.step()
    for i in range(3000):
        engine.add_request(llm._router.prepare([*prefix, i % VOCAB], greedy(1)))
    engine.scheduler.manager = counting = Counting(engine.scheduler.manager)  # type: ignore[assignment]
    counting.manager.clear()
    for _ in range(10):
        engine.step()
        assert counting.taken() <= 4 * waiting.GLANCES


def promised(rig: Rig, weak: list[Request], strong: list[Request]) -> None:
    """All run to their end; of those that came later nobody was begun in vain."""
    results = rig.run()
    for request in (*weak, *strong):
        expected = reference(request.prompt_token_ids, request.max_tokens, ignore_eos=True)
        assert results[request.request_id].outputs[0].token_ids == expected


def test_what_urgent_requests_still_lack_is_promised_to_them() -> None:
    """Two of them do not fit together: the second one waits, and is not begun."""
    rig = Rig(scheduling_policy="priority", num_blocks=16, block_size=4, max_num_batched_tokens=16)
    weak = [rig.add([i] * 12, long_answer(16), priority=5) for i in (1, 2)]
    for _ in range(3):
        rig.step()
    strong = [rig.add([i] * 36, long_answer(4), priority=1) for i in (3, 4)]
    rig.step()
    assert rig.running[0] is strong[0]
    assert strong[1] not in rig.running
    promised(rig, weak, strong)
    assert [request.metrics.num_preemptions for request in strong] == [0, 0]


def test_what_a_prompt_with_logprobs_still_lacks_is_promised_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PROMPT_LOGPROBS_CHUNK", 8)
    rig = Rig(num_blocks=20, block_size=4, max_num_batched_tokens=64)
    first = rig.add([i % VOCAB for i in range(60)], greedy(4, ignore_eos=True, prompt_logprobs=0))
    second = rig.add([9] * 30, long_answer(4))
    promised(rig, [first], [second])
    assert rig.engine.stats().computed_prompt_tokens == 90
    assert second.metrics.num_preemptions == 0


def test_what_samples_to_be_born_lack_is_promised_to_them() -> None:
    rig = Rig(block_size=4, num_blocks=30, max_num_batched_tokens=64, enable_prefix_caching=False)
    several = rig.add([1, 2, 3, 4, 5], SamplingParams(n=4, seed=1, max_tokens=24, ignore_eos=True))
    for _ in range(22):
        rig.step()
    rig.scheduler.preempt(several)
    later = rig.add([9, 8, 7] * 9, long_answer(10))
    rig.run()
    assert later.metrics.num_preemptions == 0


def test_who_has_streamed_in_another_process_has_not_waited_here(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("leafkv.engine.engine.time.monotonic", lambda: now[0])
    rig = Rig(queue_timeout=10, max_num_seqs=1)
    rig.add([1] * 5, long_answer(50))
    resumed = rig.llm._router.prepare([2] * 5, long_answer(3))
    rig.engine.add_request(resumed, journaled=True)
    rig.step()
    now[0] += 11
    assert rig.run()[resumed.request_id].outputs[0].token_ids == reference([2] * 5, 3, ignore_eos=True)


def test_a_full_queue_says_so() -> None:
    rig = Rig(max_waiting=2, max_num_seqs=1)
    requests = [rig.add([i] * 3, long_answer(3)) for i in range(2)]
    with pytest.raises(QueueFullError, match=r"2 requests are waiting, .* \(max_waiting\)"):
        rig.add([5], long_answer(3))
    rig.step()
    requests.append(rig.add([2] * 3, long_answer(3)))
    results = rig.run()
    assert results.keys() == {request.request_id for request in requests}
    for i, request in enumerate(requests):
        assert results[request.request_id].outputs[0].token_ids == reference([i] * 3, 3, ignore_eos=True)


def test_who_waits_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has run once, and was preempted, is not sent away any more."""
    now = [100.0]
    monkeypatch.setattr("leafkv.engine.engine.time.monotonic", lambda: now[0])
    rig = Rig(queue_timeout=10, num_blocks=16, max_num_seqs=2)
    old = rig.add([1] * 5, long_answer(50))
    preempted = rig.add([2] * 5, long_answer(40))
    late = rig.add([3] * 5, long_answer(3))
    while not preempted.metrics.num_preemptions:
        rig.step()
    now[0] += 9.5
    newer = rig.add([4] * 5, long_answer(3))
    rig.step()
    assert not rig.results
    now[0] += 1
    rig.step()
    assert rig.results.keys() == {late.request_id}
    error = rig.results[late.request_id].error
    assert isinstance(error, QueueTimeoutError)
    assert isinstance(error, TimeoutError)
    assert "10.5 s" in str(error)
    assert "(queue_timeout)" in str(error)
    results = rig.run()
    for request in (old, preempted, newer):
        expected = reference(request.prompt_token_ids, request.max_tokens, ignore_eos=True)
        assert results[request.request_id].outputs[0].token_ids == expected


def test_what_can_never_fit_fails_with_its_figures() -> None:
    llm = make_llm(num_blocks=10, block_size=4, max_num_seqs=4)
    router = llm._router
    with pytest.raises(InvalidInputError, match=r"^n: 5 samples .* but 4 may run|^n: 5 samples"):
        router.prepare([1], greedy(1, n=5))
    # 2 whole blocks of the prompt are shared; each sample has 3 more.
    assert router.prepare([1] * 9, greedy(10, n=2)).max_tokens == 10
    with pytest.raises(InvalidInputError, match=r"9 prompt tokens and 3 samples of 10 need 11 blocks, .* holds 10"):
        router.prepare([1] * 9, greedy(10, n=3))
    assert router.prepare([1] * 9, greedy(None, n=3)).max_tokens == 16 - 9
