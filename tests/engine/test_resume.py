"""Requests that outlive their process: wherever it ends, they go on to the tokens that they would have given."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leafkv import (
    LLM,
    AsyncEngine,
    BeamSearchParams,
    EngineDeadError,
    HandedOverError,
    InvalidInputError,
    JournalError,
    LeafKVError,
    RequestOutput,
    SamplingParams,
)
from leafkv.engine.journal import Journal
from leafkv.engine.request import Request

from .rig import greedy, make_llm
from .toy import VOCAB, ToyLoaded, ToyModel, ToyTokenizer, fail, reference
from .workload import Answer, Workload, answer_alone

KILLS = int(os.environ.get("LEAFKV_SOAK_KILLS", "10"))
OPTIONS: dict[str, Any] = {"num_blocks": 64, "block_size": 4}


def resume(path: Path, **options: Any) -> LLM:
    loaded: Any = ToyLoaded()
    return LLM.resume(path, loaded, **{**OPTIONS, **options})


def copy_journal(path: Path, to: Path) -> Path:
    """What a process leaves behind that is killed right now."""
    for suffix in ("", "-wal"):
        with suppress(FileNotFoundError):
            shutil.copy(f"{path}{suffix}", f"{to}{suffix}")
    return to


def alone(llm: LLM, request: Request) -> list[Answer]:
    prompt, params = request.prompt_token_ids, request.params
    return [answer_alone(llm._router, prompt, params, sample.seed) for sample in request.samples]


def joined(outputs: Iterable[RequestOutput], n: int) -> list[tuple[list[int], str, str | None]]:
    """Tokens, text and end of each sample, put together from deltas."""
    tokens: list[list[int]] = [[] for _ in range(n)]
    texts = [""] * n
    ends: list[str | None] = [None] * n
    for output in outputs:
        for answer in output.outputs:
            tokens[answer.index] += answer.token_ids
            texts[answer.index] += answer.text
            ends[answer.index] = answer.finish_reason or ends[answer.index]
    return list(zip(tokens, texts, ends, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_any_workload_goes_on_from_any_point(seed: int, tmp_path: Path) -> None:
    """Also with other chunks, another pool and another policy, and twice."""
    work = Workload(seed, faults=seed % 2 == 0, journal=tmp_path / "journal")
    rng = random.Random(seed)
    stop = rng.randrange(60)
    arrivals, steps = rng.randrange(3, 20), 0
    while (arrivals or work.rig.engine.has_unfinished_requests()) and steps < stop:
        for _ in range(min(arrivals, rng.choice([0, 1, 3]))):
            work.arrive()
            arrivals -= 1
        work.step()
        steps += 1
    for turn in range(2):
        path = copy_journal(tmp_path / "journal", tmp_path / f"copy{turn}")
        llm = resume(path, max_num_batched_tokens=rng.choice([3, 64]), max_num_seqs=rng.choice([4, 16]))
        unfinished = {request.request_id for request in work.requests if not request.finished}
        assert {*llm.resumed} == unfinished
        for request in rng.sample(work.requests, len(work.requests)):
            had = [rng.randint(0, sample.num_output_tokens) for sample in request.samples]
            ended = {sample.finish_reason for sample in request.samples}
            if "error" in ended:
                told: list[RequestOutput] = []
                with pytest.raises(LeafKVError, match=r"RuntimeError|not a distribution|leave no token|broke"):
                    told.extend(llm.stream(request_id=request.request_id, after=had))
                for sample, count, (tokens, *_) in zip(request.samples, had, joined(told, len(had)), strict=True):
                    assert tokens == sample.output_token_ids[count:]
                continue
            expected = alone(llm, request)
            rest = joined(llm.stream(request_id=request.request_id, after=had), len(had))
            for sample, answer, count, (tokens, text, end) in zip(request.samples, expected, had, rest, strict=True):
                if sample.finish_reason == "abort":
                    assert tokens == sample.output_token_ids[count:]
                    continue
                assert tokens == answer.tokens[count:]
                assert answer.text.endswith(text)
                assert end == answer.reason
                if count == 0:
                    assert text == answer.text
        llm.manager.check_invariants()
        assert llm.manager.stats().held_blocks == 0
        assert llm.resumed == []
        llm.close()
    work.rig.llm.close()


def test_text_logprobs_and_samples_come_back_whole(tmp_path: Path) -> None:
    llm = make_llm(journal=tmp_path / "journal")
    params = SamplingParams(n=3, temperature=1.0, logprobs=2, prompt_logprobs=1, max_tokens=20, ignore_eos=True)
    stream = llm.stream("HELLO", params)
    for _ in range(7):
        seen = next(stream)
    again = resume(copy_journal(tmp_path / "journal", tmp_path / "copy"))
    (whole,) = again.collect()
    *_, last = stream
    assert whole.prompt == "HELLO"
    assert whole.prompt_logprobs == last.prompt_logprobs
    for mine, other, before in zip(whole.outputs, last.outputs, seen.outputs, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.token_ids[:7] == before.token_ids
        assert (mine.text, mine.logprobs, mine.finish_reason) == (other.text, other.logprobs, other.finish_reason)
        assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob)
    assert again.collect() == []
    (told,) = again.stream(request_id=whole.request_id)
    assert [answer.token_ids for answer in told.outputs] == [answer.token_ids for answer in whole.outputs]


def test_logprobs_of_a_long_prompt_come_back_once_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leafkv.engine.scheduler.PROMPT_LOGPROBS_CHUNK", 4)
    llm = make_llm(journal=tmp_path / "journal")
    stream = llm.stream([i % VOCAB for i in range(30)], greedy(9, ignore_eos=True, prompt_logprobs=1))
    first = next(stream)
    again = resume(copy_journal(tmp_path / "journal", tmp_path / "copy"))
    outputs = list(again.stream(request_id=first.request_id))
    (whole,) = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert whole == first.prompt_logprobs
    assert len(whole) == 30


def test_a_seed_that_was_not_given_is_kept(tmp_path: Path) -> None:
    llm = make_llm(journal=tmp_path / "journal")
    stream = llm.stream([1, 2], SamplingParams(temperature=3.0, max_tokens=30, ignore_eos=True))
    first = next(stream)
    (again,) = resume(copy_journal(tmp_path / "journal", tmp_path / "copy")).collect()
    *_, last = stream
    assert again.outputs[0].token_ids == last.outputs[0].token_ids
    assert again.request_id == first.request_id


def test_who_asks_for_what_is_not_there_is_told(tmp_path: Path) -> None:
    llm = make_llm(journal=tmp_path / "journal")
    with pytest.raises(InvalidInputError, match="the journal has no request 'x'"):
        llm.stream(request_id="x")
    with pytest.raises(InvalidInputError, match="there is no journal, and no request 'x'"):
        make_llm().stream(request_id="x")
    with pytest.raises(InvalidInputError, match=r"^prompt: "):
        llm.stream()
    with pytest.raises(InvalidInputError, match=r"^request_id and after: "):
        llm.stream([1], request_id="x")
    stream = llm.stream([1, 2], greedy(5, ignore_eos=True))
    name = next(stream).request_id
    with pytest.raises(InvalidInputError, match="has not ended"):
        llm.stream(request_id=name)
    again = resume(copy_journal(tmp_path / "journal", tmp_path / "copy"))
    for after in (-1, 1.5, [1, 2], []):
        with pytest.raises(InvalidInputError, match=r"^after: "):
            again.stream(request_id=name, after=after)  # type: ignore[arg-type]
    one, other = (again.stream(request_id=name) for _ in range(2))
    next(one)
    with pytest.raises(InvalidInputError, match="somebody else"):
        next(other)


def test_a_journal_of_another_model_or_in_use_is_refused(tmp_path: Path) -> None:
    llm = make_llm(journal=tmp_path / "journal")
    with pytest.raises(JournalError):
        make_llm(journal=tmp_path / "journal")
    llm.close()
    with pytest.raises(JournalError, match="there is none"):
        resume(tmp_path / "nothing")
    other: Any = ToyLoaded(name="other")
    with pytest.raises(JournalError, match="model"):
        LLM.resume(tmp_path / "journal", other, **OPTIONS)
    assert resume(tmp_path / "journal").resumed == []


def test_own_functions_cannot_be_written_down(tmp_path: Path) -> None:
    llm = make_llm(journal=tmp_path / "journal")
    with pytest.raises(InvalidInputError, match="logits_processors"):
        llm.generate([1], greedy(3, logits_processors=[lambda tokens, logits: logits]))
    assert llm.generate([1], greedy(3))[0].outputs[0].token_ids == reference([1], 3)


@pytest.mark.parametrize("own", [True, False])
def test_a_checkpoint_hands_requests_over(own: bool, tmp_path: Path) -> None:
    llm = make_llm(journal=tmp_path / "journal" if own else None)
    llm.generate([9, 9], greedy(2))
    streams = [llm.stream([i, 2, 3], greedy(20, ignore_eos=True)) for i in range(3)]
    names = [next(stream).request_id for stream in streams]
    had = [len(next(stream).outputs[0].token_ids) for stream in streams]
    path = tmp_path / ("journal" if own else "other")
    assert llm.checkpoint(None if own else path) == 3
    assert llm.manager.stats().held_blocks == 0
    for stream in streams:
        with pytest.raises(HandedOverError):
            list(stream)
    if own:
        with pytest.raises(JournalError):
            llm.generate([1], greedy(1))
    else:
        assert llm.generate([1], greedy(3))[0].outputs[0].token_ids == reference([1], 3)
        with pytest.raises(InvalidInputError, match="path"):
            llm.checkpoint()
    again = resume(path)
    assert again.resumed == names
    for i, (name, count) in enumerate(zip(names, had, strict=True)):
        ((tokens, *_),) = joined(again.stream(request_id=name, after=count), 1)
        assert tokens == reference([i, 2, 3], 20, ignore_eos=True)[count:]


def test_a_checkpoint_elsewhere_is_the_end_here(tmp_path: Path) -> None:
    """Nobody is answered twice: the journal that the requests leave says that they have left."""
    llm = make_llm(journal=tmp_path / "journal")
    stream = llm.stream([1, 2, 3], greedy(10, ignore_eos=True))
    name = next(stream).request_id
    assert llm.checkpoint(tmp_path / "other") == 1
    killed = resume(copy_journal(tmp_path / "journal", tmp_path / "copy"))
    assert killed.resumed == [], "also if nobody makes a step any more"
    assert llm.generate([5], greedy(2))[0].outputs[0].token_ids == reference([5], 2)
    with pytest.raises(HandedOverError):
        list(stream)
    llm.close()
    assert resume(tmp_path / "journal").resumed == []
    assert resume(tmp_path / "other").resumed == [name]


def test_a_checkpoint_that_fails_changes_nothing(tmp_path: Path) -> None:
    llm = make_llm()
    good = llm.stream([1, 2, 3], greedy(40, ignore_eos=True))
    bad = llm.stream([1, 2, 4], greedy(10, ignore_eos=True, logits_processors=[lambda tokens, logits: logits]))
    next(good)
    next(bad)
    with pytest.raises(InvalidInputError, match="logits_processors"):
        llm.checkpoint(tmp_path / "journal")
    assert not (tmp_path / "journal").exists()
    assert len(list(bad)) == 9
    assert llm.checkpoint(tmp_path / "journal") == 1
    (output,) = resume(tmp_path / "journal").collect()
    assert output.outputs[0].token_ids == reference([1, 2, 3], 40, ignore_eos=True)


def test_a_checkpoint_keeps_the_priorities_that_were_asked_for(tmp_path: Path) -> None:
    llm = make_llm(scheduling_policy="priority", max_num_batched_tokens=8)
    engine, shared = llm.engine, list(range(40))
    engine.add_request(llm._router.prepare([*shared, 1], greedy(9), priority=5))
    engine.step()
    engine.add_request(llm._router.prepare([*shared, 2], greedy(9), priority=1))
    for _ in range(2):
        engine.step()
    assert [sample.request.urgency for sample in engine.scheduler.running.samples] == [1], "it has lent its place"
    assert llm.checkpoint(tmp_path / "journal") == 2
    again = resume(tmp_path / "journal")
    assert again._journal is not None
    assert [record.admission.priority for record in again._journal.requests()] == [5, 1]


def test_a_journal_that_cannot_be_written_is_let_go_of(tmp_path: Path) -> None:
    llm = make_llm(journal=tmp_path / "journal")
    stream = llm.stream([1, 2, 3], greedy(8, ignore_eos=True))
    next(stream)
    journal: Any = llm._journal
    journal.write = lambda **rows: fail(JournalError("the disk is full"))(None)
    with pytest.raises(JournalError, match="full"):
        next(stream)
    with pytest.raises(JournalError, match="full"):
        llm.close()
    (output,) = resume(tmp_path / "journal").collect()
    assert output.outputs[0].token_ids == reference([1, 2, 3], 8, ignore_eos=True)


def test_collect_gives_all_of_them_also_those_that_fail(tmp_path: Path) -> None:
    with make_llm(journal=tmp_path / "journal") as llm:
        streams = [llm.stream([i, 2], greedy(9, ignore_eos=True)) for i in range(3)]
        names = [next(stream).request_id for stream in streams]
    model = ToyModel()
    loaded: Any = ToyLoaded(model)
    again = LLM.resume(tmp_path / "journal", loaded, **OPTIONS, max_num_seqs=1)
    calls = iter(range(100))
    model.before_forward = lambda batch: fail(RuntimeError("the model broke"))(None) if next(calls) == 3 else None
    outputs = again.collect()
    assert [output.request_id for output in outputs] == names
    assert [output.error is not None for output in outputs] == [True, False, False]
    for i in (1, 2):
        assert outputs[i].outputs[0].token_ids == reference([i, 2], 9, ignore_eos=True)


@pytest.mark.parametrize("what", ["_fork", "commit"])
def test_what_fails_after_the_commit_tells_no_more_than_the_journal_has(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two samples one fails: tokens that were committed of the other, and that nobody has looked at, are none."""
    llm = make_llm(journal=tmp_path / "j")
    right, calls = getattr(llm.engine.scheduler, what), 0
    # A commit of the whole step fails, so it is made item by item: there the second one fails.
    failing = {"_fork": {1}, "commit": {3, 5}}[what]

    def fails(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in failing:
            raise RuntimeError(what)
        right(*arguments)

    monkeypatch.setattr(llm.engine.scheduler, what, fails)
    params = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=9, ignore_eos=True)
    llm.engine.add_request(llm._router.prepare([1, 2, 3], params))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = llm.engine.step()
    (output,) = outputs
    assert isinstance(output.error, RuntimeError)
    told = [[*answer.token_ids] for answer in output.outputs]
    assert output.metrics is not None
    assert output.metrics.num_generated_tokens == sum(map(len, told)) == llm.engine.stats().generated_tokens
    llm.close()
    with Journal(tmp_path / "j", llm._identify()) as journal:
        assert [request.tokens for request in journal.requests()] == [told]
    assert sum(map(len, told)) == (4 if what == "commit" else 0)


