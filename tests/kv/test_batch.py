"""Calls on all sequences of a step: what they take, that they equal single calls, and rows that are kept."""

from __future__ import annotations

import random
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from leafkv import InvalidInputError, OutOfBlocksError, UnknownSequenceError
from leafkv._core import KVManager
from tests.kv.lives import begin, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

POISON = -7


def grown(ids: tuple[int, ...] = (1, 2), tokens: int = 5) -> KVManager:
    """A manager of 16 blocks of 2 tokens, with sequences that have slots for all their tokens."""
    manager = KVManager(16, 2)
    for seq_id in ids:
        begin(manager, seq_id, [seq_id % 1000, *range(1, tokens)])
        manager.grow(seq_id, tokens)
    return manager


def tables_of(manager: KVManager, ids: Any) -> list[list[int]]:
    return [manager.block_table(int(seq_id)).tolist() for seq_id in ids]


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2**64 - 1],
        (1, 2**64 - 1),
        np.array([1, 2**64 - 1], np.uint64),
        np.array([1, 0, 2**64 - 1], np.uint64)[::2],
        np.array([2**64 - 1, 1], np.uint64)[::-1],
        array("Q", [1, 2**64 - 1]),
        memoryview(array("Q", [1, 2**64 - 1])),
        [np.int8(1), np.uint64(2**64 - 1)],
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_ids_and_counts_come_in_many_forms(ids: Any) -> None:
    manager = grown((1, 2**64 - 1))
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        for counts in (np.array([2, 1], dtype), np.array([2, 9, 1], dtype)[::2]):
            slots = np.empty(3, np.int64)
            manager.slots(ids, counts, slots)
            first, second = tables_of(manager, [1, 2**64 - 1])
            assert slots.tolist() == [2 * first[0], 2 * first[0] + 1, 2 * second[0]]
    out = np.empty((2, 3), np.int32)
    manager.tables(ids, out)
    assert out.tolist() == [first, second]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (np.array([1, -1]), "item 1 is -1, expected an int"),
        (np.array([1, -1], np.int8), "item 1 is -1, expected an int"),
        ([1, -1], "item 1 is -1"),
        ([1, 2**64], "item 1 is 18446744073709551616"),
        ([1, 2.0], r"item 1 is 2\.0"),
        ([1, True], "item 1 is True"),
        ([1, None], "item 1 is None"),
        (np.array([1.0, 2.0]), r"got float64 of shape \[2\]"),
        (np.array([True, False]), "got bool"),
        (np.array([1, 2], ">i8"), "got >i8"),
        (np.array([1, 2], object), "got object"),
        (np.array([[1, 2]]), r"got int64 of shape \[1, 2\]"),
        (np.array(1), r"got int64 of shape \[\]"),
        (np.zeros((1,) * 9, int), "got 9 dimensions"),
        ("12", "got '12'"),
        (b"12", "got b'12'"),
        (12, "got 12"),
        (None, "got None"),
        ({1, 2}, r"got \{1, 2\}"),
    ],
)
def test_bad_ids_and_counts_are_refused_by_name_and_position(bad: Any, problem: str) -> None:
    manager = grown()
    out, lacking, slots = np.full((2, 3), POISON, np.int32), np.full(2, POISON, np.int32), np.full(2, -7)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("seq_ids", lambda: manager.grow_many(bad, [1, 1], lacking)),
        ("seq_ids", lambda: manager.commit_many(bad, [1, 1])),
        ("seq_ids", lambda: manager.tables(bad, out)),
        ("seq_ids", lambda: manager.slots(bad, [1, 1], slots)),
        ("counts", lambda: manager.grow_many([1, 2], bad, lacking)),
        ("counts", lambda: manager.commit_many([1, 2], bad)),
        ("counts", lambda: manager.slots([1, 2], bad, slots)),
        ("new_counts", lambda: manager.commit_many([1, 2], [1, 1], [1, 2], bad)),
    ]
    for name, call in calls:
        if name == "new_counts" and bad is None:
            continue
        with pytest.raises(InvalidInputError, match=f"^{name}: {problem}"):
            call()
    assert (out == POISON).all()
    assert (lacking == POISON).all()
    assert (slots == POISON).all()
    assert tables_of(manager, [1, 2]) == tables_of(grown(), [1, 2])


