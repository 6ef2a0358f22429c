"""Speculation: the same tokens with and without it, whatever is guessed; and guesses cost nobody anything."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from leafkv import LLM, InvalidInputError, RequestOutput, RequestOutputKind, SamplingParams
from leafkv.engine.outputs import merge
from leafkv.engine.request import Sample
from leafkv.engine.sampler import pick
from leafkv.engine.speculation import PromptLookup, proposer_of
from leafkv.models import LoadedModel

from .rig import Rig, greedy, make_llm
from .sampled import FakeSequence
from .toy import EOS, VOCAB, reference, reference_logits

PROMPT = [i * 7 % VOCAB for i in range(10)]

Chosen = Callable[[int], bool]


class Oracle:
    """Proposes ``count`` tokens, the i-th of them right if ``right(i)``; notes what it was asked and said."""

    def __init__(self, count: int, right: Chosen) -> None:
        self.count = count
        self.right = right
        self.said: list[tuple[list[int], list[int]]] = []

    def propose(self, sample: Sample, most: int) -> list[int]:
        assert most > 0
        known = sample.tokens.tolist()
        for i in range(min(self.count, most)):
            token = pick(reference_logits(sample.tokens), sample).token
            sample.tokens.append(token if self.right(i) else (token + 1) % VOCAB)
        drafts = sample.tokens[len(known) :].tolist()
        del sample.tokens[len(known) :]
        self.said.append((known, drafts))
        return drafts


ORACLES: dict[str, Chosen] = {
    "right": lambda i: True,
    "wrong": lambda i: False,
    "half": lambda i: i % 2 == 0,
    "long": lambda i: i < 3,
}


def with_oracle(count: int, right: Chosen, **options: Any) -> tuple[Rig, Oracle]:
    rig, oracle = Rig(**options), Oracle(count, right)
    rig.scheduler._proposer = oracle
    return rig, oracle


def accepted(drafts: int, right: Chosen) -> int:
    return next((i for i in range(drafts) if not right(i)), drafts)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", ORACLES)
def test_what_is_accepted_is_counted(name: str, count: int) -> None:
    """Exactly: each step gives what was right and one token more, and a draft beyond the last token is not made."""
    right = ORACLES[name]
    rig, _ = with_oracle(count, right)
    request = rig.add(PROMPT, greedy(23, ignore_eos=True))
    assert rig.run()[request.request_id].outputs[0].token_ids == reference(PROMPT, 23, ignore_eos=True)
    known, steps, drafts, kept = 1, 1, 0, 0
    while known < 23:
        made = min(count, 23 - known - 1)
        steps, drafts, kept, known = (
            steps + 1,
            drafts + made,
            kept + accepted(made, right),
            known + accepted(made, right) + 1,
        )
    stats = rig.engine.stats()
    assert (stats.steps, stats.draft_tokens, stats.accepted_tokens) == (steps, drafts, kept)
    assert stats.generated_tokens == 23
    assert (request.metrics.num_draft_tokens, request.metrics.num_accepted_tokens) == (drafts, kept)
    if name == "right":
        assert kept == drafts > 0
    if name == "wrong":
        assert kept == 0 < drafts


WANTED: list[dict[str, Any]] = [
    {},
    {"temperature": 2.0, "seed": 3},
    {"temperature": 2.0, "seed": 3, "n": 3},
    {"temperature": 1.0, "seed": 3, "top_k": 4, "logprobs": 2},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"min_tokens": 12, "stop_token_ids": [*range(0, VOCAB, 4)]},
    {"prompt_logprobs": 1},
]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("name", ORACLES)
def test_the_tokens_are_the_same(name: str, wanted: dict[str, Any]) -> None:
    """Greedy and sampled, with all that looks at each token, in small chunks and under pressure."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **wanted})
    prompts = [PROMPT, PROMPT[:7], [5]]
    outputs = []
    for speculates in (False, True):
        rig, _ = with_oracle(4, ORACLES[name], num_blocks=30, max_num_batched_tokens=9)
        if not speculates:
            rig.scheduler._proposer = None
        requests = [rig.add(prompt, params) for prompt in prompts]
        results = rig.run()
        assert (rig.engine.stats().draft_tokens > 0) == speculates
        outputs.append([results[request.request_id] for request in requests])
    for plain, quick in zip(*outputs, strict=True):
        assert plain.outputs == quick.outputs
        assert plain.prompt_logprobs == quick.prompt_logprobs