@pytest.mark.parametrize("journal", [False, True])
def test_a_step_that_is_left_halfway_is_made_again(journal: bool, tmp_path: Path) -> None:
    """By what is no Exception, in the text of one sample, when another one has been given its last token."""
    steps = 0

    class Tokenizer(ToyTokenizer):
        def decode_stream(self, *arguments: Any, **options: Any) -> Any:
            stream = super().decode_stream(*arguments, **options)
            step = stream.step

            def left(token: int) -> Any:
                nonlocal steps
                steps += 1
                if steps == 3:
                    raise SystemExit
                return step(token)

            stream.step = left
            return stream

    llm = make_llm(tokenizer=Tokenizer(), journal=tmp_path / "j" if journal else None)
    streamed = llm._router.prepare([1, 2, 3], greedy(9, ignore_eos=True), stream=True)
    quiet = llm._router.prepare([5, 6], greedy(3, ignore_eos=True, detokenize=False))
    for request in (streamed, quiet):
        llm.engine.add_request(request)
    left = 0
    while llm.engine.has_unfinished_requests():
        with suppress(SystemExit):
            llm.engine.step()
            continue
        left += 1
    assert left == 1
    for request, count in ((streamed, 9), (quiet, 3)):
        expected = reference(request.prompt_token_ids, count, ignore_eos=True)
        assert request.samples[0].output_token_ids == expected
    llm.close()


