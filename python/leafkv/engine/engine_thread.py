"""The thread that an engine runs in, and the only one that touches it.

Others reach it by commands in a queue: it obeys all that wait, makes a step if there is anything to do, hands out the
outputs, and so on. With nothing to do it sleeps until the next command. Invariants:

- A journal that cannot be written (a full disk) makes the thread try again until it can: nothing is told that is not
  written, and nobody loses a request. Meanwhile no new one is taken, and :meth:`EngineThread.check` says why.
- What waits for a consumer lies in an :class:`OutputCollector`; nothing that a consumer does, or stops doing, makes
  the thread wait or fail. The thread keeps no consumer alive: who is nowhere else is gone.
- A command is either run or refused: also one that comes while the thread ends. Whoever waits for an answer gets one.
- :meth:`EngineThread.drop` and :meth:`EngineThread.stop` take no lock, so the garbage collector may call them,
  anywhere.
"""

from __future__ import annotations

import atexit
import queue
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from leafkv import log
from leafkv.engine.outputs import merge
from leafkv.errors import EngineDeadError, JournalError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from leafkv.engine.engine import Engine, EngineStats
    from leafkv.engine.output_collector import OutputCollector
    from leafkv.engine.outputs import RequestOutput
    from leafkv.engine.request import Request

T = TypeVar("T")

RETRY = 0.1
"""Seconds between two tries to write the journal."""


class _Command(NamedTuple):
    run: Callable[[], object]
    refuse: Callable[[Exception], object]


class _Consumer(NamedTuple):
    request: Request
    collector: weakref.ref[OutputCollector]


