"""The arrays of one step, filled in place: the flattened batch that the model computes.

The buffers are allocated once and reused, so a batch is valid until the next one is built. In Python the cost is
O(requests); tokens, blocks and slots are copied by numpy and the KV manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from leafkv._core import AttentionPlan
from leafkv.models.batch import Batch

if TYPE_CHECKING:
    from leafkv._core import KVManager
    from leafkv.engine.scheduler import WorkItem
    from leafkv.models.config import ModelConfig


class BatchBuilder:
    """Builds batches of at most ``max_tokens`` tokens and ``max_seqs`` sequences of ``max_model_len`` tokens."""

    def __init__(
        self,
        manager: KVManager,
        config: ModelConfig,
        *,
        max_tokens: int,
        max_seqs: int,
        max_model_len: int,
        num_threads: int | None,
    ) -> None:
        self._manager = manager
        self._config = config
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

    def build(self, work: Sequence[WorkItem]) -> Batch:
        """The batch of a step. Its logits are those of the requests whose last known token it computes."""
        counts = np.array([n for _, n in work], np.int64)
        computed = np.array([request.num_computed_tokens for request, _ in work], np.int64)
        known = np.array([len(request.tokens) for request, _ in work], np.int64)
        starts = np.zeros(len(work) + 1, np.int32)
        counts.cumsum(out=starts[1:])
        total = int(starts[-1])

        token_ids, slots = self._token_ids[:total], self._slots[:total]
        for (request, n), start in zip(work, starts.tolist(), strict=False):
            first = request.num_computed_tokens
            token_ids[start : start + n] = request.tokens[first : first + n]
        numbers = [request.number for request, _ in work]
        tables = self._tables[: len(work)]
        self._manager.tables(numbers, tables, self._stamps[: len(work)])
        self._manager.slots(numbers, counts, slots)
        return Batch(
            token_ids=token_ids,
            positions=np.arange(total) + (computed - starts[:-1]).repeat(counts),
            slots=slots,
            plan=AttentionPlan(
                tables,
                starts,
                (computed + counts).astype(np.int32),
                num_heads=self._config.num_heads,
                num_kv_heads=self._config.num_kv_heads,
                head_dim=self._config.head_dim,
                block_size=self._manager.block_size,
                num_blocks=self._manager.num_blocks,
                num_threads=self._num_threads,
            ),
            logit_rows=(starts[1:] - 1)[computed + counts == known].astype(np.int64),
            num_threads=self._num_threads,
        )
