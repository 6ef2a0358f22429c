"""Linear layers, LeafKV's beside the alternatives: one process, the same numbers, in turns.

    python -m benches.compare_linear --shapes 'smol*' --rows 1,16 --json out.json

Peers that are not installed are left out. Each result is checked against a product in float64, and each alternative
for whether a row's result depends on the other rows of its batch. README.md beside this file says what is measured.
"""

# ruff: noqa: E402, for variables that are read when numpy is imported

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

# They would slow numpy's BLAS down.
for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OPENBLAS_NUM_THREADS"):
    os.environ.pop(variable, None)

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SHAPES = {  # columns, rows of the weights
    "smol-qkv": (576, 960),
    "smol-attention-out": (576, 576),
    "smol-gate-up": (576, 3_072),
    "smol-down": (1_536, 576),
    "smol-lm-head": (576, 49_152),
    "llama-qkv": (4_096, 6_144),
    "llama-gate-up": (4_096, 28_672),
}
ROWS = (1, 4, 16, 128, 1_024)
COLD = 256 << 20
"""Bytes of weights, of several layers of a shape, that a cycle of calls reads: as in a model, they come from memory."""
MOST_LAYERS = 64
BATCHES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128)
"""In which a row must give what it gives alone."""
REST = 0.3
"""Seconds before each one's turn: the threads of OpenMP spin that long after their work, on everyone's cores."""
WARM = 0.02
"""Seconds of calls at the beginning of a turn that do not count."""


class Peer(ABC):
    """A way to compute a linear layer. ``dtype``, "f32" or "bf16", is of its weights: how the peers are compared."""

    name: str

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    @abstractmethod
    def pack(self, weight: Floats) -> Any:
        """A copy of weights [rows, columns] in the form that `product` takes. Raises `ImportError`."""

    @abstractmethod
    def rows(self, x: Floats) -> Any:
        """The input likewise."""

    @abstractmethod
    def product(self, x: Any, packed: Any) -> Any: ...

    def floats(self, out: Any) -> Floats:
        found: Floats = out if isinstance(out, np.ndarray) else out.float().numpy()
        return found


class Numpy(Peer):
    """OpenBLAS."""

    name = "numpy"

    def pack(self, weight: Floats) -> Any:
        return weight.copy().T

    def rows(self, x: Floats) -> Any:
        return x

    def product(self, x: Any, packed: Any) -> Any:
        return x @ packed


class LeafKV(Peer):
    name = "LeafKV"

    @property
    def precision(self) -> Any:
        return "float32" if self.dtype == "f32" else "bfloat16"

    def pack(self, weight: Floats) -> Any:
        from leafkv._core import Weight  # noqa: PLC0415

        return Weight([(self.precision, weight.copy() if self.dtype == "f32" else bfloat16(weight))])

    def rows(self, x: Floats) -> Any:
        return x

    def product(self, x: Any, packed: Any) -> Any:
        from leafkv._core import linear  # noqa: PLC0415

        return linear(x, packed, precision=self.precision, num_threads=THREADS)


