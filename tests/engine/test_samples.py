"""Several samples of one prompt: it is computed once, each is what its seed gives alone, and none sees another."""

from __future__ import annotations

import random
from typing import Any

import pytest

from leafkv import InvalidInputError, RequestOutput, RequestOutputKind, SamplingParams
from leafkv.engine.outputs import merge
from leafkv.engine.request import Request

from .rig import Rig, greedy
from .toy import VOCAB, ToyModel
from .workload import answer_alone

PROMPT = [i * 7 % VOCAB for i in range(10)]


def sampled(n: int, max_tokens: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(**{"n": n, "temperature": 2.0, "seed": 5, "max_tokens": max_tokens, **options})


def check_alone(rig: Rig, request: Request, output: RequestOutput) -> None:
    """Each sample is what a request for one sample with its seed gives, by a reference that knows no cache."""
    assert [answer.index for answer in output.outputs] == [*range(request.params.n)]
    for answer in output.outputs:
        seed = request.seed + answer.index
        expected = answer_alone(rig.llm._router, request.prompt_token_ids, request.params, seed)
        assert answer.token_ids == expected.tokens
        assert (answer.finish_reason, answer.text) == (expected.reason, expected.text)


@pytest.mark.parametrize("budget", [1, 3, 4, 64])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 8, 10])
def test_the_prompt_is_computed_once(budget: int, caching: bool, length: int) -> None:
    rig = Rig(max_num_batched_tokens=budget, enable_prefix_caching=caching)
    request = rig.add(PROMPT[:length], sampled(5, 6))
    check_alone(rig, request, rig.run()[request.request_id])
    assert rig.engine.stats().computed_prompt_tokens == length
    assert rig.engine.stats().cached_prompt_tokens == 0
    assert len({tuple(answer.token_ids) for answer in rig.results[request.request_id].outputs}) > 1


def test_samples_are_the_single_runs_of_the_next_seeds() -> None:
    rig = Rig()
    several = rig.add(PROMPT, sampled(4, 12, seed=2**64 - 2))  # seeds go on at 0 after the last one
    single = [rig.add(PROMPT, sampled(1, 12, seed=seed)) for seed in (2**64 - 2, 2**64 - 1, 0, 1)]
    results = rig.run()
    assert [answer.token_ids for answer in results[several.request_id].outputs] == [
        results[request.request_id].outputs[0].token_ids for request in single
    ]


@pytest.mark.parametrize("partial_hits", [True, False])
@pytest.mark.parametrize("length", [8, 9, 10, 11])
def test_no_sample_sees_another(length: int, partial_hits: bool) -> None:
    """B71: the whole blocks of the prompt are shared, its last part is copied, and what follows is each one's own."""
    rig = Rig(partial_hits=partial_hits)
    request = rig.add(PROMPT[:length], sampled(4, 9, ignore_eos=True))
    rig.step()
    while len(rig.running):
        tables = [rig.manager.block_table(sample.number) for sample in request.live]
        shared = length // 4
        assert len({tuple(table[:shared]) for table in tables}) == 1
        written = {sample.num_output_tokens for sample in request.live}
        if written != {1}:  # the last token is not computed yet
            own = [block for table in tables for block in table[shared:]]
            assert len(own) == len(set(own)), "two samples write one block"
        rig.step()
    check_alone(rig, request, rig.results[request.request_id])


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 10])
def test_preempted_as_one(n: int, caching: bool) -> None:
    """B68: in the middle of their answers, more than once, by one who is older, on a pool for either of them."""
    blocks = 2 + n * 4  # 2 of the prompt, and 4 of each sample for its last 2 tokens and 14 more
    rig = Rig(num_blocks=max(blocks, 12), enable_prefix_caching=caching, max_num_seqs=16)
    old = [rig.add([n, turn], greedy(44, ignore_eos=True)) for turn in range(2)]
    rig.step()
    request = rig.add(PROMPT, sampled(n, 14, ignore_eos=True))
    together = 0
    while rig.engine.has_unfinished_requests():
        rig.step()
        live = [sample in rig.scheduler.running.samples for sample in request.live]
        assert len(set(live)) <= 1, "some of its samples run, and others wait"
        together += all(live)
    rig.check_drained()
    assert 0 < request.metrics.num_preemptions <= len(old), "it came back before there was room for all of them"
    assert together > 0
    check_alone(rig, request, rig.results[request.request_id])
    for other in old:
        check_alone(rig, other, rig.results[other.request_id])


@pytest.mark.parametrize("seed", range(8))
def test_preempted_at_any_time(seed: int) -> None:
    """Also when some have ended, or none has begun; what is not cached any more is computed again."""
    rng = random.Random(seed)
    rig = Rig(num_blocks=40, max_num_batched_tokens=rng.choice([3, 5, 64]), enable_prefix_caching=seed % 2 == 0)
    request = rig.add(PROMPT, sampled(rng.randint(2, 5), 20, seed=seed))
    while rig.engine.has_unfinished_requests():
        rig.step()
        if rng.random() < 0.3 and request in rig.running:
            rig.scheduler.preempt(request)
            rig.manager.evict(rng.randrange(10))
            rig.check()
    rig.check_drained()
    check_alone(rig, request, rig.results[request.request_id])


