"""The asynchronous face: consumers that are many, slow, gone or wrong, and an engine that stops or dies under them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import pytest

from leafkv import AsyncEngine, EngineDeadError, InvalidInputError, InvariantError, LeafKVError, RequestOutput
from leafkv.engine.engine import Engine
from leafkv.models.batch import Batch

from .rig import greedy
from .test_llm import BAD_PROMPTS
from .toy import ToyLoaded, ToyModel, ToyTokenizer, reference

T = TypeVar("T")

WAIT = 60.0
"""Seconds after which a wait has failed; none takes a second."""


def make(model: ToyModel | None = None, *, tokenizer: Any = None, **options: Any) -> AsyncEngine:
    loaded: Any = ToyLoaded(model or ToyModel(), tokenizer or ToyTokenizer())
    return AsyncEngine(loaded, **{"num_blocks": 64, "block_size": 4, **options})


def inside(engine: AsyncEngine) -> Engine:
    return engine._thread._engine


def run(main: Callable[[], Awaitable[T]]) -> T:
    """``main`` in a new event loop, which complains of nothing in the end."""
    complaints: list[dict[str, Any]] = []

    async def bounded() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        return await asyncio.wait_for(main(), WAIT)

    result = asyncio.run(bounded())
    gc.collect()
    assert not complaints
    return result


async def answer(engine: AsyncEngine, prompt: Any, n: int, **options: Any) -> RequestOutput:
    """The last output, after a check that each one goes on where the one before ended."""
    last: RequestOutput | None = None
    async for output in engine.generate(prompt, greedy(n, ignore_eos=True), **options):
        if last is not None:
            seen = last.outputs[0].token_ids
            assert not last.finished
            assert len(output.outputs[0].token_ids) > len(seen) or output.finished
            assert output.outputs[0].token_ids[: len(seen)] == seen
            assert output.outputs[0].text.startswith(last.outputs[0].text)
        last = output
    assert last is not None
    assert last.finished
    return last


async def tokens(engine: AsyncEngine, prompt: list[int], n: int) -> list[int]:
    return (await answer(engine, prompt, n)).outputs[0].token_ids


def right(prompt: list[int], n: int) -> list[int]:
    return reference(prompt, n, ignore_eos=True)


async def check_drained(engine: AsyncEngine) -> None:
    """Nothing is left once the commands given so far are obeyed, and the step that reports them is made."""
    await engine.abort("nobody")
    await engine.abort("nobody")
    engine.manager.check_invariants()
    stats = engine.manager.stats()
    assert stats.held_blocks == stats.sequences == 0
    assert engine.stats().running == engine.stats().waiting == 0
    assert not inside(engine)._requests
    assert not engine._thread._consumers


class Gate:
    """Holds the engine within a step, the ``at``-th from now, until it is told to go on."""

    def __init__(self, model: ToyModel, at: int = 1) -> None:
        self.entered = threading.Event()
        self._left = at
        self._open = threading.Event()
        self._model = model
        model.before_forward = self._wait

    def _wait(self, batch: Batch) -> None:
        self._left -= 1
        if self._left > 0:
            return
        self.entered.set()
        assert self._open.wait(WAIT)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, WAIT)

    def open(self, then: Callable[[Batch], None] = lambda batch: None) -> None:
        self._model.before_forward = then
        self._open.set()


def test_many_at_once_each_get_their_own_answer() -> None:
    prompts = [[i, i + 1, 2] for i in range(40)]

    async def main() -> None:
        async with make() as engine:
            assert engine.is_running
            got = await asyncio.gather(*(answer(engine, prompt, 1 + i % 9) for i, prompt in enumerate(prompts)))
            for i, output in enumerate(got):
                expected = right(prompts[i], 1 + i % 9)
                assert output.prompt_token_ids == prompts[i]
                assert output.outputs[0].token_ids == expected
                assert output.outputs[0].text == ToyTokenizer().decode(expected)
            assert len({output.request_id for output in got}) == len(got)
            await check_drained(engine)
        assert not engine.is_running

    run(main)


def test_a_burst_is_all_answered() -> None:
    """B113: 500 at once, for a pool that holds a few."""
    prompts = [[i % 50, i // 50] * 10 for i in range(500)]

    async def main() -> None:
        async with make(num_blocks=40, max_num_seqs=8) as engine:
            got = await asyncio.gather(*(tokens(engine, prompt, 3) for prompt in prompts))
            assert got == [right(prompt, 3) for prompt in prompts]
            await check_drained(engine)

    run(main)


def test_text_and_chats() -> None:
    async def main() -> None:
        async with make() as engine:
            assert (await answer(engine, "HELLO", 3)).prompt == "HELLO"
            assert (await answer(engine, [{"role": "user", "content": "HI"}], 3)).prompt == "HIZ"
            assert engine.get_tokenizer() is not None

    run(main)


def test_a_slow_consumer_stops_nobody_and_misses_nothing() -> None:
    model = ToyModel()

    async def main() -> None:
        async with make(model) as engine:
            slow = engine.generate([1, 2, 3], greedy(40, ignore_eos=True))
            (await started(model, slow)).open()
            for i in range(5):
                assert await tokens(engine, [i] * 4, 40) == right([i] * 4, 40)
            while engine.stats().running:
                await asyncio.sleep(0)
            (last,) = [output async for output in slow]
            assert last.outputs[0].token_ids == right([1, 2, 3], 40)
            await check_drained(engine)

    run(main)


def test_an_idle_engine_sleeps_and_wakes() -> None:
    """B133: it is started long before the first request."""

    async def main() -> None:
        async with make() as engine:
            await engine.abort("nobody")
            looks = 0
            look = inside(engine).has_unfinished_requests

            def counted() -> bool:
                nonlocal looks
                looks += 1
                return look()

            inside(engine).has_unfinished_requests = counted  # type: ignore[method-assign]
            await asyncio.sleep(0.05)
            assert looks <= 2, "it does not sleep"
            for i in range(3):
                assert await tokens(engine, [i, 1], 5) == right([i, 1], 5)
                await check_drained(engine)
            assert engine.stats().steps == 15

    run(main)


def test_bad_prompts_fail_before_anything_is_queued() -> None:
    async def main() -> None:
        async with make() as engine:
            for prompt, _ in BAD_PROMPTS:
                with pytest.raises(InvalidInputError):
                    await anext(engine.generate(prompt))
            await check_drained(engine)
            assert engine.stats().steps == 0
            assert await tokens(engine, [1, 2], 5) == right([1, 2], 5)

    run(main)


def test_bad_arguments_are_named() -> None:
    async def main() -> None:
        async with make() as engine:
            for request_id in ("", 5, b"a"):
                with pytest.raises(InvalidInputError, match=r"^request_id: .*expected"):
                    await anext(engine.generate([1], request_id=request_id))  # type: ignore[arg-type]
            for priority in (1.0, "1", True, 2**31):
                with pytest.raises(InvalidInputError, match=r"^priority: .*expected"):
                    await anext(engine.generate([1], priority=priority))  # type: ignore[arg-type]
            with pytest.raises(InvalidInputError, match="priority: 1 needs scheduling_policy"):
                await anext(engine.generate([1], priority=1))
            with pytest.raises(InvalidInputError, match="sampling_params"):
                await anext(engine.generate([1], {"n": 1}))  # type: ignore[arg-type]
            await check_drained(engine)

    run(main)
    with pytest.raises(InvalidInputError, match="num_blocks"):
        make(num_blocks=0)
    with pytest.raises(TypeError, match="nonsense"):
        make(nonsense=1)


def test_an_id_that_is_taken_is_refused_and_its_owner_undisturbed() -> None:
    async def main() -> None:
        async with make() as engine:
            owner = engine.generate([1, 2], greedy(9, ignore_eos=True), "mine")
            assert (await anext(owner)).request_id == "mine"
            while engine.stats().running:
                await asyncio.sleep(0)
            assert (await answer(engine, [3], 5, request_id="mine")).request_id == "mine", "it has ended"

            model = inside(engine).model
            assert isinstance(model, ToyModel)
            gate = Gate(model)
            second = asyncio.create_task(answer(engine, [1, 2], 9, request_id="mine"))
            await gate.reached()
            third = engine.generate([3], greedy(9), "mine")
            refused = asyncio.ensure_future(anext(third))
            while engine._thread._commands.empty():
                await asyncio.sleep(0)
            gate.open()
            with pytest.raises(InvalidInputError, match="'mine' belongs"):
                await refused
            assert (await second).outputs[0].token_ids == right([1, 2], 9)
            await owner.aclose()  # of a request that has long ended, and whose id another one had
            await check_drained(engine)

    run(main)


@pytest.mark.parametrize("aborted", [False, True])
def test_an_id_may_be_used_again_at_once(aborted: bool) -> None:
    """The report of the first request's end, which the engine has yet to make, is not the second one's answer."""
    model = ToyModel()

    async def main() -> None:
        async with make(model) as engine:
            first = engine.generate([1, 2], greedy(200, ignore_eos=True), "mine")
            gate = await started(model, first)
            ending = asyncio.ensure_future(engine.abort("mine") if aborted else first.aclose())
            await asyncio.sleep(0)
            second = asyncio.create_task(tokens_of("mine", engine, [3, 4], 9))
            while engine._thread._commands.qsize() < 2:
                await asyncio.sleep(0)
            gate.open()
            await ending
            assert await second == right([3, 4], 9)
            if aborted:
                *_, last = [output async for output in first]
                assert last.outputs[0].finish_reason == "abort"
                assert last.outputs[0].token_ids[:2] == right([1, 2], 2)
            await check_drained(engine)

    run(main)


async def tokens_of(request_id: str, engine: AsyncEngine, prompt: list[int], n: int) -> list[int]:
    return (await answer(engine, prompt, n, request_id=request_id)).outputs[0].token_ids


def test_who_goes_late_ends_nothing_of_another_with_its_id() -> None:
    model = ToyModel()

    async def main() -> None:
        async with make(model) as engine:
            first = engine.generate([1, 2], greedy(3, ignore_eos=True), "mine")
            await anext(first)
            while engine.stats().running:
                await asyncio.sleep(0)
            gate = Gate(model, 2)
            second = asyncio.create_task(tokens_of("mine", engine, [3, 4], 9))
            await gate.reached()
            await first.aclose()
            gate.open()
            assert await second == right([3, 4], 9)
            await check_drained(engine)

    run(main)


def test_counters_are_as_of_the_last_command() -> None:
    model = ToyModel()

    async def main() -> None:
        async with make(model) as engine:
            stream = engine.generate([1, 2], greedy(200, ignore_eos=True), "mine")
            gate = await started(model, stream)
            assert engine.stats().running == 1
            seen: list[int] = []
            aborting = engine._thread.ask(lambda inner: inner.abort_request("mine"))
            aborting.add_done_callback(lambda _: seen.append(engine.stats().running))
            gate.open()
            await asyncio.wrap_future(aborting)
            assert seen == [0]

    run(main)


def test_prompts_are_tokenized_by_neither_loop_nor_engine() -> None:
    idents: set[int | None] = set()

    class Noting(ToyTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            idents.add(threading.get_ident())
            return super().encode(text, add_special_tokens)

    async def main() -> None:
        async with make(tokenizer=Noting()) as engine:
            await answer(engine, "HELLO", 3)
            assert idents
            assert not idents & {threading.get_ident(), engine._thread._thread.ident}

    run(main)


def test_a_loop_does_not_wait_for_a_step() -> None:
    model = ToyModel()
    gate = Gate(model)

    async def main() -> None:
        async with make(model) as engine:
            asking = asyncio.create_task(tokens(engine, [1, 2], 5))
            await gate.reached()
            await engine.check_health()
            assert engine.stats().steps == 0
            with pytest.raises(InvalidInputError):
                await anext(engine.generate(""))
            more = [asyncio.create_task(tokens(engine, [i], 5)) for i in range(3)]
            await asyncio.sleep(0)
            assert not asking.done()
            gate.open()
            assert await asking == right([1, 2], 5)
            assert await asyncio.gather(*more) == [right([i], 5) for i in range(3)]

    run(main)


async def started(model: ToyModel, stream: AsyncGenerator[RequestOutput, None]) -> Gate:
    """Take the first token of the engine's only request, and hold the step that computes the second."""
    gate = Gate(model, 2)
    assert len((await anext(stream)).outputs[0].token_ids) == 1
    await gate.reached()
    return gate