def bfloat16(x: Floats) -> NDArray[np.uint16]:
    """The bits of the nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Torch(Peer):
    """`F.linear`."""

    name = "torch"

    def rows(self, x: Floats) -> Any:
        import torch  # noqa: PLC0415

        torch.set_num_threads(THREADS)
        return torch.from_numpy(x.copy()).to(torch.float32 if self.dtype == "f32" else torch.bfloat16)

    def pack(self, weight: Floats) -> Any:
        return self.rows(weight)

    def product(self, x: Any, packed: Any) -> Any:
        import torch  # noqa: PLC0415

        return torch.nn.functional.linear(x, packed)


class TorchPacked(Torch):
    """oneDNN, by the operators that `torch.compile` uses: weights are packed once, for batches of ``batch`` rows."""

    def __init__(self, dtype: str, batch: int) -> None:
        super().__init__(dtype)
        self.batch = batch
        self.name = f"torch, oneDNN packed for {batch}"

    def pack(self, weight: Floats) -> Any:
        import torch  # noqa: PLC0415

        return torch.ops.mkldnn._reorder_linear_weight(self.rows(weight), self.batch)

    def product(self, x: Any, packed: Any) -> Any:
        import torch  # noqa: PLC0415

        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], None)


class TorchMkl(Torch):
    """MKL, likewise; float32 alone. Weights are packed for one number of rows: other batches multiply unpacked."""

    name = "torch, MKL packed for 16"

    def pack(self, weight: Floats) -> Any:
        import torch  # noqa: PLC0415

        tensor = self.rows(weight)
        return torch.ops.mkl._mkl_reorder_linear_weight(tensor, 16), tensor

    def product(self, x: Any, packed: Any) -> Any:
        import torch  # noqa: PLC0415

        return torch.ops.mkl._mkl_linear(x, *packed, None, 16)


def peers() -> list[Peer]:
    found: list[Peer] = [LeafKV("f32"), LeafKV("bf16"), Numpy("f32"), Torch("f32"), Torch("bf16")]
    return [*found, *(TorchPacked(dtype, batch) for dtype in ("f32", "bf16") for batch in (1, 128)), TorchMkl("f32")]


@dataclass
class Result:
    """A peer's times for a shape and a number of rows; ``invariant`` of the shape, None where it was not tried."""

    shape: str
    rows: int
    peer: str
    dtype: str
    error: float
    seconds: float
    bytes: float
    operations: float
    invariant: bool | None
    samples: list[float] = field(repr=False, default_factory=list)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def invariant(peer: Peer, packed: Any, x: Floats) -> bool:
    """Whether rows give the same bits alone and in every batch, at its beginning, middle and end."""
    most = max(BATCHES)
    alone = {
        i: peer.floats(peer.product(peer.rows(x[i : i + 1]), packed)) for i in (0, 1, most // 2, most - 2, most - 1)
    }
    for batch in BATCHES:
        for start in (0, most - batch):
            out = peer.floats(peer.product(peer.rows(x[start : start + batch]), packed))
            for i, row in alone.items():
                if start <= i < start + batch and not np.array_equal(out[i - start], row[0]):
                    return False
    return True


def compare(shape: str, rows: tuple[int, ...], chosen: list[Peer], rounds: int, budget: float) -> list[Result]:
    """All peers in turns, ``budget`` seconds each in each round."""
    columns, outputs = SHAPES[shape]
    rng = np.random.default_rng(1)
    count = min(MOST_LAYERS, max(1, -(-COLD // (columns * outputs * 4))))
    # Layers of the same numbers lie apart all the same.
    weights = [rng.standard_normal((outputs, columns), dtype=np.float32) / np.float32(columns**0.5)] * count
    x = rng.standard_normal((max(*rows, *BATCHES), columns), dtype=np.float32)
    some = [0, len(x) // 2, len(x) - 1]
    reference = x[some].astype(np.float64) @ weights[0].T.astype(np.float64)
    running: list[tuple[Peer, list[Any], float, bool]] = []
    for peer in chosen:
        try:
            layers = [peer.pack(weight) for weight in weights]
        except (ImportError, AttributeError, RuntimeError) as error:
            print(f"{shape}: {peer.name}, {peer.dtype} left out: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        off = float(np.abs(peer.floats(peer.product(peer.rows(x), layers[0]))[some] - reference).max())
        most = 1e-4 if peer.dtype == "f32" else 5e-2
        if not off <= most:
            raise AssertionError(f"{shape}: {peer.name}, {peer.dtype} is off by {off:.2g}, expected {most} at most")
        running.append((peer, layers, off, invariant(peer, layers[0], x)))
    results = []
    for n in rows:
        samples: list[list[float]] = [[] for _ in running]
        for i in range(rounds):
            for (peer, layers, _, _), own in list(zip(running, samples, strict=True))[:: -1 if i % 2 else 1]:
                given = peer.rows(x[:n])
                time.sleep(REST)
                started = time.perf_counter()
                while True:
                    first = seconds(lambda: peer.product(given, layers[0]))  # noqa: B023
                    if time.perf_counter() - started > WARM:
                        break
                calls = max(3, min(200, int(budget / first)))
                own += [seconds(lambda: peer.product(given, layers[(k + 1) % count])) for k in range(calls)]  # noqa: B023
        for (peer, _, off, same), own in zip(running, samples, strict=True):
            size = columns * outputs * (4 if peer.dtype == "f32" else 2)
            middle = median(own)
            operations = 2 * n * columns * outputs
            rates = size / middle, operations / middle
            results.append(Result(shape, n, peer.name, peer.dtype, off, middle, *rates, same, own))
    return results


def table(results: list[Result]) -> str:
    """Markdown, a table for each shape and dtype: microseconds, and GB/s of weights or, of many rows, GFLOP/s."""
    lines = []
    for shape, dtype in dict.fromkeys((result.shape, result.dtype) for result in results):
        of_shape = [result for result in results if (result.shape, result.dtype) == (shape, dtype)]
        rows = list(dict.fromkeys(result.rows for result in of_shape))
        heads = [f"{n} rows: µs | {'GB/s' if n <= 4 else 'GFLOP/s'}" for n in rows]
        lines += [f"**{shape}** {SHAPES[shape][0]} to {SHAPES[shape][1]}, {dtype}", ""]
        lines += [f"| | {' | '.join(heads)} | batch-invariant |", "|---" + "|--:" * 2 * len(rows) + "|---|"]
        for peer in dict.fromkeys(result.peer for result in of_shape):
            mine = {result.rows: result for result in of_shape if result.peer == peer}
            cells = [
                f"{mine[n].seconds * 1e6:.4g} | {(mine[n].bytes if n <= 4 else mine[n].operations) / 1e9:.1f}"
                if n in mine
                else " | "
                for n in rows
            ]
            same = "yes" if next(iter(mine.values())).invariant else "no"
            lines.append(f"| {peer} | {' | '.join(cells)} | {same} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="*", help="a pattern of names, such as 'smol*'")
    parser.add_argument("--peers", default="*", help="likewise, such as 'torch*'; several are parted by ;")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=0.05, help="seconds for a peer in a round")
    parser.add_argument("--json", type=Path, help="the raw data; those of other shapes in it are kept")
    arguments = parser.parse_args()
    patterns, dtypes = arguments.peers.split(";"), arguments.dtypes.split(",")
    chosen = [p for p in peers() if p.dtype in dtypes and any(fnmatch.fnmatch(p.name, q) for q in patterns)]
    shapes = [shape for shape in SHAPES if fnmatch.fnmatch(shape, arguments.shapes)]
    rows = tuple(map(int, arguments.rows.split(",")))
    results: list[Result] = []
    if arguments.json and arguments.json.exists():
        results = [Result(**r) for r in json.loads(arguments.json.read_text())]
        results = [result for result in results if result.shape not in shapes]
    for shape in shapes:
        measured = compare(shape, rows, chosen, arguments.rounds, arguments.budget)
        print(table(measured), flush=True)
        results += measured
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main()
