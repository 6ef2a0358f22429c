"""The request router: everything that can be wrong with a request is found here, before it reaches an engine.

It gives a request its id, tokenizes it, settles what its parameters leave open, and chooses the engine that serves it.
All of that is off the engine's step: faces call it in the thread of whoever asks.

Prompts come as text, token ids, or chat messages, alone or as vLLM's ``{"prompt": ...}`` and
``{"prompt_token_ids": ...}``, to which ``"cache_salt"`` may be added.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from leafkv._checks import check_integer
from leafkv.engine.detokenizer import Detokenizer
from leafkv.engine.guided import GuideCompiler
from leafkv.engine.logits import bad_word_token_ids
from leafkv.engine.request import Request
from leafkv.engine.sampling_params import RequestOutputKind, SamplingParams
from leafkv.errors import InvalidInputError
from leafkv.kv import namespace

if TYPE_CHECKING:
    from leafkv.models.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | NDArray[np.integer[Any]] | Mapping[str, Any] | Sequence[Message]
"""Text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or chat messages with role and content."""


class Replica(Protocol):
    """An engine, as far as the choice between several needs it."""

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that it has to serve."""


AnyReplica = TypeVar("AnyReplica", bound=Replica)


class Router:
    """Makes requests out of prompts. Safe to use from several threads.

    Args:
        tokenizer: None takes token ids only, and gives no text.
        vocab_size: token ids are below it.
        max_model_len: tokens that the model's context holds.
        num_blocks: blocks of the KV cache.
        block_size: tokens per block.
        max_num_seqs: samples that may run at the same time.
        eos_token_ids: tokens that end a sample, unless its parameters ignore them.
        has_priorities: whether requests may have any.
        model_name: what tells KV of this model from that of others, for prompts with a salt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        eos_token_ids: frozenset[int] = frozenset(),
        has_priorities: bool = False,
        model_name: str = "model",
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._eos_token_ids = eos_token_ids
        self.has_priorities = has_priorities
        self._model_name = model_name
        # So that ids are those of no other router either, in this process or another: journals outlive them.
        self._name = secrets.token_hex(4)
        self._ids = itertools.count()
        self._guides = None if tokenizer is None else GuideCompiler(tokenizer, vocab_size, eos_token_ids)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = False,
        recorded: bool = True,
    ) -> Request:
        """Check and tokenize a prompt. Nothing is queued yet.

        Raises:
            InvalidInputError: the request is malformed, or can never fit.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidInputError(f"sampling_params: expected SamplingParams, got {params!r}")
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise InvalidInputError(f"request_id: expected a string that is not empty, got {request_id!r}")
        priority = check_integer("priority", priority, -(2**31), 2**31 - 1)
        if priority != 0 and not self.has_priorities:
            raise InvalidInputError(f"priority: {priority} needs scheduling_policy='priority'")
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        if salt is not None:
            if not isinstance(salt, str) or not salt:
                raise InvalidInputError(f"cache_salt: expected a string that is not empty, got {_shown(salt)}")
            prompt = {key: value for key, value in prompt.items() if key != "cache_salt"}  # type: ignore[union-attr]
        text, token_ids = self._tokenize(prompt)
        stop_ids = frozenset(params.stop_token_ids or ())
        params.check_vocabulary(self.vocab_size)
        request = Request(
            request_id=f"{self._name}-{next(self._ids)}" if request_id is None else request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=self._max_tokens(len(token_ids), params),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            stop_ids=stop_ids if params.ignore_eos else stop_ids | self._eos_token_ids,
            bad_word_ids=self._bad_words(params),
            namespace=b"" if salt is None else namespace(self._model_name, salt=salt),
            cache_salt=salt,
            priority=priority,
            recorded=recorded,
            stream=stream and params.output_kind is not RequestOutputKind.FINAL_ONLY,
        )
        self._equip(request)
        return request

    def choose(self, replicas: Sequence[AnyReplica]) -> AnyReplica:
        """The engine that serves the next request: that with the fewest unfinished ones."""
        return min(replicas, key=lambda replica: replica.num_unfinished_requests)

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """The tokens of ``bad_words``, as far as they can come."""
        if not params.bad_words:
            return []
        words = bad_word_token_ids(self._require_tokenizer("bad_words"), params.bad_words)
        return [word for word in words if max(word) < self.vocab_size]

    def detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        """What makes text of a sample's tokens, if anything does."""
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=tuple(params.stop or ()),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _equip(self, request: Request) -> None:
        """Give each sample what keeps its text and its form."""
        params = request.params
        guide = None
        if params.structured_outputs is not None:
            self._require_tokenizer("structured_outputs")
            assert self._guides is not None
            guide = self._guides.compile(params.structured_outputs)
        if params.stop:
            self._require_tokenizer("stop")
        for sample in request.samples:
            sample.guide = guide if guide is None or sample.index == 0 else guide.fork()
            sample.detokenizer = self.detokenizer(params)

    def _tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        """The text of a prompt, if it has one, and its token ids."""
        if isinstance(prompt, str):
            return prompt, self._encode(prompt)
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys == {"prompt"} and isinstance(prompt["prompt"], str):
                return self._tokenize(prompt["prompt"])
            if keys in ({"prompt_token_ids"}, {"prompt_token_ids", "prompt"}):
                text = prompt.get("prompt")
                if text is not None and not isinstance(text, str):
                    raise InvalidInputError(f"prompt: expected text beside 'prompt_token_ids', got {_shown(text)}")
                return text, self._check_ids(prompt["prompt_token_ids"])
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
        text = self._require_tokenizer("prompt").apply_chat_template(list(messages), add_generation_prompt=True)
        return text, self._encode(text, add_special_tokens=False)  # the template has put them

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._require_tokenizer("prompt")
        if not text:
            raise InvalidInputError("prompt: empty text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"prompt: not valid Unicode text: {error}") from error
        return self._check_ids(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _require_tokenizer(self, name: str) -> Tokenizer:
        if self.tokenizer is None:
            what = "prompts must be token ids" if name == "prompt" else "it cannot be used"
            raise InvalidInputError(f"{name}: this model has no tokenizer, so {what}")
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
        """How many tokens a sample may generate: they must fit the context, and those of all samples the pool."""
        if params.n > self._max_num_seqs:
            raise InvalidInputError(
                f"n: {params.n} samples of a request run together, but {self._max_num_seqs} may (max_num_seqs)"
            )
        wanted = max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
        total = prompt_tokens + wanted
        if total > self.max_model_len:
            raise InvalidInputError(
                f"prompt and max_tokens: {prompt_tokens} prompt tokens and {wanted} to generate are {total}, "
                f"but the model's context (max_model_len) holds {self.max_model_len}"
            )
        room = self._room(prompt_tokens, params.n)
        if total > room:
            pool = self._num_blocks * self._block_size
            if params.n == 1:
                raise InvalidInputError(
                    f"prompt and max_tokens: {prompt_tokens} prompt tokens and {wanted} to generate are {total}, "
                    f"but the KV cache (num_blocks x block_size) holds {pool}"
                )
            shared = prompt_tokens // self._block_size
            blocks = shared + params.n * (-(-total // self._block_size) - shared)
            raise InvalidInputError(
                f"prompt, max_tokens and n: {prompt_tokens} prompt tokens and {params.n} samples of {wanted} need "
                f"{blocks} blocks, but the KV cache holds {self._num_blocks} (num_blocks)"
            )
        return min(self.max_model_len, room) - prompt_tokens if params.max_tokens is None else params.max_tokens

    def _room(self, prompt_tokens: int, n: int) -> int:
        """Tokens that each of ``n`` samples may have, the prompt included, if they share its whole blocks."""
        shared = prompt_tokens // self._block_size
        return (shared + max(0, self._num_blocks - shared) // n) * self._block_size


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
