"""The asynchronous face: requests of any event loop and thread, answered token by token by one engine.

The engine runs in a thread of its own (`engine_thread`); prompts are checked and tokenized in worker threads. So an
event loop waits for neither, and the engine waits for no consumer (`output_collector`). A consumer that goes away, by
whatever way, ends its request.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafkv.engine.build import EngineArgs, build
from leafkv.engine.engine_thread import EngineThread
from leafkv.engine.output_collector import OutputCollector
from leafkv.engine.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from leafkv.engine.engine import Engine, EngineStats
    from leafkv.engine.outputs import RequestOutput
    from leafkv.engine.request import Request
    from leafkv.engine.router import Prompt
    from leafkv.engine.sampling_params import SamplingParams
    from leafkv.models import LoadedModel
    from leafkv.models.tokenizer import Tokenizer


class AsyncEngine:
    """A language model that answers prompts as they come, many at a time, over one paged KV cache.

    Safe to use from several threads and event loops. It runs until :meth:`shutdown`, which the end of a ``with`` or
    ``async with`` block, of its last reference or of the process calls, too.

    Args:
        model: a .gguf file or a Hugging Face directory, a loaded model, or None for the embedded default.
        options: those of :class:`leafkv.LLM`.

    Raises:
        InvalidInputError: an argument is malformed, or not what ``model`` was loaded with.
        ModelLoadError: the model cannot be read, or not be quantized like that.
        InsufficientMemoryError: the KV cache does not fit in free memory.
    """

    def __init__(self, model: str | Path | LoadedModel | None = None, **options: Any) -> None:
        built = build(model, EngineArgs(**options))
        self.manager = built.manager
        self.cache = built.cache
        self._router = built.router
        self._tokenizer = built.tokenizer
        self._thread = EngineThread(built.engine)
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
            request_id: a name, for :meth:`abort`, that no other unfinished request has; None makes one.
            priority: lower ones go first, with ``scheduling_policy="priority"``.

        Raises:
            InvalidInputError: the request is malformed or can never fit; nothing has been queued then.
            EngineDeadError: the engine was shut down, or has died.
            Exception: what ended the request, and no other: an error of the model in its step, for example.
        """
        self._thread.check()
        request = await asyncio.to_thread(self._prepare, prompt, sampling_params, request_id, priority)
        collector = OutputCollector(delta=request.params.output_kind is RequestOutputKind.DELTA)
        subscription = _Subscription(self._thread, request)
        try:
            self._thread.add(request, collector)
            finished = False
            while not finished:
                output = await collector.get()
                if output.error is not None:
                    raise output.error
                finished = output.finished
                yield output
        finally:
            subscription.close()

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
        """Raise EngineDeadError if the engine was shut down or has died."""
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
        # Drawn, not counted: it is nobody's who chose one, nor one of an earlier process.
        name = secrets.token_hex(8) if request_id is None else request_id
        return self._router.prepare(prompt, params, request_id=name, priority=priority, stream=True)


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


def _clear(engine: Engine) -> None:
    engine.manager.clear()
