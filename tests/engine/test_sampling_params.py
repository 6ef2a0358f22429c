"""Sampling parameters: each wrong value is named, right ones are kept in one form, and a journal gets them back."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
from typing import Any

import numpy as np
import pytest

from leafkv import SamplingParams
from leafkv.engine.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
from leafkv.errors import InvalidInputError


def nothing(output: list[int], logits: Any) -> Any:
    return logits


BAD = [
    *[("n", value) for value in (0, -1, 1.5, True, "1", 10**9)],
    *[("presence_penalty", value) for value in (2.1, -2.1, float("nan"), "1", None)],
    *[("frequency_penalty", value) for value in (2.1, -2.1, float("inf"), True)],
    *[("repetition_penalty", value) for value in (0, -1.0, float("inf"), float("nan"), None)],
    *[("stop", value) for value in ("", [""], ["a", ""], b"a", 5, [5], ["a", b"b"])],
    *[("stop_token_ids", value) for value in ("ab", [1.0], [-1], [True], 5)],
    *[("min_tokens", value) for value in (-1, 17, 1.0, None)],
    *[("max_tokens", value) for value in (0, 1.0, True)],
    *[("logprobs", value) for value in (-2, True, 1.0, "1")],
    *[("prompt_logprobs", value) for value in (-2, True)],
    *[("logit_bias", value) for value in ([1], {-1: 1.0}, {1: float("inf")}, {1: "a"}, {"1": 1.0}, {1: 1e39}, 5)],
    *[("allowed_token_ids", value) for value in ([], (), [-1], "1", [1.5], 3)],
    *[("bad_words", value) for value in ("word", [""], [5], 5)],
    *[("logits_processors", value) for value in (nothing, [5], "a")],
    *[("structured_outputs", value) for value in ({"regex": "a"}, "a")],
    *[("output_kind", value) for value in (0, "DELTA", None)],
    *[("include_stop_str_in_output", value) for value in (1, None, "yes")],
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name}"):
        SamplingParams(**{name: value})


def test_what_does_not_go_together() -> None:
    with pytest.raises(InvalidInputError, match=r"^stop: "):
        SamplingParams(stop="a", detokenize=False)
    with pytest.raises(InvalidInputError, match=r"^min_tokens: expected at most max_tokens=3, got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert SamplingParams(min_tokens=4, max_tokens=None).min_tokens == 4
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": {"a": {1}}}, "structured_outputs.json"),
        ({"json": {"a": float("nan")}}, "structured_outputs.json"),
        ({"json": 5}, "structured_outputs.json"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "yes"}, "structured_outputs.choice"),
        ({"choice": [""]}, "structured_outputs.choice"),
    ],
)
def test_bad_forms_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{named}: "):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [("beam_width", 0), ("max_tokens", 0), ("temperature", -1), ("length_penalty", "1"), ("ignore_eos", 1)],
)
def test_bad_beam_search_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name}: "):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, name: value})
    assert BeamSearchParams(beam_width=np.int64(2), max_tokens=3).length_penalty == 1.0


def test_values_have_one_form_and_stay() -> None:
    stops = ["b", "a", "b"]
    bias: Any = {np.int64(3): np.float32(0.5), 4: 1}
    allowed: Any = np.array([5, 3, 5])
    params = SamplingParams(stop=stops, logit_bias=bias, allowed_token_ids=allowed, bad_words=("x",))
    stops.clear()
    bias.clear()
    allowed[:] = 0
    assert params.stop == ("b", "a")
    assert params.logit_bias == {3: 0.5, 4: 1.0}
    assert [type(x) for pair in params.logit_bias.items() for x in pair] == [int, float] * 2
    assert params.allowed_token_ids == (5, 3)
    assert params.allowed_ids is not None
    assert (params.allowed_ids.tolist(), params.biased_ids.tolist(), params.biases.tolist()) == (
        [5, 3],
        [3, 4],
        [0.5, 1.0],
    )
    assert SamplingParams(stop="ab").stop == ("ab",)
    unset = SamplingParams()
    assert [unset.stop, unset.bad_words, unset.stop_token_ids, unset.logits_processors] == [()] * 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert hash(params) == hash(dataclasses.replace(params))
    assert pickle.loads(pickle.dumps(params)) == params


OPTIONS: dict[str, list[Any]] = {
    "n": [1, 5],
    "temperature": [0.0, 0.7, 1 / 3],
    "top_p": [1.0, 0.1],
    "top_k": [-1, 0, 7],
    "min_p": [0.0, 0.05],
    "seed": [None, 0, 2**64 - 1],
    "presence_penalty": [0.0, -1.5],
    "frequency_penalty": [0.0, 0.3],
    "repetition_penalty": [1.0, 1.2],
    "stop": [None, "a", ["\u65e5\u672c", "\ud800"]],
    "include_stop_str_in_output": [False, True],
    "stop_token_ids": [None, [3, 4]],
    "ignore_eos": [False, True],
    "min_tokens": [0, 3],
    "max_tokens": [None, 3, 16],
    "logprobs": [None, 0, -1],
    "prompt_logprobs": [None, 2],
    "logit_bias": [None, {}, {3: 0.1, 10: -100.0}],
    "allowed_token_ids": [None, [1, 2, 3]],
    "bad_words": [None, ["bad"]],
    "structured_outputs": [
        None,
        StructuredOutputsParams(json={"type": "object"}),
        StructuredOutputsParams(regex="a+"),
        StructuredOutputsParams(choice=["x", "y"]),
    ],
    "detokenize": [True],
    "skip_special_tokens": [True, False],
    "output_kind": list(RequestOutputKind),
}


def test_a_journal_gets_back_what_it_wrote() -> None:
    assert set(OPTIONS) == {f.name for f in dataclasses.fields(SamplingParams) if f.init} - {"logits_processors"}
    rng = random.Random(5)
    for _ in range(300):
        params = SamplingParams(**{name: rng.choice(values) for name, values in OPTIONS.items()})
        again = SamplingParams.from_dict(json.loads(json.dumps(params.to_dict(), allow_nan=False)))
        assert again == params
        assert (again.plain, again.unchanged) == (params.plain, params.unchanged)
    assert SamplingParams.from_dict({}) == SamplingParams()
    with pytest.raises(InvalidInputError, match=r"^logits_processors: "):
        SamplingParams(logits_processors=[nothing]).to_dict()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"best_of": 1}, "sampling_params: unknown .'best_of'"),
        ({"plain": True}, "sampling_params: unknown .'plain'"),
        ({"output_kind": "ALL"}, "output_kind"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"n": 0}, "n"),
        (5, "sampling_params"),
    ],
)
def test_a_wrong_journal_is_named(values: Any, named: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{named}"):
        SamplingParams.from_dict(values)


NOT_PLAIN: dict[str, Any] = {
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "logprobs": 0,
    "logit_bias": {1: 1.0},
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "logits_processors": [nothing],
    "structured_outputs": StructuredOutputsParams(regex="a"),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain(name: str) -> None:
    params = SamplingParams(**{name: NOT_PLAIN[name]})
    assert not params.plain
    assert params.unchanged == (name == "logprobs")


def test_what_is_plain() -> None:
    rest: Any = {"n": 3, "top_k": 5, "top_p": 0.5, "stop": "a", "stop_token_ids": [1], "prompt_logprobs": 1, "seed": 1}
    for temperature in (0.0, 1.0):
        assert SamplingParams(temperature=temperature, logit_bias={}, bad_words=[], logits_processors=[], **rest).plain


def test_tokens_that_the_model_does_not_have() -> None:
    SamplingParams(logit_bias={9: 1.0}, allowed_token_ids=[9]).check_vocabulary(10)
    with pytest.raises(InvalidInputError, match=r"^logit_bias: token id 10 is outside the vocabulary of 10 tokens"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)
    with pytest.raises(InvalidInputError, match=r"^allowed_token_ids: token id 12 "):
        SamplingParams(allowed_token_ids=[3, 12]).check_vocabulary(10)