async def closed(stream: AsyncGenerator[RequestOutput, None]) -> None:
    await stream.aclose()


async def cancelled(stream: AsyncGenerator[RequestOutput, None]) -> None:
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def collected(stream: AsyncGenerator[RequestOutput, None]) -> None:
    """What the caller has is the last reference: `go` drops it with this frame."""


@pytest.mark.parametrize("go", [closed, cancelled, collected])
def test_a_consumer_who_goes_ends_its_request_and_no_other(
    go: Callable[[AsyncGenerator[RequestOutput, None]], Awaitable[None]],
) -> None:
    """B110, B111: at each token."""
    n = 12

    async def main() -> None:
        async with make() as engine:
            for after in range(n):
                other = asyncio.create_task(tokens(engine, [2, after], n))
                stream = engine.generate([1, after], greedy(200, ignore_eos=True), "gone")
                seen = 0
                while seen < after:
                    seen = len((await anext(stream)).outputs[0].token_ids)
                await go(stream)
                del stream
                gc.collect()
                assert await other == right([2, after], n)
                await asyncio.sleep(0)  # the loop itself closes what was collected
                await asyncio.sleep(0)
                await check_drained(engine)
            assert engine.is_running

    run(main)


@pytest.mark.parametrize("go", [closed, cancelled, collected])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 7])
def test_who_goes_within_a_step_has_no_other(
    go: Callable[[AsyncGenerator[RequestOutput, None]], Awaitable[None]], step: int
) -> None:
    """B110: in the prefill, which takes three steps, and when it decodes."""
    model = ToyModel()
    gate = Gate(model, step)

    async def main() -> None:
        async with make(model, max_num_batched_tokens=4) as engine:
            stream = engine.generate([1] * 12, greedy(50, ignore_eos=True))
            first = asyncio.ensure_future(anext(stream))
            await gate.reached()
            if step > 3:
                await first
            else:
                first.cancel()
                await asyncio.wait([first])
            del first
            await go(stream)
            del stream
            gc.collect()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            gate.open()
            await check_drained(engine)
            assert engine.stats().steps == step
            assert engine.stats().generated_tokens == max(0, step - 2)

    run(main)


