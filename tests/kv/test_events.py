"""Events and snapshots: what they say, and that nothing but a visible gap is ever lost."""

from __future__ import annotations

import copy
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from leafkv import InvalidInputError, OutOfBlocksError
from leafkv._core import Event, KVManager, Ready, Snapshot, block_digests
from tests.kv.lives import begin, run

if TYPE_CHECKING:
    from collections.abc import Callable

IMAGE = bytes(range(32))


def test_events_tell_the_life_of_a_prefix() -> None:
    manager = KVManager(4, 2, event_capacity=100)
    media = [(1, 2, IMAGE)]
    prompt = [1, 2, 3, 4, 5]
    digests = block_digests(prompt, 2, b"n", media)
    assert manager.events() == []

    run(manager, 0, prompt, b"n", media)
    begin(manager, 0, [*prompt, 6, 7], b"n", media)
    manager.grow(0, 3)
    manager.commit(0, 6)
    manager.release(0)
    stored, reused, more = manager.events()
    assert [event.number for event in (stored, reused, more)] == [0, 1, 2]
    assert [event.kind for event in (stored, reused, more)] == ["stored", "reused", "stored"]
    assert {event.namespace for event in (stored, reused, more)} == {b"n"}
    assert stored.parent is None
    assert stored.blocks == reused.blocks == digests
    assert more.parent == digests[1]
    assert [*digests, *more.blocks] == block_digests([*prompt, 6], 2, b"n", media)
    assert stored.tokens.dtype == np.uint32
    assert (stored.tokens.tolist(), more.tokens.tolist(), reused.tokens.tolist()) == ([1, 2, 3, 4], [5, 6], [])
    assert (stored.media, more.media, reused.media) == (media, [], [])
    assert manager.events() == []

    snapshot = manager.snapshot()
    assert snapshot.number == 3
    assert sum((event.blocks for event in snapshot.stored), []) == [*digests, *more.blocks]  # noqa: RUF017
    assert {event.number for event in snapshot.stored} == {3}

    assert manager.evict(1) == 1
    manager.clear(b"other")
    manager.clear()
    removed, cleared, all_cleared = manager.events()
    assert (removed.kind, removed.blocks, removed.namespace) == ("removed", more.blocks, b"n")
    assert (cleared.kind, cleared.namespace, cleared.blocks) == ("cleared", b"other", [])
    assert (all_cleared.kind, all_cleared.namespace, all_cleared.number) == ("cleared", None, 5)
    assert manager.snapshot().stored == []


def test_events_are_values_that_show_what_they_are() -> None:
    managers = [KVManager(8, 2, event_capacity=100) for _ in range(2)]
    for manager in managers:
        run(manager, 0, [1, 2, 3], b"n")
    a, b = (manager.events()[0] for manager in managers)
    assert a == b
    assert repr(a) == "Event(number=0, kind='stored', namespace=b'n', 1 blocks)"
    assert repr(managers[0].snapshot()) == "Snapshot(number=1, 1 blocks)"
    assert managers[0].snapshot() == managers[1].snapshot()
    managers[0].clear(b"n")
    assert managers[0].snapshot() != managers[1].snapshot()
    a.blocks.clear()
    a.tokens[:] = 7
    assert a == b
    assert a.tokens.tolist() == [1, 2]
    with pytest.raises(AttributeError):
        a.number = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        hash(a)


def test_events_travel_to_other_processes() -> None:
    manager = KVManager(4, 2, event_capacity=100)
    run(manager, 0, [1, 2, 3, 4, 5], b"n", [(3, 1, IMAGE)])
    run(manager, 0, [1, 2, 3, 4, 5], b"n", [(3, 1, IMAGE)])
    snapshot = manager.snapshot()
    manager.evict(1)
    manager.clear(b"n")
    manager.clear()
    events = manager.events()
    assert [event.kind for event in events] == ["stored", "reused", "removed", "cleared", "cleared"]
    assert pickle.loads(pickle.dumps((events, snapshot))) == (events, snapshot)
    assert copy.deepcopy(events) == events
    for event in events:
        again = Event(
            event.number, event.kind, event.namespace, event.blocks, event.parent, event.tokens, media=event.media
        )
        assert again == event
    assert Snapshot(2, events[:1]) == snapshot
    assert Snapshot(2) != snapshot
    bad: list[tuple[str, Callable[[], object]]] = [
        ("number: got -1", lambda: Event(-1, "cleared")),
        ("kind: got 'lost'", lambda: Event(0, "lost")),  # type: ignore[arg-type]
        ("kind: got 3", lambda: Event(0, 3)),  # type: ignore[arg-type]
        ("namespace: got None", lambda: Event(0, "stored")),
        ("namespace: got 'n'", lambda: Event(0, "stored", "n")),  # type: ignore[arg-type]
        ("blocks: item 1 is of 31 bytes", lambda: Event(0, "removed", b"", [IMAGE, IMAGE[1:]])),
        ("parent: got 'a'", lambda: Event(0, "stored", b"", (), "a")),  # type: ignore[arg-type]
        ("tokens: item 0 is -1", lambda: Event(0, "stored", b"", tokens=[-1])),
        ("stored: got an object of type Event", lambda: Snapshot(0, events[1:])),
    ]
    for problem, call in bad:
        with pytest.raises(InvalidInputError, match=f"^{problem}"):
            call()


