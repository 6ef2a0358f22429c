"""The KV manager's hot paths as Python sees them. What is measured, and against whom: README.md beside this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from leafkv import KVManager, Ready

TokenIds = NDArray[np.int32]

BLOCK = 16
VOCABULARY = 128_000
PROMPT = 4_096
EXTRA_PROMPTS = 200
TREE_BLOCKS = (100 * 512 + 1_000 * 256 + 10_000 * 128) // BLOCK
POOL = TREE_BLOCKS + (EXTRA_PROMPTS + 8) * PROMPT // BLOCK
ID = 1 << 40
"""A sequence id that is free between measurements."""

rng = np.random.default_rng(1)


def random_tokens(*shape: int) -> TokenIds:
    return rng.integers(0, VOCABULARY, shape, dtype=np.int32)


def begin(kv: KVManager, seq_id: int, tokens: TokenIds | list[int]) -> int:
    ready = kv.begin(seq_id, tokens)
    assert isinstance(ready, Ready)
    return ready.cached_tokens


def serve(kv: KVManager, tokens: TokenIds) -> None:
    """A prompt's whole life."""
    kv.grow(ID, len(tokens) - begin(kv, ID, tokens))
    kv.commit(ID, len(tokens))
    kv.release(ID)


@pytest.fixture(scope="module")
def prompts() -> TokenIds:
    """10,000 prompts of 896 tokens: 100 beginnings of 512, each with 10 continuations of 256, each with 10 of 128."""
    levels = [random_tokens(100, 512), random_tokens(1_000, 256), random_tokens(10_000, 128)]
    return np.concatenate([np.repeat(level, 10_000 // len(level), axis=0) for level in levels], axis=1)


def make_tree(prompts: TokenIds, **options: Any) -> KVManager:
    kv = KVManager(POOL, BLOCK, **options)
    for prompt in prompts:
        kv.grow(ID, len(prompt) - begin(kv, ID, prompt))
        kv.copies()  # of partial hits, where they are on
        kv.commit(ID, len(prompt))
        kv.release(ID)
    assert kv.stats().cached_blocks == TREE_BLOCKS
    return kv


@pytest.fixture(scope="module")
def tree(prompts: TokenIds) -> KVManager:
    """Shared by what leaves it as it was."""
    return make_tree(prompts)


def insert_path(kv: KVManager, edges: int) -> TokenIds:
    """Put a prompt into the tree as a path of ``edges`` edges of equal length: others part from it in between."""
    prompt = random_tokens(PROMPT)
    serve(kv, prompt)
    for end in range(PROMPT // edges, PROMPT, PROMPT // edges):
        serve(kv, np.concatenate([prompt[:end], random_tokens(BLOCK)]))
    return prompt


class Measure:
    """Runs a call in rounds; what is between them is not timed."""

    def __init__(self, benchmark: BenchmarkFixture) -> None:
        self._benchmark = benchmark

    def repeated(self, call: Callable[[], object], rounds: int = 500, iterations: int = 40) -> None:
        """A call that leaves everything as it was."""
        self._benchmark.pedantic(call, rounds=rounds, iterations=iterations, warmup_rounds=5)

    def once(self, call: Callable[..., object], prepare: Callable[[], tuple[Any, ...]], rounds: int) -> None:
        """A call for which everything is prepared each time."""
        self._benchmark.pedantic(call, setup=lambda: (prepare(), {}), rounds=rounds, warmup_rounds=0)


@pytest.fixture
def measure(benchmark: BenchmarkFixture) -> Measure:
    return Measure(benchmark)


class Reused:
    """A state that is made anew after it served ``uses`` measurements."""

    def __init__(self, uses: int, make: Callable[[], Any]) -> None:
        self._uses, self._make, self._left = uses, make, 0
        self._state: Any = None

    def __call__(self) -> Any:
        if self._left == 0:
            self._state, self._left = self._make(), self._uses
        self._left -= 1
        return self._state


# Finding


@pytest.mark.parametrize("edges", [1, 16])
def bench_match(measure: Measure, tree: KVManager, edges: int) -> None:
    prompt = insert_path(tree, edges)
    assert len(tree.match_prefix(prompt)) == PROMPT // BLOCK
    measure.repeated(lambda: tree.match_prefix(prompt))


@pytest.mark.parametrize("edges", [1, 16])
def bench_match_cold(measure: Measure, tree: KVManager, edges: int) -> None:
    """Nothing but the prompt is in the CPU's caches."""
    prompt = insert_path(tree, edges)
    ballast = np.zeros(1 << 24, np.int64)

    def prepare() -> tuple[TokenIds]:
        ballast.sum()
        return (prompt.copy(),)

    measure.once(tree.match_prefix, prepare, rounds=100)


def bench_match_random_leaf(measure: Measure, tree: KVManager, prompts: TokenIds) -> None:
    """896 tokens, 3 edges, each time another of the 10,000."""
    prompt = np.empty_like(prompts[0])

    def prepare() -> tuple[TokenIds]:
        prompt[:] = prompts[rng.integers(len(prompts))]
        return (prompt,)

    measure.once(tree.match_prefix, prepare, rounds=10_000)


def bench_match_list(measure: Measure, tree: KVManager) -> None:
    prompt = insert_path(tree, 16).tolist()
    measure.repeated(lambda: tree.match_prefix(prompt), iterations=10)


@pytest.mark.parametrize("edges", [1, 16])
def bench_begin_release(measure: Measure, tree: KVManager, edges: int) -> None:
    # One token is always left to compute.
    prompt = np.append(insert_path(tree, edges), np.int32(0))
    assert tree.lookup(prompt) == PROMPT

    def call() -> None:
        tree.begin(ID, prompt)
        tree.release(ID)

    measure.repeated(call)


def bench_begin_partial_hit(measure: Measure, prompts: TokenIds) -> None:
    """As before, but the hit ends in the middle of a block, one of ten that follow there."""
    kv = make_tree(prompts, partial_hits=True)
    prompt = np.append(prompts[1_234, : 512 + 256 + 8], np.int32(0))
    assert kv.lookup(prompt) == 512 + 256 + 8

    def call() -> None:
        kv.begin(ID, prompt)
        kv.release(ID)

    measure.repeated(call)


def bench_pin_unpin(measure: Measure, prompts: TokenIds) -> None:
    kv = make_tree(prompts, pin_budget=PROMPT // BLOCK)
    prompt = insert_path(kv, 16)
    assert kv.pin(prompt).pinned_tokens == PROMPT

    measure.repeated(lambda: kv.unpin(kv.pin(prompt).pin_id))


# Entering


@pytest.mark.parametrize("events", [False, True])
def bench_insert(measure: Measure, prompts: TokenIds, events: bool) -> None:
    trees = Reused(EXTRA_PROMPTS, lambda: make_tree(prompts, event_capacity=POOL if events else 0))

    def prepare() -> tuple[KVManager]:
        kv: KVManager = trees()
        if kv.stats().sequences:
            kv.release(ID)
        begin(kv, ID, random_tokens(PROMPT))
        kv.grow(ID, PROMPT)
        return (kv,)

    measure.once(lambda kv: kv.commit(ID, PROMPT), prepare, rounds=5 * EXTRA_PROMPTS)


@pytest.mark.parametrize("pool", ["roomy", "full"])
def bench_serve_cold(measure: Measure, prompts: TokenIds, pool: str) -> None:
    """In a full pool, 256 blocks are evicted on the way."""

    def make() -> KVManager:
        kv = make_tree(prompts)
        while pool == "full" and kv.stats().free_blocks:
            serve(kv, random_tokens(PROMPT))
        return kv

    trees = Reused(EXTRA_PROMPTS, make)
    measure.once(serve, lambda: (trees(), random_tokens(PROMPT)), rounds=5 * EXTRA_PROMPTS)


def bench_serve_cached(measure: Measure, tree: KVManager) -> None:
    prompt = insert_path(tree, 1)
    measure.repeated(lambda: serve(tree, prompt))


# Evicting


def bench_evict_256_tokens(measure: Measure, prompts: TokenIds) -> None:
    trees = Reused(100, lambda: make_tree(prompts))
    measure.once(lambda kv: kv.evict(256 // BLOCK), lambda: (trees(),), rounds=2_000)


def bench_evict_half(measure: Measure, prompts: TokenIds) -> None:
    """Of 2.4 million tokens, in one call."""
    extra = random_tokens(EXTRA_PROMPTS, PROMPT)

    def prepare() -> tuple[KVManager, int]:
        kv = make_tree(prompts)
        for prompt in extra:
            serve(kv, prompt)
        return kv, kv.stats().cached_blocks // 2

    measure.once(lambda kv, n: kv.evict(n), prepare, rounds=20)


# Running


class Decoding:
    """256 sequences of about 1,024 tokens, each with one more token reserved."""

    RUNNING = 256
    CONTEXT = 1_024
    STEPS = 64

    def __init__(self) -> None:
        n, columns = self.RUNNING, 2 * self.CONTEXT // BLOCK
        self.kv = KVManager(n * columns, BLOCK)
        self.ids = np.arange(n)
        self.ones = np.ones(n, np.int64)
        self.new_tokens = random_tokens(n)
        self.lacking = np.zeros(n, np.int32)
        self.tables = np.zeros((n, columns), np.int32)
        self.stamps = np.zeros(n, np.uint64)
        self.slots = np.zeros(n, np.int64)
        for seq_id in range(n):
            # Staggered: in every step another sixteenth begins a block.
            length = self.CONTEXT - self.STEPS // 2 - BLOCK + seq_id % BLOCK
            begin(self.kv, seq_id, random_tokens(length))
            self.kv.grow(seq_id, length)
            self.kv.commit(seq_id, length)
            self.kv.grow(seq_id, 1)
        # A table's first growth makes room for many: that is behind us.
        for _ in range(BLOCK):
            self.step()

    def step(self) -> None:
        """The bookkeeping between two runs of the model."""
        kv = self.kv
        kv.commit_many(self.ids, self.ones, self.new_tokens)
        kv.grow_many(self.ids, self.ones, self.lacking)
        kv.copies()
        kv.tables(self.ids, self.tables, self.stamps)
        kv.slots(self.ids, self.ones, self.slots)


def bench_decode_step(measure: Measure) -> None:
    running = Reused(Decoding.STEPS, Decoding)
    measure.once(Decoding.step, lambda: (running(),), rounds=20 * Decoding.STEPS)


def bench_fork_grow(measure: Measure) -> None:
    """A child that writes into the block it shares with its parent, and the copy that this owes."""
    kv = KVManager(1_024, BLOCK)
    begin(kv, 0, random_tokens(1_000))
    kv.grow(0, 1_000)
    kv.commit(0, 1_000)

    def call() -> None:
        kv.fork(0, 1)
        kv.grow(1, 1)
        kv.copies()
        kv.release(1)

    measure.repeated(call)


# Watching


def bench_stats(measure: Measure, tree: KVManager) -> None:
    measure.repeated(tree.stats)


def bench_snapshot(measure: Measure, prompts: TokenIds) -> None:
    """Of the whole tree: 11,100 edges, 99,200 blocks."""
    kv = make_tree(prompts, event_capacity=1)
    measure.repeated(kv.snapshot, rounds=10, iterations=1)