def test_a_wrong_batch_changes_and_writes_nothing() -> None:
    manager = KVManager(16, 2)
    for seq_id in (1, 2):
        begin(manager, seq_id, [seq_id, 0, 0, 0, 0])
        manager.grow(seq_id, 3)
    manager.commit(1, 3)
    manager.fork(1, 3)
    manager.grow(3, 1)  # Owes a copy.
    read_only = np.full(2, POISON, np.int32)
    read_only.flags.writeable = False
    good: Any = np.full(2, POISON, np.int32)
    wide: Any = np.full(3, POISON, np.int32)
    slots: Any = np.full(2, POISON, np.int64)
    rows: Any = np.full((2, 4), POISON, np.int32)
    stamps: Any = np.zeros(2, np.uint64)
    invalid, unknown = InvalidInputError, UnknownSequenceError
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (unknown, "unknown sequence 9", lambda: manager.grow_many([1, 9], [1, 1], good)),
        (invalid, "seq_ids: .*twice", lambda: manager.grow_many([1, 1], [1, 1], good)),
        (invalid, "counts: got 1,", lambda: manager.grow_many([1, 2], [1], good)),
        (invalid, "lacking: got 2,", lambda: manager.grow_many([1], [1], good)),
        (invalid, "lacking: got 3,", lambda: manager.grow_many([1, 2], [1, 1], wide)),
        (invalid, "lacking: got int64 of shape", lambda: manager.grow_many([1, 2], [1, 1], slots)),
        (invalid, "lacking: .*read-only", lambda: manager.grow_many([1, 2], [1, 1], read_only)),
        (unknown, "unknown sequence 9", lambda: manager.commit_many([2, 9], [1, 1])),
        (invalid, "seq_ids: .*twice", lambda: manager.commit_many([2, 2], [1, 1])),
        (invalid, "counts: got 3,", lambda: manager.commit_many([2, 1], [1, 1, 1])),
        (invalid, "counts: item 1, sequence 1: ", lambda: manager.commit_many([2, 1], [3, 1])),
        (invalid, "counts: item 0, sequence 2: ", lambda: manager.commit_many([2, 1], [2**63, 0])),
        (invalid, "seq_ids: item 1, sequence 3: .*owed", lambda: manager.commit_many([2, 3], [1, 0])),
        (invalid, "new_tokens: got 3,", lambda: manager.commit_many([2, 1], [1, 0], [7, 7, 7])),
        (invalid, "new_counts: .*sum to 2", lambda: manager.commit_many([2, 1], [1, 0], [7], [1, 1])),
        (invalid, "new_counts: .*sum to ", lambda: manager.commit_many([2, 1], [1, 0], [7], [2**64 - 1, 2])),
        (invalid, "new_counts: got 1,", lambda: manager.commit_many([2, 1], [1, 0], [7], [1])),
        (unknown, "unknown sequence 9", lambda: manager.tables([2, 9], rows, stamps)),
        (invalid, "out: got 1 columns", lambda: manager.tables([2, 1], rows[:, :1], stamps)),
        (invalid, "out: got 2 rows", lambda: manager.tables([2], rows, stamps[:1])),
        (invalid, "stamps: got 1,", lambda: manager.tables([2, 1], rows, stamps[:1])),
        (invalid, "stamps: got int32", lambda: manager.tables([2, 1], rows, good)),
        (invalid, "stamps: got .*list", lambda: manager.tables([2, 1], rows, [0, 0])),  # type: ignore[arg-type]
        (unknown, "unknown sequence 9", lambda: manager.slots([2, 9], [1, 1], slots)),
        (invalid, "counts: got 4 for sequence 2", lambda: manager.slots([2], [4], slots)),
        (invalid, r"out: got shape \[2\], expected \[3\]", lambda: manager.slots([2], [3], slots)),
    ]
    before = (repr(manager.stats()), tables_of(manager, [1, 2, 3]))
    for error, problem, call in calls:
        with pytest.raises(error, match=f"^{problem}"):
            call()
        assert (repr(manager.stats()), tables_of(manager, [1, 2, 3])) == before
        assert [manager.num_committed(seq_id) for seq_id in (1, 2, 3)] == [3, 0, 3]
        for out in (good, wide, slots, rows, read_only):
            assert (out == POISON).all()
        assert not stamps.any()
    manager.copies()
    manager.commit_many([2, 1, 3], [2, 0, 1], [7], [0, 0, 1])
    assert [manager.num_committed(seq_id) for seq_id in (1, 2, 3)] == [3, 2, 4]
    assert manager.grow_many([], [], np.empty(0, np.int32)) == 0
    manager.commit_many([], [])
    manager.check_invariants()