@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), JournalError("the disk is full")])
def test_what_interrupts_a_call_ends_nothing_for_good(trouble: BaseException, tmp_path: Path) -> None:
    """Ctrl-C and full disks: whoever asks again gets all of it."""
    with make_llm(journal=tmp_path / "journal") as llm:
        streams = [llm.stream([i, 2], greedy(9, ignore_eos=True)) for i in range(3)]
        names = [next(stream).request_id for stream in streams]
    again = resume(tmp_path / "journal")
    step = again.engine.step
    calls = iter(range(100))

    def perhaps() -> list[RequestOutput]:
        if next(calls) == 3:
            raise trouble
        return step()

    again.engine.step = perhaps  # type: ignore[method-assign]
    with pytest.raises(type(trouble)):
        again.collect()
    assert again.resumed == names
    assert [output.outputs[0].token_ids for output in again.collect()] == [
        reference([i, 2], 9, ignore_eos=True) for i in range(3)
    ]
    calls = iter(range(3, 100))
    with pytest.raises(type(trouble)):
        again.generate([[5, 6]], greedy(9, ignore_eos=True))
    assert again.manager.stats().held_blocks == 0
    again.close()
    (output,) = resume(tmp_path / "journal").collect()
    assert output.outputs[0].token_ids == reference([5, 6], 9, ignore_eos=True)


