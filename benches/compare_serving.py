"""SmolLM2-135M beside other engines: the same prompts of token ids, answered greedily, in turns.

    python -m benches.compare_serving --cache models --engines 'LeafKV*;vLLM*' --kinds F32 --cases ab --json out.json

Each engine is a process of its own, which loads once and is stopped while another is measured. One that is not
installed or fails is reported, and the rest runs. README.md beside this file says what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fnmatch
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from benches.serving_engines import THREADS, Engine, Limits, common, engines, touch_memory
from benches.serving_models import Models

LIMITS = "limits"
"""The worker that measures the machine instead of an engine."""
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OPENBLAS_NUM_THREADS")
"""They would slow numpy's BLAS down."""
LOADING, ANSWERING = 900, 300
"""Seconds after which an engine is given up; vLLM compiles for minutes."""
SLOW = 60
"""Seconds that a turn takes before an engine is measured enough by one."""


@dataclass(frozen=True)
class Case:
    """Requests that arrive at once: tokens that all prompts begin with, tokens of each alone, and of each answer."""

    name: str
    requests: int
    shared: int
    own: int
    new: int
    warm: bool = False
    """Whether the same prompts were answered just before."""

    def prompts(self, seed: int) -> list[list[int]]:
        # The first ids are special tokens.
        rng = np.random.default_rng([seed, self.requests, self.shared, self.own])
        shared: list[int] = rng.integers(20, 49_000, self.shared).tolist()
        own: list[list[int]] = rng.integers(20, 49_000, (self.requests, self.own)).tolist()
        return [[*shared, *tokens] for tokens in own]


CASES = {
    case.name: case
    for case in (
        Case("a", 1, 0, 128, 128),
        Case("b", 16, 0, 128, 128),
        Case("c", 16, 1_024, 32, 64),
        Case("d", 16, 1_024, 32, 64, warm=True),
        Case("p", 1, 0, 1_024, 1),
    )
}
TURNS = ("a", "b", "cd", "p")
"""What an engine is asked in one go."""

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY = 30, 576, 9, 3, 64, 1_536, 49_152
OF_LAYERS = LAYERS * (2 * HIDDEN * HEAD_DIM * (HEADS + KV_HEADS) + 3 * HIDDEN * INNER)
OF_OUTPUT = HIDDEN * VOCABULARY
"""Weights of the matrices."""
BYTES = {"F32": (4, 4), "BF16": (2, 2), "Q8_0": (34 / 32, 34 / 32), "Q4_1": (20 / 32, 34 / 32)}
"""Of a weight in the layers, and in the output matrix, where the file of Q4_1 has Q8_0."""


def bound(case: Case, kind: str, stream: float, peak: float) -> float:
    """Seconds that the machine needs at least: each step reads all weights and KV once, or is bound by arithmetic.

    A prefix that prompts share is computed once, and not at all if it is warm.
    """
    of_layers, of_output = BYTES[kind]
    weights = OF_LAYERS * of_layers + OF_OUTPUT * of_output
    kv = LAYERS * 2 * KV_HEADS * HEAD_DIM * (4 if kind == "F32" else 2)

    def step(tokens: int, visible: float, context: float) -> float:
        """Of some tokens, which see others; the KV of ``context`` is read."""
        multiplied = OF_LAYERS * tokens + OF_OUTPUT * case.requests + 2 * LAYERS * HEADS * HEAD_DIM * visible
        return max((weights + kv * context) / stream, 2 * multiplied / peak)

    mean = case.own + case.new / 2
    decode = step(case.requests, case.requests * (case.shared + mean), case.shared + case.requests * mean)
    if case.warm:
        return case.new * decode
    visible = case.shared**2 / 2 + case.requests * case.own * (case.shared + case.own / 2)
    return step(case.shared + case.requests * case.own, visible, 0) + (case.new - 1) * decode


@dataclass
class Result:
    """An engine's turns in a case, and the machine's limits in that run, per second.

    ``seconds`` of all answers, ``first`` seconds to the first tokens on average, ``tokens`` of the first turn.
    """

    engine: str
    kind: str
    case: str
    version: str = ""
    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    stream: float = 0.0
    peak: float = 0.0
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.engine, self.kind, self.case

    @property
    def share(self) -> float:
        """Of what the machine can do."""
        return bound(CASES[self.case], self.kind, self.stream, self.peak) / median(self.seconds)


