"""The rows of a journal's file: what is in them, and how they are read and verified, whatever has happened to the file.

Every table has integer keys, a ``body`` in bytes, and the CRC-32 of table name, keys and body:

``head``      the identity: what the journal belongs to.
``requests``  admissions, by number: the order of arrival.
``steps``     the log: the tokens of one write of all samples together, so that a step costs one row, not one a sample.
              The last row is the :class:`State`, which counts the rows of all tables. It is here so that a step, which
              changes both, changes one page.
``pieces``    tokens that have been moved out of the log, by request, sample and position of the first.
``ends``      how a sample ended, and after how many tokens.

A token is in a step or in a piece, never in both; a sample's positions are contiguous over its pieces, then its steps.
Lost rows are found by the counts, changed ones by the checksums, repeated or missing tokens by their positions.
Steps may name requests that are no longer there: those were dropped before their tokens left the log.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from leafkv.errors import JournalError

APPLICATION_ID = 0x4C6B764A  # "LkvJ" in the header of the file
VERSION = 2
"""Of the format: change it with the tables or the bodies."""

_KEYS = {
    "head": ("number",),
    "requests": ("number",),
    "steps": ("number",),
    "pieces": ("request", "sample", "start"),
    "ends": ("request", "sample"),
}
SCHEMA = {
    table: (
        f"CREATE TABLE {table} (number INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL)"
        if keys == ("number",)
        else f"CREATE TABLE {table} ({', '.join(f'{key} INTEGER NOT NULL' for key in keys)}, body BLOB NOT NULL, "
        f"crc INTEGER NOT NULL, PRIMARY KEY ({', '.join(keys)})) WITHOUT ROWID"
    )
    for table, keys in _KEYS.items()
}
_INSERT = {table: f"INSERT INTO {table} VALUES ({', '.join('?' * (len(keys) + 2))})" for table, keys in _KEYS.items()}
_PUT_STATE = "INSERT OR REPLACE INTO steps VALUES (?, ?, ?)"
_PUT_STEP = f"{_PUT_STATE}, (?, ?, ?)"
IDENTITY = 0
STATE = 2**63 - 1
"""The numbers of these two rows; no step has the latter."""
_MOST_NUMBERS = 1 << 20
_COUNT = struct.Struct("<I")
_STATE = struct.Struct("<7q")
_ENTRY = struct.Struct("<qiii")  # request, sample, position, token
pack_entry = _ENTRY.pack
PackError = struct.error
READ_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Damage as sqlite tells of it; the text of its errors may come from the damaged file."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request was when it was taken: enough to run it again to the same tokens.

    Attributes:
        params: its parameters as JSON has them: names are str, sequences come back as lists. ``params["n"]`` (1 where
            there is none) is the number of its samples.
        seed: 0 to 2**64 - 1.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    params: dict[str, Any]
    seed: int
    priority: int
    max_tokens: int
    cache_salt: str | None = None

    @property
    def num_samples(self) -> int:
        """How many answers it has."""
        return int(self.params.get("n", 1))


@dataclass(slots=True)
class JournaledRequest:
    """A request as the journal has it; lists have one element a sample.

    Attributes:
        tokens: the generated ones of each sample.
        logprobs: of each sample, the JSON that came with each token, or None.
        ended: the samples that have ended: (finish reason, stop reason).
        error: what went wrong with it, if something did.
    """

    admission: Admission
    tokens: list[list[int]]
    logprobs: list[list[str | None]]
    ended: dict[int, tuple[str, int | str | None]] = field(default_factory=dict)
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return len(self.ended) == len(self.tokens)


class End(NamedTuple):
    """How a sample ended: ``number`` is its place in the order of all ends, ``length`` its number of tokens."""

    number: int
    length: int
    finish_reason: str
    stop_reason: int | str | None
    error: str | None


@dataclass(slots=True)
class State:
    """Numbers to be given out next, and how many rows there are."""

    next_request: int = 0
    next_step: int = 0
    next_end: int = 0
    requests: int = 0
    steps: int = 0
    pieces: int = 0
    ends: int = 0

    def to_bytes(self) -> bytes:
        """All of it, in the order of the fields; once a write, so not JSON."""
        return _STATE.pack(
            self.next_request, self.next_step, self.next_end, self.requests, self.steps, self.pieces, self.ends
        )

    def copy(self) -> State:
        """Another one with the same numbers."""
        return State(
            self.next_request, self.next_step, self.next_end, self.requests, self.steps, self.pieces, self.ends
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> State:
        """The inverse."""
        return cls(*_STATE.unpack(data))


def to_row(table: str, body: bytes, *key: int) -> tuple[int | bytes, ...]:
    """A row as it is inserted, its checksum last."""
    return (*key, body, checksum(table, body, key))


def insert(connection: sqlite3.Connection, table: str, rows: list[tuple[int | bytes, ...]]) -> None:
    """Insert rows; a key that is there already is an error of sqlite's."""
    if rows:
        connection.executemany(_INSERT[table], rows)


