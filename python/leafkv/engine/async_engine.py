"""The asynchronous face: requests of any event loop and thread, answered token by token by one engine.

The engine runs in a thread of its own (`engine_thread`); prompts are checked and tokenized in worker threads. So an
event loop waits for neither, and the engine waits for no consumer (`output_collector`). A consumer that goes away, by
whatever way, ends its request.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafkv.engine.build import Built, EngineArgs, build
from leafkv.engine.engine_thread import EngineThread
from leafkv.engine.journal import Journal
from leafkv.engine.output_collector import OutputCollector
from leafkv.engine.outputs import Told
from leafkv.engine.recorder import restore_unfinished
from leafkv.engine.resumed import Rest, existing, recorded
from leafkv.engine.sampling_params import RequestOutputKind
from leafkv.errors import InvalidInputError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from leafkv.engine.engine import Engine, EngineStats
    from leafkv.engine.outputs import RequestOutput
    from leafkv.engine.request import Request
    from leafkv.engine.router import Prompt
    from leafkv.engine.sampling_params import SamplingParams
    from leafkv.models.tokenizer import Tokenizer


class AsyncEngine:
    """A language model that answers prompts as they come, many at a time, over one paged KV cache.

    Safe to use from several threads and event loops. It runs until :meth:`shutdown`, which the end of a ``with`` or
    ``async with`` block, of its last reference or of the process calls, too.

    Args:
        model: what :class:`leafkv.LLM` takes.
        options: those of :class:`leafkv.LLM`.

    Raises:
        InvalidInputError: an argument is malformed, or not what ``model`` was loaded with.
        ModelLoadError: the model cannot be read, or not be quantized like that.
        InsufficientMemoryError: the KV cache does not fit in free memory.
        JournalError: the journal is damaged, in use, or of another model.
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        self._start(build(model, EngineArgs(**options)))

    @classmethod
    def resume(cls, path: str | Path, model: Any = None, **options: Any) -> Self:
        """An engine with the journal at ``path``, which goes on with the requests that had not ended there.

        They give the tokens that they would have given; their consumers come back with :meth:`stream`.

        Args:
            path: the journal of an `AsyncEngine` or `LLM` that is gone, or that a checkpoint has written.
            model: that of the journal.
            options: those of :class:`leafkv.LLM`.

        Raises:
            JournalError: the journal is damaged, in use, or of another model.
            InvalidInputError: an option is malformed.
        """
        built = build(model, EngineArgs(**options, journal=existing(path)))
        assert built.journal is not None
        engine = cls.__new__(cls)
        engine._start(built, restore_unfinished(built.router, built.journal))
        return engine

    def _start(self, built: Built, resumed: Iterable[Request] = ()) -> None:
        self.manager = built.manager
        self.cache = built.cache
        self._router = built.router
        self._tokenizer = built.tokenizer
        self._identify = built.identify
        self._journal = built.journal
        self._thread = EngineThread(built.engine, resumed)
        weakref.finalize(self, self._thread.stop)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt token by token.

        The request starts with the first result asked for. A result holds all that has come since the one before: of
        a consumer slower than the engine several tokens at a time. Closing or dropping the iterator, or cancelling
        its task, ends the request.

        Args:
            prompt: text, token ids, ``{"prompt": ...}``, ``{"prompt_token_ids": ...}`` or chat messages.
            sampling_params: None for the defaults.
            request_id: a name, for :meth:`abort`, that no other unfinished request has, nor one that the journal still
                has; None makes one.
            priority: lower ones go first, with ``scheduling_policy="priority"``.

        Raises:
            InvalidInputError: the request is malformed or can never fit; nothing has been queued then.
            MissingExtraError: ``structured_outputs`` need the extra "guided".
            QueueFullError: ``max_waiting`` requests wait already.
            JournalError: the request could not be written down, and was not taken.
            EngineDeadError: the engine was shut down, or has died.
            Exception: what ended the request, after the tokens that came before it: a `QueueTimeoutError`, a
                `HandedOverError`, an error of the model in its step.
        """
        self._thread.check()
        request = await asyncio.to_thread(self._prepare, prompt, sampling_params, request_id, priority)
        delta = request.params.output_kind is RequestOutputKind.DELTA
        collector, told = OutputCollector(delta=delta), Told(delta=delta)
        thread = self._router.choose((self._thread,))
        subscription = _Subscription(thread, request)
        try:
            thread.add(request, collector)
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                if told.news(output):
                    yield output
                if output.error is not None:
                    raise output.error
        finally:
            subscription.close()

    async def stream(self, request_id: str, after: int | Sequence[int] = 0) -> AsyncGenerator[RequestOutput, None]:
        """The rest of the answer of a request of the journal, in deltas: each token once.

        The request has ended, in this process or another, or has come back by :meth:`resume`. As with
        :meth:`generate`, going away ends it.

        Args:
            request_id: which.
            after: how many tokens of it the caller has had, of every sample or of each.

        Raises:
            InvalidInputError: there is no such request, or somebody else has come for it.
            EngineDeadError: the engine was shut down, or has died.
            Exception: what ended the request.
        """
        request = await asyncio.wrap_future(self._thread.ask(partial(_resumed, self._thread, request_id)))
        told = Told(delta=True)
        if request is None:
            output = await asyncio.to_thread(recorded, self._router, self._journal, request_id, after)
            if output is not None and told.news(output):
                yield output
            if output is not None and output.error is not None:
                raise output.error
            return
        cut, collector = Rest(self._router, request, after), OutputCollector(delta=True)
        attach = partial(_attach, self._thread, request_id, collector)
        if await asyncio.wrap_future(self._thread.ask(attach)) is None:
            raise InvalidInputError(f"request_id: somebody else has asked for {request_id!r}")
        subscription = _Subscription(self._thread, request)
        try:
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                rest = cut.of(output)
                if rest is not None and told.news(rest):
                    yield rest
                if output.error is not None:
                    raise output.error
        finally:
            subscription.close()

    async def checkpoint(self, path: str | Path | None = None) -> int:
        """Hand all unfinished requests over to whoever resumes from the journal; return how many those are.

        Their consumers here get a `HandedOverError`.

        Args:
            path: a journal to be written; None for the one that this engine has, which is closed then.

        Raises:
            InvalidInputError: there is no journal, or a request cannot be written down.
            JournalError: the journal cannot be written; nothing has changed.
        """
        opened = None if path is None else lambda: Journal(path, self._identify())
        return await asyncio.wrap_future(self._thread.ask(partial(_checkpoint, opened)))

    async def abort(self, request_id: str) -> None:
        """End a request, in whatever state: its blocks are free when this returns, its consumer is told.

        Nothing happens if there is no such request, or no longer.
        """
        if self._thread.running:
            await asyncio.wrap_future(self._thread.ask(partial(_abort, request_id)))

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, as after a change of the weights. It always works, so the answer is True.

        Requests that are running go on, and leave nothing in the cache.
        """
        await asyncio.wrap_future(self._thread.ask(_clear))
        return True

    def stats(self) -> EngineStats:
        """Counters since the start, as of the last step. Those of the blocks are in ``manager.stats()``."""
        return self._thread.stats()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine was shut down or has died, JournalError while it cannot write its own."""
        self._thread.check()

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._thread.running

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self._tokenizer

    def shutdown(self) -> None:
        """Stop after the step that is being made; whoever still waits for an answer gets an EngineDeadError.

        With a journal, unfinished requests stay in it. Those of consumers that were cancelled before have ended:
        :meth:`checkpoint` comes first where they are to go on elsewhere.

        In a coroutine ``async with`` is better, or ``asyncio.to_thread``: this waits for the step.
        """
        self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def _prepare(self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int) -> Request:
        return self._router.prepare(prompt, params, request_id=request_id, priority=priority, stream=True)


class _Subscription:
    """Ends a request when its consumer is gone: also one whose generator is collected after its loop has closed."""

    def __init__(self, thread: EngineThread, request: Request) -> None:
        self._thread = thread
        self._request: Request | None = request

    def close(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            self._thread.drop(request)

    __del__ = close


def _abort(request_id: str, engine: Engine) -> None:
    engine.abort_request(request_id)


def _resumed(thread: EngineThread, request_id: str, _: Engine) -> Request | None:
    return thread.resumed(request_id)


def _attach(thread: EngineThread, request_id: str, collector: OutputCollector, _: Engine) -> Request | None:
    return thread.attach(request_id, collector)


def _checkpoint(opened: Callable[[], Journal] | None, engine: Engine) -> int:
    return engine.checkpoint(opened)


def _clear(engine: Engine) -> None:
    engine.manager.clear()
