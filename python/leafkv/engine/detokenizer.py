"""Token ids to text, one token at a time, in whole characters.

A character may take several tokens: its bytes are held back until it is whole. What is still held back when the
request ends is given out then, so the pieces together are the text of all tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leafkv.models.tokenizer import Tokenizer


class Detokenizer:
    """The text of one request. State of its own: requests never share one."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = tokenizer.decode_stream(skip_special_tokens)
        self._token_ids: list[int] = []
        self._holds_back = False

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that became whole with it, which may be none."""
        self._token_ids.append(token_id)
        delta: str = self._stream.step(token_id) or ""
        self._holds_back = not delta
        self.text += delta
        return delta

    def flush(self) -> str:
        """End of the request: return the text that was held back."""
        if not self._holds_back:
            return ""
        self._holds_back = False
        full = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        delta = full.removeprefix(self.text) if full.startswith(self.text) else ""
        self.text += delta
        return delta
