"""Token ids to the text that a stream shows, and the stop strings in it.

Text goes three steps: a token's characters become whole (`leafkv.models.token_stream`), then it is certain that they
begin no stop string, then they are shown. Only what may still become a stop string is held back, and the text of an
added token, such as ``</think>``, as long as any of it is. What is held back when the request ends is shown then.

A stop string ends the text before it, or after it where it is to be included: also in the middle of a token, as what
matters is the text, not how tokens cut it. Nothing after it is shown. It counts if it lies in the text of the tokens
after the first ``min_tokens``, wholly. Which of several wins, `stop_strings` says.

Cost: a token's text, however much there is before. `decode_all` is for those who do not stream.
"""

from __future__ import annotations

from collections import deque
from io import StringIO
from typing import TYPE_CHECKING

from leafkv.engine.stop_strings import StopStrings, stop_strings
from leafkv.models.token_stream import REPLACEMENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from leafkv.models.tokenizer import Tokenizer


def decode_all(tokenizer: Tokenizer, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
    """The text that a `Detokenizer` without stop strings shows of ``tokens``, at once."""
    tokens = list(tokens)
    if tokenizer.decodes_in_order:
        text = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        if REPLACEMENT not in text:
            return text
    stream = tokenizer.decode_stream(skip_special_tokens)
    pieces = [stream.step(token) for token in tokens]
    return "".join([*pieces, stream.finish()])


class Detokenizer:
    """The text of one sample. State of its own: samples never share one.

    Args:
        tokenizer: whose ids are pushed.
        skip_special_tokens: special tokens have no text.
        stop: strings that end the text, none of them empty.
        include_stop_str_in_output: the string that ended the text is part of it.
        min_tokens: stop strings in the text of so many tokens do not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = tokenizer.decode_stream(skip_special_tokens)
        self._stops = stop_strings(tuple(stop)) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._ended = False
        self._shown = StringIO()
        self._num_taken = 0
        """Characters that `delta` has given."""
        # With stop strings. Positions count the characters of the whole text.
        self._state = 0
        self._held = ""
        self._end = 0
        """Where ``held`` ends."""
        self._num_exempt = 0
        """Characters to come that are, in part, those of the first ``min_tokens`` tokens."""
        self._unsplit: deque[tuple[int, int]] = deque()
        """Where the added tokens in ``held`` begin and end."""

    @property
    def text(self) -> str:
        """What has been shown. It only ever grows."""
        return self._shown.getvalue()

    def delta(self) -> str:
        """What has been shown since the last call, at the cost of that alone."""
        self._shown.seek(self._num_taken)
        text = self._shown.read()
        self._num_taken += len(text)
        return text

    def push(self, token_id: int) -> str | None:
        """Take the next token; return the stop string that ended the text with it, or None.

        Once the text has ended, nothing is taken any more.
        """
        if self._ended:
            return None
        text = self._stream.step(token_id)
        if self._stops is None:
            self._shown.write(text)
            return None
        self._num_tokens += 1
        stop = self._take(self._stops, text, unsplit=token_id in self._tokenizer.added_ids)
        if self._num_tokens == self._min_tokens:
            self._num_exempt = len(self._stream.held())
        return stop

    def finish(self) -> str | None:
        """The request has ended otherwise: show what is held back. Once the text has ended, nothing happens.

        Returns:
            The stop string that ended the text after all, with a character that was never completed and so is U+FFFD.
        """
        if self._ended:
            return None
        text, stop = self._stream.finish(), None
        if self._stops is None:
            self._shown.write(text)
        else:
            stop = self._take(self._stops, text, unsplit=False)
            if stop is None:
                self._shown.write(self._held)
        self._ended = True
        return stop

    def finish_all(self, tokens: Iterable[int]) -> str | None:
        """Take all tokens, if none was pushed, and finish; at once where there are no stop strings."""
        if self._stops is None:
            self._shown.write(decode_all(self._tokenizer, tokens, self._skip_special_tokens))
            self._ended = True
            return None
        return next(filter(None, map(self.push, tokens)), None) or self.finish()

    def _take(self, stops: StopStrings, text: str, *, unsplit: bool) -> str | None:
        """Find a stop string in ``text``, or show what cannot belong to one."""
        exempt = len(text) if self._num_tokens <= self._min_tokens else min(self._num_exempt, len(text))
        self._num_exempt -= min(self._num_exempt, exempt)
        self._state, stop, end = stops.scan(self._state, text, exempt)
        if stop is not None:
            self._held += text[:end]
            self._shown.write(self._held if self._include_stop else self._held.removesuffix(stop))
            self._ended = True
            return stop
        if unsplit and text:
            self._unsplit.append((self._end, self._end + len(text)))
        self._held += text
        self._end += len(text)
        self._show(self._end - stops.depth[self._state])
        return None

    def _show(self, limit: int) -> None:
        """Show the text up to ``limit``, or up to the added token that it would cut."""
        while self._unsplit and self._unsplit[0][1] <= limit:
            self._unsplit.popleft()
        if self._unsplit:
            limit = min(limit, self._unsplit[0][0])
        count = len(self._held) - (self._end - limit)
        self._shown.write(self._held[:count])
        self._held = self._held[count:]
