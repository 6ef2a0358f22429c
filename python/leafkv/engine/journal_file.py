"""The file of a journal: one owner, one sqlite connection, made whole or not at all.

The lock is on the file itself and lives as long as its descriptor, so it dies with the process. sqlite's write-ahead
log lies beside the file; :func:`checkpoint` moves it into the file and empties it.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from leafkv.engine import journal_rows as rows
from leafkv.errors import JournalError


def own(path: str, create: bool) -> BinaryIO:
    """Open the file and lock it, without waiting; the lock lives as long as what is returned.

    Raises:
        JournalError: it is not there and ``create`` is False, somebody has it, or a log lies beside an empty file.
    """
    try:
        descriptor = os.open(
            path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600
        )  # prompts are private
    except OSError as error:
        raise JournalError(f"journal {path}: cannot be opened: {error}") from error
    file = os.fdopen(descriptor, "rb", buffering=0)
    try:
        # sqlite's own locks end when any descriptor of the file is closed in this process. This one does not.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if not isinstance(error, BlockingIOError):
            raise JournalError(f"journal {path}: cannot be locked: {error}") from error
        raise JournalError(f"journal {path}: an engine, of this process or another one, has it open") from None
    log = path + "-wal"
    if not os.path.getsize(path) and os.path.exists(log) and os.path.getsize(log):  # sqlite would delete the log
        file.close()
        raise JournalError(f"journal {path}: damaged: it is empty, but there is a log beside it")
    return file


def close(connection: sqlite3.Connection | None, file: BinaryIO) -> None:
    """Close the connection, then let go of the lock."""
    if connection is not None:
        connection.close()
    file.close()  # after sqlite: who gets the lock finds all of it written


def connect(path: str, synchronous: str) -> sqlite3.Connection:
    """A connection to a file that is owned."""
    connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        # Exclusive: without shared memory beside the file. Overwriting what is deleted would only cost time.
        for pragma in ("locking_mode=EXCLUSIVE", "temp_store=MEMORY", "secure_delete=OFF", "wal_autocheckpoint=0"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        # Or sqlite would read nothing of a file that is cut. What is damaged is found by reading all of it.
        connection.execute("PRAGMA writable_schema=ON").fetchall()
        connection.execute(f"PRAGMA synchronous={synchronous}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def make_tables(path: str, connection: sqlite3.Connection, identity: dict[str, str | int], create: bool) -> None:
    """Make the tables, if it is a new file; refuse what is no journal.

    Raises:
        JournalError: it is none, of another format, or empty and ``create`` is False.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application == rows.APPLICATION_ID:
        if version != rows.VERSION:
            raise JournalError(f"journal {path}: its format is {version}, this LeafKV knows {rows.VERSION} alone")
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        return
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    # A file with a header alone is one that somebody was about to make; less is not there, but for an empty file.
    if (num_tables, application, version) != (0, 0, 0) or num_pages != (os.path.getsize(path) > 0):
        raise JournalError(f"journal {path}: no journal, or damaged: application_id {application:#x} in its header")
    if not create:
        raise JournalError(f"journal {path}: there is none yet: the file is empty")
    connection.execute("PRAGMA journal_mode=WAL").fetchall()
    connection.execute("BEGIN IMMEDIATE")
    for statement in rows.SCHEMA.values():
        connection.execute(statement)
    rows.insert(connection, "head", [rows.to_row("head", rows.to_json(identity), rows.IDENTITY)])
    rows.insert(connection, "steps", [rows.state_row(rows.State())])
    connection.execute(f"PRAGMA application_id={rows.APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={rows.VERSION}")
    connection.execute("COMMIT")
    checkpoint(connection)  # whatever happens to the log, the file is this journal


def checkpoint(connection: sqlite3.Connection) -> None:
    """Move the log to the main file and empty it: what is cut off from a log later was never in the main file."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


@contextmanager
def sqlite_errors(path: str) -> Iterator[None]:
    """Within it, what sqlite cannot read of the file is a `JournalError`."""
    try:
        yield
    except rows.READ_ERRORS as error:
        raise JournalError(f"journal {path}: cannot be opened: {error}") from error
