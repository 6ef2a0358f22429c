"""Sequences that share blocks while they part: beams that are re-parented, drafts that are rejected.

A plain list of tokens per branch is the oracle; each branch must read the KV of exactly its own history.
"""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest

from leafkv import OutOfBlocksError
from leafkv._core import KVManager, Ready
from tests.kv.lives import Memory, assert_drained, begin, kv_of


@pytest.mark.parametrize("partial_hits", [False, True])
@pytest.mark.parametrize(("width", "block_size"), [(2, 1), (3, 4), (8, 3)])
def test_beams_with_random_parents_read_their_own_history(width: int, block_size: int, partial_hits: bool) -> None:
    rng = random.Random(width)
    prompt = [rng.randrange(2) for _ in range(2 * block_size + 1)]
    steps = 60
    longest = -(-(len(prompt) + steps) // block_size)
    # Besides the beams of two steps, a block each that is copied.
    manager = KVManager(2 * width * (longest + 1), block_size, partial_hits=partial_hits)
    memory = Memory(manager)

    begin(manager, 0, prompt)
    manager.grow(0, len(prompt))
    memory.write(0, kv_of(prompt))
    manager.commit(0, len(prompt))
    beams = {0: prompt}
    next_id, copied = 1, 0
    for _ in range(steps):
        # Each parent has any number of children, none included; of some the last child is the parent itself.
        parents = sorted(rng.choices(list(beams), k=width))
        children: dict[int, list[int]] = {}
        for index, parent in enumerate(parents):
            if parents[index + 1 : index + 2] != [parent] and rng.random() < 0.5:
                children[parent] = beams[parent]
            else:
                manager.fork(parent, next_id)
                children[next_id] = beams[parent]
                next_id += 1
        for parent in beams.keys() - children.keys():
            manager.release(parent)
        lacking = np.full(width, -1, np.int32)
        ids = np.array(list(children))
        assert manager.grow_many(ids, [1] * width, lacking) == 0
        assert not lacking.any()
        copied += memory.copy()
        tokens = [rng.randrange(3) for _ in children]
        beams = {seq_id: [*children[seq_id], token] for seq_id, token in zip(children, tokens, strict=True)}
        slots = np.empty(width, np.int64)
        manager.slots(ids, np.ones(width, np.int32), slots)
        assert len(set(slots.tolist())) == width
        memory.blocks.reshape(-1)[slots] = [kv_of(history)[-1] for history in beams.values()]
        manager.commit_many(ids, [1] * width, tokens)
        manager.check_invariants()
        for seq_id, history in beams.items():
            assert memory.read(seq_id) == kv_of(history)
    assert (copied > 0) == (block_size > 1)
    for seq_id in beams:
        manager.release(seq_id)
    assert_drained(manager)


def test_n_samples_of_one_prompt_share_all_but_their_last_block() -> None:
    manager = KVManager(64, 4)
    memory = Memory(manager)
    prompt = list(range(18))
    begin(manager, 0, prompt)
    manager.grow(0, 18)
    memory.write(0, kv_of(prompt))
    manager.commit(0, 18)
    for child in range(1, 8):
        manager.fork(0, child)
    assert manager.stats().held_blocks == 5
    ids: Any = np.arange(8, dtype=np.uint64)
    assert manager.grow_many(ids, [1] * 8, np.empty(8, np.int32)) == 0
    assert memory.copy() >= 7
    assert manager.stats().held_blocks == 4 + 8
    for seq_id in range(8):
        memory.write(seq_id, kv_of([*prompt, seq_id])[-1:])
    manager.commit_many(ids, [1] * 8, range(8))
    for seq_id in range(8):
        assert memory.read(seq_id) == kv_of([*prompt, seq_id])


def test_samples_that_are_preempted_and_computed_again_read_their_own_history() -> None:
    """Four samples of a prompt in a pool for two: the newest gives way, also between its copy being owed and made."""
    manager = KVManager(9, 4)
    memory = Memory(manager)
    prompt = list(range(10))
    samples = {seq_id: [*prompt] for seq_id in range(4)}
    begin(manager, 0, prompt)
    manager.grow(0, len(prompt))
    memory.write(0, kv_of(prompt))
    manager.commit(0, len(prompt))
    known = dict.fromkeys(samples, len(prompt))
    live, waiting, preempted = [*samples], list[int](), 0
    for child in live[1:]:
        manager.fork(0, child)
    for _ in range(200):
        while waiting and isinstance(manager.begin(waiting[0], samples[waiting[0]]), Ready):
            live.append(waiting.pop(0))
            known[live[-1]] = len(samples[live[-1]])
        for seq_id in [*live]:
            while seq_id in live:
                if manager.num_committed(seq_id) == len(samples[seq_id]):
                    samples[seq_id].append(100 * seq_id + len(samples[seq_id]))
                try:
                    manager.grow(seq_id, len(samples[seq_id]) - manager.num_committed(seq_id))
                    break
                except OutOfBlocksError:
                    waiting.insert(0, live.pop())
                    manager.release(waiting[0])
                    preempted += 1
        memory.copy()
        for seq_id in [*live]:
            tokens = samples[seq_id]
            memory.write(seq_id, kv_of(tokens)[manager.num_committed(seq_id) :])
            manager.commit(seq_id, len(tokens), tokens[known[seq_id] :])
            known[seq_id] = len(tokens)
            assert memory.read(seq_id) == kv_of(tokens)
            if len(tokens) >= 22:
                manager.release(seq_id)
                live.remove(seq_id)
        manager.check_invariants()
    assert not live
    assert not waiting
    assert preempted > 3
    assert_drained(manager)


def test_forks_of_forks_whose_copies_are_still_owed() -> None:
    manager = KVManager(16, 4)
    memory = Memory(manager)
    prompt = list(range(6))
    begin(manager, 0, prompt)
    manager.grow(0, 6)
    memory.write(0, kv_of(prompt))
    manager.commit(0, 6)
    for child in range(1, 5):
        # The parent's own last block is not written yet: it is to be copied from where its content is.
        manager.fork(child - 1, child)
        manager.grow(child, 1)
    assert memory.copy() == 4
    for seq_id in range(5):
        assert memory.read(seq_id) == kv_of(prompt)
    manager.check_invariants()


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_rejected_drafts_leave_no_trace(block_size: int) -> None:
    rng = random.Random(block_size)
    manager = KVManager(200, block_size, event_capacity=10**6)
    memory = Memory(manager)
    sequences = {seq_id: [seq_id] for seq_id in range(4)}
    ids: Any = np.arange(4)
    for seq_id, prompt in sequences.items():
        begin(manager, seq_id, prompt)
        manager.grow(seq_id, 1)
        memory.write(seq_id, kv_of(prompt))
        manager.commit(seq_id, 1)
    for _ in range(12):
        drafts = {seq_id: [rng.randrange(9) for _ in range(rng.randint(1, 5))] for seq_id in sequences}
        counts = [len(draft) for draft in drafts.values()]
        assert manager.grow_many(ids, counts, np.empty(4, np.int32)) == 0
        for seq_id, draft in drafts.items():
            memory.write(seq_id, kv_of([*sequences[seq_id], *draft])[-len(draft) :])
        accepted = [rng.randint(0, n) for n in counts]
        new = [draft[:n] for draft, n in zip(drafts.values(), accepted, strict=True)]
        manager.commit_many(ids, accepted, [*chain(*new)], accepted)
        for seq_id, tokens in zip(sequences, new, strict=True):
            sequences[seq_id] += tokens
            manager.truncate(seq_id, len(sequences[seq_id]))
            assert memory.read(seq_id) == kv_of(sequences[seq_id])
        manager.check_invariants()
    # Only accepted tokens were ever findable.
    found = [event.tokens.tolist() for event in manager.events() if event.kind == "stored"]
    whole = sum(len(tokens) // block_size for tokens in sequences.values())
    assert sum(map(len, found)) == whole * block_size
    for seq_id, tokens in sequences.items():
        manager.release(seq_id)
        assert manager.lookup([*tokens, 0]) == len(tokens) // block_size * block_size
    assert_drained(manager)
