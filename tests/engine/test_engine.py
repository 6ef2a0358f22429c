"""One step of the engine: aborts and failures in every state, and what they leave behind: nothing."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leafkv import InvalidInputError, LeafKVError, SamplingParams
from leafkv.engine.request import Request, Status

from .rig import Rig, greedy
from .toy import EOS, ToyModel, ToyTokenizer, fail, reference


def serves_on(rig: Rig) -> None:
    """The engine answers a new request, and all blocks come back."""
    prompt = [4, 2, 4, 2, 4]
    request = rig.add(prompt, greedy(5, ignore_eos=True))
    assert rig.run()[request.request_id].outputs[0].token_ids == reference(prompt, 5, ignore_eos=True)


def queued(rig: Rig) -> Request:
    return rig.add(list(range(30)), greedy(8))


def prefilling(rig: Rig) -> Request:
    request = queued(rig)
    rig.step()
    assert 0 < rig.computed(request) < 30
    return request


def decoding(rig: Rig) -> Request:
    request = rig.add(list(range(5)), greedy(20, ignore_eos=True))
    while request.samples[0].num_output_tokens < 2:
        rig.step()
    return request


def waiting_for_a_leader(rig: Rig) -> Request:
    rig.add([*range(6)], greedy(4))
    request = rig.add([*range(6)], greedy(4))
    rig.step()
    assert request.status is Status.WAITING
    return request


def preempted(rig: Rig) -> Request:
    rig.add(list(range(30)), greedy(30, ignore_eos=True))
    request = rig.add([9] * 5, greedy(30, ignore_eos=True))
    while not request.metrics.num_preemptions:
        rig.step()
    assert request.status is Status.WAITING
    return request


def finished(rig: Rig) -> Request:
    request = rig.add([1], greedy(1))
    rig.run()
    return request


@pytest.mark.parametrize("state", [queued, prefilling, decoding, waiting_for_a_leader, preempted])
def test_abort_in_every_state(state: Any) -> None:
    """B10, B11: one result, blocks free at once, a second abort is nothing."""
    rig = Rig(num_blocks=15, max_num_batched_tokens=8)
    request = state(rig)
    before = request.samples[0].output_token_ids
    rig.engine.abort_request(request.request_id)
    rig.engine.abort_request(request.request_id)
    assert request.status is Status.FINISHED
    assert request not in rig.running
    assert request not in rig.scheduler.waiting
    rig.check()
    (output,) = [output for output in rig.step() if output.request_id == request.request_id]
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == before
    serves_on(rig)


def test_abort_of_nothing_is_nothing() -> None:
    rig = Rig()
    rig.engine.abort_request("unknown")
    rig.engine.abort_request(finished(rig).request_id)
    assert not rig.engine.has_unfinished_requests()
    assert rig.engine.step() == []
    serves_on(rig)


def test_abort_during_the_last_step_wins() -> None:
    """B13: no extra token, blocks freed."""
    model = ToyModel()
    rig = Rig(model)
    request = rig.add([1, 2, 3], greedy(3, ignore_eos=True))
    rig.step()
    rig.step()
    model.before_forward = lambda batch: rig.engine.abort_request(request.request_id)
    (output,) = rig.step()
    model.before_forward = lambda batch: None
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 2
    serves_on(rig)


def test_a_failing_step_ends_its_requests_alone() -> None:
    model = ToyModel()
    rig = Rig(model, max_num_seqs=2)
    first, second = (rig.add([i] * 6, greedy(20, ignore_eos=True), stream=True) for i in (1, 2))
    later = rig.add([3] * 6, greedy(20, ignore_eos=True))
    rig.step()
    error = RuntimeError("the model broke")
    model.before_forward = fail(error)
    outputs = rig.step()
    model.before_forward = lambda batch: None
    assert {output.request_id for output in outputs} == {first.request_id, second.request_id}
    for output in outputs:
        assert output.finished
        assert output.error is error
        assert output.outputs[0].finish_reason == "error"
    assert rig.run()[later.request_id].outputs[0].token_ids == reference([3] * 6, 20, ignore_eos=True)
    serves_on(rig)


def test_a_tokenizer_that_fails_at_the_end_is_reported() -> None:
    class Failing(ToyTokenizer):
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            raise RuntimeError("the tokenizer broke")

        def decode_stream(self, skip_special_tokens: bool = True) -> Any:
            return SimpleNamespace(step=lambda token: None)  # holds all of it back

    rig = Rig(tokenizer=Failing())
    failed = rig.add([1, 2, 3], greedy(3, ignore_eos=True))
    good = rig.add([1, 2, 3], greedy(3, ignore_eos=True, detokenize=False))
    results = rig.run()
    assert results[failed.request_id].outputs[0].finish_reason == "error"
    assert "the tokenizer broke" in str(results[failed.request_id].error)
    assert results[good.request_id].outputs[0].token_ids == reference([1, 2, 3], 3, ignore_eos=True)


def test_what_a_failing_step_wrote_is_never_found() -> None:
    prompt = list(range(20))
    model = ToyModel(after_forward=lambda logits: fail(RuntimeError())(None))
    rig = Rig(model)
    rig.add(prompt, greedy(1))
    rig.step()
    model.after_forward = lambda logits: None
    again = rig.add(prompt, greedy(4))
    assert rig.run()[again.request_id].outputs[0].token_ids == reference(prompt, 4)
    assert again.metrics.num_cached_tokens == 0


def test_an_interrupt_takes_the_step_back() -> None:
    """Ctrl-C reaches the caller; the requests go on as if the step had not been."""
    model = ToyModel()
    rig = Rig(model, num_blocks=8)
    old = rig.add([1] * 6, greedy(10, ignore_eos=True))
    rig.step()
    new = rig.add([2] * 6, greedy(10, ignore_eos=True))
    model.before_forward = fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rig.engine.step()
    model.before_forward = lambda batch: None
    rig.check()
    results = rig.run()
    for request, token in ((old, 1), (new, 2)):
        assert results[request.request_id].outputs[0].token_ids == reference([token] * 6, 10, ignore_eos=True)
        assert request.metrics.num_cached_tokens == 0, "what a request finds of its own again is no prefix hit"


@pytest.mark.parametrize("where", ["copies", "copy_blocks", "before_forward", "after_forward"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_around_its_copies(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a hit inside a block copies is owed, or made and lost: the block that it is copied from stays as it was."""
    cached = list(range(16))
    prompts = [[*cached[:n], 60, 60] for n in (14, 13, 7)]
    model = ToyModel()
    rig = Rig(model, num_blocks=16, partial_hits=True)
    rig.add(cached, greedy(1))
    rig.run()
    requests = [rig.add(prompt, greedy(5, ignore_eos=True)) for prompt in prompts]
    with monkeypatch.context() as patch:
        if where == "copies":
            patch.setattr(rig.engine, "manager", SimpleNamespace(copies=lambda: fail(error())(None)))
        else:
            patch.setattr(rig.engine.cache if where == "copy_blocks" else model, where, fail(error()))
        with pytest.raises(error) if error is KeyboardInterrupt else nullcontext():
            rig.engine.step()
    rig.check()
    assert [request.metrics.num_cached_tokens for request in requests] == [14, 13, 7]
    if error is RuntimeError:
        assert not rig.scheduler.running
        requests = [rig.add(prompt, greedy(5, ignore_eos=True)) for prompt in prompts]
    again = rig.add(cached, greedy(5, ignore_eos=True))
    results = rig.run()
    for request in (*requests, again):
        expected = reference(request.prompt_token_ids, 5, ignore_eos=True)
        assert results[request.request_id].outputs[0].token_ids == expected
    assert again.metrics.num_cached_tokens == 15


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_distribution_end_their_request_alone(value: float) -> None:
    def spoil(logits: Any) -> None:
        logits[0, :] = value

    model = ToyModel()
    rig = Rig(model)
    bad = rig.add([1] * 6, greedy(5, ignore_eos=True))
    good = rig.add([2] * 6, greedy(5, ignore_eos=True))
    rig.step()
    model.after_forward = spoil
    (output,) = rig.step()
    model.after_forward = lambda logits: None
    assert output.request_id == bad.request_id
    assert isinstance(output.error, LeafKVError)
    assert "not a distribution" in str(output.error)
    assert rig.run()[good.request_id].outputs[0].token_ids == reference([2] * 6, 5, ignore_eos=True)
    serves_on(rig)


