"""One `KVManager`, many threads, a pool too small for them: each sequence reads what was written for it, and no other
writes where it may."""

from __future__ import annotations

import random
import subprocess
import sys
import sysconfig
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv import InvalidInputError, OutOfBlocksError, UnknownSequenceError
from leafkv._core import KVManager, WaitFor
from leafkv.kv.mirror import CacheMirror

BLOCK_SIZE = 4
NUM_BLOCKS = 20
THREADS = 8
ROUNDS = 50
NAMESPACES = (b"", b"tenant")
SHARED = [[branch, *(i * i % 5 % 2 for i in range(23))] for branch in range(3)]
"""What prompts begin with, for a random length."""

FORMS: tuple[Callable[[list[int]], Any], ...] = (
    list,
    tuple,
    lambda tokens: np.array(tokens, np.int64),
    lambda tokens: np.array(tokens, np.uint32),
    lambda tokens: np.repeat(np.array(tokens, np.int32), 2)[::2],
    lambda tokens: array("q", tokens),
)

PATIENCE = 40
"""How many times as long as planned threads go on until everything has happened that a test is about."""


class Census:
    """What has happened how often to all workers of a test. Each counts for itself."""

    def __init__(self, *wanted: str) -> None:
        self.wanted = wanted
        self.counters: list[Counter[str]] = []

    def counter(self) -> Counter[str]:
        self.counters.append(Counter())
        return self.counters[-1]

    def missing(self) -> list[str]:
        return [event for event in self.wanted if not any(counter[event] for counter in self.counters)]

    def rounds(self, n: int) -> Iterator[int]:
        """`n` rounds of a worker, and further ones while something is missing: how threads take turns is chance."""
        for number in range(PATIENCE * n):
            if number >= n and not self.missing():
                return
            yield number


def contents(namespace: bytes, tokens: list[int]) -> NDArray[np.int64]:
    """What stands for the KV of each token: a number that depends on all that the token's KV does."""
    state, numbers = 1 + NAMESPACES.index(namespace), []
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (1 << 61)
        numbers.append(state)
    return np.array(numbers, np.int64)


class Pool:
    """A manager and the memory that it hands out: a number a slot, and the sequence that may write it (0: none)."""

    def __init__(self) -> None:
        self.manager = KVManager(NUM_BLOCKS, BLOCK_SIZE)
        self.kv = np.zeros(NUM_BLOCKS * BLOCK_SIZE, np.int64)
        self.writer = np.zeros(NUM_BLOCKS * BLOCK_SIZE, np.int64)
        # `copies` gives all that are owed to anyone: who makes the manager owe one takes and makes it before others do.
        self.copying = threading.Lock()