@pytest.mark.parametrize("stops_by", ["string", "strings in one token", "token", "end of sequence"])
@pytest.mark.parametrize("at", range(2, 14))
def test_an_end_among_accepted_drafts(stops_by: str, at: int) -> None:
    """At each place within a step, in streams, too: nothing after it is given, counted or kept."""
    alone = reference(PROMPT, 20, ignore_eos=True)
    text = "".join(chr(65 + token) for token in alone[:at])
    ways: dict[str, dict[str, Any]] = {
        "string": {"stop": [text[-2:]]},
        "strings in one token": {"stop": [text[-3:], text[-1:]]},
        "token": {"stop_token_ids": [alone[at - 1]]},
        "end of sequence": {"logit_bias": {EOS: 0.0}},
    }
    wanted = ways[stops_by]
    kind = RequestOutputKind.DELTA if at % 2 else RequestOutputKind.CUMULATIVE
    ends = []
    for count in (0, 6):
        rig, _ = with_oracle(count, ORACLES["right"])
        if stops_by == "end of sequence":
            rig.engine._eos_token_ids[:] = [alone[at - 1]]
        request = rig.add(PROMPT, greedy(20, output_kind=kind, logprobs=1, **wanted), stream=True)
        if stops_by == "end of sequence":
            request.stop_ids = frozenset({alone[at - 1]})
        told: list[RequestOutput] = []
        while rig.engine.has_unfinished_requests():
            told += rig.step()
        rig.check_drained()
        whole = told[0]
        for output in told[1:]:
            whole = merge(whole, output, delta=kind is RequestOutputKind.DELTA)
        (answer,) = whole.outputs
        assert answer.finish_reason == "stop"
        assert answer.token_ids == alone[: len(answer.token_ids)]
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
        assert rig.engine.stats().generated_tokens == len(answer.token_ids) == whole.metrics.num_generated_tokens
        ends.append(answer)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ORACLES)
def test_what_was_guessed_is_never_found(name: str) -> None:
    """After an answer, what is cached is what was written of it, block by block, with speculation or without."""
    for length in range(7, 12):
        found = []
        for count in (0, 5):
            rig, oracle = with_oracle(count, ORACLES[name], partial_hits=False)
            request = rig.add(PROMPT[:length], greedy(21, ignore_eos=True))
            rig.run()
            tokens = request.samples[0].tokens.tolist()
            assert rig.manager.lookup([*tokens, 0, 0, 0, 0]) == (len(tokens) - 1) // 4 * 4
            stats = rig.manager.stats()
            found.append((stats.cached_blocks, stats.held_blocks, stats.free_blocks))
            for known, drafts in oracle.said:
                guess = [*known, *drafts]
                same = next((i for i, pair in enumerate(zip(guess, tokens, strict=False)) if pair[0] != pair[1]), 99)
                assert rig.manager.lookup([*guess, 0, 0, 0, 0]) <= same
        assert found[0] == found[1]
        assert found[0][0] == (length + 20) // 4


@pytest.mark.parametrize("first", ["long", "short"])
def test_nobody_is_preempted_for_a_guess(first: str) -> None:
    """On a pool that is just enough without speculation, whoever guesses, in vain."""
    lengths = [(4, 24), (5, 12), (6, 18)]
    lengths = lengths if first == "long" else lengths[::-1]

    def run(count: int, num_blocks: int) -> Rig:
        rig, _ = with_oracle(count, ORACLES["wrong"], block_size=2, num_blocks=num_blocks, enable_prefix_caching=False)
        requests = [rig.add([i] * n, greedy(m, ignore_eos=True)) for i, (n, m) in enumerate(lengths)]
        results = rig.run()
        for (n, m), (i, request) in zip(lengths, enumerate(requests), strict=True):
            assert results[request.request_id].outputs[0].token_ids == reference([i] * n, m, ignore_eos=True)
        return rig

    just_enough = run(0, 64).manager.stats().max_held_blocks
    assert run(0, just_enough).engine.stats().preemptions == 0
    assert run(0, just_enough - 1).engine.stats().preemptions > 0
    for count in range(1, 8):
        assert run(count, just_enough).engine.stats().preemptions == 0


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8])
def test_guesses_fit_the_budget(budget: int) -> None:
    """`Rig` adds up each step; known tokens go before guesses, and all have their share of steps."""
    rig, oracle = with_oracle(6, ORACLES["long"], max_num_batched_tokens=budget, num_blocks=100)
    prompts = [[i, 2, 3] for i in range(4)]
    requests = [rig.add(prompt, greedy(15, ignore_eos=True)) for prompt in prompts]
    results = rig.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert results[request.request_id].outputs[0].token_ids == reference(prompt, 15, ignore_eos=True)
    assert oracle.said
    assert (rig.engine.stats().draft_tokens > 0) == (budget > 1)