def test_the_last_tokens_come_before_the_error(tmp_path: Path) -> None:
    """As they come, of a journal, and to who comes back."""

    def make(model: ToyModel) -> Any:
        return ToyLoaded(model)

    model = ToyModel()
    llm = LLM(make(model), **OPTIONS, journal=tmp_path / "journal")
    stream = llm.stream([1, 2], greedy(9, ignore_eos=True))
    name = next(stream).request_id
    next(stream)
    model.before_forward = fail(RuntimeError("the model broke"))
    with pytest.raises(RuntimeError, match="the model broke"):
        next(stream)
    told: list[int] = []
    with pytest.raises(LeafKVError, match="the model broke"):  # noqa: PT012 (it is the second result that raises)
        for output in llm.stream(request_id=name, after=1):
            told += output.outputs[0].token_ids
    assert told == reference([1, 2], 2, ignore_eos=True)[1:]


def test_text_that_was_held_back_is_shown_once(tmp_path: Path) -> None:
    tokens = reference([1, 2], 9, ignore_eos=True)
    text = ToyTokenizer().decode(tokens)
    params = greedy(9, ignore_eos=True, stop=[f"{text[-2:]}zz"])
    llm = make_llm(journal=tmp_path / "journal")
    *_, last = llm.stream([1, 2], params)
    assert last.outputs[0].text == text
    for after in range(10):
        rest = joined(llm.stream(request_id=last.request_id, after=after), 1)
        shown = ToyTokenizer().decode(tokens[:after])
        shown = shown if after < 9 else text
        assert rest[0][0] == tokens[after:]
        assert (shown + rest[0][1]).startswith(text) or after in {8, 9}
        assert after < 9 or rest[0][1] == ""