def test_who_ends_gives_its_blocks_back_at_once() -> None:
    rig = Rig(enable_prefix_caching=False)
    stops = list(range(0, VOCAB, 6))
    request = rig.add(PROMPT, sampled(8, 24, stop_token_ids=stops, seed=3))
    ends = []
    while rig.engine.has_unfinished_requests():
        before = len(request.live)
        rig.step()
        tables = [rig.manager.block_table(sample.number) for sample in request.live]
        assert rig.manager.stats().held_blocks == len({block for table in tables for block in table})
        assert rig.manager.stats().free_blocks == 64 - rig.manager.stats().held_blocks
        ends += [before - len(request.live)] if len(request.live) < before else []
    assert len(ends) > 3, "they ended together"
    check_alone(rig, request, rig.results[request.request_id])
    rig.check_drained()


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_frees_all_of_them(steps: int) -> None:
    """Queued, with a part of the prompt, forked, and with some that have ended."""
    rig = Rig(max_num_batched_tokens=6, enable_prefix_caching=False)
    other = rig.add([1], greedy(40, ignore_eos=True))
    rig.step()
    request = rig.add(PROMPT, sampled(4, 6, stop_token_ids=[*range(0, VOCAB, 8)]))
    for _ in range(steps):
        rig.step()
    ended = [sample.finish_reason for sample in request.samples]
    rig.engine.abort_request(request.request_id)
    assert rig.manager.stats().sequences == 1
    assert rig.manager.stats().held_blocks == len(rig.manager.block_table(other.samples[0].number))
    rig.run()
    reasons = [answer.finish_reason for answer in rig.results[request.request_id].outputs]
    assert reasons == [reason or "abort" for reason in ended]


@pytest.mark.parametrize("options", [{}, {"partial_hits": False}, {"enable_prefix_caching": False}], ids=str)
@pytest.mark.parametrize("n", [2, 5])
def test_they_run_on_the_smallest_pool_that_holds_them(n: int, options: dict[str, Any]) -> None:
    """Each residue of the prompt and of the answer, cold and with its prefix cached; a block less is refused."""
    for length in range(1, 10):
        for max_tokens in range(1, 7):
            shared = length // 4
            blocks = shared + n * (-(-(length + max_tokens) // 4) - shared)
            rig = Rig(num_blocks=blocks, max_num_batched_tokens=64, **options)
            rig.add(PROMPT[: length - 1] or [3], greedy(1))
            rig.run()
            for _ in range(2):
                request = rig.add(PROMPT[:length], sampled(n, max_tokens))
                check_alone(rig, request, rig.run()[request.request_id])
            assert rig.engine.stats().preemptions == 0
            if blocks > n:
                with pytest.raises(InvalidInputError, match=f"need {blocks} blocks, but .* holds {blocks - 1} "):
                    Rig(num_blocks=blocks - 1, **options).add(PROMPT[:length], sampled(n, max_tokens))


def test_they_share_what_the_pool_has_left() -> None:
    """Without max_tokens: as many as all of them may have at once; and more samples than may run are refused."""
    rig = Rig(num_blocks=12, max_num_seqs=5)
    request = rig.add(PROMPT, sampled(5, None, ignore_eos=True))
    assert request.max_tokens == (2 + 10 // 5) * 4 - len(PROMPT)
    answers = rig.run()[request.request_id].outputs
    alone = rig.add(PROMPT, sampled(5, 6, ignore_eos=True))
    assert [answer.token_ids for answer in answers] == [
        answer.token_ids for answer in rig.run()[alone.request_id].outputs
    ]
    with pytest.raises(InvalidInputError, match=r"n: 6 samples .* but 5 may \(max_num_seqs\)"):
        rig.add(PROMPT, sampled(6, 1))


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_streams_tell_them_apart(kind: RequestOutputKind) -> None:
    """In order of index; deltas name only those that have something new."""
    rig = Rig()
    params = sampled(5, 12, output_kind=kind, stop_token_ids=[*range(0, VOCAB, 8)])
    request = rig.add(PROMPT, params, stream=True)
    told: list[RequestOutput] = []
    while rig.engine.has_unfinished_requests():
        told += rig.step()
    assert [output.finished for output in told] == [False] * (len(told) - 1) + [True]
    for output in told:
        indices = [answer.index for answer in output.outputs]
        assert indices == sorted(set(indices))
        if kind is RequestOutputKind.DELTA:
            assert all(answer.token_ids for answer in output.outputs)
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(told) == 1
    whole = told[0]
    for output in told[1:]:
        whole = merge(whole, output, delta=kind is RequestOutputKind.DELTA)
    check_alone(rig, request, whole)


def test_one_that_cannot_go_on_ends_them_all() -> None:
    """A step of theirs that fails; whoever has ended before has its answer."""
    model = ToyModel()
    rig = Rig(model)
    request = rig.add(PROMPT, sampled(6, 30, stop_token_ids=[*range(0, VOCAB, 6)], seed=3))
    other = rig.add([1, 2, 3], greedy(40, ignore_eos=True))
    while len(request.live) in {0, 6}:
        rig.step()
    ended = [sample.finish_reason for sample in request.samples]
    assert "stop" in ended

    def spoil(logits: Any) -> None:
        logits[0] = float("nan")

    model.after_forward = spoil
    rig.step()
    model.after_forward = lambda logits: None
    output = rig.results[request.request_id]
    assert [answer.finish_reason for answer in output.outputs] == [reason or "error" for reason in ended]
    assert "not a distribution" in str(output.error)
    check_alone(rig, other, rig.run()[other.request_id])
