"""Answers of a given form: a JSON schema, a regular expression, a choice. The grammars are llguidance's.

A :class:`Guide` follows one sequence. Before each token it forbids those that cannot continue the answer; an
end-of-sequence token is allowed exactly where the answer may end. It is the one thing in sampling that has state, but
state that the tokens generated so far determine: a guide that has accepted them is as good as the one that was lost.
Where the text that follows is given (a key of an object, say), only the tokens are allowed that the tokenizer itself
would split it into.

The tokenizer is read once, in about half a second, when the first guide is made; a form is compiled once and its guides
are copies. A mask costs some hundred microseconds at first, and less where the grammar has been before.
"""

from __future__ import annotations

import json
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from leafkv._extras import require
from leafkv.errors import InvalidInputError, LeafKVError

if TYPE_CHECKING:
    from collections.abc import Collection

    from leafkv.engine.sampling_params import StructuredOutputsParams
    from leafkv.models.tokenizer import Tokenizer

COMPILED = 64
"""Forms that are kept compiled."""


class Guide:
    """What may follow in the answer of one sequence. Made by :class:`GuideCompiler`."""

    def __init__(self, matcher: Any, strange: NDArray[np.intp]) -> None:
        self._matcher = matcher
        self._strange = strange
        """Tokens that llguidance takes for an end of sequence, and the model does not."""

    @property
    def stopped(self) -> bool:
        """Whether nothing may follow but the end."""
        return bool(self._matcher.is_stopped())

    def mask(self, row: NDArray[np.float32]) -> None:
        """Set the logits [vocabulary] of tokens that cannot follow to -inf.

        Raises:
            LeafKVError: the grammar became too complex to follow.
        """
        allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._check()
        row[allowed[: len(row)] == 0] = -np.inf
        row[self._strange] = -np.inf

    def accept(self, token: int) -> None:
        """Go on to after ``token``, which was picked.

        Raises:
            LeafKVError: it cannot follow.
        """
        if not self._matcher.consume_token(token):
            self._check()
            raise LeafKVError(f"structured_outputs: nothing can follow a finished answer, got token {token}")

    def fork(self) -> Guide:
        """A guide at the same place that goes its own way."""
        return Guide(self._matcher.deep_copy(), self._strange)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise LeafKVError(f"structured_outputs: {_first_lines(self._matcher.get_error())}")


class GuideCompiler:
    """Makes guides for one model. Safe to use from many threads.

    Args:
        tokenizer: the model's.
        vocab_size: logits in a row; there may be more or fewer than the tokenizer has tokens.
        eos_token_ids: the tokens that end an answer.

    Raises:
        MissingExtraError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._library: Any = None
        """llguidance, once it is needed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(token for token in eos_token_ids if token < vocab_size)
        self._lock = Lock()
        self._read: Any = None
        """The tokenizer, as llguidance has it."""
        self._strange = np.empty(0, np.intp)
        self._compiled: dict[StructuredOutputsParams, Guide] = {}
        """The forms last asked for, the latest at the end."""

    def compile(self, params: StructuredOutputsParams) -> Guide:
        """A guide at the beginning of an answer.

        Raises:
            InvalidInputError: the schema or the expression is malformed, or has what is not supported.
        """
        with self._lock:
            guide = self._compiled.pop(params, None)
            if guide is None:
                guide = self._make(params)
            self._compiled[params] = guide
            if len(self._compiled) > COMPILED:
                del self._compiled[next(iter(self._compiled))]
            return guide.fork()

    def _make(self, params: StructuredOutputsParams) -> Guide:
        self._library = require("llguidance", "guided")
        tokenizer = self._read_tokenizer()
        matcher = self._library.LLMatcher
        name = next(iter(params.to_dict()))
        try:
            if params.json is not None:
                grammar = matcher.grammar_from_json_schema(params.json)
            elif params.regex is not None:
                grammar = matcher.grammar_from_regex(params.regex)
            else:
                choices = (json.dumps(text, ensure_ascii=False) for text in params.choice or ())
                grammar = matcher.grammar_from_lark("start: " + " | ".join(choices))
            wrong, messages = matcher.validate_grammar_with_warnings(grammar, tokenizer)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"structured_outputs.{name}: {error}") from error
        if wrong or messages:
            # Also what would only be warned of: an option that is not followed is refused.
            raise InvalidInputError(f"structured_outputs.{name}: {_first_lines(messages[0])}")
        made = matcher(tokenizer, grammar, log_level=0)
        if made.is_error():
            raise InvalidInputError(f"structured_outputs.{name}: {_first_lines(made.get_error())}")
        return Guide(made, self._strange)

    def _read_tokenizer(self) -> Any:
        if self._read is None:
            if not hasattr(self._tokenizer, "to_json"):
                raise InvalidInputError("structured_outputs: this model has no tokenizer that can be guided")
            try:
                self._read = self._library.LLTokenizer(
                    self._tokenizer.to_json(),
                    n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                    eos_token=self._eos_token_ids or None,
                )
            except (TypeError, ValueError) as error:
                raise InvalidInputError(f"structured_outputs: this tokenizer cannot be guided: {error}") from error
            strange = set(self._read.eos_tokens) - set(self._eos_token_ids)
            self._strange = np.array(sorted(token for token in strange if token < self._vocab_size), np.intp)
        return self._read


def _first_lines(message: str) -> str:
    """What is wrong, without the state of the parser that llguidance appends."""
    return message.partition("<state>")[0].strip()