class Sequence:
    """A live sequence, what it should be like, and the slots that it alone may write."""

    def __init__(self, pool: Pool, seq_id: int, namespace: bytes, tokens: list[int], committed: int) -> None:
        self.pool, self.id, self.namespace = pool, seq_id, namespace
        self.tokens, self.committed, self.reserved = tokens, committed, committed
        self.claimed = np.empty(0, np.int64)
        self.check()

    def check(self) -> None:
        table = self.pool.manager.block_table(self.id)
        assert len(set(table.tolist())) == len(table) == -(-self.reserved // BLOCK_SIZE)
        assert self.pool.manager.num_committed(self.id) == self.committed
        read = self.pool.kv.reshape(-1, BLOCK_SIZE)[table].ravel()[: self.committed]
        np.testing.assert_array_equal(read, contents(self.namespace, self.tokens[: self.committed]))

    def claim(self) -> None:
        """Take the slots that wait for their KV: from now on nobody else may."""
        slots = np.empty(self.reserved - self.committed, np.int64)
        self.pool.manager.slots([self.id], [len(slots)], slots)
        assert np.isin(self.pool.writer[slots], (0, self.id)).all(), "two writers of a slot"
        self.pool.writer[slots] = self.id
        self.claimed = slots

    def give_up(self, slots: NDArray[np.int64]) -> None:
        """Nobody else took the slots so far; from now on another may."""
        assert (self.pool.writer[slots] == self.id).all(), "two writers of a slot"
        self.pool.writer[slots] = 0

    def grow(self, n: int) -> int:
        """Reserve, and make the copies that are owed for it. How many."""
        blocks = self.pool.kv.reshape(-1, BLOCK_SIZE)
        with self.pool.copying:
            self.pool.manager.grow(self.id, n)
            self.reserved += n
            self.give_up(self.claimed)  # A copy moves them to another block.
            copies = self.pool.manager.copies()
            assert len(copies) <= 1
            assert np.isin(copies[:, 1], self.pool.manager.block_table(self.id)).all(), "another's copy"
            blocks[copies[:, 1]] = blocks[copies[:, 0]]
        self.claim()
        return len(copies)

    def commit(self, n: int, rng: random.Random) -> None:
        """Write and commit `n` of the reserved tokens; ids beyond the known ones are made up."""
        end = self.committed + n
        new = [rng.randrange(2) for _ in range(end - len(self.tokens))]
        self.tokens += new
        written, self.claimed = self.claimed[:n], self.claimed[n:]
        self.pool.kv[written] = contents(self.namespace, self.tokens[:end])[self.committed :]
        self.give_up(written)
        self.pool.manager.commit(self.id, end, rng.choice(FORMS)(new))
        self.committed = end
        self.claim()

    def fork(self, child_id: int) -> Sequence:
        self.pool.manager.fork(self.id, child_id)
        return Sequence(self.pool, child_id, self.namespace, self.tokens[: self.committed], self.committed)

    def truncate(self, n: int) -> None:
        self.give_up(self.claimed[max(0, n - self.committed) :])
        self.pool.manager.truncate(self.id, n)
        self.reserved = n
        if n < self.committed:
            self.committed = n
            del self.tokens[n:]
        self.claim()

    def release(self) -> None:
        self.give_up(self.claimed)
        self.pool.manager.release(self.id)


class Worker:
    """One thread: prompts with common prefixes, each the root of a small family of forks."""

    def __init__(self, pool: Pool, number: int, seed: int, census: Census) -> None:
        self.pool, self.number, self.census = pool, number, census
        self.rng = random.Random(f"{seed} {number}")
        self.next_id = 0
        self.done = census.counter()

    def run(self) -> None:
        for _ in self.census.rounds(ROUNDS):
            family = self.begin()
            for _ in range(self.rng.randrange(4, 16)):
                if family:
                    self.step(family)
            self.rng.shuffle(family)
            for sequence in family:
                sequence.check()
                sequence.release()

    def new_id(self) -> int:
        self.next_id += 1
        return self.number << 32 | self.next_id

    def begin(self) -> list[Sequence]:
        rng, manager = self.rng, self.pool.manager
        tokens = [*rng.choice(SHARED)[: rng.randrange(24)], *(rng.randrange(2) for _ in range(rng.randrange(1, 8)))]
        form, namespace, seq_id = rng.choice(FORMS), rng.choice(NAMESPACES), self.new_id()
        found = manager.lookup(form(tokens), namespace)
        assert found % BLOCK_SIZE == 0
        assert found < len(tokens)
        for _ in range(50):
            answer = manager.begin(seq_id, form(tokens), namespace)
            if not isinstance(answer, WaitFor):
                break
            assert answer.leader >> 32 != self.number, "this thread leads nobody now"
            assert 0 < answer.tokens < len(tokens)
            self.done["wait"] += 1
            time.sleep(0)
        else:
            return []
        assert answer.cached_tokens % BLOCK_SIZE == 0
        assert answer.cached_tokens < len(tokens)
        self.done["hit"] += answer.cached_tokens > 0
        return [Sequence(self.pool, seq_id, namespace, tokens, answer.cached_tokens)]

    def step(self, family: list[Sequence]) -> None:
        rng, manager = self.rng, self.pool.manager
        sequence = rng.choice(family)
        pending = sequence.reserved - sequence.committed
        action = rng.choices(
            ("grow", "commit", "fork", "truncate", "release", "evict", "clear", "tables"),
            (6, 6, 3, 1, 1, 1, 0.2, 1),
        )[0]
        match action:
            case "grow":
                try:
                    self.done["copy"] += sequence.grow(rng.randrange(1, 10))
                except OutOfBlocksError:
                    action = "refusal"
            case "commit":
                sequence.commit(rng.choice((pending, rng.randint(0, pending))), rng)
            case "fork" if len(family) < 4:
                family.append(sequence.fork(self.new_id()))
            case "truncate":
                sequence.truncate(self.truncation(sequence, family))
            case "release":
                sequence.release()
                family.remove(sequence)
            case "evict":
                assert 0 <= manager.evict(rng.randrange(4)) < 4
            case "clear":
                assert 0 <= manager.clear(rng.choice((None, *NAMESPACES))) <= NUM_BLOCKS
            case _:
                self.read_tables(family)
        self.done[action] += 1
        if sequence in family:
            sequence.check()

    def truncation(self, sequence: Sequence, family: list[Sequence]) -> int:
        """How far to cut. Amid a committed block only where a relative holds it too.

        The next `grow` copies that block. Copies come before all writes of a step, and here are no steps: only a held
        source stays what it is until it is read.
        """
        n = self.rng.randint(0, sequence.reserved)
        index, rest = divmod(n, BLOCK_SIZE)
        if rest == 0 or n >= sequence.committed:
            return n
        tables = {other.id: self.pool.manager.block_table(other.id).tolist() for other in family}
        block = tables.pop(sequence.id)[index]
        return n if any(block in table for table in tables.values()) else n - rest

    def read_tables(self, family: list[Sequence]) -> None:
        manager = self.pool.manager
        ids = [sequence.id for sequence in family]
        tables = np.full((len(ids), NUM_BLOCKS), -1, np.int32)
        manager.tables(ids, tables)
        for row, seq_id in zip(tables, ids, strict=True):
            np.testing.assert_array_equal(row[row >= 0], manager.block_table(seq_id))
        counts = [sequence.reserved - sequence.committed for sequence in family]
        slots = np.empty(sum(counts), np.int64)
        manager.slots(ids, counts, slots)
        np.testing.assert_array_equal(slots, np.concatenate([sequence.claimed for sequence in family]))


STEPS = 120
WIDTH = 3
PIN_BUDGET = 3
IMAGES = [bytes([content]) * 32 for content in range(2)]


class BatchWorker:
    """One thread: steps of a batch, in rows that it keeps, of prompts with images, beside pins that come and go."""

    def __init__(self, manager: KVManager, number: int, census: Census) -> None:
        self.manager, self.number, self.census = manager, number, census
        self.rng = random.Random(number)
        self.next_id = number << 32
        self.ids: list[int] = []
        self.pins: list[int] = []
        self.rows = np.full((WIDTH, 2 * NUM_BLOCKS), -1, np.int32)
        self.stamps = np.zeros(WIDTH, np.uint64)
        self.done = census.counter()

    def prompt(self) -> tuple[list[int], bytes, list[tuple[int, int, bytes]]]:
        rng = self.rng
        tokens = [*rng.choice(SHARED)[: rng.randrange(1, 20)], rng.randrange(2)]
        image = rng.random() < 0.3 and [(0, 1, rng.choice(IMAGES))]
        return tokens, rng.choice(NAMESPACES), image or []

    def run(self) -> None:
        for _ in self.census.rounds(STEPS):
            self.admit()
            self.step()
            self.disturb()
        for seq_id in self.ids:
            self.manager.release(seq_id)
        for pin_id in self.pins:
            self.manager.unpin(pin_id)

    def admit(self) -> None:
        while len(self.ids) < WIDTH:
            answer = self.manager.begin(self.next_id, *self.prompt())
            if isinstance(answer, WaitFor):
                self.done["wait"] += 1
                return
            self.done["hit"] += answer.cached_tokens > 0
            self.done["partial hit"] += answer.cached_tokens % BLOCK_SIZE > 0
            self.ids.append(self.next_id)
            self.next_id += 1

    def step(self) -> None:
        manager, ids = self.manager, np.array(self.ids, np.uint64)
        lacking = np.full(len(ids), -1, np.int32)
        lack = manager.grow_many(ids, np.full(len(ids), self.rng.randrange(1, 6)), lacking)
        assert lack == np.count_nonzero(lacking)
        assert (lacking >= 0).all()
        self.done["lack"] += lack
        self.check_rows(ids)
        manager.copies()  # Whoever takes the last ones, ours are among those taken by now.
        committed = np.array([manager.num_committed(i) for i in self.ids])
        grown = ids[lacking == 0]
        if len(grown):
            manager.commit_many(grown, [1] * len(grown), [self.rng.randrange(2) for _ in grown])
        after = np.array([manager.num_committed(i) for i in self.ids])
        np.testing.assert_array_equal(after - committed, lacking == 0)
        self.check_rows(ids)
        for seq_id in ids[lacking > 0].tolist():
            manager.release(seq_id)
            self.ids.remove(seq_id)

    def check_rows(self, ids: NDArray[np.uint64]) -> None:
        n = len(ids)
        self.manager.tables(ids, self.rows[:n], self.stamps[:n])
        for row, seq_id in zip(self.rows, ids.tolist(), strict=False):
            table = self.manager.block_table(seq_id)
            np.testing.assert_array_equal(row[: len(table)], table)

    def disturb(self) -> None:
        rng, manager = self.rng, self.manager
        match rng.randrange(8):
            case 0 | 1:
                pin = manager.pin(*self.prompt(), ttl=rng.choice((None, 1, 9)))
                self.done["pin"] += pin.pinned_tokens > 0
                self.pins.append(pin.pin_id)
            case 2 if self.pins:
                self.done["unpin"] += manager.unpin(self.pins.pop(rng.randrange(len(self.pins))))
            case 3 if self.ids:
                seq_id = rng.choice(self.ids)
                manager.truncate(seq_id, manager.num_committed(seq_id))
            case 4 if self.ids:
                manager.release(self.ids.pop(rng.randrange(len(self.ids))))
            case 5 if 0 < len(self.ids) < WIDTH:
                manager.fork(rng.choice(self.ids), self.next_id)
                self.ids.append(self.next_id)
                self.next_id += 1
            case 6 if rng.random() < 0.2:
                manager.clear(rng.choice((None, *NAMESPACES)))


def test_batches_pins_and_images_of_many_threads() -> None:
    """Rows stay right, counters never fall, and the events tell of all that is cached in the end."""
    manager = KVManager(2 * NUM_BLOCKS, BLOCK_SIZE, partial_hits=True, pin_budget=PIN_BUDGET, event_capacity=1_000_000)
    mirror = CacheMirror(BLOCK_SIZE)
    census = Census("wait", "lack", "pin", "unpin", "hit", "partial hit")
    workers = [BatchWorker(manager, number, census) for number in range(1, 5)]
    stop = threading.Event()
    failures: list[BaseException] = []

    def follow() -> None:
        before = manager.stats()
        while not stop.is_set():
            mirror.apply(manager.events())
            if len(mirror) % 3 == 0:
                mirror.load(manager.snapshot())
            now = manager.stats()
            for counter in ("query_tokens", "hit_tokens", "partial_hit_tokens", "stored_blocks", "evicted_blocks"):
                assert getattr(before, counter) <= getattr(now, counter), counter
            assert now.pinned_blocks <= PIN_BUDGET
            assert now.free_blocks + now.cached_blocks + now.held_blocks == now.num_blocks
            manager.check_invariants()
            before = now

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)
                stop.set()

        return run

    follower = threading.Thread(target=guarded(follow), daemon=True)
    threads = [threading.Thread(target=guarded(worker.run), daemon=True) for worker in workers]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in (follower, *threads):
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"no end in sight: {manager!r}"
    finally:
        stop.set()
        sys.setswitchinterval(interval)
    follower.join(60)
    assert not follower.is_alive()
    if failures:
        raise failures[0]

    mirror.apply(manager.events())
    fresh = CacheMirror(BLOCK_SIZE)
    fresh.load(manager.snapshot())
    assert mirror.blocks == fresh.blocks
    manager.copies()
    manager.check_invariants()
    stats = manager.stats()
    assert (stats.sequences, stats.held_blocks, stats.pinned_blocks, stats.dropped_events) == (0, 0, 0, 0)
    assert not census.missing()
    assert 0 < stats.partial_hit_tokens < stats.hit_tokens


