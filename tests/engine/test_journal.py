"""The journal against a dictionary, and against what happens to files: kill -9, full disks, cuts, flipped bits."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leafkv.engine import journal as journal_module
from leafkv.engine import journal_file, journal_rows
from leafkv.engine.journal import Admission, Journal, JournaledRequest
from leafkv.errors import InvalidInputError, JournalError

ROOT = Path(__file__).parents[2]
IDENTITY: dict[str, str | int] = {"model": "toy", "vocab_size": 4}
IDS = ["{}", "é{}", "'; --{}", "\0{}", "日本{}", " {} "]


class Model:
    """What a journal has to hold: the obvious way, all in memory."""

    def __init__(self, seed: int, keep_finished: int) -> None:
        self.rng = random.Random(seed)
        self.keep_finished = keep_finished
        self.requests: dict[str, JournaledRequest] = {}
        self.finished: list[str] = []
        self.arrivals = 0

    def write(self, *, end: float = 0.1) -> dict[str, Any]:
        """A random write, which the model has made already."""
        rng = self.rng
        write: dict[str, Any] = {"admitted": [], "tokens": [], "ended": []}
        for _ in range(rng.choice((0, 0, 1, 2)) if self.arrivals else 1):
            n = rng.choice((1, 1, 3))
            admission = Admission(
                request_id=rng.choice(IDS).format(self.arrivals),
                prompt=rng.choice((None, "", "naïve 🙂 \0")),
                prompt_token_ids=[rng.randrange(2**31) for _ in range(rng.choice((1, 5, 300)))],
                params={"n": n, "temperature": 0.7, "logit_bias": {"5": -1.5}, "stop": ["é"], "seed": None},
                seed=rng.choice((0, 2**63, 2**64 - 1)),
                priority=rng.randrange(-3, 3),
                max_tokens=2**31,
                cache_salt=rng.choice((None, "salt")),
            )
            self.arrivals += 1
            write["admitted"].append(admission)
            self.requests[admission.request_id] = JournaledRequest(
                admission, [[] for _ in range(n)], [[] for _ in range(n)]
            )
        ended = 0
        for request_id, request in self.requests.items():
            for sample, (tokens, logprobs) in enumerate(zip(request.tokens, request.logprobs, strict=True)):
                if sample in request.ended or rng.random() < 0.3:
                    continue
                for _ in range(rng.choice((1, 1, 1, 3))):
                    row = (rng.randrange(2**31), rng.choice((None, None, '{"3":[-0.5,"é\\n"]}')))
                    write["tokens"].append((request_id, sample, len(tokens), *row))
                    tokens.append(row[0])
                    logprobs.append(row[1])
                if rng.random() < end:
                    reason = rng.choice(("stop", "length", "abort", "error"))
                    stop = rng.choice((None, 7, "stop é")) if reason == "stop" else None
                    error = "it broke" if reason == "error" else None
                    write["ended"].append((request_id, sample, reason, stop, error))
                    request.ended[sample] = (reason, stop)
                    request.error = request.error or error
                    ended += 1
                    if request.finished:
                        self.finished.append(request_id)
        while len(self.finished) > self.keep_finished + 1:
            del self.requests[self.finished.pop(0)]
        return write

    def contents(self) -> list[JournaledRequest]:
        return copy.deepcopy(list(self.requests.values()))


def check(journal: Journal, expected: list[JournaledRequest]) -> None:
    assert journal.requests() == expected
    assert journal.unfinished() == [request for request in expected if not request.finished]


@pytest.fixture(autouse=True)
def small_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tokens move out of the log often; and wait for no disk, as no test cuts the power."""
    monkeypatch.setattr(journal_module, "FOLD_WRITES", 7)
    connect = journal_file.connect
    monkeypatch.setattr(journal_file, "connect", lambda path, synchronous: connect(path, "off"))


def copy_of(path: Path, to: Path) -> Path:
    """The files as a crash at this moment would leave them."""
    for suffix in ("", "-wal"):
        part = Path(f"{path}{suffix}")
        Path(f"{to}{suffix}").unlink(missing_ok=True)
        if part.exists():
            shutil.copyfile(part, f"{to}{suffix}")
    return to


