"""Paged attention as Python sees it. What is measured, and beside which limits: README.md beside this file."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from benches.attention_cases import LLAMA, SMOL, Case, Model, cases
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from leafkv import AttentionPlan, KVCache, paged_attention

BLOCK = 16
COLD = 256 << 20
"""Bytes that a cycle of calls reads at least, so that nothing is left in the CPU's caches from the one before."""
POOL = 1 << 30
"""Bytes of KV at most: a longer context names blocks of it more than once."""
DTYPES = ["float32", "bfloat16", "float16", "int8"]
LAYOUTS = ["tiled", "rows"]

rng = np.random.default_rng(1)


def numbers(dtype: str, *shape: int) -> NDArray[Any]:
    """Of variance 1 where it is a float, as the cache holds them."""
    x = rng.standard_normal(shape, dtype=np.float32)
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return np.clip(40 * x, -127, 127).astype(np.int8) if dtype == "int8" else x.astype(dtype)


def make_cache(model: Model, num_blocks: int, num_layers: int, dtype: str, layout: Any) -> KVCache:
    """A full cache: memory that was never written is not read, either."""
    cache = KVCache(num_blocks, num_layers, model.num_kv_heads, model.head_dim, BLOCK, dtype, layout)
    block = numbers(dtype, *cache.layer(0)[0].shape[1:])
    for layer in range(num_layers):
        for side in cache.layer(layer):
            side[:] = block
        for scale in cache.scales(layer).values():
            scale[:] = 1 / 40
    return cache


class Step:
    """A case with its memory: as in a model, one plan for many layers, each call another."""

    def __init__(self, case: Case, dtype: str, layout: str = "tiled", cold: int = COLD) -> None:
        model = case.model
        block_nbytes = KVCache.nbytes_of_block(1, model.num_kv_heads, model.head_dim, BLOCK, dtype)
        blocks = case.kv_tokens // BLOCK
        num_layers = -(-cold // (blocks * block_nbytes))
        num_blocks = min(blocks, POOL // (num_layers * block_nbytes))
        self.case = case
        self.nbytes = blocks * block_nbytes
        self.cache = make_cache(model, num_blocks, num_layers, dtype, layout)
        self.tables = case.pages(BLOCK, num_blocks, rng)
        self.query = numbers("float32", case.count * case.new, model.num_heads, model.head_dim)
        self.out = np.empty_like(self.query)
        self.layers = cycle([(self.cache.layer(i), self.cache.scales(i)) for i in range(num_layers)])
        self.attend = self.make_plan().attend

    def make_plan(self) -> AttentionPlan:
        return self.case.plan(self.tables, self.cache)

    def __call__(self) -> None:
        views, scales = next(self.layers)
        self.attend(self.query, *views, out=self.out, **scales)


def measure(benchmark: BenchmarkFixture, call: Callable[[], object], rounds: int, iterations: int = 1) -> None:
    benchmark.pedantic(call, rounds=rounds, iterations=iterations, warmup_rounds=1)


def note(benchmark: BenchmarkFixture, name: str, work: float) -> None:
    """A rate, in 10^9 a second, as a column beside the times."""
    if benchmark.stats is not None:  # it is with --benchmark-disable
        benchmark.extra_info[name] = round(work / benchmark.stats.stats.median / 1e9, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def bench_attend(benchmark: BenchmarkFixture, case: Case, dtype: str, layout: str) -> None:
    step = Step(case, dtype, layout)
    # About half a second each, at 20 GB/s or 100 GFLOP/s.
    seconds = max(step.nbytes / 20e9, case.operations / 100e9)
    measure(benchmark, step, rounds=min(1_000, max(5, int(0.5 / seconds))))
    note(benchmark, "GB/s", step.nbytes)
    note(benchmark, "GFLOP/s", case.operations)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", [LLAMA, SMOL], ids=lambda model: model.name)
def bench_attend_short(benchmark: BenchmarkFixture, model: Model, dtype: str) -> None:
    """One sequence of 16 tokens, into an array that is there: what a call costs at least."""
    step = Step(Case("decode", model, 1, 1, 16), dtype, cold=1)
    (key, value), scales = next(step.layers)
    attend, query, out = step.attend, step.query, step.out
    measure(benchmark, lambda: attend(query, key, value, out=out, **scales), rounds=500, iterations=40)


def bench_paged_attention(benchmark: BenchmarkFixture) -> None:
    """The same in one call, its plan included."""
    step = Step(Case("decode", SMOL, 1, 1, 16), "float32", cold=1)
    (key, value), _ = next(step.layers)
    case, query, tables, out = step.case, step.query, step.tables, step.out
    starts, lens = case.query_starts, case.kv_lens
    measure(
        benchmark, lambda: paged_attention(query, key, value, tables, starts, lens, out=out), rounds=500, iterations=40
    )


@pytest.mark.parametrize("count", [1, 32, 256])
def bench_plan(benchmark: BenchmarkFixture, count: int) -> None:
    """Of sequences of 1,024 tokens."""
    step = Step(Case("decode", SMOL, count, 1, 1_024), "float32", cold=1)
    measure(benchmark, step.make_plan, rounds=200, iterations=5)


@pytest.mark.parametrize("count", [1, 32, 256])
def bench_plan_attend(benchmark: BenchmarkFixture, count: int) -> None:
    """With its first call, which makes the schedule. Of sequences of 16 tokens, so that there is little else to do."""
    step = Step(Case("decode", SMOL, count, 1, 16), "float32", cold=1)

    def call() -> None:
        step.attend = step.make_plan().attend
        step()

    measure(benchmark, call, rounds=200)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [32, 2_048])
def bench_write_kv(benchmark: BenchmarkFixture, count: int, dtype: str, layout: str) -> None:
    """A token each of 32 sequences, or a prompt of 2,048; to random blocks of a layer of Llama's."""
    num_blocks, tokens = 4_096, 1 if count == 32 else BLOCK
    cache = make_cache(LLAMA, num_blocks, 1, dtype, layout)
    key, value = numbers("float32", 2, count, LLAMA.num_kv_heads, LLAMA.head_dim)
    order = rng.permutation(num_blocks)[: count // tokens * 64].reshape(-1, count // tokens, 1)
    slots = cycle((order * BLOCK + np.arange(tokens)).reshape(len(order), -1))
    measure(benchmark, lambda: cache.write(0, key, value, next(slots)), rounds=200)
    note(benchmark, "GB/s", key.nbytes + value.nbytes)