def lookup_by_hand(tokens: Sequence[int], most: int, longest: int, shortest: int) -> list[int]:
    """What followed the longest end that was there before, the last time that it was."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return list(tokens[start + n : start + n + most])
    return []


def test_prompt_lookup_is_the_obvious_search() -> None:
    rng = random.Random(1)
    found = 0
    for _ in range(3000):
        tokens = [rng.randrange(rng.choice([1, 2, 3, 8])) for _ in range(rng.randrange(1, 30))]
        longest = rng.randint(1, 6)
        shortest, count, most = rng.randint(1, longest), rng.randint(1, 6), rng.randint(1, 6)
        sample: Any = FakeSequence(SamplingParams(), tokens[:1], tokens[1:])
        drafts = PromptLookup(count, max_ngram=longest, min_ngram=shortest).propose(sample, most)
        assert drafts == lookup_by_hand(tokens, min(count, most), longest, shortest)
        assert sample.tokens.tolist() == tokens
        found += bool(drafts)
    assert 500 < found < 2900
    sample.guide = object()
    assert PromptLookup(3, min_ngram=1).propose(sample, 3) == [], "a form goes on with tokens that count"


BAD: list[tuple[Any, str]] = [
    ("ngram", "speculative_config: expected a dict"),
    ([("method", "ngram")], "speculative_config: expected a dict"),
    ({"method": "eagle"}, "speculative_config: expected the method 'ngram', got 'eagle'"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
    ({"num_speculative_tokens": 2.5}, "num_speculative_tokens"),
    ({"num_speculative_tokens": True}, "num_speculative_tokens"),
    ({"prompt_lookup_max": 0}, "prompt_lookup_max"),
    ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min"),
    ({"prompt_lookup_min": -1}, "prompt_lookup_min"),
    ({"model": "small", "method": "ngram"}, "speculative_config: unknown keys 'model'"),
]


@pytest.mark.parametrize(("config", "message"), BAD, ids=str)
def test_what_is_no_speculation_is_named(config: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        make_llm(speculative_config=config)


def test_what_is_left_out_has_its_default() -> None:
    assert proposer_of(None) is None
    for config, expected in (
        ({}, (5, 5, 2)),
        ({"method": "ngram", "num_speculative_tokens": 3}, (3, 5, 2)),
        ({"prompt_lookup_max": 1}, (5, 1, 1)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 4}, (5, 4, 4)),
    ):
        made = proposer_of(config)
        assert made is not None
        assert (made.num_speculative_tokens, made.max_ngram, made.min_ngram) == expected


def test_a_real_model_repeats_itself_in_fewer_steps(loaded: LoadedModel) -> None:
    """Lists that go on as they began: the same tokens, of which some were guessed."""
    prompts = ["one two three four, one two three four, one two three four, one", "a b c a b c a b c a b"]
    params = [greedy(24, ignore_eos=True), SamplingParams(temperature=0.7, seed=1, max_tokens=24, ignore_eos=True)]
    answers, steps = [], []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 4}):
        llm = LLM(loaded, num_blocks=64, speculative_config=config)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([(output.outputs[0].token_ids, output.outputs[0].text) for output in outputs])
        steps.append(llm.stats().steps)
    assert answers[0] == answers[1]
    stats = llm.stats()
    assert stats.accepted_tokens > 0
    assert steps[1] < steps[0]
    assert sum(output.metrics.num_accepted_tokens for output in outputs) == stats.accepted_tokens
