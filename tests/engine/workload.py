"""Random workloads for a whole engine, and what each request of them must give: its answer when it runs alone.

Everything that a request may ask for, on tiny pools, with shared prefixes, arrivals and aborts at any time, preemption,
chunks of any size, failing steps, every policy. The reference asks the toy model, which has no cache, token by token.
All of it is determined by the seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leafkv import QueueFullError, RequestOutput, RequestOutputKind, SamplingParams
from leafkv.engine.logprobs import token_logprobs
from leafkv.engine.outputs import merge
from leafkv.engine.request import Request, Sample
from leafkv.engine.router import Router
from leafkv.engine.sampler import pick

from .rig import Rig
from .toy import VOCAB, ToyModel, ToyTokenizer, fail, reference_logits


class SpoiledError(Exception):
    """What a request's own function raises."""


@dataclass(frozen=True)
class Processor:
    """A request's own function: it turns the logits by the tokens so far, and fails after ``good`` of them."""

    turn: int
    good: int | None

    def __call__(self, output: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.good is not None and len(output) >= self.good:
            raise SpoiledError
        return np.roll(row, self.turn + len(output))


@dataclass
class Answer:
    """What one sample gives if nothing disturbs it."""

    tokens: list[int]
    text: str
    reason: str
    stop_reason: int | str | None
    logprobs: list[Any] | None


def answer_alone(router: Router, prompt: Sequence[int], params: SamplingParams, seed: int) -> Answer:
    """The answer of one sample with its own seed, token by token."""
    request = router.prepare(list(prompt), replace(params, n=1, seed=seed))
    (sample,) = request.samples
    logprobs: list[Any] | None = None if params.logprobs is None else []
    text, reason, exempt = "", "", 0
    stop_reason: int | str | None = None
    while not reason:
        logits = reference_logits(sample.tokens)
        try:
            token = pick(logits, sample).token
        except SpoiledError:
            return Answer(sample.output_token_ids, text, "error", None, logprobs)
        if logprobs is not None and params.logprobs is not None:
            logprobs.append(token_logprobs(logits, token, params.logprobs, lambda i: ToyTokenizer().decode([i], False)))
        sample.tokens.append(token)
        if token in request.stop_ids:
            stop_reason = token if token in (params.stop_token_ids or ()) else None
            reason = "stop"
            text += ToyTokenizer().decode([token]) if params.include_stop_str_in_output else ""
            continue
        text += ToyTokenizer().decode([token])
        if sample.num_output_tokens <= params.min_tokens:
            exempt = len(text)
        if found := [stop for stop in params.stop or () if text[exempt:].endswith(stop)]:
            stop_reason, reason = max(found, key=len), "stop"
            text = text if params.include_stop_str_in_output else text.removesuffix(max(found, key=len))
        elif sample.num_output_tokens == request.max_tokens:
            reason = "length"
    return Answer(sample.output_token_ids, text if params.detokenize else "", reason, stop_reason, logprobs)


def random_params(
    rng: random.Random, max_tokens: int, *, samples: int, functions: bool, faults: bool
) -> dict[str, Any]:
    """Parameters of any kind; often the plain ones."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.4:
        options |= {"temperature": rng.choice([0.3, 1.0, 3.0]), "seed": rng.choice([rng.randrange(50), 2**64 - 1])}
        options["n"] = rng.randint(1, samples)
        if rng.random() < 0.5:
            options |= {"top_k": rng.choice([0, 2, 10]), "top_p": rng.choice([0.5, 1.0]), "min_p": rng.choice([0, 0.1])}
    if rng.random() < 0.2:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    if rng.random() < 0.2:
        options["stop_token_ids"] = [rng.randrange(VOCAB) for _ in range(4)]
    if rng.random() < 0.2:
        options["stop"] = [chr(65 + rng.randrange(VOCAB)) for _ in range(2)]
        options["include_stop_str_in_output"] = rng.random() < 0.5
    if rng.random() < 0.15:
        options["min_tokens"] = rng.randint(0, max_tokens)
    if rng.random() < 0.15:
        options["logprobs"] = rng.choice([0, 2, -1])
    if rng.random() < 0.15:
        options["prompt_logprobs"] = rng.choice([0, 2])
    if rng.random() < 0.1:
        options["allowed_token_ids"] = rng.sample(range(VOCAB), 20)
    if rng.random() < 0.1:
        options["logit_bias"] = {rng.randrange(VOCAB): rng.choice([-100.0, 1.5]) for _ in range(5)}
    if rng.random() < 0.1:
        options["bad_words"] = [chr(65 + rng.randrange(VOCAB)) for _ in range(5)]
    if functions and rng.random() < 0.1:
        good = rng.randrange(max_tokens) if faults and rng.random() < 0.4 else None
        options["logits_processors"] = [Processor(rng.randrange(VOCAB), good)]
    options["output_kind"] = rng.choice([*RequestOutputKind, RequestOutputKind.CUMULATIVE])
    return options


class Guesser:
    """Proposes what really comes next, more often than not."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def propose(self, sample: Sample, most: int) -> list[int]:
        known = len(sample.tokens)
        drafts = []
        for _ in range(self.rng.randint(0, min(most, 5))):
            token = self.rng.randrange(VOCAB)
            if self.rng.random() < 0.8:
                with suppress(SpoiledError):
                    token = pick(reference_logits(sample.tokens), sample).token
            drafts.append(token)
            sample.tokens.append(drafts[-1])
        del sample.tokens[known:]
        return drafts


class Workload:
    """Requests that come to an engine at random times, and what has become of them.

    Args:
        seed: determines all of it.
        faults: whether requests are aborted and refused, and steps and requests' own functions fail.
        options: of the `LLM`, in place of random ones.
    """

    def __init__(self, seed: int, *, faults: bool = True, **options: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.faults = faults
        block_size = rng.choice([1, 2, 3, 4, 8])
        self.longest = rng.choice([12, 30, 60])
        room = -(-self.longest // block_size)  # blocks of the longest request: the smallest pool there may be
        self.model = ToyModel()
        speculation = {"method": "ngram", "num_speculative_tokens": rng.randint(1, 6), "prompt_lookup_min": 1}
        self.options: dict[str, Any] = {
            "block_size": block_size,
            "num_blocks": rng.choice([room, room + 1, 2 * room, 4 * room]),
            "max_num_batched_tokens": rng.choice([1, 2, block_size, block_size + 1, 16, 17, 64]),
            "max_num_seqs": rng.choice([1, 2, 3, 8, 16]),
            "enable_prefix_caching": rng.random() < 0.85,
            "partial_hits": seed % 2 == 0,
            "scheduling_policy": rng.choice(["fcfs", "priority", "prefix"]),
            "speculative_config": speculation if rng.random() < 0.5 else None,
            "max_waiting": rng.choice([None, None, 4]) if faults else None,
            **options,
        }
        self.rig = Rig(self.model, **self.options)
        self.rig.looks_at_tokens = rng.random() < 0.5
        if rng.random() < 0.3:
            self.rig.scheduler._proposer = Guesser(rng)
        self.stems = [[rng.randrange(VOCAB) for _ in range(self.longest)] for _ in range(3)]
        self.requests: list[Request] = []
        self.by_id: dict[str, Request] = {}
        self.steps = 0
        self.doomed: dict[int, list[Request]] = {}
        """Who is aborted, by step."""
        self.live: list[Request] = []
        self.told: dict[str, RequestOutput] = {}
        """What each request has given so far, deltas joined."""

    def arrive(self) -> None:
        """A request comes."""
        rng, rig = self.rng, self.rig
        stem = rng.choice(self.stems)
        length = rng.randrange(1, self.longest)
        prompt = [*stem[:length], *([rng.randrange(VOCAB)] if length + 2 <= self.longest else [])]
        max_tokens = rng.randrange(1, self.longest - len(prompt) + 1)
        block_size, num_blocks = self.options["block_size"], self.options["num_blocks"]
        shared = len(prompt) // block_size
        own = -(-(len(prompt) + max_tokens) // block_size) - shared
        samples = min(4, self.options["max_num_seqs"], (num_blocks - shared) // own if own else 4)
        # A journal cannot write functions down.
        functions = self.options.get("journal") is None
        params = random_params(rng, max_tokens, samples=samples, functions=functions, faults=self.faults)
        if rng.random() < 0.15:  # a stop string of several characters that does come, or begins to
            seed = params.get("seed", 0)
            text = answer_alone(rig.llm._router, prompt, SamplingParams(**params), seed).text
            start = rng.randrange(len(text) + 1)
            stop = text[start : start + rng.randint(2, 4)] + rng.choice(["", "", "A"])
            params["stop"] = [*params.get("stop", []), *([stop] if stop else [])]
        stream, priority = rng.random() < 0.5, rng.randrange(3)
        priority *= self.options["scheduling_policy"] == "priority"
        asked = {"prompt_token_ids": prompt, **rng.choice([{}, {}, {"cache_salt": "a"}, {"cache_salt": "b"}])}
        try:
            request = rig.add(asked, SamplingParams(**params), stream=stream, priority=priority)
        except QueueFullError:
            assert rig.scheduler.num_waiting >= self.options["max_waiting"]
            return
        self.requests.append(request)
        self.by_id[request.request_id] = request
        if rng.random() < 0.1 * self.faults:
            self.doomed.setdefault(self.steps + rng.randrange(1, 80), []).append(request)
        self.live.append(request)

    def step(self) -> None:
        """One step, in which all may go wrong."""
        rng, rig = self.rng, self.rig
        self.steps += 1
        for request in self.doomed.pop(self.steps, ()):  # which may have ended
            rig.engine.abort_request(request.request_id)
        if rng.random() < 0.05:
            rig.manager.evict(rng.randrange(1, 4))
        if rng.random() < 0.01:
            rig.manager.clear()
        error = rng.choice((RuntimeError, KeyboardInterrupt)) if rng.random() < 0.004 * self.faults else None
        self.model.before_forward = fail(error()) if error else lambda _: None
        with suppress(KeyboardInterrupt):
            for output in rig.step():
                self._hear(output)
        self.live = [request for request in self.live if not request.finished]

    def _hear(self, output: RequestOutput) -> None:
        """Take an output, which goes on where the one before ended."""
        request = self.by_id[output.request_id]
        before, kind = self.told.get(output.request_id), request.params.output_kind
        assert before is None or not before.finished
        if kind is RequestOutputKind.DELTA:
            assert all(answer.token_ids or answer.text or answer.finish_reason for answer in output.outputs)
            output = output if before is None else merge(before, output, delta=True)
        elif before is not None:
            assert request.stream
            assert kind is not RequestOutputKind.FINAL_ONLY
            for old, new in zip(before.outputs, output.outputs, strict=True):
                assert new.text.startswith(old.text)
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
        assert request.stream or output.finished
        self.told[output.request_id] = output

    def run(self, arrivals: int, *, crowd: int = 1000) -> None:
        """All of it, to the end; nobody comes while ``crowd`` requests wait."""
        while arrivals or self.rig.engine.has_unfinished_requests():
            room = crowd - self.rig.scheduler.num_waiting
            for _ in range(min(arrivals, room, self.rng.choice([0, 0, 1, 2, 8]))):
                self.arrive()
                arrivals -= 1
            self.step()
        self.rig.check_drained()

    def check(self) -> None:
        """Every output is what its request gives alone."""
        assert self.told.keys() == {request.request_id for request in self.requests}
        for request in self.requests:
            output = self.told[request.request_id]
            assert output.finished
            assert [answer.index for answer in output.outputs] == [*range(request.params.n)]
            expected = [self._check_answer(sample, output) for sample in request.samples]
            self._check_error(output, expected)
            if request.params.prompt_logprobs is not None and output.error is None and output.outputs[0].token_ids:
                self._check_prompt(request, output)
        self._check_tenants()

    def _check_answer(self, sample: Sample, output: RequestOutput) -> Answer:
        request, answer = sample.request, output.outputs[sample.index]
        expected = answer_alone(self.rig.llm._router, request.prompt_token_ids, request.params, sample.seed)
        tokens = answer.token_ids
        assert tokens == expected.tokens[: len(tokens)]
        if expected.logprobs is not None:
            assert answer.logprobs == expected.logprobs[: len(tokens)]
        if answer.finish_reason in {"stop", "length"}:
            assert tokens == expected.tokens
            assert answer.text == expected.text, (answer, expected, request.params)
            assert (answer.finish_reason, answer.stop_reason) == (expected.reason, expected.stop_reason)
        elif not request.params.stop:
            assert expected.text.startswith(answer.text)
        return expected

    def _check_error(self, output: RequestOutput, expected: list[Answer]) -> None:
        """A request fails with its own function, or with a step that failed; and with nothing else."""
        reasons = {answer.finish_reason for answer in output.outputs}
        assert ("error" in reasons) == (output.error is not None)
        spoiled = any(answer.reason == "error" for answer in expected)
        if isinstance(output.error, SpoiledError):
            assert spoiled, "it had ended before its function failed"
        elif output.error is not None:
            assert isinstance(output.error, RuntimeError)
            assert self.faults
        else:
            assert not spoiled or reasons & {"abort"}

    def _check_tenants(self) -> None:
        """What is found in the cache, a request of the same tenant has left there."""
        left: dict[tuple[str | None, tuple[int, ...]], set[str]] = {}
        for request in self.requests:
            for tokens in (sample.tokens for sample in request.samples):
                for end in range(1, len(tokens)):
                    left.setdefault((request.cache_salt, tuple(tokens[:end])), set()).add(request.request_id)
        for request in self.requests:
            prefix = tuple(request.prompt_token_ids[: request.metrics.num_cached_tokens])
            if prefix:
                others = left[request.cache_salt, prefix] - {request.request_id}
                assert others, f"request {request.request_id} has found what no other of its tenant has left"

    @staticmethod
    def _check_prompt(request: Request, output: RequestOutput) -> None:
        assert output.prompt_logprobs is not None
        prompt, k = request.prompt_token_ids, request.params.prompt_logprobs
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for i, entry in enumerate(output.prompt_logprobs[1:], 1):
            logits = reference_logits(prompt[:i])
            assert entry == token_logprobs(
                logits, prompt[i], k or 0, lambda token: ToyTokenizer().decode([token], False)
            )
