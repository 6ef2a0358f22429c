"""Text as it is served, through both faces, of a real tokenizer: a model plays back scripts of tokens.

What must come is what the tokenizer makes of all tokens at once, up to the first stop string that it has.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from leafkv import LLM, AsyncEngine, AttentionPlan, QueueFullError, RequestOutput, RequestOutputKind, SamplingParams
from leafkv.kv import KVCache
from leafkv.models import LoadedModel
from leafkv.models.batch import Batch
from leafkv.models.tokenizer import Tokenizer

from .toy import ToyConfig, ToyLoaded, reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)

LONGEST = 40
SEATS = 8
"""Scripts that a model plays at the same time."""

PIECES = [
    "👩‍👩‍👧",
    "🇩🇪",
    "🙂",
    "日本語のテキスト",
    "e\u0301\u0323",
    "ก็",
    "Straße",
    "</think>",
    "</thin",
    "<|im_end",
    "\n\n",
    "aab",
]


@dataclass
class Player:
    """Its next token depends on the position alone: ``script[p]`` follows the token at ``p``."""

    plan = AttentionPlan
    config: ToyConfig
    script: NDArray[np.int64] = field(default_factory=lambda: np.zeros(SEATS * (LONGEST + 8), np.int64))

    def forward(self, batch: Batch, cache: KVCache) -> NDArray[np.float32]:
        logits = np.zeros((len(batch.logit_rows), self.config.vocab_size), np.float32)
        logits[np.arange(len(logits)), self.script[batch.positions[batch.logit_rows]]] = 1.0
        return logits

    def load(self, seat: int, tokens: Sequence[int]) -> list[int]:
        """The prompt of whom a script is to be played to."""
        start = seat * (LONGEST + 8)
        self.script[start : start + len(tokens)] = tokens
        return [1] * (start + 1)


@dataclass
class Stage:
    tokenizer: Tokenizer
    player: Player

    @property
    def loaded(self) -> Any:
        model: Any = self.player
        return ToyLoaded(model, self.tokenizer)

    @property
    def options(self) -> dict[str, Any]:
        return {"num_blocks": 512, "block_size": 16}


@pytest.fixture(scope="module")
def stage(loaded: LoadedModel) -> Stage:
    backend = Backend.from_str(loaded.tokenizer._backend.to_str())
    backend.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=loaded.tokenizer.eos_token_ids)
    config = ToyConfig(vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    return Stage(tokenizer, Player(config))


@dataclass
class Case:
    """A script, what is asked for, and what must come."""

    tokens: list[int]
    params: SamplingParams
    text: str
    reason: str
    stop_reason: int | str | None
    unsplit: list[tuple[int, int]]
    """Where added tokens lie in the text."""

    def check(self, outputs: Sequence[RequestOutput]) -> None:
        """Outputs of a stream, of either kind, or the only one of `generate`."""
        delta = self.params.output_kind is RequestOutputKind.DELTA
        text, tokens = "", list[int]()
        for output in outputs:
            (answer,) = output.outputs
            before = text
            text = text + answer.text if delta else answer.text
            tokens = tokens + answer.token_ids if delta else answer.token_ids
            assert text.startswith(before)
            assert self.text.startswith(text)
            assert output.finished or not any(start < len(text) < end for start, end in self.unsplit)
            assert output.finished == (output is outputs[-1])
        assert text == self.text
        assert tokens == self.tokens
        assert (answer.finish_reason, answer.stop_reason) == (self.reason, self.stop_reason)


def random_script(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    script: list[int] = []
    added = sorted(tokenizer.added_ids)
    while len(script) < LONGEST:
        match rng.randrange(5):
            case 0:
                script += [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(6))]
            case 1:
                script.append(rng.choice(added) if rng.random() < 0.7 else rng.choice(tokenizer.eos_token_ids))
            case 2:  # parts of characters, and what they end in
                ids = tokenizer.encode(rng.choice(PIECES), add_special_tokens=False)
                script += ids[: rng.randrange(len(ids) + 1)]
            case _:
                script += tokenizer.encode(rng.choice(PIECES), add_special_tokens=False)
    return script[:LONGEST]


def random_case(rng: random.Random, tokenizer: Tokenizer) -> Case:
    script = random_script(rng, tokenizer)
    skip = rng.random() < 0.6

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=skip)

    whole = decode(script)
    stops = [piece[: rng.randint(1, 3)] for piece in rng.sample(PIECES, rng.randrange(3))]
    for _ in range(rng.choice([0, 0, 1, 3])):
        start = rng.randrange(len(whole))
        stops.append(whole[start : start + rng.randint(1, 12)] + rng.choice(["", "", "x"]))
    stops = [stop for stop in stops if "\ufffd" not in stop]
    include, ignore_eos = rng.random() < 0.3, rng.random() < 0.4
    stop_ids = rng.sample(script, 2) if rng.random() < 0.2 else []
    max_tokens = rng.randint(1, LONGEST)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        stop=stops,
        stop_token_ids=stop_ids,
        include_stop_str_in_output=include,
        ignore_eos=ignore_eos,
        skip_special_tokens=skip,
        output_kind=rng.choice([*RequestOutputKind][:2]),
    )
    ends = {*stop_ids, *(() if ignore_eos else tokenizer.eos_token_ids)}
    tokens, reason = script[:max_tokens], "length"
    stop_reason: int | str | None = None
    for count in range(1, max_tokens + 1):
        ended = script[count - 1] in ends
        text = decode(script[: count - (ended and not include)])
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if ended or found:
            tokens, reason = script[:count], "stop"
        if found:
            end, length, stop = min(found)
            text, stop_reason = text[: end if include else end + length], stop
        if ended:
            stop_reason = script[count - 1] if script[count - 1] in stop_ids else None
        if ended or found:
            break
    # Where nothing but the end cuts an added token. Characters before it are whole, or never will be.
    places = [
        (len(decode(tokens[:i])), len(decode(tokens[: i + 1])))
        for i, t in enumerate(tokens)
        if t in tokenizer.added_ids
    ]
    return Case(tokens, params, text, reason, stop_reason, places)


def watch(llm: LLM, cases: list[Case], player: Player, rng: random.Random) -> list[list[RequestOutput]]:
    """All streams at the same time, each read as it comes."""
    streams: list[Iterator[RequestOutput]] = []
    for seat, case in enumerate(cases):
        prompt = player.load(seat, case.tokens)
        streams.append(llm.stream(prompt, case.params))
    told: list[list[RequestOutput]] = [[] for _ in cases]
    left = [*range(len(cases))]
    while left:
        i = rng.choice(left)
        output = next(streams[i], None)
        if output is None:
            left.remove(i)
        else:
            told[i].append(output)
    return told


@pytest.mark.parametrize("seed", range(24))
def test_streams_and_answers_are_the_text_of_all_tokens(seed: int, stage: Stage) -> None:
    """B73, B75, B76, with neighbours that are in the middle of other characters."""
    rng = random.Random(seed)
    llm = LLM(stage.loaded, speculative_config={} if seed % 3 == 0 else None, **stage.options)
    cases = [random_case(rng, stage.tokenizer) for _ in range(SEATS)]
    for case, outputs in zip(cases, watch(llm, cases, stage.player, rng), strict=True):
        case.check(outputs)
    prompts = [stage.player.load(seat, case.tokens) for seat, case in enumerate(cases)]
    for case, output in zip(cases, llm.generate(prompts, [case.params for case in cases], use_tqdm=False), strict=True):
        case.check([output])
    assert llm.manager.stats().held_blocks == 0


@pytest.mark.parametrize("seed", range(100, 108))
def test_slow_and_quick_consumers_get_the_same_text(seed: int, stage: Stage) -> None:
    """B73: what has come together is in one piece, and in no other."""
    rng = random.Random(seed)
    cases = [random_case(rng, stage.tokenizer) for _ in range(SEATS)]
    prompts = [stage.player.load(seat, case.tokens) for seat, case in enumerate(cases)]

    async def consume(engine: AsyncEngine, prompt: list[int], case: Case, slow: bool) -> list[RequestOutput]:
        told = []
        async for output in engine.generate(prompt, case.params):
            told.append(output)
            if slow:
                await asyncio.sleep(0.002)
        return told

    async def main() -> None:
        async with AsyncEngine(stage.loaded, **stage.options) as engine:
            consumers = [
                consume(engine, *pair, slow=i % 2 == 0) for i, pair in enumerate(zip(prompts, cases, strict=True))
            ]
            for case, told in zip(cases, await asyncio.gather(*consumers), strict=True):
                case.check(told)

    asyncio.run(asyncio.wait_for(main(), 60))


def play(stage: Stage, tokens: list[int], **options: Any) -> list[str]:
    """The deltas of a stream."""
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": len(tokens), "output_kind": RequestOutputKind.DELTA, **options}
    )
    llm = LLM(stage.loaded, **stage.options)
    return [output.outputs[0].text for output in llm.stream(stage.player.load(0, tokens), params)]


def test_a_cut_character_is_flushed_once(stage: Stage) -> None:
    """B76: of an emoji of several tokens, cut by max_tokens after each of them; in pieces that are whole otherwise."""
    tokens = stage.tokenizer.encode("so:🪿", add_special_tokens=False)
    assert play(stage, tokens)[-1] == "🪿"
    first = next(i for i in range(len(tokens)) if "\ufffd" in stage.tokenizer.decode(tokens[: i + 1]))
    for count in range(first + 1, len(tokens)):
        deltas = play(stage, tokens[:count])
        assert deltas[-1] == "\ufffd"
        assert "".join(deltas[:-1]) == stage.tokenizer.decode(tokens[:first])


def test_nothing_comes_twice_when_a_stop_is_straddled(stage: Stage) -> None:
    """B73: what has been held back comes once, where it was no stop string after all, and not at all where it was."""
    tokens = stage.tokenizer.encode("one END of two ENDS here", add_special_tokens=False)
    assert "".join(play(stage, tokens, stop=["ENDED", "END of three", " here!"])) == "one END of two ENDS here"
    assert "".join(play(stage, tokens, stop=["D of two E"])) == "one EN"
    assert "".join(play(stage, tokens, stop=["D of two E"], include_stop_str_in_output=True)) == "one END of two E"


def test_added_tokens_come_whole(stage: Stage) -> None:
    """B75: whatever may begin within one."""
    (think,) = stage.tokenizer.encode("</think>", add_special_tokens=False)
    before, after = (stage.tokenizer.encode(text, add_special_tokens=False) for text in ("so it is", " is"))
    deltas = play(stage, [*before, think, *after], stop=["think> is not", "k>!", "<|", "s</t!"])
    assert sum("</think>" in delta for delta in deltas) == 1
    assert "".join(deltas) == "so it is</think> is"


def test_a_burst_beyond_the_queue_is_answered_or_refused() -> None:
    """B113: each one, at once, with an error that says so; and later ones are served again."""

    async def ask(engine: AsyncEngine, i: int) -> str:
        try:
            async for output in engine.generate([i % 50, i // 50] * 10, GREEDY):
                last = output
        except QueueFullError as error:
            return "refused" if "max_waiting" in str(error) else str(error)
        assert last.outputs[0].token_ids == reference([i % 50, i // 50] * 10, 3, ignore_eos=True)
        return "answered"

    async def main() -> None:
        toy: Any = ToyLoaded()
        async with AsyncEngine(toy, num_blocks=40, block_size=4, max_num_seqs=4, max_waiting=8) as engine:
            told = await asyncio.gather(*(ask(engine, i) for i in range(500)))
            assert set(told) == {"answered", "refused"}
            assert await ask(engine, 0) == "answered"
            assert engine.manager.stats().held_blocks == 0

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_who_goes_frees_all_whatever_was_to_come(kind: RequestOutputKind) -> None:
    """B110: also who waits for nothing but the end, which nobody would have noticed."""

    async def main() -> None:
        toy: Any = ToyLoaded()
        async with AsyncEngine(toy, num_blocks=1000, block_size=4) as engine:
            params = SamplingParams(temperature=0.0, n=2, max_tokens=1900, ignore_eos=True, output_kind=kind)

            async def consume() -> None:
                async for _ in engine.generate([1, 2, 3], params):
                    pass

            task = asyncio.create_task(consume())
            while engine.stats().running == 0:
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await engine.abort("nobody")  # comes after the consumer's going
            assert engine.manager.stats().sequences == 0
            assert engine.stats().generated_tokens < 2 * 1900

    asyncio.run(asyncio.wait_for(main(), 60))
