"""Guided answers of the real model, at a temperature that makes it write anything: what comes out has the form."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from leafkv import (
    LLM,
    InvalidInputError,
    MissingExtraError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from leafkv.engine.outputs import CompletionOutput
from leafkv.models import LoadedModel

from .rig import make_llm

SCHEMA = {
    "type": "object",
    "properties": {
        "good": {"type": "boolean"},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "mood": {"enum": ["calm", "日本", 'a"b']},
    },
    "required": ["good", "stars", "mood"],
    "additionalProperties": False,
}
REGEX = r"[A-C]{2}-[0-9]{3}(é|🙂)"
CHOICE = ["yes", "yes, very", "no"]


def check_json(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["good", "stars", "mood"]
    assert isinstance(value["good"], bool)
    assert value["stars"] in range(1, 6)
    assert value["mood"] in {"calm", "日本", 'a"b'}


def check_regex(text: str) -> None:
    assert re.fullmatch(REGEX, text)


def check_choice(text: str) -> None:
    assert text in CHOICE


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": SCHEMA}, check_json),
    "regex": ({"regex": REGEX}, check_regex),
    "choice": ({"choice": CHOICE}, check_choice),
}


def guided(form: dict[str, Any], **options: Any) -> SamplingParams:
    structured = StructuredOutputsParams(**form)
    return SamplingParams(**{"max_tokens": 60, "seed": 1, "structured_outputs": structured, **options})


@pytest.fixture(scope="module")
def no_space(loaded: LoadedModel) -> dict[int, float]:
    """A bias against white space: JSON may have any amount of it, and this model would never come to an end."""
    decode = loaded.tokenizer.decode
    return {token: -100.0 for token in range(loaded.tokenizer.vocab_size) if decode([token]).isspace()}


def tokens_of(answers: list[CompletionOutput]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def llm(loaded: LoadedModel) -> LLM:
    return LLM(loaded, num_blocks=96, speculative_config={"num_speculative_tokens": 4})


def test_each_answer_has_its_own_form(llm: LLM, no_space: dict[int, float]) -> None:
    """All forms in the same steps, two samples of each, beside an answer that is free."""
    params = [guided(form, n=2, logit_bias=no_space) for form, _ in FORMS.values()]
    free = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    *outputs, beside = llm.generate(["How was it?"] * 4, [*params, free], use_tqdm=False)
    for output, (_, check) in zip(outputs, FORMS.values(), strict=True):
        for answer in output.outputs:
            assert answer.finish_reason == "stop"
            check(answer.text)
    (alone,) = llm.generate("How was it?", free, use_tqdm=False)
    assert tokens_of(beside.outputs) == tokens_of(alone.outputs)
    ways = {answer.text for output in outputs for answer in output.outputs}
    assert len(ways) > len(FORMS), "the samples of a request are all the same"


@pytest.mark.parametrize("form", FORMS)
def test_a_preempted_answer_goes_on_in_its_form(
    form: str, llm: LLM, loaded: LoadedModel, no_space: dict[int, float]
) -> None:
    """At any token: the same tokens as undisturbed, of both samples."""
    options, check = FORMS[form]
    params = guided(options, n=2, seed=4, logit_bias=no_space)
    (undisturbed,) = llm.generate("How was it?", params, use_tqdm=False)
    other = LLM(loaded, num_blocks=64, block_size=4, enable_prefix_caching=False)
    scheduler = other.engine.scheduler
    for step, output in enumerate(other.stream("How was it?", params)):
        if step % 4 == 0 and not output.finished:
            scheduler.preempt(scheduler.running.samples[0].request)
    assert output.metrics.num_preemptions > 0
    assert tokens_of(output.outputs) == tokens_of(undisturbed.outputs)
    for answer in output.outputs:
        check(answer.text)


def test_an_answer_that_is_cut_says_so(llm: LLM) -> None:
    """And one may stop at a string within its form."""
    (output,) = llm.generate("How was it?", guided({"json": SCHEMA}, max_tokens=3), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    (output,) = llm.generate("How was it?", guided({"regex": REGEX}, stop=["-"]), use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "-")
    assert re.fullmatch("[A-C]{2}", output.outputs[0].text)


def test_deltas_of_both_samples_are_whole(llm: LLM, no_space: dict[int, float]) -> None:
    texts = ["", ""]
    params = guided({"json": SCHEMA}, n=2, logit_bias=no_space, output_kind=RequestOutputKind.DELTA)
    for output in llm.stream("How was it?", params):
        for answer in output.outputs:
            texts[answer.index] += answer.text
    for text in texts:
        check_json(text)


@pytest.mark.parametrize(
    ("form", "name"),
    [({"json": {"type": "nonsense"}}, "json"), ({"regex": "(a"}, "regex"), ({"json": {"not": {}}}, "json")],
    ids=str,
)
def test_a_form_that_cannot_be_is_refused_at_the_call(llm: LLM, form: dict[str, Any], name: str) -> None:
    steps = llm.stats().steps
    with pytest.raises(InvalidInputError, match=rf"^structured_outputs\.{name}: "):
        llm.generate(["fine", "How was it?"], [SamplingParams(max_tokens=1), guided(form)], use_tqdm=False)
    with pytest.raises(InvalidInputError, match=rf"^structured_outputs\.{name}: "):
        llm.stream("How was it?", guided(form))
    assert llm.stats().steps == steps
    assert not llm.engine.has_unfinished_requests()


def test_without_the_extra_only_guided_requests_are_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    llm = LLM(loaded, num_blocks=16)
    with pytest.raises(MissingExtraError, match=r"leafkv\[guided\]"):
        llm.generate("How was it?", guided({"choice": CHOICE}), use_tqdm=False)
    (output,) = llm.generate("How was it?", SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1


def test_who_has_no_tokenizer_is_told() -> None:
    with pytest.raises(InvalidInputError, match="structured_outputs: this model has no tokenizer that can be guided"):
        make_llm().generate([1, 2], guided({"choice": CHOICE}), use_tqdm=False)