def test_who_goes_while_queued_is_never_computed() -> None:
    model = ToyModel()
    gate = Gate(model)

    async def main() -> None:
        async with make(model, max_num_seqs=1) as engine:
            first = asyncio.create_task(tokens(engine, [1] * 5, 9))
            await gate.reached()
            second = asyncio.create_task(tokens(engine, [2] * 5, 9))
            while engine._thread._commands.empty():
                await asyncio.sleep(0)
            second.cancel()
            await asyncio.wait([second])
            gate.open()
            assert await first == right([1] * 5, 9)
            await check_drained(engine)
            assert engine.stats().computed_prompt_tokens == 5

    run(main)


@pytest.mark.parametrize("kept", [False, True])
def test_a_closed_loop_ends_its_requests(kept: bool) -> None:
    """Its generators close no more: one that is collected while queued is never computed, one that is kept no longer
    than to its next token."""
    model = ToyModel()
    with make(model, max_num_seqs=1) as engine:
        gate = Gate(model)
        loop = asyncio.new_event_loop()
        streams = [engine.generate([i] * 5, greedy(200, ignore_eos=True)) for i in (1, 2)]

        async def first(stream: AsyncGenerator[RequestOutput, None]) -> None:
            await anext(stream)  # here, as a generator takes note of the loop that first asks it

        waiting = [loop.create_task(first(streams[0]))]
        loop.run_until_complete(asyncio.wait_for(gate.reached(), WAIT))
        waiting.append(loop.create_task(first(streams[1])))
        while engine._thread._commands.empty():
            loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_default_executor())
        for task in waiting:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        if not kept:
            waiting.clear()
            del task
            streams.clear()
            gc.collect()
        gate.open()
        run(lambda: asyncio.to_thread(engine._thread.ask(lambda _: None).result, WAIT))
        for _ in range(3):  # the steps that are left, at most one for each
            engine._thread.ask(lambda _: None).result(WAIT)
        assert engine.stats().running == engine.stats().waiting == 0
        assert engine.stats().generated_tokens <= 2
        assert engine.stats().computed_prompt_tokens == (10 if kept else 5)
        run(lambda: check_drained(engine))
        assert run(lambda: tokens(engine, [3, 4], 5)) == right([3, 4], 5)