def test_who_lacks_blocks_is_told_how_many_and_keeps_nobody_from_growing() -> None:
    manager = KVManager(6, 2)
    for seq_id in (1, 2, 3):
        begin(manager, seq_id, [seq_id])
    lacking = np.full(3, POISON, np.int32)
    assert manager.grow_many([1, 2, 3], np.array([4, 14, 8]), lacking) == 1
    assert lacking.tolist() == [0, 7 - 4, 0]
    assert [len(manager.block_table(seq_id)) for seq_id in (1, 2, 3)] == [2, 0, 4]
    assert manager.grow_many([3, 2], [0, 2**63], lacking[1:]) == 1
    assert lacking.tolist() == [0, 0, 2**31 - 1]


def lacking_of(manager: KVManager, seq_id: int, n: int) -> int:
    """The blocks that a single `grow` lacks."""
    try:
        manager.grow(seq_id, n)
    except OutOfBlocksError as error:
        needed, allocatable = (int(word) for word in str(error).split() if word.isdigit())
        return needed - allocatable
    return 0


@pytest.mark.parametrize("seed", range(5))
def test_batch_calls_equal_single_calls(seed: int) -> None:
    rng = random.Random(seed)
    batch, single = (KVManager(24, 3, partial_hits=True) for _ in range(2))
    live: list[int] = []
    for step in range(150):
        if len(live) < 6:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
            answers = [repr(manager.begin(step, prompt)) for manager in (batch, single)]
            assert answers[0] == answers[1]
            live += [step] * answers[0].startswith("Ready")
        ids = rng.sample(live, rng.randint(0, len(live)))
        counts = [rng.randint(0, 5) for _ in ids]
        lacking = np.full(len(ids), POISON, np.int32)
        failed = batch.grow_many(np.array(ids, np.int64), counts, lacking)
        for seq_id, n, lacks in zip(ids, counts, lacking.tolist(), strict=True):
            assert lacks == lacking_of(single, seq_id, n)
        assert failed == np.count_nonzero(lacking)
        assert batch.copies().tolist() == single.copies().tolist()
        reserved = dict.fromkeys(ids, 0) | {
            seq_id: n for seq_id, n, lacks in zip(ids, counts, lacking.tolist(), strict=True) if lacks == 0
        }
        new = [[rng.randrange(2)] * rng.randint(0, 2) for _ in ids]
        news, given = [len(tokens) for tokens in new], [*chain(*new)]
        errors = []
        try:
            batch.commit_many(ids, list(reserved.values()), given, news)
        except InvalidInputError as error:
            errors.append(error)
        if not errors:
            for seq_id, n, tokens in zip(ids, reserved.values(), new, strict=True):
                single.commit(seq_id, single.num_committed(seq_id) + n, tokens)
        for seq_id in ids:
            # Reserved slots that could not be committed are given back.
            for manager in (batch, single):
                manager.truncate(seq_id, manager.num_committed(seq_id))
            if rng.random() < 0.1 or batch.num_committed(seq_id) > 40:
                live.remove(seq_id)
                batch.release(seq_id)
                single.release(seq_id)
        assert tables_of(batch, live) == tables_of(single, live)
        assert repr(batch.stats()) == repr(single.stats())
        batch.check_invariants()


