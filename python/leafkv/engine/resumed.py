"""For a consumer that comes back after the process that answered it has gone: the rest of its answer.

A resumed request tells all that it has from its first token on, in deltas. :class:`Rest` cuts off what the consumer has
had, so that it gets each token once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from leafkv._checks import check_integer
from leafkv.engine.outputs import RequestOutput
from leafkv.engine.recorder import restore
from leafkv.engine.request import Status
from leafkv.errors import InvalidInputError, JournalError, LeafKVError

if TYPE_CHECKING:
    from leafkv.engine.detokenizer import Detokenizer
    from leafkv.engine.journal import Journal
    from leafkv.engine.outputs import CompletionOutput
    from leafkv.engine.request import Request
    from leafkv.engine.router import Router


def existing(path: str | Path) -> str | Path:
    """The path of a journal that is to be there.

    Raises:
        JournalError: it is not.
    """
    if not isinstance(path, (str, Path)):
        raise InvalidInputError(f"path: expected a path, got {path!r}")
    if not Path(path).is_file() or not Path(path).stat().st_size:
        raise JournalError(f"journal {path}: there is none")
    return path


def recorded(
    router: Router, journal: Journal | None, request_id: str, after: int | Sequence[int]
) -> RequestOutput | None:
    """All that a request gave that has ended, without what the consumer has had; None if that is nothing.

    Raises:
        InvalidInputError: the journal has no such request, or it has not ended, or ``after`` is malformed.
    """
    record = None if journal is None else journal.request(request_id)
    if record is None:
        where = "there is no journal, and" if journal is None else "the journal has"
        raise InvalidInputError(f"request_id: {where} no request {request_id!r}")
    if not record.finished:
        what = "somebody else is told of it, or it was not resumed, as the log says"
        raise InvalidInputError(f"request_id: {request_id!r} has not ended: {what}")
    request = restore(router, record)
    request.status = Status.FINISHED
    request.prompt_logprobs = None  # the journal does not have them
    if record.error is not None:
        request.error = LeafKVError(record.error)
    return Rest(router, request, after).of(RequestOutput.of(request))


class Rest:
    """What is left of a request's deltas for a consumer that has had the first ``after`` tokens.

    Args:
        router: of the engine.
        request: whose deltas come, from the first one on.
        after: tokens that the consumer has had, of every sample; or of each, in order.

    Raises:
        InvalidInputError: ``after`` is malformed.
    """

    def __init__(self, router: Router, request: Request, after: int | Sequence[int]) -> None:
        n = request.params.n
        each = list(after) if isinstance(after, Sequence) else [after] * n
        if len(each) != n:
            raise InvalidInputError(f"after: expected a number or one for each of {n} samples, got {len(each)}")
        self._samples = [_Had(check_integer("after", count, 0), router.detokenizer(request.params)) for count in each]

    def of(self, output: RequestOutput) -> RequestOutput | None:
        """The next delta without what the consumer has had; None if that is all of it."""
        answers = [self._samples[answer.index].cut(answer) for answer in output.outputs]
        news = [answer for answer in answers if answer.token_ids or answer.text or answer.finish_reason]
        return replace(output, outputs=news) if news or output.finished else None


@dataclass(slots=True)
class _Had:
    """What a consumer has had of a sample: so many more tokens than have come again, and the text of all of them."""

    tokens: int
    detokenizer: Detokenizer | None
    text: str = ""
    is_past: bool = False

    def cut(self, answer: CompletionOutput) -> CompletionOutput:
        """A delta without what was had."""
        if self.is_past:
            return answer
        had = min(self.tokens, len(answer.token_ids))
        if self.detokenizer is not None:
            for token in answer.token_ids[:had]:
                self.detokenizer.push(token)
        self.tokens -= had
        self.text += answer.text
        text = ""
        if self.tokens == 0:
            shown = self.detokenizer.text if self.detokenizer is not None else ""
            # What is held back for a stop string is shown at the end, with the last token, and not once more.
            over = had == len(answer.token_ids) and answer.finish_reason in {"stop", "length"}
            text, self.is_past = "" if over else self.text[len(shown) :], True
        logprobs = None if answer.logprobs is None else answer.logprobs[had:]
        return replace(answer, token_ids=answer.token_ids[had:], text=text, logprobs=logprobs)
