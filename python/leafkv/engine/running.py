"""The running samples as columns: what a step asks of all of them is a few numpy calls, whatever their number.

Row i of every column belongs to ``samples[i]``. Rows are in the order of service: of requests by `Request.order`, of
the samples of a request by index. So those of a request are neighbours, and the last are the first to be preempted.
Rows come and go when requests do; a step of decoding changes numbers alone.
"""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from leafkv.engine.request import Request, Sample

NUMBER, PROMPT, KNOWN, COMPUTED, LIMIT, LAST, BORN, EOS, WATCHED, PLAIN, GREEDY = COLUMNS = range(11)
"""Columns, the first nine as `KVManager.grow_running` has them: the sample's sequence id; tokens of the prompt; known
tokens; those with KV; known tokens at which it ends; the last known token; whether it has a sequence yet; whether an
end of sequence ends it; whether each of its tokens is looked at; `SamplingParams.plain` and `greedy`."""


class Running:
    """The running samples, in order of service."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        """Another list whenever they change: who has one keeps it as it was."""
        self.num_requests = 0
        self.version = 0
        """Changes whenever rows do."""
        self.plain = self.greedy = True
        """Whether all samples are."""
        self._columns = np.zeros((len(COLUMNS), 64), np.int64)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def columns(self) -> NDArray[np.int64]:
        """All columns, as a view that may be written: [columns, len(self)]. Valid until rows come or go."""
        return self._columns[:, : len(self.samples)]

    def column(self, name: int) -> NDArray[np.int64]:
        """One of the columns, as a view that may be written: [len(self)]. Valid until rows come or go."""
        return self._columns[name, : len(self.samples)]

    def row(self, sample: Sample) -> int:
        """Where a sample is."""
        return self.samples.index(sample)

    def insert(self, request: Request, computed: int, *, watched: bool) -> int:
        """Put in the live samples of a request: the first has ``computed`` tokens with KV, the others are to be born.

        Returns the row of the first.
        """
        samples = request.live
        rows = np.zeros((len(samples), len(COLUMNS)), np.int64)
        rows[:, NUMBER] = [sample.number for sample in samples]
        rows[:, PROMPT] = request.num_prompt_tokens
        rows[:, KNOWN] = [len(sample.tokens) for sample in samples]
        rows[:, LIMIT] = request.num_prompt_tokens + request.max_tokens
        rows[:, LAST] = [sample.tokens[-1] for sample in samples]
        rows[:, EOS] = not request.params.ignore_eos
        rows[:, PLAIN] = request.params.plain
        rows[:, GREEDY] = request.params.greedy
        rows[:, WATCHED] = watched
        rows[0, [COMPUTED, BORN]] = computed, True
        self.num_requests += 1
        return self._put(request, rows)

    def move(self, request: Request, rank: int, urgency: int) -> None:
        """Give a request another place in the order of service."""
        _, rows = self._take(request)
        request.rank, request.urgency = rank, urgency
        self._put(request, rows)

    def remove(self, request: Request) -> list[Sample]:
        """Take out all samples of a request; return those that have a sequence."""
        self.num_requests -= 1
        samples, rows = self._take(request)
        return [sample for sample, row in zip(samples, rows, strict=True) if row[BORN]]

    def remove_sample(self, sample: Sample) -> None:
        """Take out one sample of a request that has others here."""
        row = self.row(sample)
        self._cut(row, row + 1)

    def _put(self, request: Request, rows: NDArray[np.int64]) -> int:
        before, more = len(self.samples), len(rows)
        at = bisect(self.samples, request.order, key=lambda sample: sample.request.order)
        if before + more > self._columns.shape[1]:
            wider = np.zeros((len(self._columns), 2 * (before + more)), np.int64)
            wider[:, :before] = self._columns[:, :before]
            self._columns = wider
        self._columns[:, at + more : before + more] = self._columns[:, at:before].copy()
        self._columns[:, at : at + more] = rows.T
        self._changed([*self.samples[:at], *request.live, *self.samples[at:]])
        return at

    def _take(self, request: Request) -> tuple[list[Sample], NDArray[np.int64]]:
        """Take out all samples of a request; return them, and their columns, one row each."""
        end = bisect(self.samples, request.order, key=lambda sample: sample.request.order)
        at = end
        while at > 0 and self.samples[at - 1].request is request:
            at -= 1
        return self._cut(at, end)

    def _cut(self, start: int, end: int) -> tuple[list[Sample], NDArray[np.int64]]:
        samples, count = self.samples, len(self.samples)
        gone: NDArray[np.int64] = self._columns[:, start:end].T.copy()
        self._columns[:, start : count - (end - start)] = self._columns[:, end:count].copy()
        self._changed([*samples[:start], *samples[end:]])
        return samples[start:end], gone

    def _changed(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.version += 1
        self.plain = bool(self.column(PLAIN).all())
        self.greedy = bool(self.column(GREEDY).all())
