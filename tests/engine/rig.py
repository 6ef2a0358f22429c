"""An engine over the toy model that checks, after every step, what must always hold."""

from __future__ import annotations

from typing import Any

from leafkv import LLM, RequestOutput, SamplingParams
from leafkv.engine.request import Request, Sample, Status
from leafkv.engine.running import BORN, COMPUTED, KNOWN, LAST, LIMIT, NUMBER
from leafkv.engine.work import Work

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
        self.work: dict[Sample, int] = {}
        self.known: dict[Sample, int] = {}
        """The work of the last step, and how many tokens it had known."""
        self.orders: dict[Sample, tuple[int, int]] = {}
        """The order of service in that step."""
        self.out_of_blocks = False
        """Whether the last step has preempted for blocks."""
        self.looks_at_tokens = True
        """Whether each step looks at all tokens: otherwise most of them stay with the KV manager until the end."""
        schedule, reserve = self.scheduler.schedule, self.scheduler._reserve

        def recorded() -> Work:
            self.out_of_blocks = False
            work = schedule()
            self.work = dict(zip(work.samples, work.counts.tolist(), strict=True))
            self.known = dict(zip(work.samples, work.known.tolist(), strict=True))
            if self.looks_at_tokens:
                assert [len(sample.tokens) for sample in work.samples] == work.known.tolist()
            self.orders = {sample: sample.request.order for sample in self.scheduler.running.samples}
            return work

        def watched(*arguments: Any) -> Any:
            before = self.scheduler.num_preemptions
            result = reserve(*arguments)
            self.out_of_blocks = self.scheduler.num_preemptions > before
            return result

        self.scheduler.schedule = recorded  # type: ignore[method-assign]
        self.scheduler._reserve = watched  # type: ignore[method-assign, assignment]

    def add(self, prompt: Any, params: SamplingParams, *, stream: bool = False, priority: int = 0) -> Request:
        request = self.llm._router.prepare(prompt, params, stream=stream, priority=priority)
        self.engine.add_request(request)
        return request

    @property
    def running(self) -> list[Request]:
        return [*dict.fromkeys(sample.request for sample in self.scheduler.running.samples)]

    def computed(self, request: Request) -> int:
        """Tokens of the first live sample whose KV is written."""
        running = self.scheduler.running
        live = [row for row, sample in enumerate(running.samples) if sample.request is request]
        return int(running.column(COMPUTED)[live[0]]) if live else 0

    def step(self) -> list[RequestOutput]:
        waiting = set(self.scheduler.waiting)
        first = self.scheduler.running.samples[0] if len(self.scheduler.running) else None
        before = self.computed(first.request) if first else 0
        preemptions = first.request.metrics.num_preemptions if first else 0
        outputs = self.engine.step()
        for output in outputs:
            if output.finished:
                assert output.request_id not in self.results, "finished twice"
                self.results[output.request_id] = output
        self._check_work(waiting)
        if self.scheduler.running.samples[:1] == [first] and first is not None:
            # As it was then: a place that was lent goes back to its owner when the request ends.
            served = self.orders.get(first, first.request.order)
            passed = any(self.orders[sample] < served for sample in self.work)
            kept = first.request.metrics.num_preemptions == preemptions and not passed
            assert not kept or self.computed(first.request) > before, "the first stood still"
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
        assert stats.sequences == running.column(BORN).sum(), "only running samples hold blocks"
        assert len(running) <= self.scheduler.max_num_seqs
        for orders in ([sample.request.order for sample in running.samples], [request.order for request in waiting]):
            assert orders == sorted(orders), "not in order of service"
        assert self.scheduler.num_waiting == len(waiting)
        for row, sample in enumerate(running.samples):
            assert sample.request.status is Status.RUNNING
            assert sample.finish_reason is None
            computed, known, number = (int(running.column(name)[row]) for name in (COMPUTED, KNOWN, NUMBER))
            assert number == sample.number
            assert known < running.column(LIMIT)[row]
            if self.looks_at_tokens:
                assert known == len(sample.tokens)
                assert sample.tokens[-1] == running.column(LAST)[row]
            if not running.column(BORN)[row]:
                assert computed == 0
                assert sample is not sample.request.live[0]
                continue
            assert known - computed >= 1
            held = -(-computed // self.manager.block_size)
            assert len(self.manager.block_table(number)) == held, "slots left over from a step"
            assert computed == self.manager.num_committed(number)
        for request in self.running:
            assert [sample for sample in running.samples if sample.request is request] == request.live
        for request in waiting:
            assert request.status is Status.WAITING

    def check_drained(self) -> None:
        self.check()
        stats = self.manager.stats()
        assert stats.held_blocks == stats.sequences == 0
        assert stats.free_blocks + stats.cached_blocks == self.manager.num_blocks
        assert not len(self.scheduler.running)
        assert not self.scheduler.waiting
        for name, left in (vars(self.scheduler) | vars(self.scheduler._parking)).items():
            if isinstance(left, dict):
                assert not left, f"{name} is not empty"
        assert not self.engine._requests
        assert not self.engine._queued

    def _check_work(self, waiting: set[Request]) -> None:
        counts = self.work.values()
        assert all(n >= 1 for n in counts), "an empty work item"
        assert sum(counts) <= self.scheduler.max_num_batched_tokens
        assert len(self.work) <= self.scheduler.max_num_seqs
        if self.out_of_blocks and self.scheduler.policy != "priority":  # a more urgent one is admitted first
            assert not any(sample.request in waiting for sample in self.work), "admitted while preempting"
        for sample, known in self.known.items():
            request = sample.request
            if request in waiting and request.status is Status.RUNNING and len(request.samples) == 1:
                lacking = -(-known // self.manager.block_size) - len(self.manager.block_table(sample.number))
                assert lacking <= self.manager.allocatable_blocks, "admitted without room for its known tokens"
