"""Pins: prefixes that stay cached, within a budget, for a time that is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from leafkv import InvalidInputError, OutOfBlocksError
from leafkv._core import KVManager, Pin
from tests.kv.lives import assert_drained, begin, run

if TYPE_CHECKING:
    from collections.abc import Callable


def pinned(manager: KVManager) -> int:
    manager.check_invariants()
    return manager.stats().pinned_blocks


def test_a_pinned_prefix_outlives_pressure_until_it_is_unpinned() -> None:
    manager = KVManager(8, 2, pin_budget=4)
    run(manager, 0, [1, 2, 3, 4, 5])
    pin = manager.pin([1, 2, 3, 4, 5])
    assert repr(pin) == f"Pin(pin_id={pin.pin_id}, pinned_tokens=4, partial=False)"
    assert (manager.stats().pinned_blocks, manager.stats().held_blocks, manager.allocatable_blocks) == (2, 2, 6)
    assert run(manager, 0, range(10, 18)) == 0
    with pytest.raises(InvalidInputError, match="9 tokens need 5 blocks, the pool has 4"):
        manager.begin(0, range(9))
    begin(manager, 0, [7])
    with pytest.raises(OutOfBlocksError, match="7 needed, 6 allocatable"):
        manager.grow(0, 13)
    manager.grow(0, 12)
    manager.release(0)
    assert manager.evict(100) == 0
    assert manager.lookup([1, 2, 3, 4, 5]) == 4
    assert run(manager, 0, [1, 2, 3, 4, 6]) == 4

    again = manager.pin((1, 2, 3))
    assert again.pin_id != pin.pin_id
    assert manager.unpin(pin.pin_id)
    assert not manager.unpin(pin.pin_id)
    assert pinned(manager) == 1
    assert manager.evict(100) == 1
    assert manager.unpin(again.pin_id)
    assert manager.evict(100) == 1
    assert_drained(manager)


def test_the_budget_is_of_different_blocks_and_a_pin_may_be_partial() -> None:
    manager = KVManager(16, 2, pin_budget=3)
    run(manager, 0, range(8))
    run(manager, 0, [0, 1, 2, 3, 9, 9])

    def pin(tokens: Any) -> tuple[int, bool]:
        answer = manager.pin(tokens)
        assert manager.stats().pinned_blocks <= 3
        return answer.pinned_tokens, answer.partial

    assert pin(range(4)) == (4, False)
    assert pin(range(5)) == (4, False), "a part of a block is none that is missing"
    assert pin([0, 1, 2, 3, 9, 9]) == (6, False)
    assert pin(range(8)) == (4, True), "over the budget"
    assert pin([0, 1, 7, 7]) == (2, True), "not cached"
    nothing = manager.pin([5, 5])
    assert (nothing.pinned_tokens, nothing.partial) == (0, True)
    assert not manager.unpin(nothing.pin_id)
    assert not manager.pin([]).partial
    assert pinned(manager) == 3
    assert not KVManager(4, 2, enable_prefix_caching=False, pin_budget=1).pin([1, 2]).pinned_tokens


def test_a_tick_is_an_admitted_sequence_until_the_caller_counts() -> None:
    manager = KVManager(16, 2, pin_budget=8)
    assert manager.time == 0
    run(manager, 0, [1, 2, 3])
    assert manager.time == 1
    manager.pin([1, 2], ttl=2)
    begin(manager, 1, [9, 9, 9])
    assert repr(manager.begin(2, [9, 9, 9])).startswith("WaitFor")
    assert (manager.time, pinned(manager)) == (2, 1)
    # The pin ends before the prefix is looked up, which is then found like any other.
    assert begin(manager, 2, [1, 2, 3]) == 2
    assert (manager.time, pinned(manager)) == (3, 0)

    manager.set_time(100)
    run(manager, 3, [5])
    assert manager.time == 100
    manager.pin([1, 2], ttl=5)
    endless = manager.pin([1, 2], ttl=2**64 - 1).pin_id
    manager.set_time(104)
    assert pinned(manager) == 1
    with pytest.raises(InvalidInputError, match=r"^now: got 103, expected at least 104"):
        manager.set_time(103)
    for seq_id in (1, 2):
        manager.release(seq_id)
    manager.set_time(105)
    assert pinned(manager) == 1
    assert manager.unpin(endless)
    assert not manager.unpin(endless)


def test_clear_ends_the_pins_of_its_namespace() -> None:
    manager = KVManager(16, 2, pin_budget=8)
    pins = {}
    for namespace in (b"a", b"b"):
        run(manager, 0, [1, 2, 3, 4], namespace)
        pins[namespace] = manager.pin([1, 2, 3, 4], namespace)
    assert pinned(manager) == 4
    assert manager.clear(b"a") == 2
    assert pinned(manager) == 2
    assert not manager.unpin(pins[b"a"].pin_id)
    assert manager.match_prefix([1, 2, 3, 4], b"b").tolist() == [2, 3]
    assert manager.clear() == 2
    assert_drained(manager)


def test_bad_pins_are_refused_by_name() -> None:
    manager = KVManager(16, 2, pin_budget=8)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("ttl: got 0, expected at least 1", lambda: manager.pin([1], ttl=0)),
        (r"ttl: got -1 \(int\)", lambda: manager.pin([1], ttl=-1)),
        ("ttl: got 1.5", lambda: manager.pin([1], ttl=1.5)),  # type: ignore[arg-type]
        ("pin_id: got -1", lambda: manager.unpin(-1)),
        ("pin_id: got True", lambda: manager.unpin(True)),
        ("now: got None", lambda: manager.set_time(None)),  # type: ignore[arg-type]
        ("tokens: item 0 is -1", lambda: manager.pin([-1])),
        ("namespace: got 'a'", lambda: manager.pin([1], "a")),  # type: ignore[arg-type]
        ("media: span 0 ", lambda: manager.pin([1], b"", [(1, 1, bytes(32))])),
        ("pin_budget: it is 0", lambda: KVManager(16, 2).pin([1])),
        ("pin_budget: got 16, expected less than the 16 blocks", lambda: KVManager(16, 2, pin_budget=16)),
        ("pin_budget: got -1", lambda: KVManager(16, 2, pin_budget=-1)),
        ("event_capacity: got -1", lambda: KVManager(16, 2, event_capacity=-1)),
    ]
    for problem, call in calls:
        with pytest.raises(InvalidInputError, match=f"^{problem}"):
            call()
    assert manager.stats().pinned_blocks == 0
    with pytest.raises(TypeError):
        Pin()  # type: ignore[call-arg, unused-ignore]