@pytest.mark.parametrize("victim", range(3))
def test_a_commit_that_fails_ends_its_request_alone(victim: int) -> None:
    model = ToyModel()
    rig = Rig(model)
    requests = [rig.add([token] * 6, greedy(5, ignore_eos=True)) for token in (1, 2, 3)]
    bad = requests.pop(victim)
    rig.step()

    def take_slots(logits: Any) -> None:
        rig.manager.truncate(bad.samples[0].number, rig.computed(bad))

    model.after_forward = take_slots
    (output,) = rig.step()
    model.after_forward = lambda logits: None
    assert output.request_id == bad.request_id
    assert isinstance(output.error, InvalidInputError)
    results = rig.run()
    for request in requests:
        expected = reference(request.prompt_token_ids, 5, ignore_eos=True)
        assert results[request.request_id].outputs[0].token_ids == expected


def test_owed_copies_are_made_before_the_step_writes() -> None:
    """A block that a fork shares is copied before it is written."""
    rig = Rig()
    request = rig.add([1, 2, 3, 4, 5, 6], greedy(20, ignore_eos=True))
    rig.step()
    rig.manager.fork(request.samples[0].number, 999)
    shared = rig.manager.block_table(999)[-1]
    rig.engine.step()
    assert rig.manager.block_table(request.samples[0].number)[1] != shared
    rig.manager.release(999)
    expected = reference([1, 2, 3, 4, 5, 6], 20, ignore_eos=True)
    assert rig.run()[request.request_id].outputs[0].token_ids == expected