def watch(manager: KVManager, stop: threading.Event) -> None:
    while not stop.is_set():
        manager.check_invariants()
        stats = manager.stats()
        assert stats.free_blocks + stats.cached_blocks + stats.held_blocks == NUM_BLOCKS
        assert 0 <= manager.allocatable_blocks <= NUM_BLOCKS
        assert repr(manager).startswith("KVManager(")


@pytest.mark.parametrize("seed", range(2))
def test_threads_that_contend_for_every_block(seed: int) -> None:
    pool = Pool()
    census = Census(
        "grow", "commit", "fork", "truncate", "release", "evict", "clear", "tables", "copy", "hit", "refusal"
    )
    workers = [Worker(pool, number, seed, census) for number in range(1, THREADS + 1)]
    start, stop = threading.Barrier(THREADS + 1), threading.Event()
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                start.wait(60)
                work()
            except BaseException as error:
                failures.append(error)
                stop.set()

        return run

    threads = [threading.Thread(target=guarded(worker.run), daemon=True) for worker in workers]
    watcher = threading.Thread(target=guarded(lambda: watch(pool.manager, stop)), daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in (*threads, watcher):
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"no end in sight: {pool.manager!r}"
        stop.set()
        watcher.join(60)
        assert not watcher.is_alive(), "the watcher hangs"
    finally:
        stop.set()
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]

    manager = pool.manager
    manager.check_invariants()
    assert not pool.writer.any()
    assert manager.copies().shape == (0, 2)
    stats = manager.stats()
    assert (stats.sequences, stats.held_blocks) == (0, 0)
    assert stats.free_blocks + stats.cached_blocks == manager.allocatable_blocks == NUM_BLOCKS
    assert not census.missing()
    assert stats.evicted_blocks > 0


