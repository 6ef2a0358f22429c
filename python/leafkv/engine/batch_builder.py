"""The arrays of one step, filled in place: the flattened batch that the model computes.

The buffers are allocated once and reused, so a batch is valid until the next one is built. The cost is a few numpy
calls, and one for each sample that computes more than its last token; tables and slots are written by the KV manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from leafkv.engine.running import LAST, NUMBER
from leafkv.models.batch import Batch

if TYPE_CHECKING:
    from leafkv._core import KVManager
    from leafkv.engine.running import Running
    from leafkv.engine.work import Work
    from leafkv.models.batch import Model


class BatchBuilder:
    """Builds batches of at most ``max_tokens`` tokens and ``max_seqs`` sequences of ``max_model_len`` tokens."""

    def __init__(
        self,
        manager: KVManager,
        model: Model,
        *,
        max_tokens: int,
        max_seqs: int,
        max_model_len: int,
        num_threads: int | None,
    ) -> None:
        self._manager = manager
        self._model = model
        self._num_threads = num_threads
        # Every token of a step has a slot of its own, every sequence at least one of the tokens.
        max_tokens = min(max_tokens, manager.num_blocks * manager.block_size)
        max_seqs = min(max_seqs, max_tokens, manager.num_blocks)
        max_blocks = -(-max_model_len // manager.block_size)
        self._token_ids = np.empty(max_tokens, np.int32)
        self._slots = np.empty(max_tokens, np.int64)
        self._tables = np.zeros((max_seqs, max_blocks), np.int32)
        # What is in each row: a request that keeps its place in the batch gets only what changed of its table.
        self._stamps = np.zeros(max_seqs, np.uint64)

    def build(self, work: Work, running: Running, wanted: NDArray[np.int64]) -> Batch:
        """The batch of a step. Its logits are those of the last ``wanted[i]`` tokens that each item computes."""
        counts, shape = work.counts, self._model.config
        starts = np.zeros(len(work) + 1, np.int32)
        counts.cumsum(out=starts[1:])
        total = int(starts[-1])

        token_ids, slots = self._token_ids[:total], self._slots[:total]
        token_ids[starts[1:] - 1] = running.column(LAST)[work.rows]
        several = (counts > 1) | (work.computed + counts < work.known)
        for item in several.nonzero()[0].tolist():
            sample, first, start, n = work.samples[item], int(work.computed[item]), int(starts[item]), int(counts[item])
            ids = sample.tokens[first : first + n]
            if len(ids) < n:
                ids.extend(work.drafts[sample])
            token_ids[start : start + n] = ids
        numbers = running.column(NUMBER)[work.rows]
        tables = self._tables[: len(work)]
        self._manager.tables(numbers, tables, self._stamps[: len(work)])
        self._manager.slots(numbers, counts, slots)
        positions = np.arange(total)
        positions += (work.computed - starts[:-1]).repeat(counts)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            plan=self._model.plan(
                tables,
                starts,
                (work.computed + counts).astype(np.int32),
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                block_size=self._manager.block_size,
                num_blocks=self._manager.num_blocks,
                num_threads=self._num_threads,
            ),
            logit_rows=_last(starts[1:], wanted),
            num_threads=self._num_threads,
        )


def _last(ends: NDArray[np.int32], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last ``wanted[i]`` rows before ``ends[i]``, all one after another."""
    before = wanted.cumsum() - wanted
    return np.arange(int(wanted.sum())) + (ends - wanted - before).repeat(wanted)
