"""Hits that end inside a block, executed over memory: what is copied, what is read, and what is never touched."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from leafkv import InvalidInputError, OutOfBlocksError
from leafkv._core import KVManager, Ready
from leafkv.kv import KVCache
from tests.kv.lives import Memory, assert_drained, begin, kv_of, run
from tests.kv.test_cache import BLOCKS, DIM, HEADS, KINDS, LAYERS, as_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray


@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_a_hit_goes_as_far_as_the_tokens_are_equal(block_size: int) -> None:
    """Every length of common prefix, against what is plainly computed."""
    cached = list(range(3 * block_size))
    for common in range(len(cached) + 1):
        for more in (0, 1, 2):
            tokens = cached[:common] + [99] * more
            if not tokens:
                continue
            manager = KVManager(16, block_size, partial_hits=True)
            memory = Memory(manager)
            begin(manager, 0, cached)
            manager.grow(0, len(cached))
            memory.write(0, kv_of(cached))
            manager.commit(0, len(cached))
            manager.release(0)
            before = memory.blocks.copy()

            hit = min(common, len(tokens) - 1)
            assert manager.lookup(tokens) == hit
            assert begin(manager, 1, tokens) == hit
            assert memory.read(1) == kv_of(tokens)[:hit]
            manager.grow(1, len(tokens) - hit)
            assert memory.copy() == (hit % block_size > 0)
            assert memory.read(1) == kv_of(tokens)[:hit]
            memory.write(1, kv_of(tokens)[hit:])
            manager.commit(1, len(tokens))
            assert memory.read(1) == kv_of(tokens)
            # What was cached is as it was.
            cached_blocks = manager.match_prefix(cached)
            assert memory.blocks[cached_blocks].ravel().tolist() == kv_of(cached)
            np.testing.assert_array_equal(memory.blocks[cached_blocks], before[cached_blocks])
            manager.release(1)
            assert_drained(manager)
            stats = manager.stats()
            assert (stats.hit_tokens, stats.partial_hit_tokens) == (hit, hit % block_size)


def test_the_child_that_shares_most_is_the_source() -> None:
    manager = KVManager(32, 4, partial_hits=True)
    run(manager, 0, [0, 1, 2, 3])
    for seq_id, tail in enumerate(([4, 9, 9, 9], [4, 5, 9, 9], [4, 5, 6, 9], [9, 5, 6, 7]), 1):
        run(manager, seq_id, [0, 1, 2, 3, *tail])
    assert manager.lookup([0, 1, 2, 3, 4, 5, 6, 7]) == 7
    assert manager.lookup([0, 1, 2, 3, 4, 5, 8, 7]) == 6
    assert manager.lookup([0, 1, 2, 3, 8]) == 4
    assert manager.lookup([0, 1, 2, 8]) == 3
    begin(manager, 9, [0, 1, 2, 3, 4, 5, 6, 7])
    source = manager.block_table(9)[-1]
    assert source == manager.match_prefix([0, 1, 2, 3, 4, 5, 6, 9])[-1]
    manager.grow(9, 1)
    ((copied, own),) = manager.copies().tolist()
    assert (copied, own) == (source, manager.block_table(9)[-1])
    assert own not in (source, *manager.match_prefix([0, 1, 2, 3, 4, 5, 6, 9]))


def test_whole_blocks_are_all_that_is_found_without_partial_hits() -> None:
    manager = KVManager(16, 4)
    run(manager, 0, range(8))
    assert manager.lookup([0, 1, 2, 3, 4, 5, 9]) == 4
    assert begin(manager, 1, range(8)) == 4
    assert manager.stats().partial_hit_tokens == 0


def test_a_prompt_that_fills_the_pool_does_not_fail_because_of_its_own_hit() -> None:
    manager = KVManager(4, 4, partial_hits=True, event_capacity=100)
    memory = Memory(manager)
    for prompt in (list(range(16)), [*range(14), 99, 99]):
        hit = begin(manager, 0, prompt)
        manager.grow(0, len(prompt) - hit)
        assert memory.copy() == 0
        memory.write(0, kv_of(prompt)[hit:])
        manager.commit(0, 16)
        assert memory.read(0) == kv_of(prompt)
        manager.release(0)
        manager.check_invariants()
    assert hit == 14
    assert manager.lookup([*range(16), 0]) == 14
    assert manager.stats().evicted_blocks == 1
    assert [event.kind for event in manager.events()] == ["stored", "removed", "reused", "stored"]


@pytest.mark.parametrize("seed", range(6))
def test_under_pressure_everybody_reads_their_own_history(seed: int) -> None:
    """A tiny pool, two tokens, random lives: a block that is taken, copied or written wrongly is read by somebody."""
    rng = random.Random(seed)
    manager = KVManager(rng.randint(4, 14), rng.randint(1, 5), partial_hits=True, pin_budget=rng.randint(0, 2))
    memory = Memory(manager)
    live: dict[int, tuple[list[int], bytes, list[tuple[int, int, bytes]]]] = {}
    known: dict[int, int] = {}
    partial = 0
    for step in range(1200):
        choice = rng.random()
        if choice < 0.35:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
            media = []
            if rng.random() < 0.3:
                start = rng.randrange(len(tokens))
                media.append((start, rng.randint(1, len(tokens) - start), bytes([rng.randrange(2)]) * 32))
            namespace = rng.choice([b"", b"", b"\0"])
            try:
                answer = manager.begin(step, tokens, namespace, media)
            except InvalidInputError:
                assert len(tokens) > manager.block_size * (manager.num_blocks - 2)
                continue
            if isinstance(answer, Ready):
                assert memory.read(step) == kv_of(tokens, namespace, media)[: answer.cached_tokens]
                live[step] = (tokens, namespace, media)
                known[step] = len(tokens)
                partial += answer.cached_tokens % manager.block_size > 0
        elif live:
            seq_id = rng.choice(list(live))
            tokens, namespace, media = live[seq_id]
            committed = manager.num_committed(seq_id)
            if choice < 0.75:
                tokens += [rng.randrange(2) for _ in range(rng.randint(0, 2))]
                n = rng.randint(0, len(tokens) - committed)
                try:
                    manager.grow(seq_id, n)
                except OutOfBlocksError:
                    manager.release(seq_id)
                    del live[seq_id]
                    continue
                memory.copy()
                kv = kv_of(tokens, namespace, media)
                memory.write(seq_id, kv[committed : committed + n])
                manager.commit(seq_id, committed + n, tokens[known[seq_id] :])
                known[seq_id] = len(tokens)
            elif choice < 0.85:
                manager.release(seq_id)
                del live[seq_id]
            elif choice < 0.9 and manager.stats().held_blocks < manager.num_blocks:
                try:
                    manager.fork(seq_id, step)
                except InvalidInputError:
                    assert any(start < committed < start + n for start, n, _ in media)
                    continue
                live[step] = (tokens[:committed], namespace, [span for span in media if span[0] < committed])
                known[step] = committed
            elif choice < 0.93:
                manager.evict(rng.randint(1, 3))
        manager.check_invariants()
        for seq_id, (tokens, namespace, media) in live.items():
            committed = manager.num_committed(seq_id)
            assert memory.read(seq_id) == kv_of(tokens, namespace, media)[:committed]
    assert partial > 20 or manager.block_size == 1
    for seq_id in live:
        manager.release(seq_id)
    memory.copy()
    manager.check_invariants()


def filled(dtype: str, layout: Any, block_size: int) -> KVCache:
    """A cache in which no two blocks have a byte pattern in common."""
    cache = KVCache(BLOCKS, LAYERS, HEADS, DIM, block_size, dtype, layout)
    rng = np.random.default_rng(1)
    kv = rng.integers(-99, 99, (2, BLOCKS * block_size, HEADS, DIM)).astype(np.float32)
    for layer in range(LAYERS):
        cache.write(layer, kv[0] + layer, kv[1] + layer, np.arange(BLOCKS * block_size))
    return cache


@pytest.mark.parametrize(("dtype", "layout", "block_size"), KINDS)
def test_a_partial_hit_copies_one_block_of_a_real_cache(dtype: str, layout: Any, block_size: int) -> None:
    for shared in {1, block_size // 2, block_size - 1} - {0}:
        manager = KVManager(BLOCKS, block_size, partial_hits=True)
        cache = filled(dtype, layout, block_size)
        run(manager, 0, range(2 * block_size))
        prompt = [*range(block_size + shared), *[999] * (block_size - shared)]
        assert begin(manager, 1, prompt) == block_size + (shared if block_size > 1 else 0)
        manager.grow(1, len(prompt) - manager.num_committed(1))
        pairs = manager.copies()
        before = cache.array.copy()
        cache.copy_blocks(pairs)
        if block_size == 1:
            assert len(pairs) == 0
            continue
        ((source, own),) = pairs.tolist()
        np.testing.assert_array_equal(cache.array[own], before[source])
        others = np.arange(BLOCKS) != own
        np.testing.assert_array_equal(cache.array[others], before[others])
        # The rest is written over; the first tokens are still the source's, in all layers, K and V.
        slots = np.empty(block_size - shared, np.int64)
        manager.slots([1], [block_size - shared], slots)
        assert (slots // block_size == own).all()
        new: NDArray[np.float32] = np.full((block_size - shared, HEADS, DIM), 7, np.float32)
        for layer in range(LAYERS):
            cache.write(layer, new, -new, slots)
            for kv, value in enumerate((7, -7)):
                rows = as_rows(cache, layer, kv)
                np.testing.assert_array_equal(rows[own, :, :shared], rows[source, :, :shared])
                assert (rows[own, :, shared:] == value).all()
                assert (rows[source] != value).any()
        np.testing.assert_array_equal(cache.array[others], before[others])


@pytest.mark.parametrize(("dtype", "layout", "block_size"), KINDS)
def test_copies_are_simultaneous(dtype: str, layout: Any, block_size: int) -> None:
    cache = filled(dtype, layout, block_size)
    before = cache.array.copy()
    pairs: list[list[tuple[int, int]]] = [
        [],
        [(0, 1), (1, 0)],
        [(0, 1), (1, 2), (2, 0)],
        [(0, 1), (0, 2), (1, 3)],
        [(4, 4), (0, 1)],
    ]
    for batch in pairs:
        cache.array[:] = before
        cache.copy_blocks(np.array(batch, np.int32).reshape(-1, 2))
        expected = before.copy()
        for source, destination in batch:
            expected[destination] = before[source]
        np.testing.assert_array_equal(cache.array, expected)
    for bad in ([(0, 1), (2, 1)], [(0, BLOCKS)], [(-1, 0)]):
        cache.array[:] = before
        with pytest.raises(InvalidInputError, match=r"^pairs: "):
            cache.copy_blocks(np.array(bad, np.int32))
        np.testing.assert_array_equal(cache.array, before)
