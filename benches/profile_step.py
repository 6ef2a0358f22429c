"""Where the time of a step goes: each operation of the model, and Python around them.

    python -m benches.profile_step --cache target/serving --kinds F32,Q4_1 --batches 1,16 --out profile.md

A step is timed as it is: the last ones of a decoding batch, or all of a new prompt. Its calls of the extension are then
recorded and made again, one after another, without the code around them: what they take less is Python's, the engine
and the model's. Made once more, each is timed by itself.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from benches.serving_engines import LeafKV
from benches.serving_models import Models

from leafkv import SamplingParams
from leafkv.models import llama

STEPS, REPLAYS = 48, 24
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

    def run(self, llm: Any, new: int | None = None) -> None:
        # What was asked before is cached: good for decoding, and no prompt at all otherwise.
        random = np.random.default_rng(0 if self.decodes else next(self.seeds))
        prompts = [random.integers(1000, 40_000, self.prompt).tolist() for _ in range(self.batch)]
        params = SamplingParams(temperature=0.0, max_tokens=new or self.new, ignore_eos=True, detokenize=False)
        llm.generate(prompts, params, use_tqdm=False)

    def seconds(self, llm: Any) -> float:
        laps, step = [], llm.engine.step

        def timed() -> Any:
            start = time.perf_counter()
            outputs = step()
            laps.append(time.perf_counter() - start)
            return outputs

        with patch.object(llm.engine, "step", timed):
            self.run(llm)
        return median(laps[-self.new // 2 :]) if self.decodes else sum(laps)

    def calls(self, llm: Any) -> list[Call]:
        """Of the last step, or of all."""
        calls: list[Call] = []
        model = llm.engine.model
        forward = model.forward

        def record(step: Any, cache: Any) -> Any:
            if self.decodes:
                calls.clear()
            return forward(replace(step, plan=Plan(calls, step.plan)), cache)

        functions: dict[str, Any] = {name: recording(calls, name, getattr(llama, name)) for name in OPERATIONS}
        with patch.multiple(llama, **functions), patch.object(model, "forward", record):
            self.run(llm)
        return calls


def recording(calls: list[Call], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        label = f"{name} {args[1]!r}".replace("Weight", "") if name == "linear" else name
        calls.append((label, function, args, kwargs))
        return function(*args, **kwargs)

    return call


class Plan:
    def __init__(self, calls: list[Call], plan: Any) -> None:
        self.attend = recording(calls, "attend", plan.attend)


def rates(calls: list[Call], seconds: float) -> str:
    """What linear layers of one shape read and compute."""
    if not calls[0][0].startswith("linear"):
        return " | "
    read = sum(args[1].nbytes for _, _, args, _ in calls)
    computed = sum(2 * len(args[0]) * args[1].shape[0] * args[1].shape[1] for _, _, args, _ in calls)
    return f"{read / seconds / 1e9:.1f} | {computed / seconds / 1e9:.0f}"


def profile(llm: Any, kind: str, work: Work) -> list[str]:
    work.run(llm, new=4)
    calls = work.calls(llm)
    steps, replays, each = [], [], defaultdict(list)
    for _ in range(3):  # in turns: the machine is not always equally fast
        steps.append(work.seconds(llm))
        for _ in range(REPLAYS // 3 if work.decodes else 2):
            start = time.perf_counter()
            for _, function, args, kwargs in calls:
                function(*args, **kwargs)
            replays.append(time.perf_counter() - start)
            spent: dict[str, float] = defaultdict(float)
            for name, function, args, kwargs in calls:
                start = time.perf_counter()
                function(*args, **kwargs)
                spent[name] += time.perf_counter() - start
            for name, seconds in spent.items():
                each[name].append(seconds)
    step, replay = median(steps), median(replays)
    lines = [f"| {kind}, {work.name} | calls | ms | share | GB/s | GFLOP/s |", "|---|--:|--:|--:|--:|--:|"]
    for name, samples in each.items():
        same, seconds = [call for call in calls if call[0] == name], median(samples)
        share = f"{len(same)} | {1e3 * seconds:.2f} | {seconds / step:.1%}"
        lines.append(f"| {name} | {share} | {rates(same, seconds)} |")
    rest = max(0.0, step - replay)
    lines.append(f"| Python | | {1e3 * rest:.2f} | {rest / step:.1%} | | |")
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