def test_containers_that_change_during_a_call() -> None:
    """What a call reads of them is from before or after a change, or is refused; nothing worse."""
    manager = KVManager(64, BLOCK_SIZE)
    good = [1, 2, 3, 4] * 20
    assert not isinstance(manager.begin(1, good), WaitFor)
    manager.grow(1, len(good))
    tokens, numbers, ids = list(good), array("q", good), [1] * 8
    values = np.array(good)
    stop = threading.Event()

    def change() -> None:
        rng = random.Random(0)
        while not stop.is_set():
            n = rng.randrange(len(good))
            tokens[n:] = good[: rng.randrange(len(good))]
            values[n] = rng.choice((-1, 1, 2**40))
            ids[:] = [rng.choice((1, 2)) for _ in range(rng.randrange(8))]
            with suppress(BufferError):  # It is being read.
                numbers.append(5)
                del numbers[n:]

    changing = threading.Thread(target=change, daemon=True)
    changing.start()
    out, slots = np.full((8, 20), -1, np.int32), np.empty(8, np.int64)
    right = 0
    try:
        for _ in range(3000):
            calls: tuple[Callable[[], object], ...] = (
                lambda: manager.lookup(tokens),
                lambda: manager.lookup(numbers),
                lambda: manager.lookup(values),
                lambda: manager.tables(ids, out),
                lambda: manager.slots(ids, [1] * len(ids), slots),
            )
            for call in calls:
                with suppress(InvalidInputError, UnknownSequenceError):
                    call()
                    right += 1
    finally:
        stop.set()
        changing.join(60)
    assert right > 0
    assert np.isin(out, [-1, *manager.block_table(1)]).all()
    manager.check_invariants()


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_the_import_leaves_the_gil_off() -> None:
    code = "import sys, leafkv; sys.exit(sys._is_gil_enabled())"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
