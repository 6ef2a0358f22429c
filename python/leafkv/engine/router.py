"""The request router: everything that can be wrong with a request is found here, before it reaches an engine.

Prompts come as text, token ids, or chat messages, alone or as vLLM's ``{"prompt": ...}`` and
``{"prompt_token_ids": ...}``.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from leafkv.engine.detokenizer import Detokenizer
from leafkv.engine.request import Request
from leafkv.engine.sampling_params import SamplingParams
from leafkv.errors import InvalidInputError

if TYPE_CHECKING:
    from leafkv.models.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | NDArray[np.integer[Any]] | Mapping[str, Any] | Sequence[Message]
"""Text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or chat messages with role and content."""


class Router:
    """Makes requests out of prompts.

    Args:
        tokenizer: None takes token ids only, and gives no text.
        vocab_size: token ids are below it.
        max_model_len: tokens that the model's context holds.
        max_pool_tokens: tokens that the KV cache holds.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int, max_model_len: int, max_pool_tokens: int
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.max_pool_tokens = max_pool_tokens
        self._ids = itertools.count()

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None, *, stream: bool = False) -> Request:
        """Check and tokenize a prompt. Nothing is queued yet.

        Raises:
            InvalidInputError: the request is malformed, or can never fit.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidInputError(f"sampling_params: expected SamplingParams, got {params!r}")
        text, token_ids = self._tokenize(prompt)
        detokenizer = None
        if self.tokenizer is not None and params.detokenize:
            detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens)
        return Request(
            request_id=str(next(self._ids)),
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=self._max_tokens(len(token_ids), params),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            detokenizer=detokenizer,
            stream=stream,
        )

    def _tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        """The text of a prompt, if it has one, and its token ids."""
        if isinstance(prompt, str):
            return prompt, self._encode(prompt)
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys == {"prompt"} and isinstance(prompt["prompt"], str):
                return self._tokenize(prompt["prompt"])
            if keys in ({"prompt_token_ids"}, {"prompt_token_ids", "prompt"}):
                return prompt.get("prompt"), self._check_ids(prompt["prompt_token_ids"])
            raise InvalidInputError(
                f"prompt: expected a dict with the text 'prompt' or with 'prompt_token_ids', got {_shown(prompt)}"
            )
        if is_chat(prompt):
            return self._render(prompt)
        return None, self._check_ids(prompt)

    def _render(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidInputError(f"messages: expected dicts with 'role' and 'content', got {_shown(message)}")
        text = self._require_tokenizer().apply_chat_template(list(messages), add_generation_prompt=True)
        return text, self._encode(text, add_special_tokens=False)  # the template has put them

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._require_tokenizer()
        if not text:
            raise InvalidInputError("prompt: empty text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"prompt: not valid Unicode text: {error}") from error
        return self._check_ids(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidInputError("prompt: this model has no tokenizer, so prompts must be token ids")
        return self.tokenizer

    def _check_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, np.ndarray):
            ids = ids.tolist() if ids.ndim == 1 else None
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
            raise InvalidInputError(f"prompt: expected text, token ids or chat messages, got {_shown(ids)}")
        if len(ids) == 0:
            raise InvalidInputError("prompt: no tokens; at least one is needed")
        for token in ids:
            if not is_token_id(token):
                raise InvalidInputError(f"prompt: token ids are integers, got {_shown(token)}")
            if not 0 <= token < self.vocab_size:
                raise InvalidInputError(
                    f"prompt: token id {token} is outside the vocabulary of {self.vocab_size} tokens"
                )
        return [int(token) for token in ids]

    def _max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        """How many tokens may be generated: all of them must fit the context and the pool."""
        for limit, name in (
            (self.max_model_len, "the model's context (max_model_len)"),
            (self.max_pool_tokens, "the KV cache (num_blocks x block_size)"),
        ):
            wanted = 1 if params.max_tokens is None else params.max_tokens
            if prompt_tokens + wanted > limit:
                raise InvalidInputError(
                    f"prompt and max_tokens: {prompt_tokens} prompt tokens and {wanted} to generate are "
                    f"{prompt_tokens + wanted}, but {name} holds {limit}"
                )
        room = min(self.max_model_len, self.max_pool_tokens) - prompt_tokens
        return room if params.max_tokens is None else params.max_tokens


def is_token_id(value: Any) -> bool:
    """Whether a value is an integer, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or a sequence of them, as a list. Token ids, and chat messages, are one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = [prompts] if prompts.ndim == 1 else prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise InvalidInputError(f"prompts: expected a prompt or a list of prompts, got {_shown(prompts)}")
    if is_chat(prompts) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer))):
        return [prompts]
    return list(prompts)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