class Rows:
    """A caller's rows of block tables, kept from step to step, with an oracle of what may be written."""

    def __init__(self, manager: KVManager, ids: list[int], columns: int) -> None:
        self.manager = manager
        self.ids = ids
        self.out: NDArray[np.int32] = np.full((len(ids), columns), POISON, np.int32)
        self.stamps: NDArray[np.uint64] = np.zeros(len(ids), np.uint64)
        self.written: list[list[int] | None] = [None] * len(ids)
        """What is known to be in each row; None: anything."""

    def update(self) -> int:
        """Update all rows. Entries that did not change must not be touched; how many those were."""
        tables = tables_of(self.manager, self.ids)
        same = []
        for row, (table, written) in enumerate(zip(tables, self.written, strict=True)):
            first = 0
            if written is not None:
                while first < min(len(table), len(written)) and table[first] == written[first]:
                    first += 1
            self.out[row, :first] = POISON
            self.out[row, len(table) :] = POISON
            same.append(first)
        self.manager.tables(np.array(self.ids, np.int64), self.out, self.stamps)
        for row, (table, first) in enumerate(zip(tables, same, strict=True)):
            assert (self.out[row, :first] == POISON).all(), "unchanged entries were written"
            self.out[row, :first] = table[:first]
            assert self.out[row, : len(table)].tolist() == table
            assert (self.out[row, len(table) :] == POISON).all(), "entries past the table were written"
        assert self.stamps.all()
        self.written = [*tables]
        return sum(same)


def test_rows_with_stamps_get_only_what_changed() -> None:
    manager = KVManager(64, 2)
    rows = Rows(manager, [1, 2, 3], 8)
    for seq_id in rows.ids:
        begin(manager, seq_id, [seq_id, 1, 2, 3, 4, 5])
        manager.grow(seq_id, 5)
    assert rows.update() == 0
    first = rows.stamps.tolist()
    assert len(set(first)) == 3
    assert rows.update() == 9
    for seq_id in rows.ids:
        manager.grow(seq_id, 3)
    assert rows.update() == 9
    # Dropped entries and those that come back are other ones, maybe.
    manager.truncate(1, 3)
    manager.truncate(2, 0)
    assert rows.update() == 2 + 4
    manager.grow(1, 4)
    manager.grow(2, 5)
    assert rows.update() == 2 + 4
    # A commit may re-point entries to the blocks of the one that was first, a fork's first write replaces its last.
    for seq_id in (1, 2):
        manager.release(seq_id)
        begin(manager, seq_id, [1])
        manager.grow(seq_id, 4)
        rows.written[seq_id - 1] = None
    rows.update()
    manager.commit(1, 4, [1, 1, 1])
    manager.commit(2, 4, [1, 1, 1])
    assert rows.update() == 2 + 0 + 4
    manager.release(3)
    manager.truncate(1, 3)
    manager.fork(1, 3)
    rows.written[2] = None
    rows.update()
    manager.grow(3, 1)
    manager.copies()
    assert rows.update() == 2 + 2 + 1
    manager.check_invariants()


def test_stamps_that_are_not_of_this_row_and_sequence_are_not_believed() -> None:
    manager = grown((1, 2))
    rows = Rows(manager, [1, 2], 3)
    rows.update()

    def expect_whole(*which: int) -> None:
        for row in which:
            rows.written[row] = None
        assert rows.update() == 3 * (2 - len(which))

    old = rows.stamps.copy()
    rows.stamps[0] = 0
    expect_whole(0)
    rows.stamps[:] = old  # Stale: what row 0 was before.
    expect_whole(0)
    rows.stamps[:] = rows.stamps[::-1].copy()  # Swapped stamps.
    expect_whole(0, 1)
    rows.stamps[1] = rows.stamps[0]  # That of another sequence.
    expect_whole(1)
    rows.stamps[:] = [2**64 - 1, rows.stamps.max() + 1]  # Never given.
    expect_whole(0, 1)
    # Rows that move together with their stamps are known.
    rows.ids.reverse()
    rows.out[:], rows.stamps[:] = rows.out[::-1].copy(), rows.stamps[::-1].copy()
    rows.written.reverse()
    expect_whole()
    # The sequence's name is used again; so are its blocks.
    manager.release(1)
    begin(manager, 1, [1, 1, 2, 3, 4])
    manager.grow(1, 5)
    expect_whole(1)
    # The same sequence twice: two rows, one of which has the last stamp.
    twice = np.full((2, 3), POISON, np.int32)
    stamps = np.zeros(2, np.uint64)
    for _ in range(2):
        twice[:] = POISON
        manager.tables([1, 1], twice, stamps)
        assert twice[0].tolist() == tables_of(manager, [1])[0]
        twice[1, twice[1] == POISON] = twice[0, twice[1] == POISON]
        assert twice[1].tolist() == twice[0].tolist()
    # Without stamps every row is written whole.
    twice[:] = POISON
    manager.tables([1, 2], twice)
    assert twice.tolist() == tables_of(manager, [1, 2])


