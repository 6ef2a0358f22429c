"""`CacheMirror` against real managers: it always knows what a fresh snapshot says, or says that it does not."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from leafkv import CacheMirror, EventGapError, InvalidInputError, KVManager, OutOfBlocksError, Ready
from leafkv._core import block_digests
from leafkv.kv.mirror import KINDS

Media = list[tuple[int, int, bytes]]

BLOCK = 2
NAMESPACES = (b"", b"other")


@dataclass
class Wire:
    """An event or a snapshot as it comes over a network."""

    number: int
    kind: str = ""
    namespace: bytes | None = b""
    blocks: list[bytes] = field(default_factory=list)
    parent: bytes | None = None
    tokens: list[int] = field(default_factory=list)
    stored: list[Wire] = field(default_factory=list)


def run(manager: KVManager, seq_id: int, tokens: Any, namespace: bytes = b"") -> int:
    """The whole life of a prompt; the hit."""
    answer = manager.begin(seq_id, tokens, namespace)
    assert isinstance(answer, Ready)
    manager.grow(seq_id, len(tokens) - answer.cached_tokens)
    manager.commit(seq_id, len(tokens))
    manager.release(seq_id)
    return answer.cached_tokens


def snapshot_of(manager: KVManager) -> CacheMirror:
    mirror = CacheMirror(manager.block_size)
    mirror.load(manager.snapshot())
    return mirror


def random_prompt(rng: random.Random) -> tuple[list[int], bytes, Media]:
    tokens = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
    media: Media = []
    if rng.random() < 0.3:
        start = rng.randrange(len(tokens))
        length = rng.randint(1, len(tokens) - start)
        tokens[start : start + length] = [0] * length
        media.append((start, length, bytes([rng.randrange(2)]) * 32))
    return tokens, rng.choice(NAMESPACES), media


def random_operation(rng: random.Random, manager: KVManager, live: dict[int, int], number: int) -> None:
    """One call of the manager that may change the cache. ``live`` has the known tokens of each sequence."""
    pick = rng.random()
    try:
        if not live or (pick < 0.3 and len(live) < 4):
            tokens, namespace, media = random_prompt(rng)
            if isinstance(manager.begin(number, tokens, namespace, media), Ready):
                live[number] = len(tokens)
            return
        seq_id = rng.choice(list(live))
        if pick < 0.6:
            committed = manager.num_committed(seq_id)
            new = [rng.randrange(2) for _ in range(rng.randrange(3))] if committed == live[seq_id] else []
            n = live[seq_id] + len(new) - committed
            n = n if rng.random() < 0.7 else rng.randint(0, n)
            manager.grow(seq_id, n)
            manager.copies()
            manager.commit(seq_id, committed + n, new)
            live[seq_id] += len(new)
            manager.truncate(seq_id, committed + n)
        elif pick < 0.65:
            manager.truncate(seq_id, n := rng.randint(0, manager.num_committed(seq_id)))
            live[seq_id] = n
        elif pick < 0.7:
            manager.fork(seq_id, number)
            live[number] = manager.num_committed(seq_id)
        elif pick < 0.9:
            manager.release(seq_id)
            del live[seq_id]
        elif pick < 0.95:
            manager.evict(rng.randrange(4))
        elif pick < 0.99:
            manager.pin(*random_prompt(rng), ttl=rng.randint(1, 4))
        else:
            manager.clear(rng.choice((*NAMESPACES, None)))
    except (OutOfBlocksError, InvalidInputError):
        pass  # Does not fit now, or cuts a span of media: nothing has changed.


def histories(event_capacity: int) -> Iterator[tuple[random.Random, KVManager, Iterator[None]]]:
    """Random managers, each with an iterator that does one more operation at each step."""
    for seed in range(60):
        rng = random.Random(seed)
        manager = KVManager(
            rng.randint(5, 9), BLOCK, partial_hits=seed % 2 == 0, pin_budget=2, event_capacity=event_capacity
        )
        yield rng, manager, operations(rng, manager)


def operations(rng: random.Random, manager: KVManager) -> Iterator[None]:
    live: dict[int, int] = {}
    for number in range(150):
        random_operation(rng, manager, live, number)
        yield


def assert_same(rng: random.Random, mirror: CacheMirror, manager: KVManager) -> None:
    fresh = snapshot_of(manager)
    assert mirror.blocks == fresh.blocks
    assert len(mirror) == len(fresh) == sum(map(len, fresh.blocks.values()))
    for _ in range(4):
        prompt = random_prompt(rng)
        assert mirror.lookup(*prompt) == BLOCK * len(manager.match_prefix(*prompt))


def assert_stale(mirror: CacheMirror) -> None:
    assert mirror.stale
    assert "stale" in repr(mirror)
    with pytest.raises(EventGapError, match="events are missing, load a snapshot"):
        mirror.lookup([0, 1])
    with pytest.raises(EventGapError, match="events are missing, load a snapshot"):
        mirror.apply([])


def test_a_mirror_equals_a_fresh_snapshot_after_every_operation() -> None:
    kinds = Counter[str]()
    for rng, manager, steps in histories(event_capacity=10_000):
        mirror = CacheMirror(BLOCK)
        for _ in steps:
            events = manager.events()
            kinds.update(event.kind for event in events)
            mirror.apply(events)
            assert_same(rng, mirror, manager)
    assert min(kinds[kind] for kind in KINDS) > 50, kinds


def test_a_snapshot_taken_with_events_pending_includes_them() -> None:
    for rng, manager, steps in histories(event_capacity=10_000):
        followers = [CacheMirror(BLOCK)]
        for _ in steps:
            if rng.random() < 0.3:
                followers.append(snapshot_of(manager))
            if rng.random() < 0.3:
                events = manager.events()
                for follower in followers:
                    follower.apply(events)
                assert all(follower.blocks == snapshot_of(manager).blocks for follower in followers)
                # New ones come, old ones go, the one that never had a snapshot stays.
                del followers[1:-2]


def test_a_gap_is_noticed_and_a_snapshot_repairs_it() -> None:
    gaps = 0
    for rng, manager, steps in histories(event_capacity=4):
        mirror = CacheMirror(BLOCK)
        for _ in steps:
            if rng.random() < 0.8:
                continue  # A slow consumer.
            events = manager.events()
            try:
                mirror.apply(events)
            except EventGapError:
                gaps += 1
                assert_stale(mirror)
                mirror.load(manager.snapshot())
            assert not mirror.stale
            assert_same(rng, mirror, manager)
    assert gaps > 200


def test_clearing_a_namespace_and_all() -> None:
    manager = KVManager(32, 4, event_capacity=64)
    mirror = CacheMirror(4)
    for number, namespace in enumerate((b"a", b"b", b"c")):
        run(manager, number, range(9), namespace)
    mirror.apply(manager.events())
    assert {name: len(blocks) for name, blocks in mirror.blocks.items()} == {b"a": 2, b"b": 2, b"c": 2}
    manager.clear(b"b")
    mirror.apply(manager.events())
    assert [mirror.lookup(range(9), name) for name in (b"a", b"b", b"c")] == [8, 0, 8]
    manager.clear()
    mirror.apply(manager.events())
    assert mirror.blocks == {}
    assert len(mirror) == 0
    assert mirror


PROMPTS = [[*range(20)], [*range(10), *range(50, 60)], [7] * 13]


def test_managers_of_different_processes_name_equal_blocks_equally() -> None:
    code = f"""if True:
        import json, leafkv
        manager = leafkv.KVManager(64, 4, event_capacity=1024)
        for number, prompt in enumerate({PROMPTS!r}):
            manager.begin(number, prompt, b"n")
            manager.grow(number, len(prompt) - manager.num_committed(number))
            manager.commit(number, len(prompt))
        print(json.dumps([
            [event.number, event.kind, event.namespace.hex(), [block.hex() for block in event.blocks],
             event.parent and event.parent.hex(), event.tokens.tolist()]
            for event in manager.events()
        ]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    events = [
        Wire(
            number,
            kind,
            bytes.fromhex(name),
            list(map(bytes.fromhex, blocks)),
            parent and bytes.fromhex(parent),
            tokens,
        )
        for number, kind, name, blocks, parent, tokens in json.loads(done.stdout)
    ]
    there = CacheMirror(4)
    there.apply(events)
    # Other blocks, another order, another history.
    here = KVManager(64, 4, event_capacity=1024)
    run(here, 0, [9] * 30, b"n")
    for number, prompt in enumerate(reversed(PROMPTS)):
        run(here, number, prompt, b"n")
    assert there.blocks[b"n"].items() < snapshot_of(here).blocks[b"n"].items()
    assert [there.lookup(prompt, b"n") for prompt in PROMPTS] == [20, 20, 12]
    digests = block_digests(PROMPTS[1], 4, b"n")
    assert there.match(digests, b"n") == len(digests) == 5
    assert there.match(digests[:3], b"n") == 3
    assert there.match(digests) == 0


def test_a_thread_follows_while_others_work() -> None:
    manager = KVManager(24, BLOCK, event_capacity=100_000)
    mirror = CacheMirror(BLOCK)
    done = threading.Event()
    errors: list[BaseException] = []

    def follow() -> None:
        try:
            while not done.is_set():
                mirror.apply(manager.events())
                mirror.hot_prefixes(3)
        except BaseException as error:
            errors.append(error)

    def work(worker: int) -> None:
        rng = random.Random(worker)
        try:
            for number in range(300):
                seq_id = 1000 * worker + number
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, 10))]
                answer = manager.begin(seq_id, prompt)
                if isinstance(answer, Ready):
                    manager.grow(seq_id, len(prompt) - answer.cached_tokens)
                    manager.commit(seq_id, len(prompt))
                    manager.release(seq_id)
                mirror.lookup(prompt)
        except BaseException as error:
            errors.append(error)

    follower = threading.Thread(target=follow)
    workers = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in (follower, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    follower.join()
    assert not errors
    mirror.apply(manager.events())
    assert len(mirror) > 0
    assert_same(random.Random(0), mirror, manager)


def test_hot_prefixes_are_the_longest_that_were_reused_most() -> None:
    manager = KVManager(64, 2, event_capacity=1024)
    mirror = CacheMirror(2)
    # A system prompt of two blocks, a longer one that goes on from it, one of another namespace, one used once.
    prompts = [([1, 2, 3, 4, 5], b"", 4), ([1, 2, 3, 4, 5, 6, 7], b"", 3), ([8, 8, 8], b"n", 5), ([9, 9, 9], b"", 1)]
    number = 0
    for tokens, namespace, times in prompts:
        for _ in range(times):
            run(manager, number := number + 1, tokens, namespace)
    mirror.apply(manager.events())
    hot = [(prefix.namespace, prefix.blocks, prefix.reuses) for prefix in mirror.hot_prefixes(10)]
    longer = tuple(block_digests(prompts[1][0], 2))
    assert hot == [
        (b"", longer[:2], 6),
        (b"n", tuple(block_digests([8, 8], 2, b"n")), 4),
        (b"", longer, 2),
    ]
    assert len(mirror.hot_prefixes(2)) == 2
    mirror.load(manager.snapshot())
    assert mirror.hot_prefixes(10) == []


def test_events_that_cannot_be_right_are_refused() -> None:
    mirror = CacheMirror(4)
    stored = Wire(0, "stored", b"", [b"d" * 32], None, [1, 2, 3, 4])
    mirror.apply([stored])
    before = mirror.blocks
    for wrong, message in [
        (
            Wire(2, "stored", b"", [b"e" * 32], None, [1, 2]),
            "events: number 2 stores 1 blocks with 2 tokens, expected 4",
        ),
        (Wire(2, "moved", b"", [b"e" * 32]), "number 2 is of kind 'moved'"),
        (Wire(2, "removed", None, [b"d" * 32]), "number 2 is of kind 'removed' with namespace None"),
    ]:
        with pytest.raises(InvalidInputError, match=message):
            mirror.apply([Wire(1, "cleared", None), wrong])
        with pytest.raises(InvalidInputError, match=message):
            mirror.load(Wire(0, stored=[wrong]))
        assert mirror.blocks == before
    # A manager that started anew counts from 0 again. What came before the gap counts.
    with pytest.raises(EventGapError, match="expected event 2, got 0"):
        mirror.apply([Wire(1, "cleared", None), Wire(0, "cleared", None)])
    assert mirror.blocks == {}
    with pytest.raises(InvalidInputError, match="block_size: expected an integer >= 1"):
        CacheMirror(0)