def test_an_abort_reaches_the_consumer() -> None:
    model = ToyModel()

    async def main() -> None:
        async with make(model, max_num_seqs=1) as engine:
            running = engine.generate([1, 2], greedy(200, ignore_eos=True), "running")
            gate = await started(model, running)
            queued = asyncio.create_task(answer(engine, [1, 2], 50, request_id="queued"))
            other = asyncio.create_task(tokens(engine, [3, 2], 50))
            while engine._thread._commands.qsize() < 2:
                await asyncio.sleep(0)
            ids = ["queued", "running", "no such request"] * 2
            aborts = asyncio.gather(*map(engine.abort, ids))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            gate.open()
            await aborts
            assert (await queued).outputs[0].finish_reason == "abort"
            *_, last = [output async for output in running]
            assert last.outputs[0].finish_reason == "abort"
            cut = last.outputs[0].token_ids
            assert cut == right([1, 2], 200)[: len(cut)]
            assert await other == right([3, 2], 50)
            await check_drained(engine)

    run(main)


def test_an_error_is_raised_in_the_consumers_concerned() -> None:
    model = ToyModel()

    async def main() -> None:
        async with make(model) as engine:
            good = engine.generate([1, 2], greedy(200, ignore_eos=True))
            gate, gates = await started(model, good), list[Gate]()
            bad = asyncio.create_task(answer(engine, [3, 4], 5))
            while engine._thread._commands.empty():
                await asyncio.sleep(0)

            def spoil(logits: Any) -> None:
                if len(logits) == 2:
                    logits[1] = float("nan")
                    gates.append(Gate(model))

            model.after_forward = spoil
            gate.open()
            with pytest.raises(LeafKVError, match="not a distribution"):
                await bad
            (gate,) = gates
            await gate.reached()
            while len(seen := (await anext(good)).outputs[0].token_ids) < 3:
                pass
            assert seen == right([1, 2], 3)

            def broken(batch: Any) -> None:
                raise RuntimeError("the model broke")

            bad = asyncio.create_task(answer(engine, [3, 4], 5))
            while engine._thread._commands.empty():
                await asyncio.sleep(0)
            gate.open(then=broken)
            with pytest.raises(RuntimeError, match="the model broke"):
                async for _ in good:
                    pass
            with pytest.raises(RuntimeError, match="the model broke"):
                await bad
            model.before_forward, model.after_forward = lambda batch: None, lambda logits: None
            await engine.check_health()
            assert await tokens(engine, [5, 6], 7) == right([5, 6], 7)
            await check_drained(engine)

    run(main)


