"""Turn the results of compare_serving into a dated record.

    python -m benches.report_serving target/serving.json --profile target/profile.md

writes benches/records/YYYY-MM-DD-serving.md.
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import date
from pathlib import Path
from statistics import median

from benches.compare_serving import CASES, HEADS_OF_TABLE, Result, figure_of, table
from benches.report import HERE, version
from benches.serving_engines import THREADS


def cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def summary(results: list[Result]) -> list[str]:
    """LeafKV's figures, and how many times as long the fastest other engine takes with weights of the same type."""
    names = [name for name in CASES if any(result.case == name for result in results)]
    lines = ["| LeafKV | " + " | ".join(HEADS_OF_TABLE[name] for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind in dict.fromkeys(result.kind for result in results):
        cells = []
        for name in names:
            measured = [r for r in results if (r.kind, r.case) == (kind, name) and r.seconds]
            ours = next((r for r in measured if r.engine == "LeafKV"), None)
            others = [r for r in measured if r.engine != "LeafKV"]
            best = min(others, key=lambda r: median(r.seconds), default=None)
            cell = "" if ours is None else figure_of(ours)
            if ours is not None and best is not None:
                cell += f"; {best.engine} {median(best.seconds) / median(ours.seconds):.2f}"
            cells.append(cell)
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def record(results: list[Result], title: str, notes: str, profile: str, commands: list[str]) -> str:
    """The whole file, named ``title``."""
    versions = dict.fromkeys(result.version for result in results if result.version)
    git = version("git", "-C", str(HERE), "describe", "--always", "--dirty")
    lines = [
        f"# SmolLM2-135M beside other engines, {title.removesuffix('-serving')}",
        "",
        f"CPU: {cpu()}, {THREADS} threads. Python {platform.python_version()}, {', '.join(versions)} ({git}).",
        "Medians. What is measured, and how: [benches/README.md](../README.md).",
        "",
        *([notes, ""] if notes else []),
        "## Beside the fastest other engine",
        "",
        "LeafKV's figures, and how many times as long the fastest other engine takes with weights of the same type.",
        "",
        *summary(results),
        "## All figures",
        "",
        "With the slowest and the fastest turn, and as shares of what the machine can do at best. Equal tokens are",
        "LeafKV's, up to where an answer parts from its.",
        "",
        table(results),
        *(["## Where LeafKV's time goes", "", profile, ""] if profile else []),
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
    parser.add_argument("results", type=Path, help="the JSON of compare_serving")
    parser.add_argument("--date", type=date.fromisoformat, default=date.today(), help="of the measurement")  # noqa: DTZ011
    parser.add_argument("--notes", type=Path, help="a Markdown file to put at the beginning")
    parser.add_argument("--profile", type=Path, help="the Markdown of profile_step")
    parser.add_argument("--command", action="append", help="that measured; make bench-serving if none is given")
    parser.add_argument("--out", type=Path, default=HERE / "records", help="the folder for the file")
    arguments = parser.parse_args()
    title = f"{arguments.date.isoformat()}-serving"
    notes, profile = (path.read_text().strip() if path else "" for path in (arguments.notes, arguments.profile))
    results = [Result(**result) for result in json.loads(arguments.results.read_text())]
    commands = arguments.command or ["make bench-serving PYTHON_PEERS=peers/bin/python"]
    arguments.out.mkdir(exist_ok=True)
    out = arguments.out / f"{title}.md"
    out.write_text(record(results, title, notes, profile, commands))
    print(out)


if __name__ == "__main__":
    main()
