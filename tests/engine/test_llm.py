"""The offline face: forms of prompts, bad input, streams, threads."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import leafkv
from leafkv import LLM, InvalidInputError, InvariantError, SamplingParams
from leafkv.engine.build import EngineArgs
from leafkv.kv.storage import DTYPES
from leafkv.models import load_model

from ..models.tiny import CONFIGS, write_hf
from .rig import greedy, make_llm
from .toy import EOS, VOCAB, ToyModel, ToyTokenizer, reference

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType


@pytest.fixture
def llm() -> LLM:
    return make_llm()


def drained(llm: LLM) -> bool:
    llm.manager.check_invariants()
    stats = llm.manager.stats()
    return stats.held_blocks == 0 and stats.free_blocks + stats.cached_blocks == stats.num_blocks


def test_results_come_in_order_with_vllm_names(llm: LLM) -> None:
    prompts: list[Any] = ["HELLO", [1, 2, 3], {"prompt": "WORLD"}, {"prompt_token_ids": [4, 5]}, np.array([6, 7])]
    lengths = [9, 1, 5, 3, 7]
    outputs = llm.generate(prompts, [greedy(n, ignore_eos=True) for n in lengths], use_tqdm=False)
    tokenizer = ToyTokenizer()
    expected = [tokenizer.encode("HELLO"), [1, 2, 3], tokenizer.encode("WORLD"), [4, 5], [6, 7]]
    assert [output.prompt_token_ids for output in outputs] == expected
    assert [output.prompt for output in outputs] == ["HELLO", None, "WORLD", None, None]
    for output, ids, n in zip(outputs, expected, lengths, strict=True):
        (answer,) = output.outputs
        assert output.finished
        assert answer.token_ids == reference(ids, n, ignore_eos=True)
        assert answer.text == tokenizer.decode(answer.token_ids)
        assert (answer.index, answer.finish_reason) == (0, "length")
    assert len({output.request_id for output in outputs}) == len(outputs)
    assert drained(llm)


@pytest.mark.parametrize("prompt", ["HELLO", [7, 4, 11, 11, 14], (7, 4, 11, 11, 14), {"prompt": "HELLO"}])
def test_one_prompt_alone(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt, greedy(3))
    assert output.prompt_token_ids == [7, 4, 11, 11, 14]


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "system", "content": "BE"}, {"role": "user", "content": "HI"}]
    (one,) = llm.chat(conversation, greedy(3))
    assert one.prompt == "BEHIZ"
    assert len(llm.chat([conversation, conversation], greedy(3))) == 2
    assert list(llm.stream(conversation, greedy(3)))[-1].prompt == "BEHIZ"


@pytest.mark.parametrize("messages", [None, 5, "A", [None], [[]], {"role": "user", "content": "A"}])
def test_bad_chats_fail_at_the_call(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^messages: "):
        llm.chat(messages)


def test_the_same_twice(llm: LLM) -> None:
    """B63, B78: no state is kept from the first call."""
    prompts = [[i, 1, 2, 3, 4] for i in range(5)]
    first, second = (llm.generate(prompts, greedy(8)) for _ in range(2))
    assert [o.outputs for o in first] == [o.outputs for o in second]
    assert [o.num_cached_tokens for o in second] == [4] * 5
    cold = make_llm(enable_prefix_caching=False)
    for _ in range(2):
        again = cold.generate(prompts, greedy(8))
        assert [o.outputs for o in again] == [o.outputs for o in first]
        assert {o.num_cached_tokens for o in again} == {0}


NAN = float("nan")

BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "empty"),
    ([[]], "no tokens"),
    ([""], "empty"),
    ({"prompt": ""}, "empty"),
    ({"prompt_token_ids": []}, "no tokens"),
    ([1, VOCAB], f"{VOCAB}"),
    ([1, -1], "-1"),
    ([1, 2**40], f"{2**40}"),
    ([True, False], "True"),
    ([1, 2.0], "2.0"),
    ([1, "a"], "'a'"),
    ([None], "None"),
    (None, "None"),
    (7, "7"),
    ([b"bytes"], "bytes"),
    ({"prompt": "A", "multi_modal_data": {}}, "multi_modal_data"),
    ({"prompt": 3}, "prompt"),
    ({}, "{}"),
    ([["A", "B"]], "'A'"),
    ("\ud800", "Unicode"),
    (np.zeros((1, 2, 2), np.int64), "prompt"),
    (np.array([1.5]), "1.5"),
    ([{"role": "user", "content": "A"}, {"content": "B"}], "role"),
    ([[1, 2], ""], "empty"),
    ([0] * 245, "257 .* 256|256"),
    (np.array(5), "5"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_bad_prompts_fail_at_the_call_and_the_engine_serves_on(llm: LLM, prompt: Any, message: str) -> None:
    good = llm.stream([1, 2, 3], greedy(6, ignore_eos=True))
    tokens = next(good).outputs[0].token_ids
    steps = llm.stats().steps
    with pytest.raises(InvalidInputError, match=message):
        llm.generate(prompt)
    assert llm.stats().steps == steps, "something ran"
    with pytest.raises(InvalidInputError):
        llm.stream("" if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else prompt)
    *_, last = good
    assert last.outputs[0].token_ids[:1] == tokens
    assert last.outputs[0].token_ids == reference([1, 2, 3], 6, ignore_eos=True)
    assert drained(llm)


BAD_PARAMS: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (NAN, Fraction(10**400), -0.1, float("inf"), "1", None, True, [1.0])],
    *[("top_p", value) for value in (NAN, 0.0, -0.1, 1.1, "1", None, True)],
    *[("min_p", value) for value in (NAN, -0.1, 1.1, "0", None, False)],
    *[("top_k", value) for value in (-2, 1.0, NAN, "1", None, True)],
    *[("max_tokens", value) for value in (0, -1, 1.0, NAN, "16", True)],
    *[("seed", value) for value in (-1, 2**64, 1.0, "1", True)],
    *[("n", value) for value in (0, -1, 1.0, None, True)],
    *[("stop_token_ids", value) for value in (3, "3", b"3", [-1], [1.0], [True], [None])],
    *[(name, 1) for name in ("ignore_eos", "detokenize", "skip_special_tokens")],
]


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS)
def test_bad_sampling_params_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{name}: .*expected"):
        SamplingParams(**{name: value})


def test_good_sampling_params() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=2**64 - 1, max_tokens=None, stop_token_ids={3}
    )
    assert not params.greedy
    assert SamplingParams(stop_token_ids=np.array([3, 4])).stop_token_ids == (3, 4)
    # One that numpy cannot compute with would fail the whole step.
    numbers: Any = {"temperature": Fraction(1, 2), "top_p": Fraction(1, 2), "min_p": Fraction(1, 4)}
    mine = SamplingParams(**numbers, max_tokens=4, seed=1)
    same = SamplingParams(temperature=0.5, top_p=0.5, min_p=0.25, max_tokens=4, seed=1)
    results = make_llm().generate([[1, 2, 3]] * 2, [mine, same])
    assert results[0].outputs[0] == results[1].outputs[0]
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams() == SamplingParams(n=1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=16)
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "params", ["greedy", {"temperature": 0}, [SamplingParams()], [SamplingParams(), None], [None] * 3, 3]
)
def test_bad_lists_of_params(llm: LLM, params: Any) -> None:
    bad: Any = [SamplingParams(), "x"] if params == [SamplingParams(), None] else params
    with pytest.raises(InvalidInputError, match="sampling_params"):
        llm.generate([[1], [2]], bad)
    assert drained(llm)


@pytest.mark.parametrize(
    "options",
    [
        *[{name: 0} for name in ("num_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs")],
        *[{name: value} for name in ("num_blocks", "num_threads") for value in (-1, 1.5, "4", True)],
        {"max_model_len": 0},
        {"max_model_len": 5000},
        {"num_threads": 0},
        {"num_threads": 1025},
        {"enable_prefix_caching": 1},
        {"partial_hits": None},
        {"dtype": "float16"},
        {"dtype": None},
        {"quantization": "int8"},
        {"quantization": "q8_0", "dtype": "bfloat16"},
        {"dtype": "bfloat16"},  # the toy was not loaded like that
        {"quantization": "q8_0"},
        {"kv_cache_dtype": "int4"},
        *[{"scheduling_policy": value} for value in ("lifo", None)],
        *[{"max_waiting": value} for value in (0, 1.5, "4", True)],
        *[{"queue_timeout": value} for value in (0, -1.0, NAN, "4", True)],
        *[{"speculative_config": value} for value in (1, "ngram")],
        *[{"journal": value} for value in (1, "", b"path")],
    ],
)
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        make_llm(**options)


def test_both_faces_have_the_same_options() -> None:
    of_llm = list(inspect.signature(LLM.__init__).parameters.values())[2:]
    assert {option.name: option.default for option in of_llm} == {
        option.name: option.default for option in dataclasses.fields(EngineArgs)
    }
    assert all(option.kind is option.KEYWORD_ONLY for option in of_llm)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "weights float32, 0.1 MB mapped; arithmetic in float32"),
        ({"dtype": "bfloat16"}, "weights bfloat16, 0.0 MB in memory; arithmetic in bfloat16"),
        ({"dtype": "float32", "quantization": "q8_0"}, "weights q8_0, 0.0 MB in memory; arithmetic in float32"),
    ],
)
def test_dtype_and_quantization_are_those_of_the_model(
    options: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_hf(tmp_path, CONFIGS["llama"] | {"intermediate_size": 64})
    loaded = load_model(path, **options)
    with caplog.at_level("INFO", "leafkv"):
        own, given = (LLM(model, num_blocks=8, num_threads=1, **options) for model in (path, loaded))
        auto = LLM(loaded, num_blocks=8, num_threads=1)  # whatever it was loaded as
    assert caplog.text.count(f"{path.name}: {said}") == 3
    answers = [llm.generate([[5, 6, 7]], greedy(9))[0].outputs[0].token_ids for llm in (own, given, auto)]
    assert answers[0] == answers[1] == answers[2]
    other = "bfloat16" if loaded.dtype == "float32" else "float32"
    with pytest.raises(InvalidInputError, match=f"^dtype: expected auto or {loaded.dtype}, as the model was loaded"):
        LLM(loaded, num_blocks=8, dtype=other)
    with pytest.raises(InvalidInputError, match=r"^quantization: expected (None|'q8_0'), as the model was loaded, got"):
        LLM(loaded, num_blocks=8, quantization="q4_1")


def test_absurd_limits_cost_nothing_and_numpy_sizes_do_not_wrap() -> None:
    llm = make_llm(
        num_blocks=np.uint8(200), block_size=np.uint8(16), max_num_batched_tokens=10**30, max_num_seqs=10**30
    )
    assert llm.generate([5] * 300, greedy(4))[0].outputs[0].token_ids == reference([5] * 300, 4)


def test_limits_give_their_figures() -> None:
    """B58, B60, B61: what cannot fit fails at the call; without max_tokens an answer fills what is left."""
    llm = make_llm(num_blocks=10, max_model_len=30)
    with pytest.raises(InvalidInputError, match=r"25 prompt tokens and 6 .* 31, but the model's context .* holds 30"):
        llm.generate([1] * 25, greedy(6))
    assert len(llm.generate([1] * 25, greedy(5, ignore_eos=True))[0].outputs[0].token_ids) == 5
    with pytest.raises(InvalidInputError, match="holds 30"):
        llm.generate([1] * 30, greedy(None))
    (full,) = llm.generate([1] * 3, greedy(None, ignore_eos=True))
    assert full.outputs[0].token_ids == reference([1] * 3, 27, ignore_eos=True)
    assert full.outputs[0].finish_reason == "length"

    llm = make_llm(num_blocks=5)
    with pytest.raises(InvalidInputError, match=r"21, but the KV cache .* holds 20"):
        llm.generate([1] * 15, greedy(6))
    (full,) = llm.generate([1] * 3, greedy(None, ignore_eos=True))
    assert full.outputs[0].token_ids == reference([1] * 3, 17, ignore_eos=True)
    assert drained(llm)


def test_a_stream_is_the_answer_piece_by_piece(llm: LLM) -> None:
    expected = llm.generate("HELLO", greedy(12))[0].outputs[0]
    seen = list(llm.stream("HELLO", greedy(12)))
    assert [len(output.outputs[0].token_ids) for output in seen] == [*range(1, len(expected.token_ids) + 1)]
    assert seen[-1].outputs[0] == expected
    for before, after in itertools.pairwise(seen):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
        assert not before.finished
    assert seen[-1].finished


def test_breaking_off_a_stream_frees_its_blocks(llm: LLM) -> None:
    for output in llm.stream([1, 2, 3], greedy(50, ignore_eos=True)):
        if len(output.outputs[0].token_ids) == 3:
            break
    gc.collect()
    assert drained(llm)
    assert not llm.stats().running
    assert llm.engine.scheduler.waiting == []


def test_a_stream_never_started_is_no_request(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], greedy(5))
    assert llm.stats().waiting == 0
    del stream
    assert not llm.engine.has_unfinished_requests()


def test_an_answer_that_cannot_come_is_not_awaited(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], greedy(5, ignore_eos=True))
    llm.engine.abort_request(next(stream).request_id)
    llm.engine.step()  # somebody else took the report
    with pytest.raises(InvariantError, match="awaited"):
        next(stream)
    assert drained(llm)


def test_an_abort_reaches_the_stream(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], greedy(5, ignore_eos=True))
    llm.engine.abort_request(next(stream).request_id)
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]


def test_a_stream_dropped_within_a_step_is_aborted() -> None:
    """The garbage collector may run anywhere."""
    model = ToyModel()
    llm = make_llm(model)
    streams: list[Any] = [llm.stream([i] * 4, greedy(30, ignore_eos=True)) for i in (1, 2)]
    for stream in streams:
        next(stream)
    dropped, kept = streams

    def drop(batch: Any) -> None:
        dropped.close()

    model.before_forward = drop
    assert len(next(kept).outputs[0].token_ids) >= 2
    assert llm.stats().running == 1
    assert list(kept)[-1].outputs[0].token_ids == reference([2] * 4, 30, ignore_eos=True)
    assert drained(llm)


def test_a_stream_dropped_while_results_are_handed_out_stops_nobody() -> None:
    llm = make_llm()
    streams: Any = (llm.stream([i] * 4, greedy(3, ignore_eos=True)) for i in (1, 2))
    dropped, kept = streams
    next(dropped)

    class Inboxes(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            dropped.close()
            return found

        def get(self, key: str, default: Any = None) -> Any:
            dropped.close()
            return super().get(key, default)

    llm._inboxes = Inboxes(llm._inboxes)
    assert list(kept)[-1].outputs[0].token_ids == reference([2] * 4, 3, ignore_eos=True)
    assert drained(llm)


def test_a_stream_dropped_while_another_looks_is_aborted(llm: LLM) -> None:
    stream: Any = llm.stream([1] * 4, greedy(9, ignore_eos=True))
    next(stream)
    stats = llm.engine.stats

    def drop() -> Any:
        stream.close()
        return stats()

    llm.engine.stats = drop  # type: ignore[method-assign]
    llm.stats()
    assert drained(llm)


def test_a_reset_prefix_cache_finds_nothing_of_before(llm: LLM) -> None:
    prompt = list(range(1, 22))
    tokens = reference(prompt, 9)

    def ask() -> tuple[list[int], int]:
        (output,) = llm.generate(prompt, greedy(9), use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens

    assert [ask(), ask()] == [(tokens, 0), (tokens, 20)]
    assert llm.reset_prefix_cache()
    stream = llm.stream(prompt, greedy(9))
    first = next(stream)
    assert first.num_cached_tokens == 0
    assert llm.reset_prefix_cache()  # the stream goes on with its own KV, and leaves none of it in the cache
    assert list(stream)[-1].outputs[0].token_ids == tokens
    assert drained(llm)
    assert llm.manager.stats().cached_blocks == 0
    assert ask() == (tokens, 0)


def test_streams_and_calls_share_the_steps(llm: LLM) -> None:
    streams = {i: llm.stream([i] * 5, greedy(10, ignore_eos=True)) for i in range(4)}
    last: dict[int, list[int]] = {}
    for round_ in range(10):
        for i, stream in streams.items():
            last[i] = next(stream).outputs[0].token_ids
        if round_ == 4:
            assert llm.generate([9, 9], greedy(6, ignore_eos=True))[0].outputs[0].token_ids == reference(
                [9, 9], 6, ignore_eos=True
            )
    assert last == {i: reference([i] * 5, 10, ignore_eos=True) for i in range(4)}


def test_a_failing_model_reaches_the_callers_concerned() -> None:
    model = ToyModel()
    llm = make_llm(model)
    stream = llm.stream([1] * 4, greedy(9, ignore_eos=True))
    next(stream)

    def broken(batch: Any) -> None:
        raise RuntimeError("the model broke")

    model.before_forward = broken
    with pytest.raises(RuntimeError, match="the model broke"):
        llm.generate([[2] * 4, [3] * 4], greedy(9))
    with pytest.raises(RuntimeError, match="the model broke"):
        next(stream)
    model.before_forward = lambda batch: None
    assert drained(llm)
    assert llm.generate([5] * 4, greedy(9))[0].outputs[0].token_ids == reference([5] * 4, 9)
    assert not llm._inboxes


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    model = ToyModel()
    llm = make_llm(model)
    stream = llm.stream([1] * 4, greedy(9, ignore_eos=True))
    next(stream)

    def interrupt(batch: Any) -> None:
        model.before_forward = lambda batch: None
        raise KeyboardInterrupt

    model.before_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[2] * 4, [3] * 4], greedy(9))
    assert llm.stats().running + llm.stats().waiting == 1
    assert list(stream)[-1].outputs[0].token_ids == reference([1] * 4, 9, ignore_eos=True)
    assert drained(llm)


def test_a_handler_that_changes_itself_stays_changed_and_waits_for_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first Ctrl-C asks politely, the second one is for real: in one call, in the middle of steps."""
    model, asked = ToyModel(), 0

    def polite(*_: object) -> None:
        nonlocal asked
        asked += 1
        signal.signal(signal.SIGINT, signal.default_int_handler)

    llm = make_llm(model)
    other = llm._router.prepare([7, 8], greedy(4, ignore_eos=True))
    llm.engine.add_request(other)
    commit, steps = llm.engine.scheduler.commit, 0

    def interrupt(*arguments: Any) -> None:
        nonlocal steps
        commit(*arguments)
        steps += 1
        if steps in {2, 4}:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm.engine.scheduler, "commit", interrupt)
    handler = signal.signal(signal.SIGINT, polite)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3]], greedy(9, ignore_eos=True))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (asked, steps) == (1, 4)
    llm.engine.step()  # tells of the other one, which had its last token in the step that was interrupted
    assert other.samples[0].output_token_ids == reference([7, 8], 4, ignore_eos=True)
    assert drained(llm)