def work(label: str, folder: Path) -> None:
    """An engine's process: answers a line on standard input by one on standard output."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print goes to the log
    die_with_parent()
    if label == LIMITS:
        limits = Limits()
        print("{}", file=pipe)
        for _ in sys.stdin:
            print(json.dumps(limits.measure()), file=pipe)
        return
    engine = next(engine for engine in engines() if engine.label == label)
    engine.load(Models(folder))
    for name in "ap":  # what is made on first use
        engine.run(CASES[name].prompts(0), min(CASES[name].new, 2))
    touch_memory()
    before: list[list[int]] = []
    print(json.dumps({"version": engine.version()}), file=pipe)
    for line in sys.stdin:
        name, seed = json.loads(line)
        case = CASES[name]
        prompts = case.prompts(seed)
        if case.warm and prompts != before:
            engine.run(prompts, case.new)
        print(json.dumps(asdict(engine.run(prompts, case.new))), file=pipe)
        before = prompts


def die_with_parent() -> None:
    """Even while stopped, where the system knows how."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class WorkerError(Exception):
    """An engine's process ended, or did not answer."""


class Worker:
    """An engine's process, stopped whenever nothing is asked of it."""

    def __init__(self, label: str, environment: dict[str, str], folder: Path) -> None:
        self.log = folder / f"{label}.log"
        clean = {name: value for name, value in os.environ.items() if name not in UNSET}
        command = [sys.executable, "-m", "benches.compare_serving", "--worker", label, "--cache", str(folder)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=clean | {"OMP_NUM_THREADS": str(THREADS)} | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                start_new_session=True,
            )

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def answer(self, timeout: float) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            last = self.log.read_text().strip().splitlines()[-1:]
            raise WorkerError(last[0] if ready and last else f"no answer within {timeout} s")
        os.killpg(self.process.pid, signal.SIGSTOP)
        return json.loads(line)

    def ask(self, *question: object) -> Any:
        assert self.process.stdin is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(json.dumps(question) + "\n")
        return self.answer(ANSWERING)


def compare(kind: str, of_kind: list[Engine], turns: list[str], rounds: int, folder: Path) -> Iterator[list[Result]]:
    """The engines of one kind, in turns; what is known after each."""
    results = {
        engine.name: {name: Result(engine.name, kind, name) for turn in turns for name in turn} for engine in of_kind
    }
    running: dict[str, Worker] = {}
    measured: list[dict[str, float]] = []

    def fail(name: str, error: WorkerError) -> None:
        print(f"{name}: {error}", file=sys.stderr)
        for result in results[name].values():
            result.error = str(error)
        running.pop(name, None)

    def with_limits() -> list[Result]:
        found = [result for of_engine in results.values() for result in of_engine.values()]
        for result in found:
            result.stream = median(limit["stream"] for limit in measured)
            result.peak = median(limit["F32" if kind == "F32" else "BF16"] for limit in measured)
        return found

    start = time.monotonic()
    with contextlib.ExitStack() as workers:
        limits = Worker(LIMITS, {}, folder)
        workers.callback(limits.close)
        limits.answer(LOADING)
        for engine in of_kind:
            worker = Worker(engine.label, engine.environment, folder)
            workers.callback(worker.close)
            try:
                version = worker.answer(LOADING)["version"]
            except WorkerError as error:
                fail(engine.name, error)
                continue
            print(f"{engine.label}: loaded after {time.monotonic() - start:.0f} s", file=sys.stderr)
            running[engine.name] = worker
            for result in results[engine.name].values():
                result.version = version
        for i in range(rounds):
            for turn in turns:
                measured.append(limits.ask())
                for name in list(running)[:: -1 if i % 2 else 1]:
                    asked = [results[name][case] for case in turn]
                    if sum(sum(result.seconds) for result in asked) > SLOW:
                        continue
                    try:
                        for result in asked:
                            run = running[name].ask(result.case, i + 1)
                            result.seconds.append(run["seconds"])
                            result.first.append(run["first"])
                            result.tokens = result.tokens or run["tokens"]
                    except WorkerError as error:
                        fail(name, error)
                    print(f"{kind}, round {i + 1}: {turn} {name}", file=sys.stderr)
                    yield with_limits()
        yield with_limits()


