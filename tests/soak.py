"""What takes too long for every change: thousands of requests through one engine, and processes killed a hundred times.

`make soak` runs it, in some minutes:

* **workloads**: for every policy, thousands of requests of `tests.engine.workload` through one engine, some of them
  with a journal. Every answer is that of its request alone, every invariant holds after every step, and in the end
  nothing is held or remembered.
* **memory**: for every policy, tens of thousands of tiny requests, a part of which fail, are aborted or lose their
  consumer (B128). In the end nothing is remembered, and the process has not grown.
* **kills**: the tests that kill a process with a journal (``kill -9``), more often.

It says how far it is, then a verdict; the exit status is 0 only if all of it went well.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leafkv import LLM, RequestOutputKind, SamplingParams
from leafkv.engine.waiting import POLICIES, SLACK

from .engine.rig import make_llm
from .engine.toy import VOCAB, ToyLoaded, ToyModel
from .engine.workload import Workload

ROOT = Path(__file__).parents[1]

GROWTH = 16 * 2**20
"""Bytes that a process may grow after its warm-up: a request that is remembered takes more than a kilobyte."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def check_forgotten(llm: LLM) -> None:
    """Nothing of any request is held by blocks, or remembered, but for a few that the queue has let go of."""
    llm.manager.check_invariants()
    stats = llm.manager.stats()
    assert stats.held_blocks == stats.sequences == 0
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
    engine = llm.engine
    for owner in (llm, engine, engine.scheduler, engine.scheduler._queue, engine.scheduler._parking):
        for name, value in vars(owner).items():
            if isinstance(value, (list, deque)):
                assert len(value) <= SLACK + 1, f"{type(owner).__name__}.{name} has {len(value)} entries"
            assert not isinstance(value, dict) or not value, f"{type(owner).__name__}.{name} has {len(value)} entries"
    assert not llm._dropped
    assert not len(engine.scheduler.running)


def workloads(seed: int, rounds: int, requests: int) -> None:
    for turn in range(rounds):
        for index, policy in enumerate(POLICIES):
            with tempfile.TemporaryDirectory(prefix="leafkv-soak-") as folder:
                # One policy in each round, every policy in three.
                journal = Path(folder) / "journal" if (turn + index) % 3 == 0 else None
                workload(seed + turn * len(POLICIES) + index, policy, journal, requests)


def workload(seed: int, policy: str, journal: Path | None, requests: int) -> None:
    began = time.monotonic()
    work = Workload(seed, scheduling_policy=policy, journal=journal)
    while len(work.requests) < requests:  # some are refused
        work.run(min(500, requests - len(work.requests)), crowd=50)
        check_forgotten(work.rig.llm)
    work.check()
    ends: dict[str | None, int] = {}
    for output in work.told.values():
        for answer in output.outputs:
            ends[answer.finish_reason] = ends.get(answer.finish_reason, 0) + 1
    if journal is not None:
        work.rig.llm.close()
        loaded: Any = ToyLoaded()
        again = LLM.resume(journal, loaded, num_blocks=64, block_size=4)
        assert again.resumed == []
        again.close()
    stats = work.rig.engine.stats()
    say(
        f"  {policy}, seed {seed}{', with a journal' if journal else ''}: {len(work.requests)} requests right, "
        f"{stats.steps} steps, {stats.preemptions} preemptions, {stats.accepted_tokens} drafts accepted, "
        f"samples ended by {', '.join(f'{reason}: {count}' for reason, count in sorted(ends.items(), key=str))} "
        f"({time.monotonic() - began:.0f} s)"
    )