def test_a_dead_engine_says_so_to_everybody(caplog: pytest.LogCaptureFixture) -> None:
    """B115."""
    model = ToyModel()
    gate = Gate(model)

    async def main() -> None:
        async with make(model, max_num_seqs=2) as engine:
            asked = [asyncio.create_task(tokens(engine, [i], 9)) for i in range(3)]
            await gate.reached()
            late = asyncio.create_task(tokens(engine, [5], 9))
            reset = asyncio.create_task(engine.reset_prefix_cache())
            while len(engine._thread._consumers) + engine._thread._commands.qsize() < 5:
                await asyncio.sleep(0)

            def contradict() -> Any:
                raise InvariantError("a bug")

            inside(engine).scheduler.schedule = contradict  # type: ignore[method-assign]
            gate.open()
            for failure in await asyncio.gather(*asked, late, return_exceptions=True):
                assert isinstance(failure, EngineDeadError)
                assert isinstance(failure.__cause__, InvariantError)
            await reset  # it came before
            for act in (engine.check_health(), anext(engine.generate([1])), engine.reset_prefix_cache()):
                with pytest.raises(EngineDeadError, match="a bug"):
                    await act
            await engine.abort("anything")
            assert not engine.is_running
            assert engine.stats().steps == 1

    run(main)
    assert "the engine has died" in caplog.text