def test_without_a_buffer_there_are_no_events() -> None:
    manager = KVManager(8, 2)
    run(manager, 0, [1, 2, 3])
    assert manager.events() == []
    with pytest.raises(InvalidInputError, match=r"^event_capacity: it is 0"):
        manager.snapshot()
    assert manager.stats().dropped_events == 0


class Mirror:
    """What is cached, from events alone: the tokens of each block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.next = 0
        self.blocks: dict[bytes, tuple[bytes, bytes | None, tuple[int, ...]]] = {}

    def apply(self, event: Event, *, check_number: bool = True) -> None:
        if check_number:
            assert event.number == self.next
            self.next += 1
        if event.kind == "stored":
            parent = event.parent
            assert parent is None or parent in self.blocks
            rows = event.tokens.reshape(-1, self.block_size).tolist()
            for digest, tokens in zip(event.blocks, rows, strict=True):
                assert digest not in self.blocks
                assert event.namespace is not None
                self.blocks[digest] = (event.namespace, parent, tuple(tokens))
                parent = digest
        elif event.kind == "removed":
            for digest in event.blocks:
                assert all(parent != digest for _, parent, _ in self.blocks.values())
                del self.blocks[digest]
        elif event.kind == "cleared":
            kept = {} if event.namespace is None else self.blocks
            self.blocks = {digest: block for digest, block in kept.items() if block[0] != event.namespace}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [1, 6, 10**6])
def test_a_replay_is_the_snapshot_or_says_that_it_is_not(capacity: int, seed: int) -> None:
    rng = random.Random(seed)
    manager = KVManager(12, 2, partial_hits=True, pin_budget=2, event_capacity=capacity)
    mirror = Mirror(2)
    gaps = 0
    for seq_id in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        namespace = rng.choice([b"", b"n"])
        answer = manager.begin(seq_id, tokens, namespace)
        assert isinstance(answer, Ready)
        try:
            manager.grow(seq_id, len(tokens) - answer.cached_tokens)
            manager.copies()
            manager.commit(seq_id, len(tokens))
        except OutOfBlocksError:
            pass
        manager.release(seq_id)
        choice = rng.random()
        if choice < 0.05:
            manager.clear(rng.choice([None, b"", b"n"]))
        elif choice < 0.15:
            manager.pin(tokens, namespace, ttl=3)
        elif choice < 0.2:
            manager.evict(3)
        if rng.random() < 0.5:
            events = manager.events()
            if events and events[0].number != mirror.next:
                gaps += events[0].number - mirror.next
                mirror = Mirror(2)
                snapshot = manager.snapshot()
                for event in snapshot.stored:
                    mirror.apply(event, check_number=False)
                mirror.next = snapshot.number
            else:
                for event in events:
                    mirror.apply(event)
            fresh = Mirror(2)
            for event in manager.snapshot().stored:
                fresh.apply(event, check_number=False)
            assert mirror.blocks == fresh.blocks
            stats = manager.stats()
            assert len(mirror.blocks) == stats.cached_blocks + stats.held_blocks
            assert manager.snapshot().number == mirror.next
    assert manager.stats().dropped_events >= gaps
    assert (gaps > 0) == (capacity < 100)


def test_digests_of_a_snapshot_are_those_of_the_prompts() -> None:
    manager = KVManager(32, 2, event_capacity=8)
    prompts: list[tuple[list[int], bytes, list[tuple[int, int, bytes]]]] = [
        ([1, 2, 3, 4, 5, 6], b"", []),
        ([1, 2, 3, 4, 7, 7], b"", []),
        ([1, 2, 3, 4, 7, 7], b"n", []),
        ([1, 2, 3, 4, 7, 7], b"n", [(1, 4, IMAGE)]),
    ]
    expected: set[bytes] = set()
    for tokens, namespace, media in prompts:
        run(manager, 0, tokens, namespace, media)
        expected |= {*block_digests(tokens, 2, namespace, media)}
    found: list[Any] = [digest for event in manager.snapshot().stored for digest in event.blocks]
    assert len(found) == len(expected) == 3 + 1 + 3 + 3
    assert {*found} == expected