@pytest.mark.parametrize("seed", range(20))
def test_equals_a_dictionary(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed or killed in between at random, and asked for nonsense, which changes nothing."""
    rng = random.Random(seed)
    monkeypatch.setattr(journal_module, "FOLD_WRITES", rng.choice((1, 2, 7, 1000)))
    monkeypatch.setattr(journal_module, "FOLD_BYTES", rng.choice((2000, 4 << 20)))
    model = Model(seed, keep_finished=rng.choice((0, 2, 1000)))
    path = tmp_path / "0"
    journal = Journal(path, IDENTITY, keep_finished=model.keep_finished)
    for step in range(60):
        write = model.write()
        if rng.random() < 0.3:
            with pytest.raises(JournalError):
                journal.write(**spoiled(rng, write))
        journal.write(**write)
        if rng.random() < 0.2:
            fresh = tmp_path / str(step + 1)
            if rng.random() < 0.5:
                copy_of(path, fresh)
                journal.close()
            else:
                journal.close()
                copy_of(path, fresh)
            path = fresh
            journal = Journal(path, IDENTITY, keep_finished=model.keep_finished)
        if rng.random() < 0.3:
            check(journal, model.contents())
    check(journal, model.contents())
    for request_id, request in model.requests.items():
        assert journal.request(request_id) == request
    assert journal.request("nobody") is None
    journal.close()


def spoiled(rng: random.Random, write: dict[str, Any]) -> dict[str, Any]:
    """The same with one row more that no journal may take."""
    write = {name: list(rows) for name, rows in write.items()}
    bad: list[tuple[str, Any]] = [
        ("tokens", ("nobody", 0, 0, 1, None)),
        ("ended", ("nobody", 0, "stop", None, None)),
    ]
    if write["tokens"]:
        request_id, sample, position, *_ = write["tokens"][-1]
        bad += [
            ("tokens", (request_id, sample, position, 1, None)),
            ("tokens", (request_id, sample, position + 2, 1, None)),
            ("tokens", (request_id, 3, 0, 1, None)),
            ("tokens", (request_id, -1, 0, 1, None)),
            ("tokens", (request_id, sample, position + 1, 2**31, None)),
            ("tokens", (request_id, sample, position + 1, None, None)),
        ]
    if write["ended"]:
        bad.append(("ended", write["ended"][-1]))
    if write["admitted"]:
        bad.append(("admitted", write["admitted"][-1]))
    name, row = rng.choice(bad)
    write[name].append(row)
    return write


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": ""}, "request_id: expected a str that is not empty, got ''"),
        ({"seed": 2**64}, f"seed: expected an integer from 0 to {2**64 - 1}, got {2**64}"),
        ({"params": {"n": 0}}, "n: expected an integer >= 1, got 0"),
        ({"params": {"logit_bias": {5: 1.0}}}, "expected str as names"),
        ({"params": {"top_p": float("nan")}}, "JSON"),
        ({"params": {"top_p": object()}}, "JSON"),
        ({"prompt_token_ids": [2**31]}, "malformed"),
    ],
)
def test_what_it_could_not_give_back_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"prompt": None, "prompt_token_ids": [1], "params": {}, "seed": 1, "request_id": "a"}
    with Journal(tmp_path / "j", IDENTITY) as journal:
        with pytest.raises(JournalError, match=message):
            journal.write(admitted=[Admission(**fields | changes, priority=0, max_tokens=1)])
        assert journal.requests() == []


# --- one owner ---


def test_only_one_owner(tmp_path: Path) -> None:
    """Also after a failed attempt of this process, which ends sqlite's own locks."""
    path = tmp_path / "j"
    with Journal(path, IDENTITY):
        for _ in range(2):
            with pytest.raises(JournalError, match="has it open"):
                Journal(path, IDENTITY)
            with pytest.raises(JournalError, match="has it open"):
                Journal.salvage(path, tmp_path / "new")
            assert "has it open" in run_python(f"Journal({str(path)!r}, {IDENTITY})", fails=True)
    with Journal(path, IDENTITY) as journal:
        assert journal.requests() == []


def test_a_forked_child_leaves_it_alone(tmp_path: Path) -> None:
    """A child that is forked, uses it, ends in whatever way: the parent's writes all stay, and die with it alone."""
    path = tmp_path / "j"
    output = run_python(f"""
        import gc, os, signal, time
        journal = Journal({str(path)!r}, {IDENTITY})
        admission = Admission("a", None, [1], {{}}, 0, 0, 9)
        journal.write(admitted=[admission])
        if os.fork() == 0:
            try:
                journal.write(tokens=[("a", 0, 0, 1, None)])
            except JournalError as error:
                print("forked" in str(error), flush=True)
            journal.close()
            del journal
            gc.collect()
            raise SystemExit
        os.wait()
        journal.write(tokens=[("a", 0, 0, 2, None)])
        if os.fork() == 0:
            os.close(1)
            time.sleep(60)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert output == "True\n"
    with Journal(path, IDENTITY) as journal:
        assert [request.tokens for request in journal.requests()] == [[[2]]]


def run_python(code: str, *, fails: bool = False) -> str:
    imports = "from leafkv.engine.journal import *\nfrom leafkv.errors import JournalError\n"
    process = subprocess.run(
        [sys.executable, "-c", imports + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if fails else None,
        text=True,
        cwd=ROOT,
        check=False,
    )
    return process.stdout


def test_another_identity_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path, IDENTITY).close()
    for other, message in (
        (IDENTITY | {"model": "other"}, "it was written with model 'toy', now it is 'other'"),
        ({"model": "toy"}, "it was written with vocab_size 4, now it is none"),
        (IDENTITY | {"dtype": "int8"}, "it was written with dtype none, now it is 'int8'"),
        (IDENTITY | {"vocab_size": "4"}, "it was written with vocab_size 4, now it is '4'"),
    ):
        with pytest.raises(JournalError, match=message):
            Journal(path, other)
    Journal(path, dict(reversed(IDENTITY.items()))).close()
    with pytest.raises(InvalidInputError, match="identity"):
        Journal(path, {"model": 0.5})  # type: ignore[dict-item]


def test_what_is_no_journal_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(path, IDENTITY, create=False)
    path.write_bytes(b"")
    with pytest.raises(JournalError, match="there is none yet"):
        Journal(path, IDENTITY, create=False)
    path.write_bytes(b"Dear diary, " * 1000)
    with pytest.raises(JournalError, match="not a database"):
        Journal(path, IDENTITY)
    assert path.read_bytes() == b"Dear diary, " * 1000
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path, IDENTITY)
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE diary (day)")
    before = path.read_bytes()
    with pytest.raises(JournalError, match="no journal"):
        Journal(path, IDENTITY)
    assert path.read_bytes() == before


def test_closed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", IDENTITY)
    journal.close()
    journal.close()
    for use in (journal.requests, journal.unfinished, journal.write, lambda: journal.request("a")):
        with pytest.raises(JournalError, match="closed"):
            use()
    assert [path.name for path in tmp_path.iterdir()] == ["j"]


def test_threads(tmp_path: Path) -> None:
    def work(i: int) -> None:
        journal.write(admitted=[Admission(f"{i}", None, [i], {}, i, 0, 99)])
        for position in range(50):
            journal.write(tokens=[(f"{i}", 0, position, i, None)])
            request = journal.request(f"{i}")
            assert request is not None
            assert request.tokens == [[i] * (position + 1)]
        done.append(i)

    done: list[int] = []
    with Journal(tmp_path / "j", IDENTITY) as journal:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == [0, 1, 2, 3]
        assert len(journal.unfinished()) == 4


# --- what is kept ---


def test_finished_ones_go_after_so_many_newer_ones_and_the_file_stays_small(tmp_path: Path) -> None:
    """Beside one request that never ends."""
    path = tmp_path / "j"
    sizes = []
    with Journal(path, IDENTITY, keep_finished=5) as journal:
        journal.write(admitted=[Admission("long", None, [0], {}, 0, 0, 10**6)])
        for i in range(900):
            name = str(i)
            journal.write(
                admitted=[Admission(name, "text" * 50, list(range(100)), {}, i, 0, 9)],
                tokens=[(name, 0, 0, i, None), ("long", 0, i, i, None)],
            )
            journal.write(tokens=[(name, 0, 1, i, None)], ended=[(name, 0, "stop", 3, None)])
            kept = [request.admission.request_id for request in journal.requests()]
            assert kept == ["long", *map(str, range(max(0, i - 5), i + 1))]
            if i % 100 == 99:
                sizes.append(path.stat().st_size)
    assert sizes[-1] - sizes[1] <= 4 * 4096, sizes  # the long one has 2,800 bytes more
    with Journal(path, IDENTITY, keep_finished=0) as journal:  # fewer than before: from the next write on
        journal.write(admitted=[Admission("last", None, [0], {}, 0, 0, 9)])
        assert [request.admission.request_id for request in journal.requests()] == ["long", "899", "last"]


def test_the_log_is_emptied_after_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "FOLD_WRITES", 10**9)
    monkeypatch.setattr(journal_module, "FOLD_BYTES", 100_000)
    with Journal(tmp_path / "j", IDENTITY) as journal:
        journal.write(admitted=[Admission("a", None, [0], {}, 0, 0, 9)])
        for i in range(50):
            journal.write(admitted=[Admission(f"{i}", "text" * 2500, [0], {}, 0, 0, 9)])
            journal.write(tokens=[("a", 0, i, i, f'"{"logprobs" * 1250}"')])
            assert (tmp_path / "j-wal").stat().st_size < 300_000


def test_many_to_drop_go_a_few_at_a_time(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", IDENTITY) as journal:
        names = [str(i) for i in range(100)]
        journal.write(admitted=[Admission(name, None, [0], {}, 0, 0, 9) for name in names])
        journal.write(ended=[(name, 0, "abort", None, None) for name in reversed(names)])
    with Journal(tmp_path / "j", IDENTITY, keep_finished=9) as journal:
        for left in (68, 36, 10, 10):
            journal.write(admitted=[Admission(f"new {left}, {len(journal.requests())}", None, [0], {}, 0, 0, 9)])
            finished = [request.admission.request_id for request in journal.requests() if request.finished]
            assert finished == names[:left]  # those that ended last stay


# --- kill -9 ---


def write_for_ever(path: str, seed: int, start: int) -> None:
    """What the child does: tell of each write once it has returned."""
    journal_module.FOLD_WRITES = 7
    model = Model(seed, keep_finished=3)
    for _ in range(start):
        model.write()
    with Journal(path, IDENTITY, keep_finished=3) as journal:
        for i in itertools.count(start + 1):
            journal.write(**model.write())
            os.write(1, b"%d\n" % i)


@pytest.mark.parametrize("seed", range(2))
def test_kill_9_loses_nothing(seed: int, tmp_path: Path) -> None:
    """Again and again over one file: what was acknowledged is there, and at most one write more."""
    rng = random.Random(seed)
    path = tmp_path / "j"
    model = Model(seed, keep_finished=3)
    written = 0
    for _ in range(max(1, int(os.environ.get("LEAFKV_SOAK_KILLS", "10")) // 2)):
        code = f"from tests.engine.test_journal import *; write_for_ever({str(path)!r}, {seed}, {written})"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as child:
            assert child.stdout is not None
            told = [child.stdout.readline() for _ in range(rng.choice((0, 1, 7, rng.randrange(60))))]
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(rng.random() * 0.01)
            child.send_signal(signal.SIGKILL)
            told += child.stdout
            assert child.wait() == -signal.SIGKILL
        if told:
            for _ in range(int(told[-1]) - written):
                model.write()
            written = int(told[-1])
        with Journal(path, IDENTITY, keep_finished=3) as journal:
            if journal.requests() != model.contents():
                model.write()
                written += 1
            check(journal, model.contents())


# --- no space ---


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail_every_write(
    path: Path, room: Callable[[int], contextlib.AbstractContextManager[None]], step: int, copies: Path
) -> None:
    """Each write of a run with no room, then a little more, until it works: those before it change nothing."""
    model = Model(3, keep_finished=4)
    failures = 0
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal(path, IDENTITY, keep_finished=4))
        for i in range(60):
            before = model.contents()
            write = model.write()
            for nbytes in itertools.count(0, step):
                with room(nbytes):
                    if not fails(journal, write):
                        break
                failures += 1
                check(journal, before)
                if i % 10 == 0:
                    with Journal(copy_of(path, copies / "copy"), IDENTITY, keep_finished=4) as crashed:
                        check(crashed, before)
            check(journal, model.contents())
            if i % 7 == 0:
                journal.close()
                journal = stack.enter_context(Journal(path, IDENTITY, keep_finished=4))
    assert failures > 60


def fails(journal: Journal, write: dict[str, Any]) -> bool:
    try:
        journal.write(**write)
    except JournalError as error:
        if not isinstance(error.__cause__, sqlite3.Error):
            raise
        return True
    return False


def test_failed_writes_change_nothing(tmp_path: Path) -> None:
    """Files that may not grow: an error in the midst of a transaction, at each of its pages."""
    path = tmp_path / "j"

    def room(nbytes: int) -> contextlib.AbstractContextManager[None]:
        log = Path(f"{path}-wal")
        return largest_file((log.stat().st_size if log.exists() else 0) + nbytes)

    fail_every_write(path, room, 2000, tmp_path)


def test_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk of its own, as mount needs root: {mounted.stderr.strip()}")

    @contextlib.contextmanager
    def room(nbytes: int) -> Iterator[None]:
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)) == 4096:
                pass
        os.truncate(filler, max(0, filler.stat().st_size - nbytes))
        try:
            yield
        finally:
            filler.unlink()

    try:
        fail_every_write(disk / "j", room, 4096, tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_an_error_within_a_write_takes_all_of_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sqlite does not know of."""
    model = Model(4, keep_finished=4)
    with Journal(tmp_path / "j", IDENTITY, keep_finished=4) as journal:
        for _ in range(30):
            before = model.contents()
            write = model.write()
            with monkeypatch.context() as patched, contextlib.suppress(MemoryError):
                patched.setattr(journal_rows.State, "to_bytes", out_of_memory)
                journal.write(**write)
                raise AssertionError("no error")
            check(journal, before)
            journal.write(**write)
            check(journal, model.contents())


def out_of_memory(*_: object) -> bytes:
    raise MemoryError


# --- damaged files ---


def build(path: Path, *, writes: int, crash: bool, seed: int = 5) -> list[list[JournaledRequest]]:
    """Make the files of a journal at ``path``; return its contents after each write."""
    model = Model(seed, keep_finished=5)
    states = [model.contents()]
    with Journal(path.with_name("origin"), IDENTITY, keep_finished=5) as journal:
        for _ in range(writes):
            journal.write(**model.write(end=0.04))
            states.append(model.contents())
        if crash:
            copy_of(path.with_name("origin"), path)
    if not crash:
        copy_of(path.with_name("origin"), path)
    return states


def state_of(path: Path, states: list[list[JournaledRequest]]) -> int:
    """Open it: which of the states it has."""
    with Journal(path, IDENTITY, keep_finished=5) as journal:
        contents = journal.requests()
        assert contents in states, "no state that it ever had"
        return states.index(contents)


def test_a_cut_or_damaged_log_is_an_earlier_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log: sqlite's own, before it gets into the main file. The longer it is, the later the state."""
    monkeypatch.setattr(journal_module, "FOLD_WRITES", 24)
    rng = random.Random(1)
    states = build(tmp_path / "j", writes=40, crash=True)
    log = (tmp_path / "j-wal").read_bytes()
    assert len(log) > 50_000
    latest = 23  # the fold is in the main file
    for end in [*range(64), *sorted(rng.randrange(len(log)) for _ in range(150)), len(log)]:
        path = copy_of(tmp_path / "j", tmp_path / "cut")
        os.truncate(f"{path}-wal", end)
        state = state_of(path, states)
        assert latest <= state
        latest = state
    assert latest == 40
    for _ in range(100):
        path = copy_of(tmp_path / "j", tmp_path / "flipped")
        damaged = bytearray(log)
        damaged[rng.randrange(len(log))] ^= 1 << rng.randrange(8)
        Path(f"{path}-wal").write_bytes(damaged)
        assert state_of(path, states) >= 24


def test_a_log_that_is_in_the_main_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what is left of it, cut, would be older than the file that it changes."""
    monkeypatch.setattr(journal_module, "FOLD_WRITES", 24)
    build(tmp_path / "j", writes=24, crash=True)
    assert (tmp_path / "j-wal").stat().st_size == 0


def test_an_empty_file_with_a_log_is_damaged(tmp_path: Path) -> None:
    build(tmp_path / "j", writes=3, crash=True)
    os.truncate(tmp_path / "j", 0)
    with pytest.raises(JournalError, match="it is empty, but there is a log beside it"):
        Journal(tmp_path / "j", IDENTITY)
    assert (tmp_path / "j-wal").stat().st_size


@pytest.mark.parametrize("table", ["head", "requests", "steps", "pieces", "ends"])
def test_a_lost_row_is_missed(table: str, tmp_path: Path) -> None:
    """In a file that is right for sqlite, with right checksums."""
    (truth,) = build(tmp_path / "j", writes=60, crash=False)[-1:]
    key = "number" if table in {"head", "requests", "steps"} else "request, sample"
    # Of the log, the last row is the counts, and the one before it the last step.
    for order, skipped in (("ASC", 0), ("DESC", 0), ("DESC", table == "steps")):
        path = copy_of(tmp_path / "j", tmp_path / "lost")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            query = f"SELECT {key} FROM {table} ORDER BY {key} {order} LIMIT 1 OFFSET {skipped:d}"
            keys = connection.execute(query).fetchone()
            marks = ", ".join("?" * len(keys))
            assert connection.execute(f"DELETE FROM {table} WHERE ({key}) = ({marks})", keys).rowcount
        assert check_damaged(path, truth) == len(truth) - (table == "requests")


def test_another_format_is_refused(tmp_path: Path) -> None:
    for statement, message in (
        ("PRAGMA user_version = 9", "its format is 9, this LeafKV knows 2 alone"),
        ("PRAGMA application_id = 9", "no journal, or damaged: application_id 0x9"),
        ("CREATE TABLE more (number)", "the tables are"),
        ("ALTER TABLE ends ADD COLUMN more", "the tables are"),
    ):
        path = tmp_path / "j"
        path.unlink(missing_ok=True)
        Journal(path, IDENTITY).close()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(statement)
        with pytest.raises(JournalError, match=message):
            Journal(path, IDENTITY)


def check_damaged(path: Path, truth: list[JournaledRequest]) -> int | None:
    """Open a damaged journal: all is right, also once more is written, or it says so and what it saves is right.

    Return how many requests it saves, or None if it was not damaged.
    """
    by_id = {request.admission.request_id: request for request in truth}
    before = path.read_bytes()
    opened = copy_of(path, path.with_name("opened"))
    try:
        with Journal(opened, IDENTITY, keep_finished=5) as journal:
            assert journal.requests() == truth
    except JournalError as error:
        message = str(error)
    else:
        more = [Admission(f"more {i}", "text" * 1000, [1] * 9000, {}, 0, 0, 9) for i in range(9)]  # into free pages
        with Journal(opened, IDENTITY, keep_finished=5) as journal:
            journal.write(admitted=more)
        with Journal(opened, IDENTITY, keep_finished=5) as journal:
            assert [request.admission for request in journal.requests()[len(truth) :]] == more
            assert journal.requests()[: len(truth)] == truth
        return None
    assert message.startswith(f"journal {opened}: ")
    saved = path.with_name("saved")
    saved.unlink(missing_ok=True)
    try:
        whole = Journal.salvage(path, saved, identity=IDENTITY)
    finally:
        assert path.read_bytes() == before
    if "are whole" in message:
        assert f"; {whole} of " in message or f"; {whole} requests" in message
    with Journal(saved, IDENTITY, keep_finished=5) as journal:
        requests = journal.requests()
        assert len(requests) == whole
        for request in requests:
            true = by_id[request.admission.request_id]
            assert request.admission == true.admission
            for sample, tokens in enumerate(request.tokens):
                assert tokens == true.tokens[sample][: len(tokens)]
                assert request.logprobs[sample] == true.logprobs[sample][: len(tokens)]
                if sample in request.ended:
                    assert request.ended[sample] == true.ended[sample]
                    assert tokens == true.tokens[sample]
                elif sample in true.ended:  # it is generated again, at least the token with which it ends
                    assert len(tokens) < len(true.tokens[sample])
            journal.write(
                tokens=[
                    (request.admission.request_id, sample, len(tokens), 1, None)
                    for sample, tokens in enumerate(request.tokens)
                    if sample not in request.ended
                ]
            )
    return whole


def test_a_cut_file(tmp_path: Path) -> None:
    """Once the header and the first pages of the tables are there, something can be saved."""
    rng = random.Random(2)
    (truth,) = build(tmp_path / "j", writes=150, crash=False)[-1:]
    size = (tmp_path / "j").stat().st_size
    for end in [1, 99, 100, 4095, *(rng.randrange(1, size) for _ in range(60)), *range(4096, size, 4096)]:
        path = copy_of(tmp_path / "j", tmp_path / "cut")
        os.truncate(path, end)
        try:
            assert check_damaged(path, truth) is not None
        except JournalError:
            assert end < 6 * 4096, "beyond the first pages of the tables"


@pytest.mark.parametrize("width", [1, 64, 4096])
def test_flipped_bits(width: int, tmp_path: Path) -> None:
    """One bit, and whole stretches of the file."""
    rng = random.Random(width)
    (truth,) = build(tmp_path / "j", writes=151, crash=False)[-1:]
    whole = (tmp_path / "j").read_bytes()
    saved = []
    for _ in range(60):
        path = copy_of(tmp_path / "j", tmp_path / "flipped")
        data = bytearray(whole)
        start = rng.randrange(len(whole) if rng.random() < 0.7 else 6 * 4096)  # header and schema as well
        if width == 1:
            data[start] ^= 1 << rng.randrange(8)
        else:
            start -= start % width
            data[start : start + width] = rng.randbytes(len(data[start : start + width]))
        path.write_bytes(data)
        try:
            if (n := check_damaged(path, truth)) is not None:
                saved.append(n)
        except JournalError:
            assert start < 6 * 4096, "beyond the first pages of the tables"
            saved.append(0)
    assert len(saved) > 20
    assert sum(saved) > 0.7 * len(truth) * len(saved), "most are whole"


def test_what_is_whole_is_saved_whole(tmp_path: Path) -> None:
    """And goes in the same order as it would have gone."""
    (truth,) = build(tmp_path / "j", writes=100, crash=True)[-1:]
    assert Journal.salvage(tmp_path / "j", tmp_path / "saved") == len(truth)
    with pytest.raises(InvalidInputError, match="into: expected a path where nothing is"):
        Journal.salvage(tmp_path / "j", tmp_path / "saved")
    left = []
    for name in ("j", "saved"):
        with Journal(tmp_path / name, IDENTITY, keep_finished=5) as journal:
            check(journal, truth)
        with Journal(tmp_path / name, IDENTITY, keep_finished=2) as journal:
            journal.write(admitted=[Admission("new", None, [1], {}, 0, 0, 9)])
            left.append([request.admission.request_id for request in journal.requests() if request.finished])
    assert left[0] == left[1]
    assert len(left[0]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j", "origin", "saved"]
