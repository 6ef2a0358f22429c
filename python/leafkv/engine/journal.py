"""A crash-safe record of requests in one file: admissions, every token before it is delivered, ends.

What it promises, once :meth:`Journal.write` has returned:

- A kill -9 loses nothing. A power cut may lose the last writes, never one without all after it, and damages nothing:
  sqlite's write-ahead log reaches the disk at checkpoints. With ``synchronous="full"`` it does so in every write, which
  then waits for the disk and loses nothing either.
- A write is all or nothing. One that fails (a full disk) changes nothing, and the next one works once there is space.
- No token is there twice, none out of order: that raises, and so does everything that is not whole when it is read.
  Every row has a checksum, and the rows are counted; a damaged file is never read as if it were right.
- One live process owns the file. Its lock dies with it.

Steps are written as one row each, as rows by sample would be spread over as many pages as there are samples: 20 times
the time. Every ``FOLD_WRITES`` writes those tokens are moved, in the same transaction, to rows by sample, and the
write-ahead log to the main file. Until then they are kept in memory too. So a write takes some 50 microseconds, and
another one a token; memory and file are bounded by the requests that are kept.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sqlite3
import tempfile
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

from leafkv._checks import check_integer
from leafkv.engine import journal_file
from leafkv.engine import journal_rows as rows
from leafkv.engine.interrupts import interrupts_deferred
from leafkv.engine.journal_rows import Admission, JournaledRequest
from leafkv.errors import InvalidInputError, JournalError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Admission", "Journal", "JournaledRequest"]

TokenRow = tuple[str, int, int, int, "str | None"]
"""Request id, sample, position, token id, logprobs as JSON."""
EndRow = tuple[str, int, str, "int | str | None", "str | None"]
"""Request id, sample, finish reason, stop reason, error."""

FOLD_WRITES = 224
FOLD_BYTES = 4 << 20
"""What is written between two folds: this many writes, or this much. The tokens of so many writes are just short enough
for sqlite to keep them in a page with others."""
_PRUNED_AT_ONCE = 32
"""Requests that a write drops at most, besides as many as it ends."""


@dataclass(slots=True, eq=False)
class _Sample:
    """What the next write has to know of a sample, and its tokens that are in the log."""

    length: int = 0
    tail: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[str | None] = field(default_factory=list)
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    request_id: str
    samples: list[_Sample]
    num_open: int


@dataclass(slots=True)
class _Staged:
    """What a write has changed in memory so far, to be taken back if it fails."""

    requests: list[_Request] = field(default_factory=list)
    samples: list[_Sample] = field(default_factory=list)
    ends: list[tuple[_Request, _Sample]] = field(default_factory=list)
    admissions: list[tuple[int | bytes, ...]] = field(default_factory=list)
    entries: list[bytes] = field(default_factory=list)
    logprobs: list[str | None] = field(default_factory=list)
    end_rows: list[tuple[int | bytes, ...]] = field(default_factory=list)


@final
class Journal:
    """The record of all requests of one engine. Several threads may call it at once.

    Args:
        path: the file, on a local disk. Beside it lie, while it is open, the parts that sqlite makes.
        identity: what the tokens depend on (name of the model, size of its vocabulary, dtype, ...). A new file stores
            it, one that is there must have the same.
        keep_finished: a finished request is kept until more than this many have finished after it.
        synchronous: "normal" survives the end of the process, "full" also that of the machine.
        create: False refuses a file that is missing or empty.

    Raises:
        JournalError: another journal has the file open, its identity is another one, or it is damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: Mapping[str, str | int],
        *,
        keep_finished: int = 1000,
        synchronous: Literal["normal", "full"] = "normal",
        create: bool = True,
    ) -> None:
        self.path = os.fspath(path)
        self._keep_finished = check_integer("keep_finished", keep_finished, 0)
        if synchronous not in {"normal", "full"}:
            raise InvalidInputError(f"synchronous: expected 'normal' or 'full', got {synchronous!r}")
        for name, value in identity.items():
            if not isinstance(name, str) or not isinstance(value, (str, int)):
                raise InvalidInputError(f"identity: expected a str or an int for each str, got {name!r}: {value!r}")
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._requests: dict[str, _Request] = {}
        self._finished: deque[_Request] = deque()
        """In the order of their ends."""
        self._state = rows.State()
        self._writes_since_fold = self._bytes_since_fold = 0
        self._file = journal_file.own(self.path, create)
        self._let_go: weakref.finalize[..., Journal] | None = None
        try:
            with journal_file.sqlite_errors(self.path):
                self._connection = journal_file.connect(self.path, synchronous)
                journal_file.make_tables(self.path, self._connection, dict(identity), create)
            self._load(dict(identity))
            self._connection.execute("PRAGMA writable_schema=OFF").fetchall()
        except BaseException:
            self.close()
            raise
        # Who forgets to close it has it closed all the same.
        self._let_go = weakref.finalize(self, journal_file.close, self._connection, self._file)
        _OPEN.add(self)

    def write(
        self,
        *,
        admitted: Iterable[Admission] = (),
        tokens: Iterable[TokenRow] = (),
        ended: Iterable[EndRow] = (),
    ) -> None:
        """Record what one step has brought, in one transaction: admissions first, ends last.

        Args:
            admitted: new requests; ids of requests that the journal still has are refused.
            tokens: (request id, sample, position, token id, logprobs as JSON or None); a sample's first generated token
                has position 0, and each one is the next.
            ended: (request id, sample, finish reason, stop reason, error or None).

        Raises:
            JournalError: nothing was written, and nothing changed.
        """
        with self._lock, interrupts_deferred():
            connection = self._open_connection()
            staged = _Staged()
            state = self._state.copy()
            try:
                self._stage(staged, state, admitted, tokens, ended)
                if not (staged.admissions or staged.entries or staged.end_rows):
                    return
                pruned = self._to_prune(len(staged.ends))
                folding = self._writes_since_fold + 1 >= FOLD_WRITES or self._bytes_since_fold >= FOLD_BYTES
                if folding or pruned or staged.admissions or staged.end_rows:
                    connection.execute("BEGIN IMMEDIATE")
                    nbytes = self._insert(connection, staged, state, pruned, folding)
                    connection.execute("COMMIT")
                else:  # tokens alone, as most writes: one statement is a transaction
                    nbytes = self._log(connection, staged, state)
            except BaseException as error:
                self._take_back(connection, staged)
                if isinstance(error, sqlite3.Error):
                    raise JournalError(
                        f"journal {self.path}: the write failed, nothing was written: {error}"
                    ) from error
                if isinstance(error, (TypeError, ValueError, OverflowError, rows.PackError)):
                    raise JournalError(f"journal {self.path}: malformed, nothing was written: {error}") from error
                raise
            self._state = state
            self._writes_since_fold += 1
            self._bytes_since_fold += nbytes
            for request in pruned:
                self._finished.popleft()
                del self._requests[request.request_id]
            if folding:
                self._fold_done(connection)

    def requests(self) -> list[JournaledRequest]:
        """All requests that it has, in order of arrival."""
        with self._lock:
            self._open_connection()
            return [self._read(request) for request in self._requests.values()]

    def unfinished(self) -> list[JournaledRequest]:
        """Those with a sample that has not ended, in order of arrival."""
        with self._lock:
            self._open_connection()
            return [self._read(request) for request in self._requests.values() if request.num_open]

    def request(self, request_id: str) -> JournaledRequest | None:
        """The request of this id, or None: it never came, or finished long ago."""
        with self._lock:
            self._open_connection()
            request = self._requests.get(request_id)
            return None if request is None else self._read(request)

    def close(self) -> None:
        """Give the file up; twice is fine."""
        with self._lock:
            connection, self._connection = self._connection, None
            if self._let_go is not None:
                self._let_go.detach()
            journal_file.close(connection, self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def salvage(
        path: str | os.PathLike[str],
        into: str | os.PathLike[str],
        *,
        identity: Mapping[str, str | int] | None = None,
    ) -> int:
        """Write what is whole of a damaged journal to a new one; return how many requests that are.

        A request is whole if its admission is. It gets its tokens up to the first damaged one; a sample that has lost
        some has not ended any more, so that it is generated again from there, to the same tokens. Where an end may be
        lost, samples without one also give up their last token: the end comes with it, when it is generated again.
        The damaged file is only read.

        Args:
            path: the damaged journal; nobody may have it open.
            into: the new one, which must not be there yet.
            identity: what to store where the journal's own is lost.

        Raises:
            JournalError: nothing can be read, or the identity cannot and none was given.
        """
        source, target = os.fspath(path), os.fspath(into)
        if os.path.exists(target):
            raise InvalidInputError(f"into: expected a path where nothing is, got {target!r}")
        folder = os.path.dirname(os.path.abspath(target))
        with (
            journal_file.own(source, create=False),
            tempfile.TemporaryDirectory(dir=folder, prefix=".salvage-") as scratch,
        ):
            copy = os.path.join(scratch, "damaged")
            for part in ("", "-wal", "-journal"):
                if os.path.exists(source + part):
                    shutil.copyfile(source + part, copy + part)
            with journal_file.sqlite_errors(source), closing(journal_file.connect(copy, "normal")) as connection:
                reader = rows.Reader(connection)
                records = reader.read_all()
            identity = reader.identity if identity is None else identity
            if identity is None:
                what = f"journal {source}: {len(records)} requests are whole, but its identity is lost"
                raise JournalError(f"{what} ({rows.describe(reader.damages)}): give identity to salvage them")
            new = os.path.join(scratch, "new")
            _write_all(new, identity, list(records.values()), reader.ends_in_doubt)
            os.replace(new, target)
        return len(records)

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise JournalError(f"journal {self.path}: it was closed, by a checkpoint, say, or a fork")
        return self._connection

    def _load(self, identity: dict[str, str | int]) -> None:
        reader = rows.Reader(self._open_connection())
        records = reader.read_all()
        if reader.damages or reader.state is None:
            raise rows.damaged(self.path, reader, len(records))
        for name in sorted({*identity, *(reader.identity or {})}):
            stored, given = (
                repr(values[name]) if name in values else "none" for values in (reader.identity or {}, identity)
            )
            if stored != given:
                raise JournalError(f"journal {self.path}: it was written with {name} {stored}, now it is {given}")
        self._state = reader.state
        finished: list[tuple[int, _Request]] = []
        for number, record in records.items():
            samples = [
                _Sample(len(tokens), array("i", tokens[folded:]), logprobs[folded:], index in record.ends)
                for index, (tokens, logprobs, folded) in enumerate(
                    zip(record.request.tokens, record.request.logprobs, record.folded, strict=True)
                )
            ]
            request = _Request(number, record.request.admission.request_id, samples, len(samples) - len(record.ends))
            self._requests[request.request_id] = request
            if not request.num_open:
                finished.append((max(end.number for end in record.ends.values()), request))
        self._finished.extend(request for _, request in sorted(finished, key=lambda item: item[0]))

    def _read(self, request: _Request) -> JournaledRequest:
        reader = rows.Reader(self._open_connection())
        record = reader.read(request.number)
        if record is not None:
            for sample, tokens, logprobs in zip(
                request.samples, record.request.tokens, record.request.logprobs, strict=True
            ):
                tokens.extend(sample.tail)
                logprobs.extend(sample.logprobs)
            record.settle(reader.damages)
        if (
            record is None
            or reader.damages
            or any(
                len(tokens) != sample.length or (index in record.ends) != sample.ended
                for index, (sample, tokens) in enumerate(zip(request.samples, record.request.tokens, strict=True))
            )
        ):
            what = rows.describe(reader.damages) or "rows are lost"
            raise JournalError(f"journal {self.path}: request {request.request_id!r} is damaged: {what}")
        return record.request

    def _stage(
        self,
        staged: _Staged,
        state: rows.State,
        admitted: Iterable[Admission],
        tokens: Iterable[TokenRow],
        ended: Iterable[EndRow],
    ) -> None:
        requests = self._requests
        for admission in admitted:
            request_id = admission.request_id
            if not isinstance(request_id, str) or not request_id:
                raise JournalError(f"request_id: expected a str that is not empty, got {request_id!r}")
            if request_id in requests:
                raise JournalError(f"request_id: the journal has a request {request_id!r} already")
            samples = [_Sample() for _ in range(check_integer("n", admission.params.get("n", 1), 1))]
            check_integer("seed", admission.seed, 0, 2**64 - 1)
            row = rows.to_row("requests", rows.admission_body(admission), state.next_request)
            request = _Request(state.next_request, request_id, samples, len(samples))
            staged.admissions.append(row)
            staged.requests.append(request)
            requests[request_id] = request
            state.next_request += 1
        for request_id, index, position, token, logprobs in tokens:
            if (known := requests.get(request_id)) is None or not 0 <= index < len(known.samples):
                self._sample(request_id, index)  # says what is wrong; here to be quick where nothing is
                continue
            sample = known.samples[index]
            if position != sample.length or sample.ended:
                after = "its end" if sample.ended else f"{sample.length} tokens"
                raise JournalError(f"request {request_id!r}: sample {index} got a token at {position} after {after}")
            staged.entries.append(rows.pack_entry(known.number, index, position, token))
            staged.logprobs.append(logprobs)
            sample.tail.append(token)
            sample.logprobs.append(logprobs)
            sample.length += 1
            staged.samples.append(sample)
        for request_id, index, finish_reason, stop_reason, error in ended:
            request, sample = self._sample(request_id, index)
            if sample.ended:
                raise JournalError(f"request {request_id!r}: sample {index} has ended already")
            end = rows.End(state.next_end, sample.length, finish_reason, stop_reason, error)
            staged.end_rows.append(rows.to_row("ends", rows.to_json(end._asdict()), request.number, index))
            staged.ends.append((request, sample))
            sample.ended = True
            request.num_open -= 1
            state.next_end += 1
            if not request.num_open:
                self._finished.append(request)

    def _sample(self, request_id: str, index: int) -> tuple[_Request, _Sample]:
        request = self._requests.get(request_id)
        if request is None:
            raise JournalError(f"request_id: the journal has no request {request_id!r}")
        if not 0 <= index < len(request.samples):
            raise JournalError(f"request {request_id!r}: expected a sample below {len(request.samples)}, got {index!r}")
        return request, request.samples[index]

    def _take_back(self, connection: sqlite3.Connection, staged: _Staged) -> None:
        for request, sample in staged.ends:
            sample.ended = False
            if not request.num_open:
                self._finished.pop()
            request.num_open += 1
        for sample in staged.samples:
            sample.length -= 1
            sample.tail.pop()
            sample.logprobs.pop()
        for request in staged.requests:
            del self._requests[request.request_id]
        with suppress(sqlite3.Error):  # the write's error is the one to raise
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _to_prune(self, num_ended: int) -> list[_Request]:
        """The finished requests to drop now: a few at a time, should there be many."""
        excess = len(self._finished) - (self._keep_finished + 1)
        if excess <= 0:
            return []
        return [self._finished[i] for i in range(min(excess, num_ended + _PRUNED_AT_ONCE))]

    def _insert(
        self,
        connection: sqlite3.Connection,
        staged: _Staged,
        state: rows.State,
        pruned: list[_Request],
        folding: bool,
    ) -> int:
        """Put a write in the transaction; return how many bytes it is, about."""
        nbytes = sum(len(row[1]) for row in staged.admissions if isinstance(row[1], bytes))
        rows.insert(connection, "requests", staged.admissions)
        rows.insert(connection, "ends", staged.end_rows)
        state.requests += len(staged.admissions)
        state.ends += len(staged.end_rows)
        if folding:
            pieces = [
                rows.to_row(
                    "pieces",
                    rows.piece_body(sample.tail, sample.logprobs),
                    request.number,
                    index,
                    sample.length - len(sample.tail),
                )
                for request in self._requests.values()
                for index, sample in enumerate(request.samples)
                if sample.tail
            ]
            rows.insert(connection, "pieces", pieces)
            connection.execute("DELETE FROM steps WHERE number < ?", (rows.STATE,))
            state.pieces += len(pieces)
            state.steps = 0
        for request in pruned:
            key = (request.number,)
            state.requests -= connection.execute("DELETE FROM requests WHERE number = ?", key).rowcount
            state.pieces -= connection.execute("DELETE FROM pieces WHERE request = ?", key).rowcount
            state.ends -= connection.execute("DELETE FROM ends WHERE request = ?", key).rowcount
        if folding or not staged.entries:
            rows.put_last(connection, rows.state_row(state))
            return nbytes
        return nbytes + self._log(connection, staged, state)

    @staticmethod
    def _log(connection: sqlite3.Connection, staged: _Staged, state: rows.State) -> int:
        """Put the tokens of a write in the log, and the state behind them; return how many bytes those tokens are."""
        body = rows.step_body(staged.entries, staged.logprobs)
        step = rows.to_row("steps", body, state.next_step)
        state.next_step += 1
        state.steps += 1
        rows.put_last(connection, rows.state_row(state), step)
        return len(body)

    def _fold_done(self, connection: sqlite3.Connection) -> None:
        """The tokens of the log are in pieces: forget them, and bring the main file up to date."""
        for request in self._requests.values():
            for sample in request.samples:
                if sample.tail:
                    sample.tail = array("i")
                    sample.logprobs = []
        self._writes_since_fold = self._bytes_since_fold = 0
        # A checkpoint may fail, on a full disk say: the write stands all the same, and the next one tries again.
        with suppress(sqlite3.Error):
            journal_file.checkpoint(connection)


def _write_all(path: str, identity: Mapping[str, str | int], records: list[rows.Record], ends_in_doubt: bool) -> None:
    """A new journal of these requests: their ends come last, in their order."""
    ends: list[tuple[int, EndRow]] = []
    with Journal(path, identity, keep_finished=len(records)) as journal:
        for record in records:
            request = record.request
            name = request.admission.request_id
            tokens: list[TokenRow] = []
            for sample, (ids, logprobs) in enumerate(zip(request.tokens, request.logprobs, strict=True)):
                kept = len(ids) - (ends_in_doubt and sample not in request.ended and bool(ids))
                tokens += [(name, sample, i, ids[i], logprobs[i]) for i in range(kept)]
                if sample in request.ended:
                    end = record.ends[sample]
                    ends.append((end.number, (name, sample, end.finish_reason, end.stop_reason, end.error)))
            journal.write(admitted=[request.admission], tokens=tokens)
        journal.write(ended=[end for _, end in sorted(ends, key=lambda item: item[0])])


_OPEN: weakref.WeakSet[Journal] = weakref.WeakSet()


def _disown() -> None:
    """In a child that was forked: the journals are the parent's.

    Closing the connection here, even by collecting it as garbage, would write to the parent's file behind its back.
    """
    for journal in list(_OPEN):
        connection, journal._connection = journal._connection, None
        journal._lock = threading.RLock()  # a thread that is not here may hold it
        journal._file.close()  # or the lock outlives the parent
        if journal._let_go is not None:
            journal._let_go.detach()
        if connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


os.register_at_fork(after_in_child=_disown)
