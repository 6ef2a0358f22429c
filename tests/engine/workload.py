"""Random workloads for a whole engine, and what each request of them must give: its answer when it runs alone.

Everything that a request may ask for, on tiny pools, with shared prefixes, arrivals and aborts at any time, preemption,
chunks of any size, failing steps, every policy. The reference asks the toy model, which has no cache, token by token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from leafkv import RequestOutput, SamplingParams
from leafkv.engine.logprobs import token_logprobs
from leafkv.engine.request import Request, Sample
from leafkv.engine.router import Router
from leafkv.engine.sampler import pick

from .rig import Rig
from .toy import VOCAB, ToyModel, ToyTokenizer, fail, reference_logits


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
    text, reason = "", ""
    stop_reason: int | str | None = None
    while not reason:
        logits = reference_logits(sample.tokens)
        token = pick(logits, sample).token
        if logprobs is not None and params.logprobs is not None:
            logprobs.append(token_logprobs(logits, token, params.logprobs, lambda i: ToyTokenizer().decode([i], False)))
        sample.tokens.append(token)
        if token in request.stop_ids:
            stop_reason = token if token in (params.stop_token_ids or ()) else None
            reason = "stop"
            text += ToyTokenizer().decode([token]) if params.include_stop_str_in_output else ""
            continue
        text += ToyTokenizer().decode([token])
        if params.detokenize and (found := [stop for stop in params.stop or () if text.endswith(stop)]):
            stop_reason, reason = max(found, key=len), "stop"
            text = text if params.include_stop_str_in_output else text.removesuffix(max(found, key=len))
        elif sample.num_output_tokens == request.max_tokens:
            reason = "length"
    return Answer(sample.output_token_ids, text if params.detokenize else "", reason, stop_reason, logprobs)


def random_params(rng: random.Random, max_tokens: int, *, samples: int) -> SamplingParams:
    """Parameters of any kind; often the plain ones."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.4:
        options |= {"temperature": rng.choice([0.3, 1.0, 3.0]), "seed": rng.choice([rng.randrange(50), 2**64 - 1])}
        options["n"] = rng.randint(1, samples)
    if rng.random() < 0.2:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    if rng.random() < 0.2:
        options["stop_token_ids"] = [rng.randrange(VOCAB) for _ in range(4)]
    if rng.random() < 0.2:
        options["stop"] = [chr(65 + rng.randrange(VOCAB)) for _ in range(3)]
        options["include_stop_str_in_output"] = rng.random() < 0.5
    if rng.random() < 0.15:
        options["min_tokens"] = rng.randint(0, max_tokens)
        options.pop("stop", None)
    if rng.random() < 0.15:
        options["logprobs"] = rng.choice([0, 2, -1])
    if rng.random() < 0.15:
        options["prompt_logprobs"] = rng.choice([0, 2])
    if rng.random() < 0.1:
        options["allowed_token_ids"] = rng.sample(range(VOCAB), 20)
    return SamplingParams(**options)


class Guesser:
    """Proposes what really comes next, more often than not."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def propose(self, sample: Sample, most: int) -> list[int]:
        known = len(sample.tokens)
        drafts = []
        for _ in range(self.rng.randint(0, min(most, 5))):
            token = pick(reference_logits(sample.tokens), sample).token
            drafts.append(token if self.rng.random() < 0.8 else self.rng.randrange(VOCAB))
            sample.tokens.append(drafts[-1])
        del sample.tokens[known:]
        return drafts


class Workload:
    """Requests that come to an engine at random times, and what has become of them."""

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
            **options,
        }
        self.rig = Rig(self.model, **self.options)
        if rng.random() < 0.3:
            self.rig.scheduler._proposer = Guesser(rng)
        self.stems = [[rng.randrange(VOCAB) for _ in range(self.longest)] for _ in range(3)]
        self.requests: list[Request] = []
        self.live: list[Request] = []
        self.streamed: dict[str, RequestOutput] = {}

    def arrive(self) -> None:
        """A request comes."""
        rng = self.rng
        stem = rng.choice(self.stems)
        length = rng.randrange(1, self.longest)
        prompt = [*stem[:length], *([rng.randrange(VOCAB)] if length + 2 <= self.longest else [])]
        max_tokens = rng.randrange(1, self.longest - len(prompt) + 1)
        block_size, num_blocks = self.options["block_size"], self.options["num_blocks"]
        shared = len(prompt) // block_size
        own = -(-(len(prompt) + max_tokens) // block_size) - shared
        samples = min(4, self.options["max_num_seqs"], (num_blocks - shared) // own if own else 4)
        params = random_params(rng, max_tokens, samples=samples)
        stream, priority = rng.random() < 0.3, rng.randrange(3)
        priority *= self.options["scheduling_policy"] == "priority"
        request = self.rig.add(prompt, params, stream=stream, priority=priority)
        self.requests.append(request)
        self.live.append(request)

    def step(self) -> None:
        """One step, in which all may go wrong."""
        rng, rig = self.rng, self.rig
        if self.live and rng.random() < 0.05 * self.faults:
            rig.engine.abort_request(rng.choice(self.live).request_id)
        if rng.random() < 0.05:
            rig.manager.evict(rng.randrange(1, 4))
        if rng.random() < 0.01:
            rig.manager.clear()
        error = rng.choice((RuntimeError, KeyboardInterrupt)) if rng.random() < 0.03 * self.faults else None
        self.model.before_forward = fail(error()) if error else lambda _: None
        with suppress(KeyboardInterrupt):
            for output in rig.step():
                before = self.streamed.get(output.request_id)
                if before is not None:
                    for old, new in zip(before.outputs, output.outputs, strict=True):
                        assert new.text.startswith(old.text)
                        assert new.token_ids[: len(old.token_ids)] == old.token_ids
                self.streamed[output.request_id] = output
        rig.check()
        self.live = [request for request in self.live if not request.finished]

    def run(self, arrivals: int) -> None:
        """All of it, to the end."""
        while arrivals or self.rig.engine.has_unfinished_requests():
            for _ in range(min(arrivals, self.rng.choice([0, 0, 1, 2, 8]))):
                self.arrive()
                arrivals -= 1
            self.step()
        self.rig.check_drained()

    def check(self) -> None:
        """Every output is what its request gives alone."""
        results = self.rig.results
        assert results.keys() == {request.request_id for request in self.requests}
        for request in self.requests:
            output = results[request.request_id]
            failed = any(completion.finish_reason == "error" for completion in output.outputs)
            assert failed == (output.error is not None)
            assert len(output.outputs) == request.params.n
            for sample, completion in zip(request.samples, output.outputs, strict=True):
                assert completion.index == sample.index
                expected = answer_alone(self.rig.llm._router, request.prompt_token_ids, request.params, sample.seed)
                tokens = completion.token_ids
                assert tokens == expected.tokens[: len(tokens)]
                if expected.logprobs is not None:
                    assert completion.logprobs == expected.logprobs[: len(tokens)]
                if completion.finish_reason not in {"abort", "error"}:
                    assert tokens == expected.tokens
                    assert completion.text == expected.text, (completion, expected, request.params)
                    assert (completion.finish_reason, completion.stop_reason) == (expected.reason, expected.stop_reason)
            if request.params.prompt_logprobs is not None and output.error is None and output.outputs[0].token_ids:
                self._check_prompt(request, output)

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