def test_ctrl_c_strikes_while_another_thread_makes_a_step() -> None:
    llm, entered, go_on = make_llm(), threading.Event(), threading.Event()

    def slow(_: Any, logits: Any) -> Any:
        entered.set()
        assert go_on.wait(60)
        return logits

    stream: Any = llm.stream([4, 5, 6], greedy(9, ignore_eos=True))
    next(stream)
    thread = threading.Thread(target=lambda: llm.generate([[1, 2]], greedy(1, logits_processors=[slow])))
    thread.start()
    assert entered.wait(60)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        assert not go_on.is_set()
    finally:
        signal.signal(signal.SIGINT, handler)
        go_on.set()
        thread.join()
        timer.join()
    stream.close()
    assert drained(llm)


def interrupted(llm: LLM, prompts: list[list[int]], line: int) -> bool:
    """Generate, with a Ctrl-C at the ``line``-th line that the engine runs; False if there are not so many."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if "/leafkv/engine/" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        if event == "line" and lines == line:
            signal.raise_signal(signal.SIGINT)
        return trace

    # Whoever runs the tests in the background may have had it ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(trace)
    try:
        llm.generate(prompts, greedy(8))
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, handler)
    assert lines < line, "the interrupt was swallowed"
    return False


def test_an_interrupt_anywhere_leaves_the_engine_serving() -> None:
    """With admissions, leaders, chunks and preemptions on the way."""
    prompts = [[*range(10)], [*range(8), 20], [*range(30, 41)]]
    expected = [reference(prompt, 8) for prompt in prompts]
    for line in itertools.count(1, 19):
        llm = make_llm(num_blocks=7, max_num_batched_tokens=9)
        if not interrupted(llm, prompts, line):
            break
        llm.manager.check_invariants()
        assert llm.manager.stats().held_blocks == 0, f"line {line}"
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(8))] == expected, f"line {line}"
        assert drained(llm)
    assert line > 1000


def test_threads_share_one_engine(llm: LLM) -> None:
    results: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        for _ in range(5):
            results[i] = llm.generate([i] * 9, greedy(12, ignore_eos=True))[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {i: reference([i] * 9, 12, ignore_eos=True) for i in range(8)}
    assert drained(llm)


def test_without_a_tokenizer_prompts_are_ids() -> None:
    llm = make_llm()
    llm._router.tokenizer = None
    with pytest.raises(InvalidInputError, match="tokenizer"):
        llm.generate("A")
    (output,) = llm.generate([1, 2], greedy(3))
    assert output.outputs[0].text == ""


def test_text_options(llm: LLM) -> None:
    prompt = next([i, 5] for i in range(60) if EOS in reference([i, 5], 9, ignore_eos=True)[:-1])
    shown, hidden, off = (
        llm.generate(prompt, greedy(9, ignore_eos=True, **options))[0].outputs[0]
        for options in ({"skip_special_tokens": False}, {}, {"detokenize": False})
    )
    assert len(shown.text) == 9
    assert hidden.text == shown.text.replace("H", "")
    assert off.text == ""
    assert off.token_ids == shown.token_ids


def test_held_back_text_comes_with_the_end() -> None:
    class InPairs(ToyTokenizer):
        """Two tokens make a character, as it were."""

        def decode_stream(self, skip_special_tokens: bool = True) -> Any:
            decode, held = self.decode, list[int]()

            class Stream:
                def step(self, token: int) -> str:
                    held.append(token)
                    return "" if len(held) % 2 else decode(held[-2:], skip_special_tokens)

                def finish(self) -> str:
                    return decode(held[-1:], skip_special_tokens) if len(held) % 2 else ""

            return Stream()

    llm = make_llm(tokenizer=InPairs())
    texts = [o.outputs[0].text for o in llm.stream([1, 2], greedy(5, ignore_eos=True, skip_special_tokens=False))]
    assert [len(text) for text in texts] == [0, 2, 2, 4, 5]
    assert texts[-1] == ToyTokenizer().decode(reference([1, 2], 5, ignore_eos=True), skip_special_tokens=False)


def test_the_cache_is_sized_from_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "leafkv"):
        llm = make_llm(num_blocks=None, max_num_seqs=3, max_model_len=10)
    assert llm.manager.num_blocks == llm.cache.num_blocks == 3 * 3
    assert "9 blocks" in caplog.text


def test_kv_dtypes_and_threads() -> None:
    """Small integers are exact in every KV dtype; in int8, sums of a few are near enough."""
    for dtype in ("auto", *DTYPES):
        llm = make_llm(kv_cache_dtype=dtype, num_threads=1, block_size=16)
        assert llm.generate([3] * 20, greedy(9))[0].outputs[0].token_ids == reference([3] * 20, 9)


def test_the_package_stays_light() -> None:
    code = "import sys, leafkv; assert not [m for m in sys.modules if m.startswith(('leafkv.engine', 'leafkv.models'))]"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert leafkv.LLM is LLM
    with pytest.raises(AttributeError, match="nonsense"):
        _ = leafkv.nonsense
