"""Turn the results of `make bench` into one Markdown table, a dated record.

    python benches/report.py target/kv_manager.json target/criterion

writes benches/records/YYYY-MM-DD-kv-manager.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """An operation: its benchmarks, and what there is to compare with, in microseconds."""

    title: str
    python: str
    rust: str | None = None
    goal: float | None = None
    sglang: str = ""
    tgi: str = ""
    vllm: str = ""


ROWS = [
    Row("match 4,096 cached tokens, block ids returned: 1 edge", "match[1]", "match/1", 2, "9.5", "1.5"),
    Row("… 16 edges", "match[16]", "match/16", 3, "13.7", "2.8"),
    Row("match, lock, unlock (`begin`, `release`): 1 edge", "begin_release[1]", "begin_release/1"),
    Row("… 16 edges", "begin_release[16]", "begin_release/16", 4, "15"),
    Row("enter 4,096 new tokens (`commit`)", "insert[False]", "insert/commit", 4, "53", "1.6"),
    Row("evict 256 tokens of 10,000 leaves", "evict_256_tokens", "evict/256_tokens", 2, "123", "1.4"),
    Row("evict half of 2.4 M tokens, one call", "evict_half", "evict/half", 4_600, "112,000", "4,600"),
    Row("decode step: 256 sequences of ~1,024 tokens, one more each", "decode_step", "decode/step", 15, vllm="1,166"),
    Row("a prompt of 4,096 tokens, `begin` to `release`: cold", "serve_cold[roomy]", "serve/cold", 12, vllm="792"),
    Row("… cached", "serve_cached", "serve/cached", 8, vllm="719"),
    Row("… cold, and 256 blocks evicted for it", "serve_cold[full]"),
    Row("match with cold CPU caches: 4,096 tokens, 1 edge", "match_cold[1]"),
    Row("… 16 edges", "match_cold[16]"),
    Row("… a random leaf of 10,000, 896 tokens", "match_random_leaf", "match/random_leaf"),
    Row("match, tokens a list: 4,096, 16 edges", "match_list"),
    Row("`begin` with a partial hit (776 tokens), `release`", "begin_partial_hit"),
    Row("enter 4,096 new tokens, events on", "insert[True]"),
    Row("`fork`, `grow` with copy-on-write, `copies`, `release`", "fork_grow"),
    Row("`pin`, `unpin`: 4,096 tokens, 16 edges", "pin_unpin"),
    Row("`stats`", "stats"),
    Row("`snapshot` of the tree: 99,200 blocks", "snapshot"),
]


def python_medians(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Medians in microseconds by name, and what pytest-benchmark says of the machine."""
    data = json.loads(path.read_text())
    medians = {bench["name"].removeprefix("bench_"): bench["stats"]["median"] * 1e6 for bench in data["benchmarks"]}
    return medians, data["machine_info"]


def rust_medians(folder: Path) -> dict[str, float]:
    """Likewise of Criterion, whose folders are named after its benchmarks."""
    medians = {}
    for path in folder.glob("**/new/estimates.json"):
        described = json.loads((path.parent / "benchmark.json").read_text())
        medians[described["full_id"]] = json.loads(path.read_text())["median"]["point_estimate"] / 1e3
    return medians


def figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def version(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def record(python: dict[str, float], rust: dict[str, float], machine: dict[str, Any], day: date, notes: str) -> str:
    """The whole file."""
    cpu = machine["cpu"].get("brand_raw", platform.processor())
    from_git = version("git", "-C", str(HERE), "describe", "--always", "--dirty")
    versions = f"Python {machine['python_version']}, {version('rustc', '--version')}, LeafKV {from_git}"
    lines = [
        f"# KV manager, {day.isoformat()}",
        "",
        f"CPU: {cpu}, {machine['cpu'].get('count', '?')} CPUs. {versions}.",
        "Medians in µs. How they are measured, and whose the other figures are: [benches/README.md](../README.md).",
        "",
        "| operation | LeafKV, Python | LeafKV, Rust | goal | SGLang | TGI (Rust) | vLLM |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in ROWS:
        if row.python in python or row.rust in rust:
            ours = [figure(python.get(row.python)), figure(rust.get(row.rust or ""))]
            goal = f"≤ {row.goal:,}" if row.goal else ""
            lines.append("| " + " | ".join([row.title, *ours, goal, row.sglang, row.tgi, row.vllm]) + " |")
    return "\n".join([*lines, "", *([notes, ""] if notes else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pytest_benchmark_json", type=Path)
    parser.add_argument("criterion_folder", type=Path)
    parser.add_argument("--date", type=date.fromisoformat, default=date.today(), help="of the measurement")  # noqa: DTZ011
    parser.add_argument("--notes", type=Path, help="a Markdown file to put at the end")
    parser.add_argument("--out", type=Path, help="instead of benches/records/DATE-kv-manager.md")
    arguments = parser.parse_args()
    python, machine = python_medians(arguments.pytest_benchmark_json)
    rust = rust_medians(arguments.criterion_folder)
    notes = arguments.notes.read_text().strip() if arguments.notes else ""
    out = arguments.out or HERE / "records" / f"{arguments.date.isoformat()}-kv-manager.md"
    out.parent.mkdir(exist_ok=True)
    out.write_text(record(python, rust, machine, arguments.date, notes))
    print(out)


if __name__ == "__main__":
    main()