def state_row(state: State) -> tuple[int | bytes, ...]:
    """The last row of the log."""
    return to_row("steps", state.to_bytes(), STATE)


def put_last(connection: sqlite3.Connection, row: tuple[int | bytes, ...], step: tuple[int | bytes, ...] = ()) -> None:
    """Put a state row in place of the one before, and a new step before it, if there is one: one statement."""
    connection.execute(_PUT_STEP if step else _PUT_STATE, step + row)


def checksum(table: str, body: bytes, key: Sequence[int]) -> int:
    """The CRC-32 of a row; keys end with a letter that no number has, so no two rows are written alike."""
    return zlib.crc32(body, zlib.crc32(f"{table} {' '.join(map(str, key))}:".encode()))


def to_json(value: Any) -> bytes:
    """One and the same bytes for equal values; what JSON would change silently is a ValueError."""
    _check_names(value)
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def _check_names(value: Any) -> None:
    """JSON has only str as names: it would make str of others."""
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ValueError(f"expected str as names, as JSON has them, got {list(value)!r}")
        for element in value.values():
            _check_names(element)
    elif isinstance(value, (list, tuple)):
        for element in value:
            _check_names(element)


def admission_body(admission: Admission) -> bytes:
    """Everything but its number, which is the key."""
    names = ("request_id", "prompt", "params", "seed", "priority", "max_tokens", "cache_salt")
    head = to_json({name: getattr(admission, name) for name in names})
    return _COUNT.pack(len(head)) + head + _int32(array("i", admission.prompt_token_ids))


def _to_admission(body: bytes) -> Admission:
    end = _COUNT.size + _COUNT.unpack_from(body)[0]
    fields = json.loads(body[_COUNT.size : end])
    return Admission(**fields, prompt_token_ids=_from_int32(body[end:]))


def step_body(entries: list[bytes], logprobs: list[str | None]) -> bytes:
    """The tokens of one write, packed by :func:`pack_entry`."""
    return _COUNT.pack(len(entries)) + b"".join(entries) + _logprobs_tail(logprobs)


def piece_body(tokens: array[int], logprobs: list[str | None]) -> bytes:
    """Consecutive tokens of one sample."""
    return _COUNT.pack(len(tokens)) + _int32(tokens) + _logprobs_tail(logprobs)


def _to_piece(body: bytes) -> tuple[list[int], list[str | None]]:
    n = _COUNT.unpack_from(body)[0]
    end = _COUNT.size + 4 * n
    return _from_int32(body[_COUNT.size : end]), _from_logprobs_tail(body[end:], n)


def _logprobs_tail(logprobs: list[str | None]) -> bytes:
    return b"" if logprobs.count(None) == len(logprobs) else json.dumps(logprobs).encode()


def _from_logprobs_tail(tail: bytes, n: int) -> list[str | None]:
    return json.loads(tail) if tail else [None] * n


