"""What a step of the engine costs besides the model: scheduling, the batch, drawing, and the books.

    python -m benches.scheduler_cost --cache target/serving --json target/scheduler.json

Three parts. `cost`: the engine as it is, over a stand-in for the model whose logits are there already, for each of
`CASES`. `model`: the same over SmolLM2, for its own time and what the rest costs beside it, where the model has had the
CPU's caches to itself. `journal`: SmolLM2 with and without a journal, taking turns step by step.

Every round of a case makes its requests anew, has their prompts computed, and times steps in which each sample gets a
token. What is counted where, README.md beside this file says.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import numpy as np
from benches.serving_engines import touch_memory
from benches.serving_models import Models
from numpy.typing import NDArray

from leafkv import LLM, AttentionPlan, SamplingParams
from leafkv.engine.drawing import draw
from leafkv.engine.interrupts import interrupts_deferred
from leafkv.engine.running import COMPUTED, KNOWN
from leafkv.engine.sampling_params import RequestOutputKind
from leafkv.models import load_model
from leafkv.models.batch import Batch

PARTS = ("cost", "model", "journal")
PROMPT = 1_024
"""Tokens of a prompt where the model is a stand-in. Lengths are staggered: a sixteenth begins a block in each step."""
SHORT_PROMPT = 256
"""Where it is SmolLM2."""
WAITING_PROMPT = 512
WARM, STEPS, MODEL_STEPS = 16, 48, 16
"""Steps of a round that do not count; those that do, twice; and these where the model is SmolLM2."""
CYCLE = 64
"""Tokens after which an answer repeats itself, which speculation finds."""
BLOCK = 16
JOURNAL_PROMPT, JOURNAL_NEW = 32, 128
KINDS, BATCHES, JOURNAL_BATCHES = "F32,Q8_0", "1,16,64,256", "1,16,64"


@dataclass(frozen=True)
class Case:
    """Requests of one kind, all running, and how many others wait for their seats."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    waiting: int = 0
    journal: bool = False


DELTA = {"detokenize": True, "output_kind": RequestOutputKind.DELTA}
DRAFTS = 5
SPECULATION = {"method": "ngram", "num_speculative_tokens": DRAFTS}
SAMPLED = {"temperature": 0.8}

CASES = [
    Case("greedy"),
    Case("streamed, CUMULATIVE", {"detokenize": True}, stream=True),
    Case("streamed, DELTA", DELTA, stream=True),
    Case("stop strings", {"detokenize": True, "stop": ["\nUser:", "###", "</answer>"]}),
    Case("journal", journal=True),
    Case("journal, streamed, DELTA", DELTA, stream=True, journal=True),
    Case("speculation", options={"speculative_config": SPECULATION}),
    Case("sampled, temperature", SAMPLED),
    Case("sampled, top_k 50, top_p 0.95", {**SAMPLED, "top_k": 50, "top_p": 0.95}),
    Case("10,000 waiting", waiting=10_000),
    Case("policy priority", options={"scheduling_policy": "priority"}),
    Case("policy priority, 10,000 waiting", options={"scheduling_policy": "priority"}, waiting=10_000),
    Case("policy prefix, 10,000 waiting", options={"scheduling_policy": "prefix"}, waiting=10_000),
]


