"""Turn the results of scheduler_cost into a dated record.

    python -m benches.report_scheduler target/scheduler.json

writes benches/records/YYYY-MM-DD-scheduler.md.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from datetime import date
from math import sqrt
from pathlib import Path
from statistics import median

import numpy as np
from benches.report import HERE, figure, version
from benches.report_serving import cpu
from benches.scheduler_cost import CASES, PARTS, Result, read
from benches.serving_engines import THREADS

GOALS = {64: 60, 256: 200}
"""Of scheduling and update, in microseconds by running samples."""
VLLM = {256: 2_800}
"""What vLLM 0.32 takes for that."""
JOURNAL_GOAL = 0.03

PHASES = {
    "schedule": "schedule",
    "account": "account: commit, tokens, ends",
    "report": "report: outputs",
    "schedule + update": "**schedule + update**",
    "build": "build the batch",
    "draw": "draw",
    "outside": "all but the model",
}


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---", *["--:"] * (len(heads) - 1)], *rows)] + [""]


def micro(seconds: float) -> str:
    return figure(1e6 * seconds)


def spread(result: Result, phase: str) -> str:
    """The median of the rounds, and the quickest one."""
    return f"{micro(result.figure(phase))} ({micro(result.best(phase))})"


def bounds(values: list[float]) -> tuple[float, float]:
    """Of the median, at some 95 % confidence, whatever the distribution."""
    ranked = sorted(values)
    outside = max(0, int(len(ranked) / 2 - sqrt(len(ranked))))
    return ranked[outside], ranked[-1 - outside]


def of_part(results: list[Result], part: str) -> tuple[dict[tuple[str, int], Result], list[str], list[int]]:
    """The results of a part by name and batch, the names, and the batches."""
    found = {(result.name, result.batch): result for result in results if result.part == part}
    return found, [*dict.fromkeys(name for name, _ in found)], sorted({batch for _, batch in found})


def phases(results: list[Result]) -> list[str]:
    """Where the time goes when nothing else is wanted, beside the goals."""
    found, _, batches = of_part(results, "cost")
    plain = {batch: found["greedy", batch] for batch in batches if ("greedy", batch) in found}
    if not plain:
        return []
    rows = []
    for phase, title in PHASES.items():
        rows.append([title, *(spread(result, phase) for result in plain.values())])
        if phase == "schedule + update":
            rows.append(["… goal", *(f"≤ {GOALS[batch]:,}" if batch in GOALS else "" for batch in plain)])
            rows.append(["… vLLM 0.32", *(f"{VLLM[batch]:,}" if batch in VLLM else "" for batch in plain)])
    return ["## A step of decoding, greedy, by phase", "", *table(["running samples", *map(str, plain)], rows)]


def cases(results: list[Result]) -> list[str]:
    """What else may be wanted."""
    found, names, batches = of_part(results, "cost")
    if not names:
        return []
    order = [case.name for case in CASES if case.name in names]

    def rows(cell: Callable[[Result], str]) -> list[list[str]]:
        return [[name, *(cell(found[name, n]) if (name, n) in found else "" for n in batches)] for name in order]

    heads = ["running samples", *map(str, batches)]
    journaled = [row for row in rows(lambda result: spread(result, "record")) if row[0].startswith("journal")]
    speculation = [found["speculation", n] for n in batches if ("speculation", n) in found]
    tokens = ", ".join(f"{result.figure('tokens') / result.batch:.1f}" for result in speculation)
    return [
        "## Beside that: what else may be wanted",
        "",
        "Schedule + update:",
        "",
        *table(heads, rows(lambda result: spread(result, "schedule + update"))),
        "All but the model (drawing, building the batch, and the journal included):",
        "",
        *table(heads, rows(lambda result: spread(result, "outside"))),
        *([f"With speculation a step gives each sample {tokens} tokens here.", ""] if tokens else []),
        *(["The journal's transactions alone:", "", *table(heads, journaled)] if journaled else []),
        "The mean over steps instead of their median, so with what comes but now and then; the median of rounds:",
        "",
        *table(heads, rows(lambda result: spread(result, "outside, mean"))),
    ]


def model(results: list[Result]) -> list[str]:
    """How much of a real step that is."""
    found, kinds, batches = of_part(results, "model")
    if not kinds:
        return []
    heads = ["weights, running samples", "the model, ms", "draw", "build", "schedule + update", "all but the model"]
    rows = []
    for result in (found[kind, batch] for kind in kinds for batch in batches if (kind, batch) in found):
        outside, forward = result.figure("outside"), result.figure("model")
        share = outside / (outside + forward)
        books = result.figure("schedule + update")
        rows.append(
            [
                f"{result.name}, {result.batch}",
                f"{1e3 * forward:.1f}",
                micro(result.figure("draw")),
                micro(result.figure("build")),
                f"{micro(books)}: {books / (outside + forward):.2%}",
                f"{micro(outside)}: {share:.2%}",
            ]
        )
    what = "The CPU's caches are cold when the model has run. Shares are of the step."
    return ["## Beside SmolLM2", "", what, "", *table(heads, rows)]


def journal(results: list[Result]) -> list[str]:
    """What it takes of the throughput."""
    found, kinds, batches = of_part(results, "journal")
    if not kinds:
        return []
    rows = []
    for result in (found[kind, batch] for kind in kinds for batch in batches if (kind, batch) in found):
        costs = [pair["journal"] / pair["plain"] - 1 for pair in result.rounds]
        low, high = bounds(costs)
        plain, journaled = (float(np.sum([pair[name] for pair in result.rounds])) for name in ("plain", "journal"))
        rows.append(
            [
                f"{result.name}, {result.batch}",
                str(len(costs)),
                f"{median(costs):+.2%} ({low:+.2%} to {high:+.2%})",
                f"{journaled / plain - 1:+.2%}",
            ]
        )
    heads = ["weights, requests", "pairs", "seconds more with a journal", "all pairs together"]
    goal = f"The goal: under {JOURNAL_GOAL:.0%}. Medians of the paired ratios, with their bounds at 95 % confidence."
    return ["## Throughput with a journal", "", goal, "", *table(heads, rows)]


def record(results: list[Result], title: str, notes: str, commands: list[str]) -> str:
    """The whole file, named ``title``."""
    git = version("git", "-C", str(HERE), "describe", "--always", "--dirty")
    rounds = {part: max((len(result.rounds) for result in results if result.part == part), default=0) for part in PARTS}
    lines = [
        f"# What a step costs besides the model, {title.removesuffix('-scheduler')}",
        "",
        f"CPU: {cpu()}, {THREADS} threads. Python {platform.python_version()}, numpy {np.__version__}, LeafKV {git}.",
        f"Medians in µs, of {rounds['cost']} rounds; in brackets the quickest round. What is measured, and how:",
        "[benches/README.md](../README.md).",
        "",
        *([notes, ""] if notes else []),
        *phases(results),
        *cases(results),
        *model(results),
        *journal(results),
        "## Commands",
        "",
        "```sh",
        *commands,
        "```",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the JSON of scheduler_cost")
    parser.add_argument("--date", type=date.fromisoformat, default=date.today(), help="of the measurement")  # noqa: DTZ011
    parser.add_argument("--notes", type=Path, help="a Markdown file to put at the beginning")
    parser.add_argument("--command", action="append", help="that measured; make bench-scheduler if none is given")
    parser.add_argument("--out", type=Path, default=HERE / "records", help="the folder for the file")
    arguments = parser.parse_args()
    title = f"{arguments.date.isoformat()}-scheduler"
    notes = arguments.notes.read_text().strip() if arguments.notes else ""
    arguments.out.mkdir(exist_ok=True)
    out = arguments.out / f"{title}.md"
    out.write_text(record(read(arguments.results), title, notes, arguments.command or ["make bench-scheduler"]))
    print(out)


if __name__ == "__main__":
    main()