def test_what_a_caller_does_with_an_output_is_no_business_of_the_engine() -> None:
    rig = Rig()
    other = rig.add([4, 5, 6], greedy(10, ignore_eos=True))
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, prompt_logprobs=0)
    request = rig.add([1, 2, 3], params, stream=True)
    while rig.engine.has_unfinished_requests():
        for output in rig.step():
            ids = output.prompt_token_ids
            ids += output.outputs[0].token_ids
            output.outputs[0].token_ids.append(60)
            if output.prompt_logprobs is not None:
                output.prompt_logprobs.clear()
    for one in (other, request):
        assert one.samples[0].output_token_ids == reference(one.samples[0].tokens[:3].tolist(), 10, ignore_eos=True)
    assert request.prompt_logprobs is not None
    assert len(request.prompt_logprobs) == 3


class FailingAtThird(ToyTokenizer):
    """The first stream that comes to its third token fails."""

    def __init__(self) -> None:
        self.failed = False

    def decode_stream(self, skip_special_tokens: bool = True) -> Any:
        stream, count = super().decode_stream(skip_special_tokens), [0]

        def step(token: int) -> Any:
            count[0] += 1
            if count[0] == 3 and not self.failed:
                self.failed = True
                raise RuntimeError("the tokenizer broke")
            return stream.step(token)

        return SimpleNamespace(step=step, held=stream.held, finish=stream.finish)


@pytest.mark.parametrize("journal", [False, True])
def test_a_sample_that_fails_ends_the_others_with_it(journal: bool, tmp_path: Path) -> None:
    """Once: also where these would have ended in that very step. The journal has the tokens that they have."""
    rig = Rig(tokenizer=FailingAtThird(), journal=tmp_path / "journal" if journal else None)
    params = SamplingParams(n=2, seed=3, max_tokens=3, ignore_eos=True)
    bad = rig.add([1, 2, 3], params, stream=True)
    good = rig.add([4, 2, 3], greedy(5, ignore_eos=True))
    results = rig.run()
    assert [answer.finish_reason for answer in results[bad.request_id].outputs] == ["error", "error"]
    assert "the tokenizer broke" in str(results[bad.request_id].error)
    assert results[good.request_id].outputs[0].token_ids == reference([4, 2, 3], 5, ignore_eos=True)
    if journal:
        assert rig.llm._journal is not None
        record = rig.llm._journal.request(bad.request_id)
        assert record is not None
        assert record.tokens == [sample.output_token_ids for sample in bad.samples]