def test_another_model_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """Whatever differs: what it says does."""

    class Other(ToyModel):
        def forward(self, batch: Any, cache: Any) -> Any:
            return super().forward(batch, cache) * np.float32(1.5)

    make_llm(journal=tmp_path / "journal").close()
    loaded: Any = ToyLoaded(Other())
    with pytest.raises(JournalError, match="fingerprint"):
        LLM.resume(tmp_path / "journal", loaded, **OPTIONS)


def test_an_error_that_cannot_be_written_down_is_one_all_the_same(tmp_path: Path) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError

    model = ToyModel()
    loaded: Any = ToyLoaded(model)
    llm = LLM(loaded, **OPTIONS, journal=tmp_path / "journal")
    stream = llm.stream([1, 2], greedy(9, ignore_eos=True))
    name = next(stream).request_id
    model.before_forward = fail(MuteError())
    with pytest.raises(MuteError):
        next(stream)
    model.before_forward = lambda batch: None
    with pytest.raises(LeafKVError, match="MuteError"):
        list(llm.stream(request_id=name, after=1))
    assert llm.generate([5], greedy(3))[0].outputs[0].token_ids == reference([5], 3)


def test_figures_of_a_resumed_request_are_of_this_process(tmp_path: Path) -> None:
    with make_llm(journal=tmp_path / "journal") as llm:
        stream = llm.stream([1, 2, 3], greedy(40, ignore_eos=True))
        for _ in range(30):
            next(stream)
    again = resume(tmp_path / "journal")
    again.generate([1, 2, 3], greedy(30, ignore_eos=True))
    (output,) = again.collect()
    metrics = output.metrics
    assert (metrics.num_generated_tokens, metrics.num_earlier_tokens) == (40, 30)
    assert output.num_cached_tokens <= 3
    (told,) = again.stream(request_id=output.request_id)
    assert told.outputs[0].token_ids == output.outputs[0].token_ids


def test_a_kv_dtype_is_part_of_what_a_journal_belongs_to(tmp_path: Path) -> None:
    make_llm(journal=tmp_path / "journal", kv_cache_dtype="int8").close()
    with pytest.raises(JournalError, match="kv_cache_dtype"):
        resume(tmp_path / "journal")


