"""Where the time of a step goes: each operation of the model, and Python around them.

    python -m benches.profile_step --cache target/serving --kinds F32,Q4_1 --batches 1,16 --out profile.md

Steps of the engine take turns. One is timed as it is. Of the next one the calls of the extension are recorded and, at
once, made again without the code around them, all together, and then each timed by itself. What they take less than the
step before is Python's: the engine, the model, and what a step does but once (block tables, the plan of attention,
sampling). The table has the median of these paired differences, in which a change of the machine's speed cancels, and
the bounds of it, at some 95 % confidence: if zero lies between them, Python is lost in the noise. A prompt takes turns
as a whole.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from benches.serving_engines import LeafKV, touch_memory
from benches.serving_models import Models
from numpy.typing import NDArray

from leafkv import SamplingParams
from leafkv.models import llama

STEPS, RUNS, PROMPTS = 48, 3, 12
"""Of decoding, steps of a run and runs; and runs of a prompt. Turns are pairs: the first and the last are even."""
OPERATIONS = ("embed", "linear", "rope_write_kv")
Call = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Work:
    """Prompts, and tokens that are made of each: decoding if there are many, else what the prompts cost."""

    name: str
    batch: int
    prompt: int
    new: int
    seeds: Iterator[int] = field(default_factory=itertools.count)

    @property
    def decodes(self) -> bool:
        return self.new > 1

    def run(self, llm: Any, new: int | None = None) -> int:
        """How many steps that takes."""
        # What was asked before is cached: good for decoding, and no prompt at all otherwise.
        random = np.random.default_rng(0 if self.decodes else next(self.seeds))
        prompts = [random.integers(1000, 40_000, self.prompt).tolist() for _ in range(self.batch)]
        params = SamplingParams(temperature=0.0, max_tokens=new or self.new, ignore_eos=True, detokenize=False)
        before = llm.stats().steps
        llm.generate(prompts, params, use_tqdm=False)
        return int(llm.stats().steps - before)


class Turns:
    """An engine's step, in turns of some steps: timed, replayed, timed, replayed, ... All figures are in seconds."""

    def __init__(self, engine: Any, length: int) -> None:
        self.model, self.step, self.length = engine.model, engine.step, length
        self.done = 0
        # By pair of turns.
        self.steps: dict[int, float] = defaultdict(float)
        self.replays: dict[int, float] = defaultdict(float)
        self.each: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.costs: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(3))
        """Of all turns: calls, bytes that linear layers read, operations that they compute."""

    def __call__(self) -> Any:
        pair, replayed = divmod(self.done // self.length, 2)
        self.done += 1
        if not replayed:
            start = time.perf_counter()
            outputs = self.step()
            self.steps[pair] += time.perf_counter() - start
            return outputs
        outputs, calls = self.record()
        # At once: what the calls read and write is there until the next step.
        start = time.perf_counter()
        for _, function, args, kwargs in calls:
            function(*args, **kwargs)
        self.replays[pair] += time.perf_counter() - start
        for name, function, args, kwargs in calls:
            start = time.perf_counter()
            function(*args, **kwargs)
            self.each[name][pair] += time.perf_counter() - start
        for name, _, args, _ in calls:
            self.costs[name] += cost(name, args)
        return outputs

    def record(self) -> tuple[Any, list[Call]]:
        calls: list[Call] = []
        forward = self.model.forward

        def recorded(step: Any, cache: Any) -> Any:
            return forward(replace(step, plan=Plan(calls, step.plan)), cache)

        functions: dict[str, Any] = {name: recording(calls, name, getattr(llama, name)) for name in OPERATIONS}
        with patch.multiple(llama, **functions), patch.object(self.model, "forward", recorded):
            return self.step(), calls


def recording(calls: list[Call], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        label = f"{name} {args[1]!r}".replace("Weight", "") if name == "linear" else name
        calls.append((label, function, args, kwargs))
        return function(*args, **kwargs)

    return call


class Plan:
    def __init__(self, calls: list[Call], plan: Any) -> None:
        self.attend = recording(calls, "attend", plan.attend)


def cost(name: str, args: tuple[Any, ...]) -> tuple[int, int, int]:
    """1, and what a linear layer reads and computes."""
    if not name.startswith("linear"):
        return 1, 0, 0
    rows, weight = len(args[0]), args[1]
    return 1, weight.nbytes, 2 * rows * weight.shape[0] * weight.shape[1]


def profile(llm: Any, kind: str, work: Work) -> list[str]:
    work.run(llm, new=4)
    turns = Turns(llm.engine, 1 if work.decodes else work.run(llm))
    with patch.object(llm.engine, "step", turns):
        for _ in range(RUNS if work.decodes else PROMPTS):
            work.run(llm)
    step = median(turns.steps.values())
    lines = [f"| {kind}, {work.name} | calls | ms | share | GB/s | GFLOP/s |", "|---|--:|--:|--:|--:|--:|"]
    for name, samples in turns.each.items():
        seconds = median(samples.values())
        calls, read, computed = turns.costs[name] / len(turns.replays)
        rates = f"{read / seconds / 1e9:.1f} | {computed / seconds / 1e9:.0f}" if read else " | "
        lines.append(f"| {name} | {calls:.0f} | {1e3 * seconds:.2f} | {seconds / step:.1%} | {rates} |")
    rests = sorted(1e3 * (turns.steps[pair] - replay) for pair, replay in turns.replays.items())
    rest, outside = median(rests), max(0, int(len(rests) / 2 - sqrt(len(rests))))
    bounds = f"({rests[outside]:.2f} to {rests[-1 - outside]:.2f})"
    lines.append(f"| Python | | {rest:.2f} {bounds} | {rest / 1e3 / step:.1%} | | |")
    return [*lines, f"| all | | {1e3 * step:.2f} | | | |", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("target/serving"), help="where the models are")
    parser.add_argument("--kinds", default="F32,BF16,Q8_0,Q4_1")
    parser.add_argument("--batches", default="1,16", help="of sequences that decode")
    parser.add_argument("--prompt", type=int, default=1_024, help="tokens of a prompt; 0 for none")
    parser.add_argument("--out", type=Path, help="a Markdown file for the tables")
    arguments = parser.parse_args()
    lines: list[str] = []
    for kind in arguments.kinds.split(","):
        leafkv = LeafKV(kind)
        leafkv.load(Models(arguments.cache))
        touch_memory()
        works = [Work(f"a step of {n}", n, 128, STEPS) for n in map(int, arguments.batches.split(","))]
        if arguments.prompt:
            works.append(Work(f"a prompt of {arguments.prompt}", 1, arguments.prompt, 1))
        for work in works:
            table = profile(leafkv.llm, kind, work)
            print("\n".join(table), flush=True)
            lines += table
    if arguments.out:
        arguments.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