class Tiny:
    """Tiny requests through one `LLM`, many of which come to no good end."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng = random.Random(seed)
        self.model = ToyModel()
        self.llm = make_llm(self.model, num_blocks=64, scheduling_policy=policy, max_num_seqs=32, max_waiting=100)
        self.ends = {"answered": 0, "failed": 0, "aborted": 0, "left alone": 0}

    def params(self) -> SamplingParams:
        kind = self.rng.choice([*RequestOutputKind])
        stop = ["A", "bc"] if self.rng.random() < 0.2 else None
        processors = [spoil] if self.rng.random() < 0.05 else None
        return SamplingParams(
            temperature=self.rng.choice([0.0, 1.0]),
            n=self.rng.choice([1, 1, 1, 2]),
            seed=self.rng.randrange(100),
            max_tokens=self.rng.randint(1, 4),
            stop=stop,
            logits_processors=processors,
            output_kind=kind,
        )

    def some(self) -> int:
        """A few requests at the same time, each read to its end, or aborted, or dropped; return how many."""
        rng, llm = self.rng, self.llm
        streams: list[Iterator[Any]] = []
        shared = [rng.randrange(VOCAB) for _ in range(rng.randrange(8))]
        for _ in range(rng.randint(1, 40)):
            prompt = [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 4)))]
            streams.append(llm.stream(prompt, self.params()))
        count = len(streams)
        error = RuntimeError("a step that fails")
        self.model.before_forward = failing(error) if rng.random() < 0.02 else nothing
        while streams:
            stream = streams.pop(rng.randrange(len(streams)))
            try:
                output = next(stream)
            except (RuntimeError, ZeroDivisionError):
                self.model.before_forward = nothing
                self.ends["failed"] += 1
                continue
            if output.finished:
                self.ends["answered" if output.outputs[0].finish_reason != "abort" else "aborted"] += 1
            elif rng.random() < 0.1:
                self.ends["left alone"] += 1
            else:
                if rng.random() < 0.1:
                    with llm._lock:
                        llm.engine.abort_request(output.request_id)
                streams.append(stream)
        while llm.engine.has_unfinished_requests():  # reports of those who were dropped
            llm._step()
        return count


def spoil(output: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
    raise ZeroDivisionError


def failing(error: Exception) -> Callable[[object], None]:
    def fail(_: object) -> None:
        raise error

    return fail


def nothing(_: object) -> None:
    pass


def memory(seed: int, requests: int) -> None:
    for policy in POLICIES:
        began = time.monotonic()
        tiny = Tiny(seed, policy)
        done, warm, marks = 0, 0, list[int]()
        while done < requests:
            done += tiny.some()
            if done >= requests * (len(marks) + 1) // 10:
                gc.collect()
                check_forgotten(tiny.llm)
                marks.append(resident())
        warm = marks[2]  # of ten
        growth = marks[-1] - warm
        say(
            f"  {policy}: {done} requests, {', '.join(f'{count} {end}' for end, count in tiny.ends.items())}; "
            f"{marks[-1] / 2**20:.0f} MiB, {growth / 2**10:+.0f} KiB after warm-up ({time.monotonic() - began:.0f} s)"
        )
        assert min(tiny.ends.values()) > 0
        assert growth < GROWTH, f"the process has grown by {growth} bytes: {marks}"


def kills(count: int) -> None:
    tests = ["tests/engine/test_resume.py", "tests/engine/test_journal.py"]
    environment = {**os.environ, "LEAFKV_SOAK_KILLS": str(count)}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "kill_9", *tests]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="workloads, memory, kills; all by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="workloads of every policy")
    parser.add_argument("--requests", type=int, default=2000, help="of each workload")
    parser.add_argument("--tiny", type=int, default=50_000, help="requests of every policy, for the memory")
    parser.add_argument("--kills", type=int, default=int(os.environ.get("LEAFKV_SOAK_KILLS", "100")))
    args = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "workloads": lambda: workloads(args.seed, args.rounds, args.requests),
        "memory": lambda: memory(args.seed, args.tiny),
        "kills": lambda: kills(args.kills),
    }
    unknown = set(args.parts) - set(parts)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    failed = []
    for name in args.parts or parts:
        say(f"{name}:")
        try:
            parts[name]()
        except Exception:
            say(traceback.format_exc())
            failed.append(name)
    say(f"FAILED: {', '.join(failed)}" if failed else "all went well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
