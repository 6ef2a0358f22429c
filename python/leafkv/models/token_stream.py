"""Token ids to text, one by one: whole characters, each as soon as it is whole.

There are two kinds of tokens. Most are text, and go through the library's ``DecodeStream``, which knows what a token
means after those before it (whether its space counts, say). Others are bytes that only make a character together:
parts of an emoji. The library's stream would hold back everything that ends in such bytes, for ever if they never make
sense, or fail on them: so they never enter it, and a UTF-8 decoder joins them.

The text is what `Tokenizer.decode` makes of all ids, and bytes that are no UTF-8 are U+FFFD. One thing differs: in
vocabularies with byte tokens (``<0xE2>``) the library replaces a whole run of them if one is wrong, characters that
were whole before included. A stream cannot take those back: here only what is wrong is replaced.

Cost: a token's text. State is a few bytes of an unfinished character and what ``DecodeStream`` keeps, one token.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Any

from leafkv._extras import require

if TYPE_CHECKING:
    from leafkv.models.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What stands for bytes that are no text."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Byte-level vocabularies write a byte as a visible character: itself, or the next one from U+0100 on.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(0x100) if byte not in _VISIBLE]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + i): byte for i, byte in enumerate(_HIDDEN)}


def partial_bytes(token: str, text: str) -> bytes | None:
    """The bytes of a token that is part of characters; None for one that is text.

    Args:
        token: as the vocabulary writes it.
        text: what it decodes to, alone.
    """
    if REPLACEMENT not in text:
        return None
    match = _BYTE_TOKEN.fullmatch(token)
    if match is not None:
        raw = bytes.fromhex(match[1])
    elif all(char in _BYTE_OF for char in token):
        raw = bytes(_BYTE_OF[char] for char in token)
    else:
        return None
    # If these are not what the decoder has made of it, it is not one that we know, and the library's rules hold.
    return raw if raw.decode("utf-8", "replace") == text else None


class TokenStream:
    """Decodes ids one by one. State of its own: every sample has one.

    Args:
        tokenizer: whose ids they are.
        backend: the library's tokenizer that it wraps.
        skip_special_tokens: special tokens stand for nothing.
    """

    def __init__(self, tokenizer: Tokenizer, backend: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _Utf8Decoder("replace")
        self._stream = self._new_stream()
        self._last: int | None = None
        """The last token that gave text through the stream: what follows is decoded after it. None at the beginning."""
        self._silent: list[int] = []
        """Tokens that the stream has taken since, without giving text."""

    def step(self, token_id: int) -> str:
        """The text that became whole with the next token, which may be none."""
        if token_id in self._skipped:
            return ""
        partial = self._tokenizer.partial_bytes(token_id)
        # A token of text is whole characters: one that was begun before it does not go on.
        text = self._utf8.decode(partial or b"", final=partial is None)
        if text and (self._silent or self._last is None):
            text = self._restart() + text
        return text if partial is not None else text + self._step(token_id)

    def held(self) -> str:
        """What `finish` would give: one U+FFFD for a character that is not whole yet."""
        return self._held_by_the_stream() + self._utf8.getstate()[0].decode("utf-8", "replace")

    def finish(self) -> str:
        """No token follows: the text that was held back."""
        text = self.held()
        self._utf8.reset()
        self._silent.clear()
        return text

    def _step(self, token_id: int) -> str:
        """Of a token that is text."""
        try:
            text: str | None = self._stream.step(self._backend, token_id)
        except Exception:  # the library has no narrower one for text that does not go on as it began
            self._silent.append(token_id)
            return self._restart()
        if text is not None:
            self._last = token_id
            self._silent.clear()
            return text
        self._silent.append(token_id)
        # It takes U+FFFD for a character that is not whole: but this token says just that.
        return self._restart() if REPLACEMENT in (self._backend.id_to_token(token_id) or "") else ""

    def _held_by_the_stream(self) -> str:
        if not self._silent:
            return ""
        decode = self._tokenizer.decode
        before = [] if self._last is None else [self._last]
        known = decode(before, skip_special_tokens=False)
        text = decode([*before, *self._silent], skip_special_tokens=False)
        return text[len(known) :] if text.startswith(known) else decode(self._silent, skip_special_tokens=False)

    def _restart(self) -> str:
        """A new stream, which holds nothing; return what the old one held.

        Some token of text goes ahead: at the beginning of a text a decoder may drop a space, but here text was given.
        """
        text = self._held_by_the_stream()
        self._silent.clear()
        self._stream = self._new_stream()
        self._last = self._tokenizer.plain_id
        if self._last is not None:
            self._stream.step(self._backend, self._last)
        return text

    @staticmethod
    def _new_stream() -> Any:
        return require("tokenizers.decoders", "models").DecodeStream(skip_special_tokens=False)