def _int32(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = array("i", numbers)
        numbers.byteswap()
    return numbers.tobytes()


def _from_int32(data: bytes) -> list[int]:
    numbers = array("i", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


@dataclass(slots=True)
class Record:
    """One request while it is read: what is known of it so far, and whether all of its rows are right."""

    request: JournaledRequest
    ends: dict[int, End]
    folded: list[int]
    """Of each sample, the tokens that are in pieces."""
    broken: set[int]
    """Samples that have more tokens than can be told, as one before them is damaged."""

    def settle(self, damages: list[str]) -> None:
        """All tokens are there: take the ends. One whose tokens are damaged is none: both are generated again."""
        for sample, end in self.ends.items():
            if len(self.request.tokens[sample]) != end.length:
                what = f"request {self.request.admission.request_id!r}: sample {sample}"
                damages.append(f"{what} has {len(self.request.tokens[sample])} of {end.length} tokens")
            else:
                self.request.ended[sample] = (end.finish_reason, end.stop_reason)
                self.request.error = self.request.error or end.error


class Reader:
    """Reads what can be read of a journal's file, and says in ``damages`` what cannot."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.damages: list[str] = []
        self.identity: dict[str, str | int] | None = None
        self.state: State | None = None
        self.ends_in_doubt = False
        """Whether an end may be lost, so that a sample without one may have ended all the same."""
        self._connection = connection
        self._seen = dict.fromkeys(_KEYS, 0)

    def read_all(self) -> dict[int, Record]:
        """All requests whose admission is whole, by number, with all tokens up to the first damaged one."""
        if not self._check_file():
            self.ends_in_doubt = True
        if (body := self._body("head", IDENTITY)) is not None:
            self.identity = json.loads(body)
        if (body := self._body("steps", STATE)) is not None:
            self.state = State.from_bytes(body)
            self._seen["steps"] = 0
        records: dict[int, Record] = {}
        for number in self._numbers("requests"):
            record = self.read(number)
            if record is not None:
                records[number] = record
        for number in self._numbers("steps"):
            if (body := self._body("steps", number)) is not None:
                self._replay(number, body, records)
        self._check_counts()
        for record in records.values():
            record.settle(self.damages)
        return records

    def read(self, number: int) -> Record | None:
        """One request without what is in the log."""
        body = self._body("requests", number)
        if body is None:
            return None
        admission = _to_admission(body)
        n = admission.num_samples
        tokens: list[list[int]] = [[] for _ in range(n)]
        logprobs: list[list[str | None]] = [[] for _ in range(n)]
        broken: set[int] = set()
        for (_, sample, start), body in self._bodies("pieces", number):
            if body is None or sample in broken or not 0 <= sample < n or start != len(tokens[sample]):
                if sample not in broken:
                    self._damaged(f"request {admission.request_id!r}: sample {sample} from position {start} on")
                broken.add(sample)
                continue
            more, with_logprobs = _to_piece(body)
            tokens[sample] += more
            logprobs[sample] += with_logprobs
        ends = {}
        for (_, sample), body in self._bodies("ends", number):
            if body is not None and 0 <= sample < n:
                ends[sample] = End(**json.loads(body))
            else:
                self.ends_in_doubt = True
        return Record(JournaledRequest(admission, tokens, logprobs), ends, [len(part) for part in tokens], broken)

    def _replay(self, step: int, body: bytes, records: dict[int, Record]) -> None:
        n = _COUNT.unpack_from(body)[0]
        end = _COUNT.size + n * _ENTRY.size
        logprobs = _from_logprobs_tail(body[end:], n)
        for (number, sample, position, token), with_logprobs in zip(
            _ENTRY.iter_unpack(body[_COUNT.size : end]), logprobs, strict=True
        ):
            if (record := records.get(number)) is None:
                continue
            known = record.request.tokens[sample]
            if position == len(known):
                known.append(token)
                record.request.logprobs[sample].append(with_logprobs)
            elif sample not in record.broken:
                record.broken.add(sample)
                name = record.request.admission.request_id
                self._damaged(f"request {name!r}: sample {sample} comes to {position} in step {step}, not {len(known)}")

    def _check_file(self) -> bool:
        try:
            found = dict(self._connection.execute("SELECT name, sql FROM sqlite_master").fetchall())
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if found != SCHEMA or version != VERSION:
                self._damaged(
                    f"the tables are {sorted(map(str, found))} of version {version}, not those of version {VERSION}"
                )
                return False
            (verdict,) = self._connection.execute("PRAGMA integrity_check(1)").fetchone()
        except READ_ERRORS as error:
            verdict = str(error)
        if verdict != "ok":
            self._damaged(f"sqlite: {' '.join(verdict.split())}")
        return bool(verdict == "ok")

    def _check_counts(self) -> None:
        if self.identity is None:
            self._damaged("the identity is lost")
        if self.state is None:
            self._damaged("the counts of rows are lost")
            self.ends_in_doubt = True
            return
        for table in ("requests", "steps", "pieces", "ends"):
            expected = getattr(self.state, table)
            if self._seen[table] != expected:
                self._damaged(f"{table}: {self._seen[table]} of {expected} rows are whole")
                self.ends_in_doubt = self.ends_in_doubt or table == "ends"

    def _numbers(self, table: str) -> Sequence[int]:
        """The numbers that rows have; where pages are damaged, those that rows between them may have."""
        runs: list[list[int]] = []
        for order in ("ASC", "DESC"):
            numbers: list[int] = []
            runs.append(numbers)
            try:
                cursor = self._connection.execute(
                    f"SELECT number FROM {table} WHERE number < {STATE} ORDER BY number {order}"
                )
                numbers.extend(number for (number,) in cursor)  # what came before an error stays
            except READ_ERRORS as error:
                self._damaged(f"{table}: {error}")
            else:
                return numbers if order == "ASC" else numbers[::-1]
        seen = sorted({number for run in runs for number in run})
        if not seen or seen[-1] - seen[0] > _MOST_NUMBERS:  # a damaged one is among them
            return seen
        return range(seen[0], seen[-1] + 1)

    def _body(self, table: str, number: int) -> bytes | None:
        """The verified body of a row, or None."""
        for _, body in self._bodies(table, number):
            return body
        return None

    def _bodies(self, table: str, first_key: int) -> Iterator[tuple[tuple[int, ...], bytes | None]]:
        """Keys and verified bodies of the rows whose first key it is, in order; None for one that is damaged."""
        keys = _KEYS[table]
        query = f"SELECT {', '.join(keys)}, body, crc FROM {table} WHERE {keys[0]} = ? ORDER BY {', '.join(keys)}"
        rows: list[Any] = []
        try:
            rows.extend(self._connection.execute(query, (first_key,)))
        except READ_ERRORS as error:
            self._damaged(f"{table} {first_key}: {error}")
            self.ends_in_doubt = self.ends_in_doubt or table == "ends"
        for *key, body, crc in rows:
            right = isinstance(body, bytes) and checksum(table, body, key) == crc
            if right:
                self._seen[table] += 1
            else:
                self._damaged(f"{table} {' '.join(map(str, key))}: wrong checksum")
            yield tuple(key), body if right else None

    def _damaged(self, what: str) -> None:
        self.damages.append(what)


def describe(damages: list[str]) -> str:
    """The first few damages, and how many more there are."""
    more = f", and {len(damages) - 3} more" if len(damages) > 3 else ""
    return "; ".join(damages[:3]) + more


def damaged(path: str, reader: Reader, whole: int) -> JournalError:
    """The error that says what is damaged and what is not."""
    known = "" if reader.state is None else f" of {reader.state.requests}"
    return JournalError(
        f"journal {path}: damaged ({describe(reader.damages)}); {whole}{known} requests are whole: "
        "Journal.salvage(path, into) writes them to a new journal"
    )
