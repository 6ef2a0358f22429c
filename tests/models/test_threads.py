"""A model's operations from several Python threads at once, on one matrix of weights: bits are those of calls alone."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leafkv._core import Weight, embed, linear, rms_norm, rope_write_kv, silu_mul

from .arrays import F32, noise, strided

THREADS, ROUNDS = 4, 12
COLUMNS, OUTPUTS = 256, 256
HEADS, KV_HEADS, DIM = 4, 2, 32
"""A row of queries, keys and values has 256 elements, too."""
ROWS = (1, 16, 17, 60, 128, 129, 256, 257, 400)
"""The GIL is kept up to 2**20 products, 16 rows, and up to 2**16 elements: 128 rows of gate and up, 256 of all else."""

Call = Callable[..., NDArray[Any]]


def shared_weight() -> Weight:
    """Weights that are read as they are, and weights that each thread widens for itself."""
    upper = (noise(96, COLUMNS).view(np.uint32) >> 16).astype(np.uint16)
    scales = np.full((96, COLUMNS // 32, 1), 0.01, np.float16).view(np.uint8)
    quants = np.random.default_rng(0).integers(0, 256, (96, COLUMNS // 32, 32), np.uint8)
    blocks = np.concatenate([scales, quants], axis=2).reshape(96, -1)
    return Weight([("float32", noise(OUTPUTS - 192, COLUMNS)), ("bfloat16", upper), ("q8_0", blocks)])


def calls(weight: Weight, rows: int, rng: np.random.Generator) -> dict[str, Call]:
    """Each operation, on so many rows of its own."""

    def random_rows(columns: int) -> F32:
        # Nothing is aligned: a plain product copies them into the thread's scratch memory, too.
        return strided(rng.standard_normal((rows, columns), np.float32))

    x, gate_up, qkv = random_rows(COLUMNS), random_rows(2 * COLUMNS), random_rows((HEADS + 2 * KV_HEADS) * DIM)
    cos, sin, norm = random_rows(DIM // 2), random_rows(DIM // 2), noise(COLUMNS)
    slots = rng.permutation(rows)

    def rope(**options: Any) -> NDArray[Any]:
        keys, values = np.zeros((2, -(-rows // 16), KV_HEADS, 16 * DIM), np.float32)
        heads = rope_write_kv(qkv, cos, sin, keys, values, slots, num_heads=HEADS, **options)
        return np.concatenate([heads.ravel(), keys.ravel(), values.ravel()])

    return {
        "linear": partial(linear, x, weight),
        "linear, normed": partial(linear, x, weight, norm=norm, eps=1e-5),
        "linear, gated": partial(linear, gate_up, weight, gated=True),
        "embed": partial(embed, weight, rng.integers(0, OUTPUTS, rows)),
        "rms_norm": partial(rms_norm, x, norm, 1e-5),
        "silu_mul": partial(silu_mul, gate_up),
        "rope_write_kv": rope,
    }


def test_calls_at_the_same_time_agree_with_calls_alone() -> None:
    weight, start = shared_weight(), threading.Barrier(THREADS)
    failures: list[BaseException] = []

    def work(number: int, jobs: list[tuple[str, Call, bytes]]) -> None:
        rng = random.Random(number)
        try:
            start.wait(60)
            for _ in range(ROUNDS):  # in any order: scratch memory grows, and is larger than it need be
                for name, call, want in rng.sample(jobs, len(jobs)):
                    same = call(num_threads=rng.choice((None, 1, 3))).tobytes() == want
                    assert same, name
        except BaseException as error:
            failures.append(error)

    threads = []
    for number in range(THREADS):
        jobs = [
            (f"{name} of {rows} rows", call, call().tobytes())
            for rows in (least + number for least in ROWS)
            for name, call in calls(weight, rows, np.random.default_rng((number, rows))).items()
        ]
        threads.append(threading.Thread(target=work, args=(number, jobs), daemon=True))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "no end in sight"
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]
