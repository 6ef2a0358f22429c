"""An engine over the toy model that checks, after every step, what must always hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leafkv import LLM, RequestOutput, SamplingParams
from leafkv.engine.request import Request, Status

from .toy import ToyLoaded, ToyModel, ToyTokenizer


def greedy(max_tokens: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def make_llm(model: ToyModel | None = None, *, tokenizer: Any = None, **options: Any) -> LLM:
    loaded: Any = ToyLoaded(model or ToyModel(), tokenizer or ToyTokenizer())
    return LLM(loaded, **{"num_blocks": 64, "block_size": 4, **options})


class Rig:
    """Requests go in by :meth:`add`, steps are checked, finished results are collected by request id."""

    def __init__(self, model: ToyModel | None = None, **options: Any) -> None:
        self.llm = make_llm(model, **options)
        self.engine = self.llm.engine
        self.scheduler = self.engine.scheduler
        self.manager = self.llm.manager
        self.results: dict[str, RequestOutput] = {}
        self.work: list[tuple[Request, int]] = []
        self.known: dict[Request, int] = {}
        """The work of the last step, and how many tokens it had known."""
        schedule = self.scheduler.schedule

        def recorded() -> list[tuple[Request, int]]:
            self.work = schedule()
            self.known = {request: len(request.tokens) for request, _ in self.work}
            return self.work

        self.scheduler.schedule = recorded  # type: ignore[method-assign]

    def add(self, prompt: Sequence[int], params: SamplingParams, *, stream: bool = False) -> Request:
        request = self.llm._router.prepare(prompt, params, stream=stream)
        self.engine.add_request(request)
        return request

    def step(self) -> list[RequestOutput]:
        preemptions = self.scheduler.num_preemptions
        waiting = set(self.scheduler.waiting)
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        before = oldest.num_computed_tokens if oldest else 0
        outputs = self.engine.step()
        for output in outputs:
            if output.finished:
                assert output.request_id not in self.results, "finished twice"
                self.results[output.request_id] = output
        self._check_work(preempted=self.scheduler.num_preemptions > preemptions, waiting=waiting)
        if oldest is not None:
            assert oldest.finish_reason is not None or oldest.num_computed_tokens > before, "the oldest stood still"
        self.check()
        return outputs

    def run(self, max_steps: int = 100_000) -> dict[str, RequestOutput]:
        steps = 0
        while self.engine.has_unfinished_requests():
            self.step()
            steps += 1
            assert steps < max_steps, "no end in sight"
        self.check_drained()
        return self.results

    def check(self) -> None:
        self.manager.check_invariants()
        stats = self.manager.stats()
        assert stats.free_blocks + stats.cached_blocks + stats.held_blocks == self.manager.num_blocks
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert stats.sequences == len(running) <= self.scheduler.max_num_seqs, "only running requests hold blocks"
        for queue in (running, waiting):
            numbers = [request.number for request in queue]
            assert numbers == sorted(numbers), "not in order of arrival"
        for request in running:
            assert request.status is Status.RUNNING
            assert request.num_uncomputed_tokens >= 1
            held = -(-request.num_computed_tokens // self.manager.block_size)
            assert len(self.manager.block_table(request.number)) == held, "slots left over from a step"
            assert request.num_computed_tokens == self.manager.num_committed(request.number)
        for request in waiting:
            assert request.status is Status.WAITING
            assert request.num_computed_tokens == 0

    def check_drained(self) -> None:
        self.check()
        stats = self.manager.stats()
        assert stats.held_blocks == stats.sequences == 0
        assert stats.free_blocks + stats.cached_blocks == self.manager.num_blocks
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.engine._requests

    def _check_work(self, *, preempted: bool, waiting: set[Request]) -> None:
        counts = [n for _, n in self.work]
        assert all(n >= 1 for n in counts), "an empty work item"
        assert sum(counts) <= self.scheduler.max_num_batched_tokens
        assert len({request for request, _ in self.work}) == len(self.work) <= self.scheduler.max_num_seqs
        if preempted:
            assert not waiting.intersection(request for request, _ in self.work), "admitted while preempting"
        for request, known in self.known.items():
            if request in waiting and request.status is Status.RUNNING and len(request.tokens) == known:
                lacking = -(-known // self.manager.block_size) - len(self.manager.block_table(request.number))
                assert lacking <= self.manager.allocatable_blocks, "admitted without room for its known tokens"