@pytest.mark.parametrize("what", ["fork", "commit", "truncate"])
def test_a_fork_that_fails_ends_its_request_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaks nothing."""
    rig = Rig()
    bad = rig.add([1, 2, 3, 4, 5], SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True))
    good = rig.add([9, 2, 3, 4, 5], greedy(5, ignore_eos=True))
    manager = rig.manager

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return fail_twice if name == what else getattr(manager, name)

    def fail_twice(*arguments: Any) -> None:
        raise RuntimeError("the manager broke")

    rig.scheduler.manager = Failing()  # type: ignore[assignment]
    rig.step()
    rig.scheduler.manager = manager
    results = rig.run()
    assert str(results[bad.request_id].error) == "the manager broke"
    assert results[good.request_id].outputs[0].token_ids == reference([9, 2, 3, 4, 5], 5, ignore_eos=True)


def test_extreme_parameters_are_nobody_elses() -> None:
    rig = Rig()
    extremes: list[dict[str, Any]] = [
        {"top_k": 2**64},
        {"temperature": 1e300},
        {"temperature": 2e-5},
        {"top_p": 1e-300},
        {"min_p": 1e-300},
        {"seed": 2**64 - 1},
        {"logprobs": 2**40, "max_tokens": 2},
    ]
    for options in extremes:
        rig.add([1, 2, 3], SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **options}))
    good = rig.add([4, 5], greedy(6, ignore_eos=True))
    results = rig.run()
    assert [output.error for output in results.values()] == [None] * (len(extremes) + 1)
    assert results[good.request_id].outputs[0].token_ids == reference([4, 5], 6, ignore_eos=True)


def test_parameters_that_leave_no_token_are_told_from_a_model_that_fails() -> None:
    rig = Rig()
    params = greedy(3, allowed_token_ids=[5], min_tokens=3, stop_token_ids=[5])
    request = rig.add([1, 2], params)
    assert "its parameters leave no token" in str(rig.run()[request.request_id].error)


def test_figures_of_a_stream_are_those_of_now() -> None:
    rig = Rig()
    request = rig.add([1, 2, 3], SamplingParams(n=2, seed=3, max_tokens=4, ignore_eos=True), stream=True)
    generated = []
    while rig.engine.has_unfinished_requests():
        generated += [output.metrics.num_generated_tokens for output in rig.step()]
    assert generated == [2, 4, 6, 8]
    times = request.metrics
    assert times.queue_time is not None
    assert times.time_to_first_token is not None
    assert times.time_per_output_token is not None
    assert 0 <= times.queue_time <= times.time_to_first_token
    assert times.time_per_output_token >= 0


def test_a_model_of_the_wrong_shape_is_refused() -> None:
    class Wrong(ToyModel):
        def forward(self, batch: Any, cache: Any) -> Any:
            return super().forward(batch, cache)[:, :-1]

    rig = Rig(Wrong())
    rig.add([1], greedy(1))
    (output,) = rig.step()
    assert "shape" in str(output.error)


def test_why_a_request_ends() -> None:
    rig = Rig()
    prompt = next([i, 5] for i in range(60) if EOS in reference([i, 5], 40)[2:])
    full = reference(prompt, 40)
    assert full[-1] == EOS
    stop_at = full[1]
    cases = {
        "eos": rig.add(prompt, greedy(40)),
        "length": rig.add(prompt, greedy(2)),
        "stop token": rig.add(prompt, greedy(40, stop_token_ids=[stop_at])),
        "ignored": rig.add(prompt, greedy(len(full) + 1, ignore_eos=True)),
    }
    results = {name: rig.run()[request.request_id].outputs[0] for name, request in cases.items()}
    eos, length, stop, ignored = results.values()
    assert (eos.finish_reason, eos.stop_reason, eos.token_ids) == ("stop", None, full)
    assert (length.finish_reason, length.stop_reason, length.token_ids) == ("length", None, full[:2])
    cut = full.index(stop_at) + 1
    assert (stop.finish_reason, stop.stop_reason, stop.token_ids) == ("stop", stop_at, full[:cut])
    assert len(stop.text) == cut - 1, "the stop token is no part of the text"
    assert (ignored.finish_reason, ignored.token_ids[: len(full)]) == ("length", full)


def test_a_request_id_is_used_once_at_a_time() -> None:
    rig = Rig()
    request = rig.add([1], greedy(1))
    with pytest.raises(InvalidInputError, match="request_id"):
        rig.engine.add_request(request)
    rig.run()


def test_counters_and_metrics() -> None:
    rig = Rig(max_num_batched_tokens=8)
    request = rig.add(list(range(20)), greedy(3, ignore_eos=True))
    rig.run()
    stats = rig.engine.stats()
    assert (stats.computed_prompt_tokens, stats.cached_prompt_tokens, stats.generated_tokens) == (20, 0, 3)
    assert (stats.steps, stats.preemptions, stats.running, stats.waiting) == (5, 0, 0, 0)
    rig.add(list(range(20)), greedy(1))
    rig.run()
    stats = rig.engine.stats()
    assert (stats.computed_prompt_tokens, stats.cached_prompt_tokens) == (21, 19)
    times = request.metrics
    assert (
        times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time  # type: ignore[operator]
    )