def test_rows_that_outlive_their_manager_are_written_whole() -> None:
    rows = Rows(grown((1, 2, 3)), [1, 2, 3], 3)
    rows.update()
    # The same sequences in another manager, with other blocks, first seen in other rows and then in these.
    rows.manager = grown((3, 2, 1))
    for order in ([2, 3, 1], [3, 1, 2], [1, 2, 3]):
        elsewhere = np.zeros(3, np.uint64)
        rows.manager.tables(order, np.zeros((3, 3), np.int32), elsewhere)
        assert not np.isin(elsewhere, rows.stamps).any()
    rows.written = [None] * 3
    rows.update()


def columns_of(manager: KVManager, ids: list[int], **columns: Any) -> NDArray[np.int64]:
    """The columns of running sequences, a column of the caller's own behind them."""
    known = [len(manager.tokens(seq_id)) for seq_id in ids]
    values: dict[str, Any] = {
        "number": ids,
        "prompt": known,
        "known": known,
        "computed": [manager.num_committed(seq_id) for seq_id in ids],
        "limit": 99,
        "last": 0,
        "born": 1,
        "ends": 1,
        "watched": 0,
        "own": POISON,
    } | columns
    return np.array([np.broadcast_to(value, len(ids)) for value in values.values()], np.int64)


def test_steps_of_running_sequences() -> None:
    manager = KVManager(16, 2)
    for seq_id in (1, 2, 3):
        begin(manager, seq_id, [seq_id, 5, 6])
    columns = columns_of(manager, [1, 2, 3], ends=[0, 1, 1])
    # The columns may lie in a larger array, as those of a scheduler do whose sequences come and go.
    larger = np.full((10, 7), POISON, np.int64)
    larger[:, :3] = columns
    view = larger[:, :3]
    counts, lacking, everybody, prompts = manager.grow_running(view, 5)
    assert (counts.dtype.name, counts.tolist(), lacking, everybody, prompts) == ("int64", [3, 2, 0], None, False, True)
    tokens = np.array([9], np.int64)
    looks = manager.commit_running(view, [0, 1], [3, 2], tokens, [1, 0], [9])
    assert (looks.dtype.name, looks.tolist()) == ("bool", [True, False]), "the first token after the prompt"
    counts, lacking, everybody, prompts = manager.grow_running(view, 5, np.array([1, 1, 3], np.int64))
    assert (counts.tolist(), lacking, everybody, prompts) == ([1, 1, 3], None, True, True)
    looks = manager.commit_running(view, None, counts, [9, 9, 9], [1, 1, 1], (9,))
    assert looks.tolist() == [False, True, True], "one does not mind the end of sequence"
    assert [manager.tokens(seq_id).tolist() for seq_id in (1, 2, 3)] == [[1, 5, 6, 9, 9], [2, 5, 6, 9], [3, 5, 6, 9]]
    assert manager.tokens(1, 3).dtype.name == "uint32"
    assert [manager.tokens(1, start).tolist() for start in (3, 5, 2**63)] == [[9, 9], [], []]
    expected = columns_of(manager, [1, 2, 3], ends=[0, 1, 1], last=9, prompt=3)
    assert view.tolist() == expected.tolist()
    assert (larger[:, 3:] == POISON).all()
    counts, lacking, everybody, _ = manager.grow_running(view, 2**40, [30, 1, 0])
    assert lacking is not None
    assert (lacking.dtype.name, counts.tolist(), everybody) == ("int32", [30, 1, 0], False)
    assert [bool(n) for n in lacking] == [True, False, False]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (np.zeros((8, 1), np.int64), r"columns: got 8 columns, expected at least 9"),
        (np.zeros((9, 1), np.int32), r"columns: got .*int32.*, expected int64 of shape \[columns, sequences\]"),
        (np.zeros(9, np.int64), r"columns: got .*, expected int64 of shape \[columns, sequences\]"),
        ([[0]] * 9, "columns: got .*, expected a numpy array"),
        (np.broadcast_to(np.int64(0), (9, 1)), "columns: "),
    ],
)
def test_columns_that_are_none_are_refused(columns: Any, problem: str) -> None:
    manager = grown((1,))
    with pytest.raises(InvalidInputError, match=problem):
        manager.grow_running(columns, 5)
    with pytest.raises(InvalidInputError, match=problem):
        manager.commit_running(columns, None, [1], [], [0], [])


