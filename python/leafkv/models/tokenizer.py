"""Text to token ids and back: a thin face over the ``tokenizers`` library, with the model's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leafkv._extras import require
from leafkv.errors import InvalidInputError

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
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        """Ids of special tokens, such as those that delimit the turns of a chat."""

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
        return TokenStream(self._backend, skip_special_tokens)

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


class TokenStream:
    """Decodes ids one by one, holding back what is not yet whole characters."""

    def __init__(self, backend: Any, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._stream = require("tokenizers.decoders", "models").DecodeStream(skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str | None:
        """The text that ``token_id`` completes, or None."""
        text: str | None = self._stream.step(self._backend, token_id)
        return text
