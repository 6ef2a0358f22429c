"""Between the engine and its journal: what a step has brought is written before anybody hears of it, and comes back.

A request is written when it is admitted, with its seed; its tokens and its end in the transaction of the step that gave
them. Drawing a token depends on nothing else (parameters, seed, position, tokens), so :func:`restore` goes on to the
very tokens that would have come. The KV is computed again: a request that comes back is like one that was preempted.

What a failed write (a full disk) could not take is kept, and goes first into the next one.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from leafkv import log
from leafkv.engine.journal import Admission
from leafkv.engine.logprobs import Logprob
from leafkv.engine.sampling_params import RequestOutputKind, SamplingParams
from leafkv.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from leafkv.engine.journal import EndRow, Journal, JournaledRequest, TokenRow
    from leafkv.engine.request import Request, Sample
    from leafkv.engine.router import Router


class Recorder:
    """Collects what a step brings, for one write.

    Args:
        journal: where it goes.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._tokens: list[TokenRow] = []
        self._ended: list[EndRow] = []

    def admit(self, request: Request) -> None:
        """Write a new request, at once.

        Raises:
            JournalError: it is not written, or its id is one that the journal has.
            InvalidInputError: its parameters cannot be written down.
        """
        self.journal.write(admitted=[_admission(request)])

    def token(self, sample: Sample, position: int, token: int) -> None:
        """Note a generated token, and its place among those."""
        self._tokens.append(_token(sample, position, token))

    def forget(self, sample: Sample) -> None:
        """The tokens of a sample that were noted since the last flush are none."""
        key = sample.request.request_id, sample.index
        self._tokens = [row for row in self._tokens if row[:2] != key]

    def end(self, sample: Sample) -> None:
        """Note how a sample has ended."""
        self._ended.append(_end(sample))

    def flush(self) -> None:
        """Write what was noted.

        Raises:
            JournalError: nothing was written; the next flush tries again.
        """
        if self._tokens or self._ended:
            self.journal.write(tokens=self._tokens, ended=self._ended)
            self._tokens, self._ended = [], []


def copies(requests: Iterable[Request]) -> tuple[list[Admission], list[TokenRow], list[EndRow]]:
    """What a journal has of requests, for one that has nothing of them yet.

    Raises:
        InvalidInputError: the parameters of one cannot be written down.
    """
    requests = [*requests]
    samples = [sample for request in requests for sample in request.samples]
    return (
        [_admission(request) for request in requests],
        [_token(sample, *each) for sample in samples for each in enumerate(sample.output_token_ids)],
        [_end(sample) for sample in samples if sample.finish_reason is not None],
    )


def restore(router: Router, record: JournaledRequest) -> Request:
    """A request as it was, with the tokens that it has; what it gives from the first token on comes in deltas.

    Raises:
        InvalidInputError: it does not fit the engine that it comes to.
    """
    admission = record.admission
    prompt = {"prompt_token_ids": admission.prompt_token_ids, "prompt": admission.prompt}
    if admission.cache_salt is not None:
        prompt["cache_salt"] = admission.cache_salt
    params = replace(
        SamplingParams.from_dict(admission.params),
        seed=admission.seed,
        max_tokens=admission.max_tokens,
        output_kind=RequestOutputKind.DELTA,
    )
    priority = admission.priority if router.has_priorities else 0
    try:
        request = router.prepare(prompt, params, request_id=admission.request_id, priority=priority, stream=True)
    except InvalidInputError as error:
        raise InvalidInputError(f"request {admission.request_id} of the journal: {error}") from error
    for sample, tokens, logprobs in zip(request.samples, record.tokens, record.logprobs, strict=True):
        for token, packed in zip(tokens, logprobs, strict=True):
            sample.take(token, None if packed is None else _unpack(packed))
        if sample.index in record.ended:
            reason, stop_reason = record.ended[sample.index]
            sample.finish_reason, sample.stop_reason = reason, stop_reason  # type: ignore[assignment]
            sample.end_text()
        request.metrics.num_earlier_tokens += len(tokens)
    return request


def restore_unfinished(router: Router, journal: Journal) -> list[Request]:
    """The requests that have not ended, in their order. Those that do not fit stay in the journal, and are logged."""
    requests = (_restored(router, record) for record in journal.unfinished())
    return [request for request in requests if request is not None]


def _restored(router: Router, record: JournaledRequest) -> Request | None:
    try:
        return restore(router, record)
    except Exception as error:
        log.logger.warning("not resumed, and still in the journal: %s", error)
        return None


def _admission(request: Request) -> Admission:
    return Admission(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.samples[0].tokens[: request.num_prompt_tokens].tolist(),
        params=request.params.to_dict(),
        seed=request.seed,
        priority=request.priority,
        max_tokens=request.max_tokens,
        cache_salt=request.cache_salt,
    )


def _token(sample: Sample, position: int, token: int) -> TokenRow:
    logprobs = None if sample.logprobs is None else _pack(sample.logprobs[position])
    return sample.request.request_id, sample.index, position, token, logprobs


def _end(sample: Sample) -> EndRow:
    request, reason = sample.request, sample.finish_reason
    assert reason is not None
    error = None
    if request.error is not None:
        error = type(request.error).__name__
        with suppress(Exception):  # it may be of anybody's making
            error = f"{error}: {request.error}"
    return request.request_id, sample.index, reason, sample.stop_reason, error


def _pack(logprobs: dict[int, Logprob]) -> str:
    return json.dumps([[token, one.logprob, one.rank, one.decoded_token] for token, one in logprobs.items()])


def _unpack(packed: str) -> dict[int, Logprob]:
    return {token: Logprob(*values) for token, *values in json.loads(packed)}
