"""Where the time of a decode step goes: each operation of the model, and Python around them.

    python -m benches.profile_step --cache target/serving --kinds F32,Q4_1 --batches 1,16 --out profile.md

A step is timed as it is. Its calls of the extension are then recorded and made again, one after another, without the
code around them: what they take less is Python's, the engine and the model's. Made once more, each is timed by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from benches.serving_engines import LeafKV
from benches.serving_models import Models

from leafkv import SamplingParams
from leafkv.models import llama

PROMPT, STEPS, REPLAYS = 128, 48, 24
OPERATIONS = ("embed", "linear", "rope_write_kv")
Call = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def recording(calls: list[Call], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        label = f"{name} {args[1]!r}".replace("Weight", "") if name == "linear" else name
        calls.append((label, function, args, kwargs))
        return function(*args, **kwargs)

    return call


class Plan:
    def __init__(self, calls: list[Call], plan: Any) -> None:
        self.attend = recording(calls, "attend", plan.attend)


def generate(llm: Any, batch: int, steps: int) -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(1000, 40_000, PROMPT).tolist() for _ in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)


def step_seconds(llm: Any, batch: int) -> float:
    laps, step = [], llm.engine.step

    def timed() -> Any:
        start = time.perf_counter()
        outputs = step()
        laps.append(time.perf_counter() - start)
        return outputs

    with patch.object(llm.engine, "step", timed):
        generate(llm, batch, STEPS)
    return median(laps[-STEPS // 2 :])


def recorded(llm: Any, batch: int) -> list[Call]:
    """The calls of the last step."""
    calls: list[Call] = []
    model = llm.engine.model
    forward = model.forward

    def record(step: Any, cache: Any) -> Any:
        calls.clear()
        return forward(dataclasses.replace(step, plan=Plan(calls, step.plan)), cache)

    functions: dict[str, Any] = {name: recording(calls, name, getattr(llama, name)) for name in OPERATIONS}
    with patch.multiple(llama, **functions), patch.object(model, "forward", record):
        generate(llm, batch, STEPS)
    return calls


def profile(llm: Any, kind: str, batch: int) -> list[str]:
    generate(llm, batch, 4)
    calls = recorded(llm, batch)
    steps, replays, each = [], [], defaultdict(list)
    for _ in range(3):  # in turns: the machine is not always equally fast
        steps.append(step_seconds(llm, batch))
        for _ in range(REPLAYS // 3):
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
    counts = {name: sum(call[0] == name for call in calls) for name in each}
    rows = [(name, f"{counts[name]}", median(seconds)) for name, seconds in each.items()]
    rows.append(("Python", "", max(0.0, step - replay)))
    lines = [f"| {kind}, {batch} at a time | calls | ms | of a step |", "|---|--:|--:|--:|"]
    lines += [f"| {name} | {n} | {1e3 * s:.2f} | {s / step:.1%} |" for name, n, s in rows]
    return [*lines, f"| a step | | {1e3 * step:.2f} | |", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("target/serving"), help="where the models are")
    parser.add_argument("--kinds", default="F32,BF16,Q8_0,Q4_1")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--out", type=Path, help="a Markdown file for the tables")
    arguments = parser.parse_args()
    lines: list[str] = []
    for kind in arguments.kinds.split(","):
        leafkv = LeafKV(kind)
        leafkv.load(Models(arguments.cache))
        for batch in map(int, arguments.batches.split(",")):
            table = profile(leafkv.llm, kind, batch)
            print("\n".join(table), flush=True)
            lines += table
    if arguments.out:
        arguments.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
