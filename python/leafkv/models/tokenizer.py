"""Text to token ids and back: a thin face over the ``tokenizers`` library, with the model's chat template."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from leafkv.errors import InvalidInputError
from leafkv.models.token_stream import REPLACEMENT, TokenStream, partial_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from leafkv.models.chat_template import ChatTemplate, Message


class Tokenizer:
    """A model's tokenizer. Safe to use from many threads.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        bos_token_id: the token that begins a text, if the model has one.
        eos_token_ids: the tokens that end a text.
        chat_template: how messages become a prompt, if the model says so.
    """

    def __init__(
        self,
        backend: Any,
        *,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        chat_template: ChatTemplate | None = None,
    ) -> None:
        # Saved by some training scripts; an engine must neither cut a prompt nor pad it.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.added_ids: frozenset[int] = frozenset(added)
        """Ids of tokens that text is searched for as they stand, such as ``</think>``; special ones are among them."""
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids of special tokens, such as those that delimit the turns of a chat."""
        self.decodes_in_order: bool = _decodes_in_order(backend.decoder)
        """Whether what `decode` makes of ids begins with what it makes of the first of them, bytes aside."""
        self._partial_bytes: dict[int, bytes | None] = {}

    def to_json(self) -> str:
        """What a ``tokenizer.json`` file has of it."""
        text: str = self._backend.to_str()
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Special tokens spelt out in it are parsed as such.

        ``add_special_tokens`` puts the tokens around it that the model expects, such as a begin-of-text token:
        leave it out for a rendered chat, whose template has written them.
        """
        if not isinstance(text, str):
            raise InvalidInputError(f"text: expected a string, got {type(text).__name__}")
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # the only strings that UTF-8 cannot hold
            raise InvalidInputError("text: it has lone surrogates, which are not text") from error
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Ids that the tokenizer does not have stand for nothing."""
        ids = [int(token_id) for token_id in ids]
        try:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise InvalidInputError("ids: expected token ids in [0, 2**32)") from error
        return text

    def decode_stream(self, skip_special_tokens: bool = True) -> TokenStream:
        """A decoder for ids that come one by one."""
        return TokenStream(self, self._backend, skip_special_tokens)

    def partial_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that is part of characters; None for one that is text, none for one unknown."""
        try:
            return self._partial_bytes[token_id]
        except KeyError:
            token: str | None = self._backend.id_to_token(token_id)
            partial = b"" if token is None else partial_bytes(token, self.decode([token_id], skip_special_tokens=False))
            self._partial_bytes[token_id] = partial
            return partial

    @cached_property
    def plain_id(self) -> int | None:
        """Some token that is text and no space, if there is one."""
        for token_id in range(self.vocab_size):
            text = self.decode([token_id], skip_special_tokens=False)
            if text.strip() and REPLACEMENT not in text:
                return token_id
        return None

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt of a chat; encode it without adding special tokens.

        Args:
            messages: mappings with ``role`` and ``content``.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            InvalidInputError: messages are malformed, or the model has no chat template or refuses them.
        """
        if self.chat_template is None:
            raise InvalidInputError("messages: this model has no chat template; pass a string or token ids")
        return self.chat_template.render(messages, add_generation_prompt)


def _decodes_in_order(decoder: Any) -> bool:
    """Whether a decoder of the library never takes back what it made of the first ids."""
    if decoder is None:
        return True
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # it is written in Python: who knows
        return False
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return all(_part_in_order(part) for part in parts)


def _part_in_order(part: dict[str, Any]) -> bool:
    match part["type"]:
        case "ByteLevel" | "Metaspace" | "ByteFallback" | "Fuse" | "BPEDecoder" | "WordPiece":
            return True
        case "Replace":  # of more than a character, it could reach back
            return len(part["pattern"].get("String", "")) == 1
        case "Strip":
            return bool(part["start"] <= 1 and part["stop"] == 0)
    return False