def test_a_write_that_fails_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: what is not written is not told, a request that is not written is not taken."""
    llm = make_llm(journal=tmp_path / "journal")
    journal: Any = llm._journal
    write, full = journal.write, [False]

    def perhaps(**rows: Any) -> None:
        if full[0]:
            raise JournalError("the disk is full")
        write(**rows)

    monkeypatch.setattr(journal, "write", perhaps)
    engine = llm.engine
    request = llm._router.prepare([1, 2, 3], greedy(12, ignore_eos=True), stream=True)
    engine.add_request(request)
    told: list[int] = []
    rng = random.Random(1)
    while engine.has_unfinished_requests():
        full[0] = rng.random() < 0.5
        if full[0]:
            with pytest.raises(JournalError):
                engine.add_request(llm._router.prepare([5], greedy(1)))
        try:
            outputs = engine.step()
        except JournalError:
            continue
        assert not full[0]
        for output in outputs:
            assert len(output.outputs[0].token_ids) > len(told)
            told = output.outputs[0].token_ids
            record = journal.request(request.request_id)
            assert record.tokens == [told], "told before it was written"
    assert told == reference([1, 2, 3], 12, ignore_eos=True)


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_journal_gives_each_token_once_all_the_same(seed: int, tmp_path: Path) -> None:
    """The log is cut anywhere: what it has lost is drawn again, to the same tokens."""
    rng = random.Random(seed)
    llm = make_llm(journal=tmp_path / "journal")
    requests, had = [], {}
    for _ in range(6):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        params = SamplingParams(temperature=1.0, max_tokens=rng.randint(1, 20), ignore_eos=True)
        requests.append(llm._router.prepare(prompt, params, stream=True))
        llm.engine.add_request(requests[-1])
        for _ in range(rng.randint(0, 5)):
            for output in llm.engine.step():
                had[output.request_id] = len(output.outputs[0].token_ids)
    path = copy_journal(tmp_path / "journal", tmp_path / "copy")
    log = Path(f"{path}-wal")
    os.truncate(log, rng.randrange(log.stat().st_size + 1))
    try:
        again = resume(path)
    except JournalError:  # so early that there is no journal yet
        return
    lost = 0
    for request in requests:
        name, count = request.request_id, had.get(request.request_id, 0)
        try:
            outputs = list(again.stream(request_id=name, after=count))
        except InvalidInputError:  # its admission was cut off: who asked for it knows, and asks again
            lost += 1
            continue
        assert not lost, "one that came later is there"
        ((tokens, *_),) = joined(outputs, 1)
        assert tokens == alone(llm, request)[0].tokens[count:]


CHILD = """
import json, sys
from leafkv import RequestOutputKind
from tests.engine.test_resume import *

loaded = ToyLoaded(ToyModel(before_forward=lambda batch: time.sleep(0.002)))
path, seed = sys.argv[1:]
options = {**OPTIONS, "max_num_batched_tokens": 16}
llm = LLM.resume(path, loaded, **options) if seed != "0" else LLM(loaded, **options, journal=path)
rng = random.Random(int(seed))

def tell(output):
    print(json.dumps([output.request_id, [answer.token_ids for answer in output.outputs]]), flush=True)