def test_an_engine_that_dies_of_a_command_says_so_to_its_sender() -> None:
    model = ToyModel()

    async def main() -> None:
        async with make(model) as engine:
            first = engine.generate([1, 2], greedy(200, ignore_eos=True), "mine")
            gate = await started(model, first)
            aborting = asyncio.ensure_future(engine.abort("mine"))
            await asyncio.sleep(0)
            second = asyncio.create_task(answer(engine, [3, 4], 9, request_id="mine"))
            while engine._thread._commands.qsize() < 2:
                await asyncio.sleep(0)

            def die() -> Any:
                raise SystemExit

            inside(engine).scheduler.schedule = die  # type: ignore[method-assign]
            gate.open()
            await aborting
            with pytest.raises(EngineDeadError, match="SystemExit"):
                await second
            failing = engine._thread.ask(lambda _: None)
            with pytest.raises(EngineDeadError, match="SystemExit"):
                await asyncio.wrap_future(failing)

    run(main)


def test_a_flood_of_commands_does_not_keep_the_engine_from_its_steps() -> None:
    async def main() -> None:
        async with make() as engine:
            flooding = True

            def again(_: object) -> None:
                if flooding:
                    engine._thread.ask(again)

            try:
                await asyncio.wrap_future(engine._thread.ask(again))
                assert await tokens(engine, [1, 2], 9) == right([1, 2], 9)
            finally:
                flooding = False

    run(main)


def test_a_shutdown_ends_the_wait() -> None:
    async def main() -> None:
        engine = make()
        stream = engine.generate([1, 2], greedy(200, ignore_eos=True))
        first = await anext(stream)
        await asyncio.to_thread(engine.shutdown)
        seen = first.outputs[0].token_ids
        ends = []
        try:
            async for output in stream:  # what had come before is not lost
                seen = output.outputs[0].token_ids
        except EngineDeadError as error:
            ends.append(str(error))
        assert ends == ["the engine was shut down"] or len(seen) == 200
        assert seen == right([1, 2], 200)[: len(seen)]
        engine.shutdown()
        for act in (engine.check_health(), anext(engine.generate([1])), engine.reset_prefix_cache()):
            with pytest.raises(EngineDeadError, match="shut down"):
                await act
        await engine.abort("anything")

    run(main)


def test_threads_and_loops_share_one_engine() -> None:
    """B133: requests from eight threads."""
    got: dict[int, list[list[int]]] = {}
    with make(num_blocks=20) as engine:

        def ask(i: int) -> None:
            async def main() -> list[list[int]]:
                return await asyncio.gather(*(tokens(engine, [i, k, 5, 6], 9) for k in range(6)))

            got[i] = run(main)

        threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert got == {i: [right([i, k, 5, 6], 9) for k in range(6)] for i in range(8)}
        run(lambda: check_drained(engine))


