"""`KVManager` from Python: the contract end to end, and what it refuses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from leafkv import InvalidInputError, OutOfBlocksError, UnknownSequenceError
from leafkv._core import KVManager, Ready, WaitFor
from tests.kv.lives import assert_drained, begin, run

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_life_of_two_requests_with_a_common_prompt() -> None:
    manager = KVManager(num_blocks=16, block_size=4)
    kv = np.full(16 * 4, -1)  # One number stands for the KV of a token.
    prompt = np.arange(10, 20)

    assert begin(manager, 1, prompt) == 0
    waiting = manager.begin(2, prompt)
    assert isinstance(waiting, WaitFor)
    assert (waiting.leader, waiting.tokens) == (1, 8)

    manager.grow(1, 10)
    slots = np.empty(10, np.int64)
    manager.slots([1], [10], slots)
    kv[slots] = prompt
    manager.commit(1, 10, [20])
    assert begin(manager, 2, prompt) == 8

    tables = np.full((2, 4), -1, np.int32)
    manager.grow(1, 1)
    manager.grow(2, 2)
    manager.tables([1, 2], tables)
    np.testing.assert_array_equal(tables[0, :2], tables[1, :2])
    assert tables[0, 2] != tables[1, 2]
    np.testing.assert_array_equal(tables[:, 3], [-1, -1])
    slots = np.empty(3, np.int64)
    manager.slots([1, 2], [1, 2], slots)
    kv[slots] = [20, 18, 19]
    manager.commit(1, 11)
    manager.commit(2, 10)

    # A branch of the first one: its last block is copied before it is written.
    manager.fork(1, 3)
    manager.grow(3, 1)
    copies = manager.copies()
    assert copies.dtype == np.int32
    assert copies.shape == (1, 2)
    blocks = kv.reshape(16, 4)
    blocks[copies[:, 1]] = blocks[copies[:, 0]]
    assert manager.copies().shape == (0, 2)
    slot = np.empty(1, np.int64)
    manager.slots([3], [1], slot)
    kv[slot] = 99
    manager.commit(3, 12, [99])
    manager.check_invariants()

    def read(seq_id: int) -> list[int]:
        written = kv.reshape(16, 4)[manager.block_table(seq_id)].ravel()
        return [int(token) for token in written[: manager.num_committed(seq_id)]]

    assert read(1) == list(range(10, 21))
    assert read(2) == list(range(10, 20))
    assert read(3) == [*range(10, 21), 99]

    for seq_id in (1, 2, 3):
        manager.release(seq_id)
    assert_drained(manager)
    assert manager.lookup([*range(10, 21), 99, 0]) == 12
    stats = manager.stats()
    assert (stats.query_tokens, stats.hit_tokens, stats.cached_blocks) == (20, 8, 3)
    assert stats.max_held_blocks == 5
    assert manager.evict(2) == 2
    assert manager.stats().evicted_blocks == 2
    assert manager.clear() == 1
    assert manager.stats().free_blocks == 16


def test_answers_show_what_they_are() -> None:
    manager = KVManager(8, 2)
    assert repr(manager.begin(2**64 - 1, [1, 2, 3])) == "Ready(cached_tokens=0)"
    assert repr(manager.begin(0, [1, 2, 3])) == f"WaitFor(leader={2**64 - 1}, tokens=2)"
    assert re.fullmatch(r"Stats\(num_blocks=8, free_blocks=8, .*sequences=1.*\)", repr(manager.stats()))
    assert repr(manager) == "KVManager(num_blocks=8, block_size=2: 8 free, 0 cached, 0 held by 1 sequences)"
    assert KVManager(1).block_size == 16
    assert (manager.num_blocks, manager.block_size) == (8, 2)


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    manager = KVManager(16, 2, enable_prefix_caching=False)
    assert run(manager, 0, [1, 2, 3, 4]) == 0
    assert begin(manager, 0, [1, 2, 3, 4]) == 0
    assert begin(manager, 1, [1, 2, 3, 4]) == 0
    manager.release(0)
    manager.release(1)
    assert manager.stats().free_blocks == 16


def test_namespaces_and_clear() -> None:
    manager = KVManager(16, 2)
    assert run(manager, 0, [1, 2, 3], b"a") == 0
    assert run(manager, 0, [1, 2, 3], b"b\0") == 0
    assert [manager.lookup([1, 2, 3], namespace) for namespace in (b"a", b"", b"b", b"b\0")] == [2, 0, 0, 2]
    assert manager.clear(b"a") == 1
    assert [manager.lookup([1, 2, 3], namespace) for namespace in (b"a", b"b\0")] == [0, 2]


@pytest.mark.parametrize("bad", [-1, 2**64, 1.0, True, "1", None])
def test_bad_ids_and_counts_are_refused_by_name(bad: Any) -> None:
    manager = KVManager(16, 2)
    begin(manager, 1, [1, 2, 3])
    out = np.zeros((1, 2), np.int32)
    calls: dict[str, Callable[[], object]] = {
        "seq_id": lambda: manager.begin(bad, [1]),
        "n": lambda: manager.grow(1, bad),
        "child_id": lambda: manager.fork(1, bad),
        "parent_id": lambda: manager.fork(bad, 2),
        "seq_ids": lambda: manager.tables([bad], out),
        "counts": lambda: manager.slots([1], [bad], np.zeros(1, np.int64)),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidInputError, match=f"^{name}: (got|item 0 is) "):
            call()
    for name, arguments in {"num_blocks": (bad, 1), "block_size": (1, bad)}.items():
        if not (name == "block_size" and bad is None):
            with pytest.raises(InvalidInputError, match=f"^{name}: "):
                KVManager(*arguments)
    manager.check_invariants()


def test_errors_say_what_is_wrong_and_change_nothing() -> None:
    manager = KVManager(4, 2)
    begin(manager, 1, [1, 2, 3])
    with pytest.raises(InvalidInputError, match="seq_id: sequence 1 is live"):
        manager.begin(1, [1])
    with pytest.raises(InvalidInputError, match=r"namespace: got 'a'"):
        manager.begin(2, [1], "a")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="namespace: got None"):
        manager.lookup([1], None)  # type: ignore[arg-type]
    with pytest.raises(OutOfBlocksError, match="5 needed, 4 allocatable"):
        manager.grow(1, 9)
    with pytest.raises(OutOfBlocksError):
        manager.grow(1, 2**64 - 1)
    with pytest.raises(InvalidInputError, match=r"n: got 1, expected 0 \(committed\) to 0 \(reserved\)"):
        manager.commit(1, 1)
    for call in (manager.release, manager.num_committed, manager.block_table):
        with pytest.raises(UnknownSequenceError, match="unknown sequence 7"):
            call(7)
    for num_blocks, block_size in ((0, 1), (2**31, 1), (1, 0), (1, 2**31)):
        with pytest.raises(InvalidInputError, match="expected 1 to 2147483647"):
            KVManager(num_blocks, block_size)
    manager.release(1)
    assert manager.stats().free_blocks == 4


def test_the_largest_pool_costs_nothing_until_it_is_used() -> None:
    manager = KVManager(2**31 - 1)
    assert run(manager, 0, range(100)) == 0
    assert run(manager, 0, range(100)) == 96
    assert_drained(manager)


def test_out_arrays_are_checked_and_rows_may_be_slices() -> None:
    manager = KVManager(16, 2)
    for seq_id in (1, 2):
        begin(manager, seq_id, [seq_id, 2, 3, 4, 5])
        manager.grow(seq_id, 5)
    wide = np.full((8, 10), -1, np.int32)
    manager.tables([2, 1], wide[2:6:2, 3:6])
    assert wide[2, 3:6].tolist() == manager.block_table(2).tolist()
    assert wide[4, 3:6].tolist() == manager.block_table(1).tolist()
    assert (wide == -1).sum() == 80 - 6

    read_only = np.zeros((1, 3), np.int32)
    read_only.flags.writeable = False
    misaligned = np.zeros(13, np.uint8)[1:].view(np.int32).reshape(1, 3)
    bad_tables: list[tuple[Any, str]] = [
        (np.zeros((1, 2), np.int32), "got 2 columns, expected at least 3"),
        (np.zeros((2, 3), np.int32), "got 2 rows, expected one for each of the 1 sequences"),
        (np.zeros((1, 3), np.int64), "got int64"),
        (np.zeros((1, 3), np.uint32), "got uint32"),
        (np.zeros((1, 3), ">i4"), "got >i4"),
        (np.zeros(3, np.int32), r"shape \[3\]"),
        (np.zeros((3, 1), np.int32).T[:, ::-1], "contiguous"),
        (np.zeros((1, 6), np.int32)[:, ::2], "contiguous"),
        (read_only, "read-only"),
        (misaligned, "misaligned"),
        ([[0, 0, 0]], "expected a numpy array"),
    ]
    for out, problem in bad_tables:
        with pytest.raises(InvalidInputError, match=f"^out: .*{problem}"):
            manager.tables([1], out)
        assert not np.any(out)
    untouched = np.full((2, 3), -1, np.int32)
    with pytest.raises(UnknownSequenceError):
        manager.tables([1, 9], untouched)
    assert (untouched == -1).all()

    slots = np.full(4, -1, np.int64)
    bad_slots: list[tuple[list[int], list[int], Any, str]] = [
        ([1], [6], np.full(6, -1, np.int64), "counts: got 6 for sequence 1, expected at most 5"),
        ([1, 2], [1], slots, "counts: got 1, expected one for each of the 2"),
        ([1], [5], slots, r"out: got shape \[4\], expected \[5\]"),
        ([1], [3], slots, r"out: got shape \[4\], expected \[3\]"),
        ([1], [4], slots.astype(np.int32), "out: got int32"),
    ]
    for ids, counts, array_out, problem in bad_slots:
        with pytest.raises(InvalidInputError, match=f"^{problem}"):
            manager.slots(ids, counts, array_out)
        assert (array_out == -1).all()
    manager.slots((1, 2), [3, 1], slots)
    first, second = manager.block_table(1), manager.block_table(2)
    assert slots.tolist() == [first[0] * 2, first[0] * 2 + 1, first[1] * 2, second[0] * 2]
    empty = np.empty(0, np.int64)
    manager.slots([], [], empty)
    manager.tables([], np.empty((0, 0), np.int32))


def test_sixteen_prompts_arriving_together_compute_their_prefix_once() -> None:
    manager = KVManager(1024, 16)
    prefix = list(range(1024))
    prompts = {seq_id: [*prefix, *range(2000 + 50 * seq_id, 2032 + 50 * seq_id)] for seq_id in range(16)}
    computed = 0
    waiting = list(prompts)
    while waiting:
        running = []
        for seq_id in waiting:
            answer = manager.begin(seq_id, prompts[seq_id])
            if isinstance(answer, Ready):
                running.append((seq_id, len(prompts[seq_id]) - answer.cached_tokens))
        assert running
        for seq_id, missing in running:
            manager.grow(seq_id, missing)
            manager.commit(seq_id, len(prompts[seq_id]))
            computed += missing
            waiting.remove(seq_id)
    assert computed == 1024 + 16 * 32
    manager.check_invariants()