class EngineThread:
    """Runs ``engine`` from now until :meth:`shutdown`, or the end of the process.

    Args:
        engine: nobody else uses it from now on.
        resumed: requests that have come back from its journal. What they give is kept until a consumer comes.
    """

    def __init__(self, engine: Engine, resumed: Iterable[Request] = ()) -> None:
        self._engine = engine
        self._resumed: dict[str, tuple[Request, RequestOutput | None]] = {}
        """Requests of the journal that no consumer has come for: what they have given so far."""
        self._trouble: JournalError | None = None
        """Why the journal cannot be written, while it cannot."""
        for request in resumed:
            engine.add_request(request, journaled=True)
            self._resumed[request.request_id] = request, None
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()  # whose `put` a finalizer may call
        self._consumers: dict[str, _Consumer] = {}
        """Of the requests whose end the engine has not reported."""
        self._stats = engine.stats()
        self._stopping = False
        self._ended: tuple[str, BaseException | None] | None = None
        # A daemon, as threads that are none are waited for before anybody is told that the process ends.
        self._thread = threading.Thread(target=self._run, name="leafkv-engine", daemon=True)
        atexit.register(self.shutdown)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether requests are taken."""
        return self._ended is None and not self._stopping

    @property
    def num_unfinished_requests(self) -> int:
        """Requests whose end has not been reported."""
        return len(self._consumers) + len(self._resumed)

    def check(self) -> None:
        """Raise EngineDeadError unless requests are taken, JournalError while none can be written down."""
        if not self.running:
            raise self._dead()
        if self._trouble is not None:
            raise JournalError(str(self._trouble)) from self._trouble

    def stats(self) -> EngineStats:
        """The counters after the last step or command. Waits for nothing."""
        return self._stats

    def add(self, request: Request, collector: OutputCollector) -> None:
        """Queue a request; what becomes of it, an error included, comes to ``collector``."""
        consumer = _Consumer(request, weakref.ref(collector))
        self._submit(_Command(partial(self._add, consumer), partial(_fail, consumer)))

    def resumed(self, request_id: str) -> Request | None:
        """A request that has come back from the journal, and that no consumer has come for."""
        request, _ = self._resumed.get(request_id, (None, None))
        return request

    def attach(self, request_id: str, collector: OutputCollector) -> Request | None:
        """Let a consumer have what a resumed request gives, from its first token on; None if there is no such request.

        To be called between two steps, by :meth:`ask`.
        """
        found = self._resumed.pop(request_id, None)
        if found is None:
            return None
        request, output = found
        if output is None or not output.finished:  # what has ended in the engine may still be to be told
            self._consumers[request_id] = _Consumer(request, weakref.ref(collector))
        if output is not None and collector.put(output):
            _wake([collector])
        return request

    def drop(self, request: Request) -> None:
        """End a request whose outputs nobody will take any more, unless it has ended."""
        if self._ended is None:
            self._commands.put(_Command(partial(self._drop, request), _nothing))

    def ask(self, act: Callable[[Engine], T]) -> Future[T]:
        """The result of ``act``, called between two steps."""
        future: Future[T] = Future()
        self._submit(_Command(partial(self._answer, future, act), partial(_refuse, future)))
        return future

    def stop(self) -> None:
        """Make the thread end after the step that it is in."""
        self._stopping = True
        self._commands.put(_Command(_nothing, _nothing))  # which wakes it

    def shutdown(self) -> None:
        """End the thread and wait for it; once is as good as twice."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if not self._stopping and self._engine.has_unfinished_requests():
                    self._step()
        except BaseException as error:  # a bug: what a request does wrong ends that request alone
            log.logger.exception("the engine has died")
            self._end(f"the engine has died: {error!r}", error)
        else:
            self._end("the engine was shut down", None)

    def _obey(self) -> None:
        """Run the commands that wait; with nothing else to do, wait for one."""
        idle = not self._engine.has_unfinished_requests()
        # Not those that come meanwhile: there is always a step between, however many are sent.
        for _ in range(max(idle, self._commands.qsize())):
            command = self._commands.get()
            try:
                command.run()
            except BaseException:
                self._commands.put(command)  # to be refused: nobody else knows of it any more
                raise
        self._stats = self._engine.stats()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except JournalError as error:
            if not isinstance(error.__cause__, sqlite3.Error):  # a bug, and not something that passes
                raise
            if self._trouble is None:
                log.logger.warning("requests wait until the journal can be written: %s", error)
            self._trouble = error
            time.sleep(RETRY)
            return
        self._trouble = None
        self._stats = self._engine.stats()
        self._deliver(outputs)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        # To wake a loop is a system call: once for all its consumers.
        woken: dict[AbstractEventLoop, list[OutputCollector]] = {}
        for output in outputs:
            consumer = self._consumers.get(output.request_id)
            if consumer is None:
                self._keep(output)
                continue
            collector = consumer.collector()
            if output.finished:
                del self._consumers[output.request_id]
            if collector is None or collector.loop.is_closed():
                self._drop(consumer.request)
                continue
            if collector.put(output):
                woken.setdefault(collector.loop, []).append(collector)
        for collectors in woken.values():
            _wake(collectors)  # in vain where the loop is closed by now: the next output finds that

    def _keep(self, output: RequestOutput) -> None:
        request, kept = self._resumed[output.request_id]
        self._resumed[output.request_id] = request, output if kept is None else merge(kept, output, delta=True)

    def _add(self, consumer: _Consumer) -> None:
        request_id = consumer.request.request_id
        if request_id in self._consumers:
            # Perhaps of one that has been aborted: the report of that is not for the new one.
            self._step()
        try:
            self._engine.add_request(consumer.request)
        except Exception as error:  # such as an id that is taken
            _fail(consumer, error)
        else:
            self._consumers[request_id] = consumer

    def _drop(self, request: Request) -> None:
        consumer = self._consumers.get(request.request_id)
        if consumer is not None and consumer.request is request:  # its id may be another one's meanwhile
            self._engine.abort_request(request.request_id)

    def _answer(self, future: Future[T], act: Callable[[Engine], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = act(self._engine)
        except Exception as error:
            future.set_exception(error)
        else:
            self._stats = self._engine.stats()
            future.set_result(result)

    def _submit(self, command: _Command) -> None:
        self._commands.put(command)
        if self._ended is not None:  # so perhaps nobody else will look at it
            self._refuse_commands()

    def _end(self, message: str, cause: BaseException | None) -> None:
        # A command that comes before this is refused here, one that comes later by who sends it.
        self._ended = (message, cause)
        for consumer in self._consumers.values():
            _fail(consumer, self._dead())
        self._consumers.clear()
        self._refuse_commands()
        try:
            self._engine.close()
        except JournalError as error:
            log.logger.warning("not all could be written at the end: %s", error)
        atexit.unregister(self.shutdown)

    def _refuse_commands(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait().refuse(self._dead())

    def _dead(self) -> EngineDeadError:
        """A new one each time: a traceback is of one raising."""
        message, cause = self._ended or ("the engine was shut down", None)
        error = EngineDeadError(message)
        error.__cause__ = cause
        return error


def _nothing(*_: object) -> None:
    pass


def _refuse(future: Future[T], error: Exception) -> None:
    with suppress(InvalidStateError):  # it may have been cancelled
        future.set_exception(error)


def _fail(consumer: _Consumer, error: Exception) -> None:
    collector = consumer.collector()
    if collector is not None and collector.fail(error):
        _wake([collector])


def _wake(collectors: list[OutputCollector]) -> None:
    """Wake consumers of one event loop."""
    with suppress(RuntimeError):  # it is closed, so they are gone
        collectors[0].loop.call_soon_threadsafe(_wake_all, collectors)


def _wake_all(collectors: list[OutputCollector]) -> None:
    for collector in collectors:
        collector.wake()
