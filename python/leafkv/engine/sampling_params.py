"""How the tokens of a request are picked, and when it ends. Names and defaults are vLLM's.

Everything is checked when the object is made and nothing changes afterwards, so that an engine, which reads it at
every token, has nothing left to check. What came as a list, a numpy number or one string is kept as a tuple, a Python
number or a tuple of one string. :meth:`SamplingParams.to_dict` gives what a journal writes down.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from math import isfinite
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from leafkv._checks import MAX_TOKEN_ID, check_bool, check_integer, check_number, check_strings, check_token_ids
from leafkv.errors import InvalidInputError

GREEDY_BELOW = 1e-5
"""Temperatures below this one pick the likeliest token."""

MAX_N = 16_384
"""Samples per prompt at most, vLLM's limit: each of them holds memory."""

LogitsProcessor: TypeAlias = Callable[[list[int], NDArray[np.float32]], NDArray[np.float32]]
"""Called with the tokens generated so far and the logits [vocabulary], which it may change; it returns the new ones."""


class RequestOutputKind(Enum):
    """What each output of a running request holds."""

    CUMULATIVE = 0
    """All of the answer so far."""
    DELTA = 1
    """What is new since the output before."""
    FINAL_ONLY = 2
    """Nothing until the request has ended; then all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A form that the answer must have; exactly one of the three.

    Args:
        json: a JSON schema, as a dict or as text; it is kept as text.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these strings.

    Raises:
        InvalidInputError: none or several are given, or one is malformed. Whether a schema or an expression is
            supported is known when a request with it is submitted.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Collection[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidInputError(f"structured_outputs: expected one of json, regex and choice, got {given or None}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.regex is not None and not isinstance(self.regex, str):
            raise InvalidInputError(f"structured_outputs.regex: expected a string, got {self.regex!r}")
        if self.choice is not None:
            choice = check_strings("structured_outputs.choice", self.choice)
            if not choice:
                raise InvalidInputError("structured_outputs.choice: expected at least one string, got none")
            object.__setattr__(self, "choice", choice)

    def to_dict(self) -> dict[str, Any]:
        """The one that is given, in JSON's types."""
        given = {"json": self.json, "regex": self.regex, "choice": self.choice and list(self.choice)}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request; checked when made, and never changed.

    Args:
        n: answers per prompt, each with a seed of its own; 1 to 16,384.
        temperature: divides the logits; 0 is greedy, the likeliest token.
        top_p: keep the likeliest tokens whose probabilities add up to this much, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop the tokens less likely than this share of the likeliest one's probability, in [0, 1].
        seed: makes sampling repeatable, whatever else runs; None draws one. 0 to 2**64 - 1.
        presence_penalty: taken from the logits of tokens that were generated before, in [-2, 2].
        frequency_penalty: the same, once for each time that the token was generated, in [-2, 2].
        repetition_penalty: divides the logits of tokens in the prompt or the answer where they are positive, and
            multiplies them where not; > 0, and above 1 it makes repetitions less likely.
        stop: end at any of these strings, which then is not in ``text``; it needs ``detokenize``.
        include_stop_str_in_output: leave the string that ended the answer in ``text``.
        stop_token_ids: end at any of these tokens, which then is the last of ``token_ids`` but not in ``text``.
        ignore_eos: go on after the model's end-of-sequence tokens.
        min_tokens: tokens to generate before an end-of-sequence token, a stop token or a stop string may end it;
            at most ``max_tokens``.
        max_tokens: tokens to generate at most, >= 1; None is all that the model's context and the KV cache hold.
        logprobs: for each token, its log-probability and those of this many likeliest ones; -1 gives all.
        prompt_logprobs: the same for each token of the prompt.
        logit_bias: by token id, what is added to its logit.
        allowed_token_ids: the only tokens that may be generated; at least one.
        bad_words: texts that must not be generated, as the tokenizer splits them, with and without a space before:
            the token that would complete one is never picked.
        logits_processors: functions that change the logits, see `LogitsProcessor`; called in this order.
        structured_outputs: a form that the answer must have.
        detokenize: False leaves ``text`` empty.
        skip_special_tokens: leave special tokens out of ``text``.
        output_kind: what each output of a running request holds.

    Raises:
        InvalidInputError: a value is out of its range or of another type.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: Collection[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Collection[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    plain: bool = field(init=False, repr=False, compare=False)
    """Whether tokens are picked from the model's logits as they are, and nothing else is wanted of those."""
    unchanged: bool = field(init=False, repr=False, compare=False)
    """Whether tokens are picked from the model's logits as they are: no option before the temperature changes them."""
    allowed_ids: NDArray[np.intp] | None = field(init=False, repr=False, compare=False)
    """``allowed_token_ids`` as an array."""
    biased_ids: NDArray[np.intp] = field(init=False, repr=False, compare=False)
    """The tokens of ``logit_bias``; ``biases`` has what is added to each."""
    biases: NDArray[np.float32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Of numpy's numbers, fractions and the like only the value is kept; of a list, which may change, a copy.
        values: dict[str, object] = {
            "n": check_integer("n", self.n, 1, MAX_N),
            "temperature": check_number("temperature", self.temperature, "a finite number >= 0", lambda x: x >= 0),
            "top_p": check_number("top_p", self.top_p, "a number in (0, 1]", lambda x: 0 < x <= 1),
            "min_p": check_number("min_p", self.min_p, "a number in [0, 1]", lambda x: 0 <= x <= 1),
            "top_k": check_integer("top_k", self.top_k, -1),
            "repetition_penalty": check_number(
                "repetition_penalty", self.repetition_penalty, "a finite number > 0", lambda x: x > 0
            ),
            "stop": check_strings("stop", (self.stop,) if isinstance(self.stop, str) else _some(self.stop)),
            "stop_token_ids": check_token_ids("stop_token_ids", _some(self.stop_token_ids)),
            "bad_words": check_strings("bad_words", _some(self.bad_words)),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            values[name] = check_number(name, getattr(self, name), "a number in [-2, 2]", lambda x: -2 <= x <= 2)
        for name, low, high in (
            ("seed", 0, 2**64 - 1),
            ("max_tokens", 1, None),
            ("logprobs", -1, None),
            ("prompt_logprobs", -1, None),
        ):
            if getattr(self, name) is not None:
                values[name] = check_integer(name, getattr(self, name), low, high)
        values["min_tokens"] = check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInputError(f"min_tokens: expected at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        if values["stop"] and not self.detokenize:
            raise InvalidInputError("stop: strings are found in text, which detokenize=False leaves out")
        _check_type("structured_outputs", self.structured_outputs, StructuredOutputsParams, optional=True)
        _check_type("output_kind", self.output_kind, RequestOutputKind)
        values["logits_processors"] = _functions(self.logits_processors)
        bias = _biases(self.logit_bias)
        values["logit_bias"] = bias if self.logit_bias is not None else None
        values["biased_ids"] = np.array(list(bias), np.intp)
        values["biases"] = np.array(list(bias.values()), np.float32)
        values["allowed_ids"] = None
        if self.allowed_token_ids is not None:
            allowed = check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidInputError("allowed_token_ids: expected at least one token id, got none")
            values["allowed_token_ids"] = allowed
            values["allowed_ids"] = np.array(allowed, np.intp)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "unchanged", self._is_unchanged())
        object.__setattr__(self, "plain", self.unchanged and self.logprobs is None)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    def draw(self, seed: int, position: int) -> tuple[int, int, float, int, float, float]:
        """What `leafkv._core.draw` takes for the token at ``position`` of a sample that is not greedy."""
        return seed, position, self.temperature, min(max(self.top_k, 0), MAX_TOKEN_ID), self.top_p, self.min_p

    @property
    def penalized(self) -> bool:
        """Whether what was generated before changes the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def _is_unchanged(self) -> bool:
        changed = self.penalized or self.logit_bias or self.bad_words or self.min_tokens or self.logits_processors
        return not changed and self.allowed_token_ids is None and self.structured_outputs is None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse ``logit_bias`` and ``allowed_token_ids`` that name tokens which a model does not have.

        Raises:
            InvalidInputError: a token id is not below ``vocab_size``.
        """
        for name, ids in (("logit_bias", self.biased_ids), ("allowed_token_ids", self.allowed_ids)):
            if ids is not None and ids.size and ids.max() >= vocab_size:
                raise InvalidInputError(
                    f"{name}: token id {ids.max()} is outside the vocabulary of {vocab_size} tokens"
                )

    def to_dict(self) -> dict[str, Any]:
        """All values in JSON's types; :meth:`from_dict` makes an equal object of them, also after JSON.

        Raises:
            InvalidInputError: there are logits processors: functions cannot be written down.
        """
        if self.logits_processors:
            raise InvalidInputError("logits_processors: functions cannot be written down, expected none")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.name != "logits_processors"}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        if self.logit_bias is not None:  # JSON's keys are strings
            values["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if self.structured_outputs is not None:
            values["structured_outputs"] = self.structured_outputs.to_dict()
        values["output_kind"] = self.output_kind.name
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """What :meth:`to_dict` wrote; a name that is left out has its default.

        Raises:
            InvalidInputError: there is a name that is not known, or a value is wrong.
        """
        _check_type("sampling_params", values, Mapping)
        values = dict(values)
        known = {f.name for f in fields(cls) if f.init}
        if not known >= set(values):
            raise InvalidInputError(f"sampling_params: unknown {sorted(map(str, set(values) - known))}")
        bias, kind, form = (values.get(name) for name in ("logit_bias", "output_kind", "structured_outputs"))
        if isinstance(bias, Mapping):
            values["logit_bias"] = {_number(token): amount for token, amount in bias.items()}
        if isinstance(kind, str):
            if kind not in RequestOutputKind.__members__:
                raise InvalidInputError(f"output_kind: expected {list(RequestOutputKind.__members__)}, got {kind!r}")
            values["output_kind"] = RequestOutputKind[kind]
        if isinstance(form, Mapping):
            if not {"json", "regex", "choice"} >= set(form):
                raise InvalidInputError(f"structured_outputs: expected json, regex or choice, got {sorted(form)}")
            values["structured_outputs"] = StructuredOutputsParams(**form)
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search; checked when made, and never changed.

    Args:
        beam_width: answers that are followed at once, and given in the end; >= 1.
        max_tokens: tokens to generate at most, >= 1.
        ignore_eos: go on after the model's end-of-sequence tokens.
        temperature: divides the logits; 0 leaves them as they are.
        length_penalty: an answer of n tokens is worth its log-probability divided by n to this power.
        include_stop_str_in_output: leave the end-of-sequence token in ``text``.

    Raises:
        InvalidInputError: a value is out of its range or of another type.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        values: dict[str, object] = {
            "beam_width": check_integer("beam_width", self.beam_width, 1, MAX_N),
            "max_tokens": check_integer("max_tokens", self.max_tokens, 1),
            "temperature": check_number("temperature", self.temperature, "a finite number >= 0", lambda x: x >= 0),
            "length_penalty": check_number("length_penalty", self.length_penalty, "a finite number", isfinite),
        }
        for name in ("ignore_eos", "include_stop_str_in_output"):
            check_bool(name, getattr(self, name))
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _some(values: Any) -> Any:
    return () if values is None else values


def _check_type(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    if not isinstance(value, kind) and not (optional and value is None):
        raise InvalidInputError(f"{name}: expected {kind.__name__}, got {value!r}")


def _functions(functions: Any) -> tuple[LogitsProcessor, ...]:
    functions = _some(functions)
    if not isinstance(functions, Sequence) or not all(map(callable, functions)):
        raise InvalidInputError(f"logits_processors: expected a list of functions, got {functions!r}")
    return tuple(functions)


def _biases(bias: Any) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise InvalidInputError(f"logit_bias: expected a dict of token ids and numbers, got {bias!r}")
    return {
        check_integer("logit_bias", token, 0, MAX_TOKEN_ID): check_number(
            f"logit_bias[{token}]", amount, "a finite number", lambda x: abs(x) <= float(np.finfo(np.float32).max)
        )
        for token, amount in bias.items()
    }


def _number(text: Any) -> Any:
    """The number that a key of a JSON object stands for; anything else as it is."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else text


def _schema_text(schema: Any) -> str:
    """A JSON schema as text."""
    name = "structured_outputs.json"
    if isinstance(schema, str):
        try:
            jsonlib.loads(schema)
        except ValueError as error:
            raise InvalidInputError(f"{name}: expected a JSON schema, got text that is not JSON: {error}") from error
        return schema
    if not isinstance(schema, Mapping):
        raise InvalidInputError(f"{name}: expected a JSON schema as a dict or as text, got {schema!r}")
    try:
        return jsonlib.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{name}: expected a JSON schema, got {schema!r}: {error}") from error
