"""What a step computes: the scheduler's answer, and what the rest of the step goes by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from leafkv.engine.request import Sample


@dataclass(slots=True)
class Work:
    """``counts[i]`` more tokens of ``samples[i]``, which has ``computed[i]`` of ``known[i]``.

    Drafts of speculation are among the counted tokens, after the known ones.
    """

    samples: list[Sample]
    rows: slice | NDArray[np.int64]
    """Their rows in the columns of the running samples, while those have ``version``; a slice if they are all."""
    counts: NDArray[np.int64]
    computed: NDArray[np.int64]
    known: NDArray[np.int64]
    version: int
    plain: bool
    """Whether every item has one row of logits at most, of which nothing but a token is wanted."""
    greedy: bool
    """Whether all tokens are the likeliest."""
    prefills: bool
    """Whether any of the tokens is of a prompt."""
    drafts: dict[Sample, list[int]] = field(default_factory=dict)
    copies: list[NDArray[np.int32]] = field(default_factory=list)
    """Of blocks, to be made one after another, and before those that the manager still owes."""
    looks: NDArray[np.bool_] | None = None
    """Whose new tokens want a look, once it is committed."""

    def __len__(self) -> int:
        return len(self.samples)

    def only(self, items: NDArray[np.bool_]) -> Work:
        """These items of it."""
        samples = [sample for sample, kept in zip(self.samples, items.tolist(), strict=True) if kept]
        rows = np.arange(len(self))[items] if isinstance(self.rows, slice) else self.rows[items]
        columns = (rows, self.counts[items], self.computed[items], self.known[items])
        work = Work(samples, *columns, self.version, self.plain, self.greedy, self.prefills, self.drafts)
        work.looks = None if self.looks is None else self.looks[items]
        return work