streams = [llm.stream(request_id=name) for name in llm.resumed]
for i in range(12):
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
    params = SamplingParams(
        n=rng.randint(1, 3), temperature=1.0, max_tokens=rng.randint(1, 30), ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    streams.append(llm.stream(prompt, params))
print("ready", flush=True)
while streams:
    stream = rng.choice(streams)
    output = next(stream, None)
    if output is None:
        streams.remove(stream)
    else:
        tell(output)
print("done", flush=True)
"""


def test_kill_9_at_any_moment(tmp_path: Path) -> None:
    """Again and again over one journal: no request is lost, and no token is told twice to who says what he has had."""
    path = tmp_path / "journal"
    rng = random.Random(7)
    root = Path(__file__).parents[2]
    for turn in range(KILLS):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(turn)], cwd=root, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(rng.random() * 0.8)
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().splitlines(keepends=True)
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL or lines[-1] == "done\n"
        told: dict[str, list[list[int]]] = {}
        for line in lines:
            if line.endswith("\n") and line != "done\n":  # the last one may be cut
                name, deltas = json.loads(line)
                told.setdefault(name, []).append(deltas)
        llm = resume(copy_journal(path, tmp_path / f"copy{turn}"))
        assert llm._journal is not None
        records = {record.admission.request_id: record for record in llm._journal.requests()}
        assert told.keys() <= records.keys(), "an answer to a request that nobody knows"
        for name, record in records.items():
            if turn and name not in told:
                continue
            n = record.admission.num_samples
            params = SamplingParams.from_dict(record.admission.params)
            expected = [
                answer_alone(llm._router, record.admission.prompt_token_ids, params, record.admission.seed + i).tokens
                for i in range(n)
            ]
            had = [len(tokens) for tokens in record.tokens]
            rest = joined(llm.stream(request_id=name, after=had), n)
            for i in range(n):
                assert record.tokens[i] + rest[i][0] == expected[i]
        llm.close()


def test_async_consumers_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        loaded: Any = ToyLoaded()
        had: dict[str, list[int]] = {}
        async with AsyncEngine(loaded, **OPTIONS, journal=tmp_path / "journal") as engine:

            async def some(i: int) -> None:
                async for output in engine.generate([i, 1, 2], greedy(25, ignore_eos=True), request_id=f"r{i}"):
                    had[output.request_id] = output.outputs[0].token_ids
                    if len(output.outputs[0].token_ids) > i * 5:
                        await asyncio.Event().wait()

            tasks = [asyncio.create_task(some(i)) for i in range(4)]
            while len(had) < 4 or any(len(had[f"r{i}"]) <= i * 5 for i in range(4)):
                await asyncio.sleep(0.001)
            assert await engine.checkpoint() <= 4
            with pytest.raises(JournalError):
                async for _ in engine.generate([1], greedy(1)):
                    pass
            for task in tasks:
                task.cancel()
        async with AsyncEngine.resume(tmp_path / "journal", loaded, **OPTIONS) as engine:
            for i in range(4):
                name = f"r{i}"
                expected = reference([i, 1, 2], 25, ignore_eos=True)
                assert had[name] == expected[: len(had[name])]
                outputs = [output async for output in engine.stream(name, after=len(had[name]))]
                ((tokens, text, end),) = joined(outputs, 1)
                assert had[name] + tokens == expected
                assert text == ToyTokenizer().decode(tokens)
                assert end == "length"
                (told,) = [output async for output in engine.stream(name)]
                assert told.outputs[0].token_ids == expected
            with pytest.raises(InvalidInputError, match="no request 'x'"):
                async for _ in engine.stream("x"):
                    pass

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("end", ["abort", "checkpoint"])
def test_a_consumer_comes_back_while_its_request_ends(end: str, tmp_path: Path) -> None:
    with make_llm(journal=tmp_path / "journal") as llm:
        streams = [llm.stream([1, 2, i], greedy(60, ignore_eos=True)) for i in (3, 4)]
        names = [next(stream).request_id for stream in streams]

    async def main() -> None:
        entered, go_on = threading.Event(), threading.Event()

        def hold(batch: object) -> None:
            entered.set()
            go_on.wait(30)

        loaded: Any = ToyLoaded(ToyModel(before_forward=hold))
        async with AsyncEngine.resume(tmp_path / "journal", loaded, **OPTIONS) as engine:
            await asyncio.to_thread(entered.wait)

            async def come_back() -> list[RequestOutput]:
                return [output async for output in engine.stream(names[0])]

            ending = engine.abort(names[0]) if end == "abort" else engine.checkpoint(tmp_path / "other")
            tasks = [asyncio.ensure_future(ending), asyncio.ensure_future(come_back())]
            await asyncio.sleep(0.05)  # both wait for the end of the step
            go_on.set()
            _, told = await asyncio.gather(*tasks, return_exceptions=True)
            if end == "abort":
                assert told[-1].outputs[0].finish_reason == "abort"  # type: ignore[index]
            else:
                assert isinstance(told, (HandedOverError, LeafKVError))
            assert engine.is_running

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_malformed_after_ends_nothing(tmp_path: Path) -> None:
    with make_llm(journal=tmp_path / "journal") as llm:
        stream = llm.stream([1, 2, 3], greedy(40, ignore_eos=True))
        name = next(stream).request_id

    async def main() -> None:
        loaded: Any = ToyLoaded()
        async with AsyncEngine.resume(tmp_path / "journal", loaded, **OPTIONS) as engine:
            with pytest.raises(InvalidInputError, match=r"^after: "):
                _ = [output async for output in engine.stream(name, after=[1, 2])]
            outputs = [output async for output in engine.stream(name)]
            ((tokens, *_),) = joined(outputs, 1)
            assert tokens == reference([1, 2, 3], 40, ignore_eos=True)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_journal_that_contradicts_itself_ends_the_engine(tmp_path: Path) -> None:
    """It is a bug, and no disk that will have space again: nobody waits for ever."""

    async def main() -> None:
        loaded: Any = ToyLoaded()
        async with AsyncEngine(loaded, **OPTIONS, journal=tmp_path / "journal") as engine:
            outputs = engine.generate([1, 2], greedy(20, ignore_eos=True))
            await outputs.__anext__()
            journal: Any = engine._journal
            journal.write = lambda **rows: fail(JournalError("malformed"))(None)
            with pytest.raises(EngineDeadError, match="malformed"):
                _ = [output async for output in outputs]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_async_engine_waits_for_its_journal(tmp_path: Path) -> None:
    """A disk that is full for a while stops everybody, loses nobody, and says so to who asks."""

    async def main() -> None:
        loaded: Any = ToyLoaded()
        async with AsyncEngine(loaded, **OPTIONS, journal=tmp_path / "journal") as engine:
            journal: Any = engine._journal
            write, full = journal.write, [False]

            def perhaps(**rows: Any) -> None:
                if full[0]:
                    raise JournalError("the disk is full") from sqlite3.OperationalError()
                write(**rows)

            journal.write = perhaps
            outputs = engine.generate([1, 2], greedy(20, ignore_eos=True))
            first = await outputs.__anext__()
            full[0] = True
            while engine._thread._trouble is None:
                await asyncio.sleep(0.001)
            with pytest.raises(JournalError, match="full"):
                await engine.check_health()
            with pytest.raises(JournalError, match="full"):
                await engine.generate([5], greedy(1)).__anext__()
            full[0] = False
            *_, last = [output async for output in outputs]
            assert first.outputs[0].token_ids == last.outputs[0].token_ids[: len(first.outputs[0].token_ids)]
            assert last.outputs[0].token_ids == reference([1, 2], 20, ignore_eos=True)
            await engine.check_health()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_is_asked_to_answer_something_else_is_not_recorded(tmp_path: Path) -> None:
    llm = make_llm(journal=tmp_path / "journal")
    llm.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=3, max_tokens=4))
    assert llm._journal is not None
    assert llm._journal.requests() == []


def test_an_abort_is_recorded_at_once(tmp_path: Path) -> None:
    llm = make_llm(journal=tmp_path / "journal")
    stream = llm.stream([1, 2], greedy(9, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert resume(copy_journal(tmp_path / "journal", tmp_path / "copy")).resumed == []


def test_two_engines_hand_over_to_one_file(tmp_path: Path) -> None:
    streams = []
    for _ in range(2):
        llm = make_llm()
        streams.append(llm.stream([1, 2], greedy(9, ignore_eos=True)))
        next(streams[-1])
        assert llm.checkpoint(tmp_path / "journal") == 1
    outputs = resume(tmp_path / "journal").collect()
    assert [output.outputs[0].token_ids for output in outputs] == [reference([1, 2], 9, ignore_eos=True)] * 2


def test_a_request_that_does_not_fit_stays_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And holds up nobody else."""
    with make_llm(journal=tmp_path / "journal") as llm:
        streams = [llm.stream([1] * length, greedy(9, ignore_eos=True)) for length in (30, 3)]
        long, short = (next(stream).request_id for stream in streams)
    with resume(tmp_path / "journal", num_blocks=5) as small:
        assert small.resumed == [short]
        assert f"request {long} of the journal: prompt and max_tokens: 30 " in caplog.text
        (answer,) = small.collect()
        assert answer.outputs[0].token_ids == reference([1] * 3, 9, ignore_eos=True)
    with resume(tmp_path / "journal") as large:
        assert large.resumed == [long]


def test_a_request_that_fails_is_not_tried_again(tmp_path: Path) -> None:
    model = ToyModel()
    llm = make_llm(model, journal=tmp_path / "journal")
    stream = llm.stream([1, 2], greedy(9, ignore_eos=True))
    name = next(stream).request_id
    model.before_forward = fail(RuntimeError("the model broke"))
    with pytest.raises(RuntimeError, match="the model broke"):
        next(stream)
    llm.close()
    again = resume(tmp_path / "journal")
    assert again.resumed == []
    with pytest.raises(LeafKVError, match="RuntimeError: the model broke"):
        list(again.stream(request_id=name))