def test_arguments_of_steps_are_refused_by_name() -> None:
    manager = grown((1, 2))
    columns = columns_of(manager, [1, 2])
    before = columns.copy()
    arguments: Any
    for arguments, problem in [
        ((-1,), "budget: got -1"),
        ((5, [1]), "wishes: got 1, expected one for each of 2 rows"),
        ((5, [1, -1]), "wishes: item 1 is -1"),
    ]:
        with pytest.raises(InvalidInputError, match=problem):
            manager.grow_running(columns, *arguments)
    for arguments, problem in [
        (([2], [1], [], [0], []), "rows: got row 2, expected less than 2"),
        (([-1], [1], [], [0], []), "rows: item 0 is -1"),
        ((None, [1], [], [0, 0], []), "counts: got 1, expected one for each of the 2"),
        ((None, [1, 1], [3], [0, 0], []), "new_counts: they sum to 0, expected the 1 new tokens"),
        ((None, [1, 1], [3], [1, 0], ["?"]), "ends: item 0 is '\\?'"),
        (([1, 1], [1, 1], [], [0, 0], []), "seq_ids: item 1 is 2, which is there twice"),
    ]:
        with pytest.raises(InvalidInputError, match=problem):
            manager.commit_running(columns, *arguments)
    columns[0, 1] = 7
    with pytest.raises(UnknownSequenceError):
        manager.grow_running(columns, 10)
    with pytest.raises(UnknownSequenceError):
        manager.commit_running(columns, None, [0, 0], [], [0, 0], [])
    with pytest.raises(UnknownSequenceError):
        manager.tokens(7)
    assert (columns[1:] == before[1:]).all()
    assert [manager.num_committed(seq_id) for seq_id in (1, 2)] == [0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_rows_follow_the_tables_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    manager = KVManager(40, 2, partial_hits=True)
    rows = Rows(manager, [], 40)
    kept, next_id = 0, 0
    for _ in range(250):
        choice = rng.random()
        if (choice < 0.2 and len(rows.ids) < 6) or not rows.ids:
            child = rng.random() < 0.3 and rows.ids
            if child:
                manager.fork(rng.choice(rows.ids), next_id)
            elif not hasattr(
                manager.begin(next_id, [rng.randrange(2) for _ in range(rng.randint(1, 9))]), "cached_tokens"
            ):
                continue
            rows.ids.append(next_id)
            rows.written.append(None)
            rows.out = np.vstack([rows.out, np.full((1, 40), POISON, np.int32)])
            rows.stamps = np.append(rows.stamps, np.uint64(0))
            next_id += 1
        row = rng.randrange(len(rows.ids))
        seq_id = rows.ids[row]
        try:
            if choice < 0.5:
                manager.grow(seq_id, rng.randint(0, 4))
            elif choice < 0.7:
                n = min(len(manager.block_table(seq_id)) * 2, manager.num_committed(seq_id) + rng.randint(0, 4))
                manager.copies()
                manager.commit(seq_id, n, [rng.randrange(2)] * 4)
            elif choice < 0.8:
                manager.truncate(seq_id, rng.randint(0, manager.num_committed(seq_id)))
        except (OutOfBlocksError, InvalidInputError):
            pass
        if choice >= 0.95:
            manager.release(rows.ids.pop(row))
            rows.written.pop(row)
            rows.out = np.delete(rows.out, row, axis=0)
            rows.stamps = np.delete(rows.stamps, row)
        kept += rows.update()
    assert kept > 500
    manager.copies()
    manager.check_invariants()


def test_a_hit_moves_into_rows_of_a_reused_id() -> None:
    manager = KVManager(16, 2)
    run(manager, 1, [1, 2, 3, 4, 5])
    begin(manager, 1, [1, 2, 3, 4, 6])
    manager.grow(1, 1)
    out, stamps = np.full((1, 3), POISON, np.int32), np.zeros(1, np.uint64)
    manager.tables([1], out, stamps)
    manager.release(1)
    begin(manager, 1, [1, 2, 3, 4, 7])
    manager.grow(1, 1)
    out[:] = POISON
    manager.tables([1], out, stamps)
    assert out.tolist() == tables_of(manager, [1])