@dataclass
class Result:
    """By round: of a step's phases the median in seconds, or the seconds of a run with and without a journal."""

    part: str
    name: str
    batch: int
    rounds: list[dict[str, float]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.part, self.name, self.batch

    def figure(self, phase: str) -> float:
        """The median of all rounds."""
        return median(each[phase] for each in self.rounds)

    def best(self, phase: str) -> float:
        """That of the quickest round: a busy neighbour only ever adds."""
        return min(each[phase] for each in self.rounds)


# Words, and a model that says them


def words(tokenizer: Any, vocab_size: int) -> NDArray[np.int64]:
    """Tokens that are whole words: their text is known with them alone."""
    special = {*tokenizer.added_ids, *tokenizer.eos_token_ids}
    texts = ((token, tokenizer.decode([token])) for token in range(vocab_size) if token not in special)
    return np.array([token for token, text in texts if text.isascii() and text.strip().isalpha()], np.int64)


class Scripted:
    """Stands in for a model: after each token of a cycle comes the next one. Its logits lie ready but for a few."""

    def __init__(self, config: Any, tokens: NDArray[np.int64]) -> None:
        self.config = replace(config, num_layers=1)  # its cache is never read: a small one will do
        self.cycles = tokens[: len(tokens) // CYCLE * CYCLE].reshape(-1, CYCLE)
        self._next = np.zeros(config.vocab_size, np.int64)
        self._next[self.cycles] = np.roll(self.cycles, -1, axis=1)
        self._noise = np.random.default_rng(0).standard_normal((64, config.vocab_size), np.float32)
        self._logits = np.empty((0, config.vocab_size), np.float32)
        self._likeliest = np.empty(0, np.int64)

    plan = AttentionPlan

    def prompt(self, index: int, length: int) -> list[int]:
        """A prompt that goes round a cycle of its own. Indices that are not ``len(cycles)`` apart share nothing."""
        cycle = self.cycles[index % len(self.cycles)]
        tokens: list[int] = np.resize(cycle, length).tolist()
        return tokens

    def forward(self, batch: Batch, cache: object) -> NDArray[np.float32]:  # noqa: ARG002
        tokens = self._next[batch.token_ids[batch.logit_rows]]
        rows = np.arange(len(tokens))
        if len(tokens) > len(self._logits):
            self._logits = np.resize(self._noise, (len(tokens), self.config.vocab_size))
            self._likeliest = np.zeros(len(tokens), np.int64)
        logits = self._logits[: len(tokens)]
        before = self._likeliest[: len(tokens)]
        logits[rows, before] = self._noise[rows % len(self._noise), before]
        logits[rows, tokens] = 20.0
        before[:] = tokens
        return logits


@dataclass(frozen=True)
class Loaded:
    """What `LLM` takes for a loaded model."""

    model: Any
    tokenizer: Any
    config: Any


# Steps, timed


class Clock:
    """Times an engine's steps, what is watched of each by phase. To watch a call takes up to a microsecond."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._spent: dict[str, float] = defaultdict(float)

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        spent = self._spent

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            spent[phase] += time.perf_counter() - start
            return result

        return call

    @contextlib.contextmanager
    def _watching(self, *, split: bool) -> Iterator[None]:
        engine = self._engine
        calls = [(engine, "_compute", "compute"), (engine.model, "forward", "model")]
        if engine._recorder is not None:
            calls.append((engine, "_record", "record"))
        if split:
            calls += [(engine.scheduler, "schedule", "schedule"), (engine, "_account", "account")]
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch("leafkv.engine.engine.draw", self._timed("draw", draw)))
            for owner, name, phase in calls:
                stack.enter_context(patch.object(owner, name, self._timed(phase, getattr(owner, name))))
            yield

    def steps(self, count: int, *, split: bool) -> list[dict[str, float]]:
        """Seconds of each step by phase. Where they are ``split``, so are scheduling and update."""
        with self._watching(split=split):
            return [self._step(split) for _ in range(count)]

    def _step(self, split: bool) -> dict[str, float]:
        spent = self._spent
        spent.clear()
        start = time.perf_counter()
        outputs = self._engine.step()
        took = time.perf_counter() - start
        del outputs  # which is not the engine's
        rest = took - spent["compute"] - spent["draw"] - spent["record"]
        if not split:
            return {"model": spent["model"], "outside": took - spent["model"], "schedule + update": rest}
        return {
            "schedule": spent["schedule"],
            "build": spent["compute"] - spent["model"],
            "draw": spent["draw"],
            "account": spent["account"],
            "record": spent["record"],
            "report": rest - spent["schedule"] - spent["account"],
        }


def measure(engine: Any, batch: int, steps: int) -> dict[str, float]:
    """The median of each phase over so many steps, twice, and the tokens of a step."""
    clock, before = Clock(engine), engine.stats()
    whole: list[dict[str, float]] = []
    split: list[dict[str, float]] = []
    for _ in range(0, steps, BLOCK):
        whole += clock.steps(BLOCK, split=False)
        split += clock.steps(BLOCK, split=True)
    after = engine.stats()
    if (after.running, after.preemptions) != (
        batch,
        0,
    ) or after.computed_prompt_tokens != before.computed_prompt_tokens:
        raise RuntimeError(f"no steady state of {batch} samples: {before}, then {after}")
    medians = {phase: median(step[phase] for step in of_all) for of_all in (whole, split) for phase in of_all[0]}
    # What comes but now and then (the journal's folding, the garbage collector) is in the mean alone.
    medians["outside, mean"] = mean(step["outside"] for step in whole)
    medians["tokens"] = (after.generated_tokens - before.generated_tokens) / (2 * steps)
    return medians


def prefilled(engine: Any) -> bool:
    """Whether all samples that run have but their last token to compute."""
    running = engine.scheduler.running
    return bool((running.column(KNOWN) - running.column(COMPUTED) == 1).all())


# The parts


def case_round(case: Case, batch: int, scripted: Scripted, tokenizer: Any, folder: str) -> dict[str, float]:
    new = (WARM + 2 * STEPS + 2) * (1 + DRAFTS * ("speculative_config" in case.options)) + 2
    most = PROMPT + new + BLOCK
    llm: Any = LLM(
        Loaded(scripted, tokenizer, scripted.config),
        block_size=BLOCK,
        num_blocks=(batch + 2) * -(-most // BLOCK) + 64,
        max_num_batched_tokens=batch * PROMPT,  # all prompts in one step, so that all answers are as long
        max_num_seqs=batch,
        max_model_len=most,
        journal=Path(folder) / "journal" if case.journal else None,
        **case.options,
    )
    engine, prepare = llm.engine, llm._router.prepare
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": new, "detokenize": False, "seed": 0, **case.params})
    for i in range(batch):
        engine.add_request(prepare(scripted.prompt(i, PROMPT - i % BLOCK), params, stream=case.stream))
    while len(engine.scheduler.running) < batch or not prefilled(engine):
        engine.step()
    for i in range(case.waiting):
        # Each begins as one that runs, whose blocks it would find.
        prompt = scripted.prompt(i % batch, WAITING_PROMPT // 2) + scripted.prompt(batch + i, WAITING_PROMPT // 2)
        engine.add_request(prepare(prompt, params))
    for _ in range(WARM):
        engine.step()
    figures = measure(engine, batch, STEPS)
    llm.close()
    return figures


class Steady:
    """SmolLM2 in the middle of answers. Who computed the prompts makes no difference to the time of what follows."""

    def __init__(self, loaded: Any, scripted: Scripted, largest: int) -> None:
        self._scripted, self._prompts = scripted, itertools.count()
        most = SHORT_PROMPT + 2 * MODEL_STEPS + 4 + BLOCK
        self._llm: Any = LLM(
            loaded,
            block_size=BLOCK,
            num_blocks=(largest + 2) * -(-most // BLOCK),
            max_num_batched_tokens=largest * SHORT_PROMPT,
            max_num_seqs=largest,
            enable_prefix_caching=False,
        )
        touch_memory()

    def round(self, batch: int) -> dict[str, float]:
        engine = self._llm.engine
        new = 2 * MODEL_STEPS + 4
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        prompts = [self._scripted.prompt(next(self._prompts), SHORT_PROMPT - i % BLOCK) for i in range(batch)]
        requests = [self._llm._router.prepare(prompt, params) for prompt in prompts]
        for request in requests:
            engine.add_request(request)
        with patch.object(engine.model, "forward", self._scripted.forward):
            while len(engine.scheduler.running) < batch or not prefilled(engine):
                engine.step()
        for _ in range(2):
            engine.step()
        figures = measure(engine, batch, MODEL_STEPS)
        for request in requests:
            engine.abort_request(request.request_id)
        engine.step()
        return figures


def journal_pair(loaded: Any, batch: int, index: int, folder: str) -> dict[str, float]:
    """The same requests with a journal and without; after each step of one comes the same step of the other."""
    rng = np.random.default_rng(index)
    prompts = rng.integers(1_000, 40_000, (batch, JOURNAL_PROMPT)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=JOURNAL_NEW, ignore_eos=True, detokenize=False, seed=0)
    blocks = batch * -(-(JOURNAL_PROMPT + JOURNAL_NEW + 1) // BLOCK) + 1
    llms: dict[str, Any] = {
        name: LLM(loaded, block_size=BLOCK, num_blocks=blocks, max_num_seqs=batch, journal=journal)
        for name, journal in (("plain", None), ("journal", Path(folder) / "journal"))
    }
    seconds = dict.fromkeys(llms, 0.0)

    def timed(name: str, call: Callable[[Any], object]) -> None:
        start = time.perf_counter()
        call(llms[name].engine)
        seconds[name] += time.perf_counter() - start

    def add(engine: Any, prompts: list[Any]) -> None:
        for prompt in prompts:
            engine.add_request(prompt)

    names = [*llms] if index % 2 else [*llms][::-1]
    requests = {name: [llms[name]._router.prepare(prompt, params) for prompt in prompts] for name in names}
    touch_memory()
    for name in names:
        timed(name, lambda engine, name=name: add(engine, requests[name]))  # type: ignore[misc]
    with interrupts_deferred():  # as in the thread of an `AsyncEngine`, where it costs nothing
        while any(llm.engine.has_unfinished_requests() for llm in llms.values()):
            for name in names:
                timed(name, lambda engine: engine.step())
            names.reverse()
    answers = [[request.samples[0].output_token_ids for request in of_one] for of_one in requests.values()]
    if answers[0] != answers[1] or {len(tokens) for tokens in answers[0]} != {JOURNAL_NEW}:
        raise RuntimeError("the answers with a journal are others")
    for llm in llms.values():
        llm.close()
    return seconds


def rounds_of(arguments: argparse.Namespace) -> Iterator[Result]:
    """The rounds, one result each; whatever is measured takes turns."""
    embedded: Any = load_model(None)
    scripted = Scripted(embedded.config, words(embedded.tokenizer, embedded.config.vocab_size))
    for token in scripted.cycles.flat:
        embedded.tokenizer.partial_bytes(int(token))  # which it looks up but once
    batches = [int(n) for n in arguments.batches.split(",")]
    patterns = arguments.cases.split(";")
    cases = [case for case in CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]
    kinds = arguments.kinds.split(",")

    def folder() -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(dir=arguments.folder)

    if "cost" in arguments.parts:
        for _, batch, case in itertools.product(range(arguments.rounds), batches, cases):
            with folder() as path:
                figures = case_round(case, batch, scripted, embedded.tokenizer, path)
            yield Result("cost", case.name, batch, [figures])
    for kind in kinds if {"model", "journal"} & {*arguments.parts} else ():
        loaded = load_model(Models(arguments.cache).gguf(kind))
        if "model" in arguments.parts:
            steady = Steady(loaded, scripted, max(batches))
            for _, batch in itertools.product(range(arguments.rounds), batches):
                yield Result("model", kind, batch, [steady.round(batch)])
            del steady
        if "journal" in arguments.parts:
            pairs = range(2 * arguments.rounds + 1)
            for index, batch in itertools.product(pairs, map(int, arguments.journal_batches.split(","))):
                with folder() as path:
                    yield Result("journal", kind, batch, [journal_pair(loaded, batch, index, path)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("target/serving"), help="where the models are")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--cases", default="*", help="of the part cost: a pattern of names; several are parted by ;")
    parser.add_argument("--batches", default=BATCHES, help="samples that run")
    parser.add_argument("--journal-batches", default=JOURNAL_BATCHES, help="the same, of the part journal")
    parser.add_argument("--kinds", default=KINDS, help="of SmolLM2's weights, one after the other")
    parser.add_argument("--rounds", type=int, default=5, help="pairs with and without a journal are twice as many")
    parser.add_argument("--folder", type=Path, help="for the journals, on the disk that they are to be measured on")
    parser.add_argument("--json", type=Path, help="the raw data; what else is in it is kept")
    arguments = parser.parse_args()
    results: dict[tuple[str, str, int], Result] = {}
    if arguments.json and arguments.json.exists():
        results = {result.key: result for result in read(arguments.json)}
    measured: set[tuple[str, str, int]] = set()
    for found in rounds_of(arguments):
        if found.key in measured:
            results[found.key].rounds += found.rounds
        else:
            measured.add(found.key)
            results[found.key] = found
        shown = {phase: f"{1e6 * value:,.1f}" for phase, value in found.rounds[0].items() if phase != "tokens"}
        print(*found.key, *(f"{phase} {value}" for phase, value in shown.items()), sep="; ", file=sys.stderr)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(result) for result in results.values()]))


def read(path: Path) -> list[Result]:
    return [Result(**result) for result in json.loads(path.read_text())]


if __name__ == "__main__":
    main()
