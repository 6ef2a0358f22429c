"""What a consumer that is behind finds: everything, in one output."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from leafkv import CompletionOutput as Answer
from leafkv import Logprob
from leafkv import RequestOutput as Output
from leafkv.engine.output_collector import OutputCollector
from leafkv.engine.request import RequestMetrics

METRICS = RequestMetrics()


def output(answers: list[Any], *, finished: bool = False, error: Exception | None = None, **fields: Any) -> Output:
    return Output("0", "A", [1], answers, finished, 0, METRICS, error=error, **fields)


def logprobs(tokens: list[int], wanted: bool) -> list[dict[int, Logprob]] | None:
    return [{token: Logprob(-1.0)} for token in tokens] if wanted else None


def joined(before: Answer, answer: Answer) -> Answer:
    return Answer(
        answer.index,
        before.text + answer.text,
        before.token_ids + answer.token_ids,
        logprobs=None if before.logprobs is None else before.logprobs + (answer.logprobs or []),
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_taken_joins_to_the_whole(delta: bool, seed: int) -> None:
    """Several samples, each output about some of them; the consumer takes one now and then."""
    rng = random.Random(seed)
    samples, wanted = rng.randrange(1, 4), rng.random() < 0.5
    whole = {i: [rng.randrange(50) for _ in range(rng.randrange(9))] for i in range(samples)}
    sent = dict.fromkeys(whole, 0)
    ended: set[int] = set()
    taken: dict[int, Answer] = {}
    prompt_logprobs: list[Any] = []

    def take(got: Any) -> bool:
        assert isinstance(got, Output)
        assert [answer.index for answer in got.outputs] == sorted({answer.index for answer in got.outputs})
        if got.prompt_logprobs is not None:
            prompt_logprobs.append(got.prompt_logprobs)
        for answer in got.outputs:
            before = taken.get(answer.index)
            assert isinstance(answer, Answer)
            assert before is None or before.finish_reason is None, "more after the end"
            taken[answer.index] = joined(before, answer) if delta and before is not None else answer
        return got.finished

    async def main() -> None:
        collector, waits = OutputCollector(delta=delta), False
        first: dict[str, Any] = {"prompt_logprobs": [None]}
        while len(ended) < samples:
            answers = []
            for i in sorted(rng.sample(sorted(whole.keys() - ended), rng.randrange(1, samples - len(ended) + 1))):
                start = sent[i] if delta else 0
                sent[i] = min(sent[i] + rng.randrange(3), len(whole[i]))
                tokens = whole[i][start : sent[i]]
                reason: Any = rng.choice(("stop", "length")) if sent[i] == len(whole[i]) else None
                ended.update([i] * (reason is not None))
                text = "".join(chr(97 + token) for token in tokens)
                stop = 5 if reason == "stop" else None
                found = logprobs(tokens, wanted)
                answers.append(Answer(i, text, tokens, logprobs=found, finish_reason=reason, stop_reason=stop))
            assert collector.put(output(answers, finished=len(ended) == samples, **first)) is not waits
            waits, first = True, {}
            if rng.random() < 0.3:
                collector.wake()
                take(await asyncio.wait_for(collector.get(), 60))
                waits = False
        if waits:
            collector.wake()
            assert take(await asyncio.wait_for(collector.get(), 60))

    asyncio.run(main())
    assert prompt_logprobs == [[None]]
    assert {i: answer.token_ids for i, answer in taken.items()} == whole
    for i, answer in taken.items():
        assert answer.text == "".join(chr(97 + token) for token in whole[i])
        assert answer.logprobs == logprobs(whole[i], wanted)
        assert answer.finish_reason == ("stop" if answer.stop_reason == 5 else "length")


def test_an_error_comes_after_what_waits() -> None:
    async def main() -> None:
        collector = OutputCollector()
        assert collector.put(output([Answer(0, "a", [0])]))
        assert not collector.fail(RuntimeError("no more"))
        collector.wake()
        assert (await asyncio.wait_for(collector.get(), 60)).outputs[0].text == "a"
        with pytest.raises(RuntimeError, match="no more"):
            await asyncio.wait_for(collector.get(), 60)
        assert OutputCollector().fail(RuntimeError())

    asyncio.run(main())


def test_a_failed_request_says_so_whatever_waited() -> None:
    async def main() -> None:
        for delta in (False, True):
            collector, error = OutputCollector(delta=delta), RuntimeError("the model broke")
            collector.put(output([Answer(0, "a", [0])]))
            collector.put(output([Answer(0, "", [], finish_reason="error")], finished=True, error=error))
            collector.wake()
            got = await asyncio.wait_for(collector.get(), 60)
            assert got.finished
            assert got.error is error

    asyncio.run(main())