def equal_tokens(result: Result, results: list[Result]) -> str:
    """How many tokens are LeafKV's, up to where an answer parts from it: float32 alone is fair for that."""
    ours = next((r for r in results if r.key == ("LeafKV", "F32", result.case)), None)
    if result.kind != "F32" or ours is None or not ours.tokens:
        return ""
    same = sum(map(common, result.tokens, ours.tokens))
    return f"{same} of {sum(map(len, ours.tokens))}"


def figure_of(result: Result, spread: bool = False) -> str:
    """Of a case's turns the median, with the least and the most."""
    case = CASES[result.case]
    rate = result.case in "abd"
    figures = [case.requests * case.new / s if rate else s for s in result.seconds]
    digits = 1 if rate else 2
    around = f" ({min(figures):.{digits}f} to {max(figures):.{digits}f})" if spread and len(figures) > 1 else ""
    return f"{median(figures):.{digits}f}{around}"


def cells(result: Result) -> tuple[str, str, str]:
    """The figure of a case, with its spread; the share of the bound; the time to the first token."""
    if not result.seconds:
        return "", "", ""
    return figure_of(result, spread=True), f"{result.share:.0%}", f"{median(result.first):.2f}"


HEADS_OF_TABLE = {"a": "a: tokens/s", "b": "b: tokens/s", "c": "c: s", "d": "d: tokens/s", "p": "p: s"}


def table(results: list[Result]) -> str:
    """Markdown, a table for each kind of weights: medians, the fastest and slowest turn, shares of the bound."""
    lines = []
    for kind in dict.fromkeys(result.kind for result in results):
        of_kind = [result for result in results if result.kind == kind]
        names = [name for name in CASES if any(result.case == name for result in of_kind)]
        stream, peak = of_kind[0].stream / 1e9, of_kind[0].peak / 1e9
        heads = [
            part for name in names for part in (HEADS_OF_TABLE[name], "of bound", *(["first, s"] * (name in "cd")))
        ]
        lines += [f"**{kind}** (stream {stream:.1f} GB/s, peak {peak:.0f} GFLOP/s)", ""]
        lines += ["| engine | " + " | ".join(heads) + " | equal tokens |", "|---" + "|--:" * (len(heads) + 1) + "|"]
        for engine in dict.fromkeys(result.engine for result in of_kind):
            by_case = {result.case: result for result in of_kind if result.engine == engine}
            parts: list[str] = []
            equal: list[str] = []
            for name in names:
                figure, share, first = cells(by_case[name]) if name in by_case else ("", "", "")
                parts += [figure, share, *([first] * (name in "cd"))]
                if name in by_case and (same := equal_tokens(by_case[name], results)):
                    equal.append(same)
            lines.append(f"| {engine} | " + " | ".join(parts) + f" | {'; '.join(equal)} |")
        lines.append("")
        errors = dict.fromkeys((result.engine, result.error) for result in of_kind if result.error)
        lines += [f"{engine} left out: {error}" for engine, error in errors] + [""] * bool(errors)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="a folder for models in every format, and for logs")
    parser.add_argument("--engines", default="*", help="a pattern of names, such as 'vLLM*'; several are parted by ;")
    parser.add_argument("--kinds", default=",".join(BYTES), help="of weights, one after the other")
    parser.add_argument("--cases", default="".join(CASES), help="letters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="the raw data; those of other engines and cases in it are kept")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.cache)
        os._exit(0)  # whatever threads an engine has
    patterns = arguments.engines.split(";")
    turns = [turn for turn in ("".join(c for c in turn if c in arguments.cases) for turn in TURNS) if turn]
    results: list[Result] = []
    if arguments.json and arguments.json.exists():
        results = [Result(**result) for result in json.loads(arguments.json.read_text())]
    arguments.cache.mkdir(parents=True, exist_ok=True)
    for kind in arguments.kinds.split(","):
        chosen = [e for e in engines() if e.kind == kind and any(fnmatch.fnmatch(e.name, p) for p in patterns)]
        before, found = results, []
        for found in compare(kind, chosen, turns, arguments.rounds, arguments.cache.resolve()):
            names = {result.key for result in found}
            results = [result for result in before if result.key not in names] + found
            if arguments.json:
                arguments.json.write_text(json.dumps([asdict(result) for result in results]))
        print(table(found), flush=True)


if __name__ == "__main__":
    main()