@pytest.mark.parametrize("after", range(0, 24, 3))
def test_a_shutdown_while_eight_threads_ask(after: int) -> None:
    """B133: each request has its answer, or is told; nobody waits for ever."""
    engine = make()
    done = threading.Semaphore(0)
    ends: list[bool] = []

    def ask(i: int) -> None:
        async def main() -> None:
            for k in itertools.count():
                assert await tokens(engine, [i, k % 50], 5) == right([i, k % 50], 5)
                done.release()

        try:
            run(main)
        except EngineDeadError:
            ends.append(True)

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(after):
        assert done.acquire(timeout=WAIT)
    engine.shutdown()
    for thread in threads:
        thread.join(WAIT)
    assert len(ends) == 8


@pytest.mark.parametrize("seed", range(12))
def test_random_consumers(seed: int) -> None:
    """Some read on, some go, some are aborted; a tiny pool makes them wait and be preempted."""
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4))
    options: dict[str, Any] = {
        "num_blocks": 48 // block_size,
        "block_size": block_size,
        "max_num_seqs": rng.choice((2, 5, 64)),
    }
    options["max_num_batched_tokens"] = rng.choice((3, 8, 64))

    async def main() -> None:
        async with make(**options) as engine:

            async def consume(own: random.Random, name: str) -> None:
                for _ in range(own.randrange(20)):
                    await asyncio.sleep(0)
                prompt = [own.randrange(3) for _ in range(own.randrange(1, 14))]
                n = own.randrange(1, 25)
                leaves = own.choice((None, None, own.randrange(n)))
                stream, seen = engine.generate(prompt, greedy(n, ignore_eos=True), name), list[int]()
                async for output in stream:
                    assert output.outputs[0].token_ids[: len(seen)] == seen
                    seen = output.outputs[0].token_ids
                    assert seen == right(prompt, n)[: len(seen)]
                    if leaves is not None and len(seen) >= leaves:
                        break
                    if output.finished:
                        assert len(seen) == n or output.outputs[0].finish_reason == "abort"
                    for _ in range(own.randrange(4)):
                        await asyncio.sleep(0)
                if own.random() < 0.5:
                    await stream.aclose()

            async def abort_some() -> None:
                for _ in range(15):
                    await asyncio.sleep(0)
                    await engine.abort(f"{rng.randrange(60)}")

            await asyncio.gather(abort_some(), *(consume(random.Random(rng.random()), f"{i}") for i in range(60)))
            gc.collect()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await check_drained(engine)

    run(main)


def test_a_reset_prefix_cache_finds_nothing_of_before() -> None:
    prompt = list(range(1, 22))

    async def main() -> None:
        async with make() as engine:
            assert [(await answer(engine, prompt, 5)).num_cached_tokens for _ in range(2)] == [0, 20]
            assert await engine.reset_prefix_cache()
            assert (await answer(engine, prompt, 5)).num_cached_tokens == 0

    run(main)


def test_an_engine_that_nobody_has_any_more_ends() -> None:
    engine = make()
    thread, inner = engine._thread._thread, weakref.ref(inside(engine))
    del engine
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()
    gc.collect()
    assert inner() is None


@pytest.mark.parametrize("asks", [False, True])
def test_a_process_ends_with_its_engine_running(asks: bool) -> None:
    code = f"""
import asyncio, atexit, threading
from tests.engine.rig import greedy
from tests.engine.test_async_engine import make
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # the last thing
engine = make()
async def main():
    stream = engine.generate([1, 2], greedy(200, ignore_eos=True))
    if {asks}:
        await anext(stream)
    loop = asyncio.get_running_loop()
    keep.append(stream)
keep = []
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['MainThread']\n", "")
