"""Turn the results of the benchmarks of attention into a dated record.

    python -m benches.report_attention target/attention.md target/attention.json target/attention_peers.json

writes benches/records/YYYY-MM-DD-attention.md, and a plot of the same name beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

from benches.compare_attention import Result, plot, summary, table
from benches.report import HERE, figure, python_medians, version

Row = dict[str, str]

GOALS = {"attend_short[smol-float32]": "≤ 3"}
"""Of calls through Python, in µs."""


def rust_rows(path: Path) -> list[Row]:
    """The rows of the table that the Rust benches write; of several tables where they were run in parts."""
    lines = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in path.read_text().splitlines()]
    head = next(cells for cells in lines if cells[0] == "benchmark")
    # The last column is empty but for a few.
    return [dict(zip(head, [*cells, ""], strict=False)) for cells in lines if "/" in cells[0] and len(cells) > 2]


def share(row: Row) -> float:
    """Of the limit that is closer: random reads, or arithmetic."""
    return max(float(row[name].removesuffix(" %") or 0) for name in ("of gather", "of peak"))


def beside_limits(rows: list[Row]) -> list[str]:
    """A table for each layout: what a call takes, and its share of the closer limit."""
    lines = []
    for layout in ("tiled", "rows"):
        of_layout: dict[str, dict[str, Row]] = {}
        for row in rows:
            case, model, dtype, own = row["benchmark"].split("/")
            if own == layout:
                of_layout.setdefault(f"{model} {case}", {})[dtype] = row
        dtypes = list(dict.fromkeys(dtype for found in of_layout.values() for dtype in found))
        lines += [f"| {layout} | " + " | ".join(dtypes) + " |", "|---" + "|--:" * len(dtypes) + "|"]
        for case, found in of_layout.items():
            cells = [f"{float(found[d]['ms']):.3g}, {share(found[d]):.0f} %" if d in found else "" for d in dtypes]
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def through_python(medians: dict[str, float]) -> list[str]:
    lines = ["| call | µs | goal |", "|---|--:|--:|"]
    for name, value in medians.items():
        if not name.startswith("attend["):
            lines.append(f"| {name} | {figure(value)} | {GOALS.get(name, '')} |")
    return [*lines, ""]


def record(
    rust: Path, python: tuple[dict[str, float], dict[str, Any]], peers: list[Result], title: str, notes: str
) -> str:
    """The whole file, named ``title``."""
    medians, machine = python
    rows = rust_rows(rust)
    cpu = machine["cpu"].get("brand_raw", platform.processor())
    from_git = version("git", "-C", str(HERE), "describe", "--always", "--dirty")
    threads = rust.read_text().splitlines()[0]
    versions = f"Python {machine['python_version']}, {version('rustc', '--version')}, LeafKV {from_git}"
    lines = [
        f"# Paged attention, {title.removesuffix('-attention')}",
        "",
        f"CPU: {cpu}, {threads} {versions}.",
        "Medians. How they are measured: [benches/README.md](../README.md).",
        "",
        *([notes, ""] if notes else []),
        "## Beside the machine's limits",
        "",
        "In Rust: milliseconds of a call, and its share of the closer limit: reading the same pieces of memory in the",
        "same order, or the peak of multiply-adds.",
        "",
        *beside_limits(rows),
        "## Through Python",
        "",
        *through_python(medians),
        "## Beside other engines",
        "",
        "Milliseconds of a call, and how many times as long the fastest other engine takes for KV of as many bits.",
        "",
        summary(peers),
        f"![share of the stream by context length]({title}.svg)",
        "",
        "## All figures",
        "",
        table(peers),
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|---" + "|--:" * (len(rows[0]) - 1) + "|",
        *("| " + " | ".join(row.values()) + " |" for row in rows),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rust", type=Path, help="what LEAFKV_BENCH_OUT named")
    parser.add_argument("pytest_benchmark_json", type=Path)
    parser.add_argument("peers", type=Path, help="the JSON of compare_attention")
    parser.add_argument("--date", type=date.fromisoformat, default=date.today(), help="of the measurement")  # noqa: DTZ011
    parser.add_argument("--notes", type=Path, help="a Markdown file to put at the beginning")
    parser.add_argument("--out", type=Path, default=HERE / "records", help="the folder for both files")
    arguments = parser.parse_args()
    title = f"{arguments.date.isoformat()}-attention"
    notes = arguments.notes.read_text().strip() if arguments.notes else ""
    peers = [Result(**result) for result in json.loads(arguments.peers.read_text())]
    python = python_medians(arguments.pytest_benchmark_json)
    arguments.out.mkdir(exist_ok=True)
    out = arguments.out / f"{title}.md"
    out.write_text(record(arguments.rust, python, peers, title, notes))
    plot(peers, out.with_suffix(".svg"))
    print(out)


if __name__ == "__main__":
    main()
