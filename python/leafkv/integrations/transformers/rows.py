"""The rows of a cache: each a sequence of the KV manager, and all as long in columns.

A row's sequence has its real tokens only, under their true ids, so that whole blocks of them can be found by others. A
row whose KV is no function of its tokens goes on *privately*: from then on its tokens go by ids that no text has, and
that are never given twice, so that nothing behind them is ever found.

Slots are taken when a forward begins, for all rows or none, and committed when it has ended; what a forward that failed
had taken is given back by whatever comes next. Costs one call of the manager each, and O(batch * columns) in numpy.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from leafkv.errors import InvalidInputError, OutOfBlocksError
from leafkv.integrations.transformers import forward
from leafkv.integrations.transformers.step import ForwardStep
from leafkv.kv import KVManager

if TYPE_CHECKING:
    from leafkv.integrations.transformers.pool import KVPool


class Rows:
    """Sequences of a pool, released when this object goes."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.step: ForwardStep | None = None
        self.cached_tokens = 0
        self._ids: list[int] = []
        self._real = np.zeros((0, 0), np.bool_)
        self._private = np.zeros(0, np.bool_)
        self._namespace = b""
        self._finalizer = weakref.finalize(self, _release, pool.manager, self._ids)
        self._finalizer.atexit = False

    @property
    def count(self) -> int:
        """Rows: 0 before the first forward."""
        return len(self._ids)

    @property
    def columns(self) -> int:
        """Columns that are written, in all layers."""
        return self._real.shape[1]

    @property
    def closed(self) -> bool:
        """Whether the rows are gone for good."""
        return not self._finalizer.alive

    def check_open(self) -> None:
        """Refuse rows of a cache that was closed, or whose pool was."""
        if self.closed or self.pool.closed:
            raise InvalidInputError("cache: expected an open LeafCache, got one that is closed, or whose pool is")

    def begin_prompts(self, tokens: NDArray[np.int64], real: NDArray[np.bool_]) -> None:
        """Start with what is cached of the prompts [B, columns]: the columns that all rows have, less than all."""
        self._start(len(tokens))
        limit = self.pool.layout.length_limit
        if limit is not None and real.sum(1).max(initial=0) >= limit:
            return
        ends = []
        for row, (ids, columns) in enumerate(zip(tokens, real, strict=True)):
            prompt = ids[columns]
            (where,) = columns.nonzero()
            hit = self.pool.manager.lookup(prompt, self._namespace) if len(prompt) else 0
            if hit:
                old = self._ids[row]
                self._ids[row], hit = self.pool.start(prompt[: hit + 1], self._namespace)
                self.pool.manager.release(old)
            # Where the first token is that has to be computed.
            ends.append(int(where[hit]) if len(prompt) else len(columns) - 1)
        self._real = real[:, : min(ends)]
        self._truncate_to_columns()
        self.cached_tokens = int(self._real.sum())

    def begin_forward(self, arguments: Mapping[str, Any], in_place: bool) -> None:
        """Take slots for what a forward brings.

        Raises:
            InvalidInputError: its rows or its mask do not go with the cache.
            OutOfBlocksError: the pool has no room. Nothing changed.
        """
        self.check_open()
        self.roll_back()
        repeats = self._repeats(forward.batch_of(arguments))
        new = forward.read(arguments, self._real.repeat(repeats, axis=0), self.pool.layout.length_limit)
        if new.begins_again:
            self.reset()
            self._start(len(new.real))
            self.cached_tokens = 0
        else:
            self.repeat(repeats)
        if self.pool.namespace() != self._namespace or self.pool.decoder.training:
            new.shareable[:] = False
        self._private |= ~new.shareable
        ids, counts = np.array(self._ids, np.uint64), new.real.sum(1)
        manager, size = self.pool.manager, self.pool.kv.block_size
        lens = self._real.sum(1) + counts
        tables = np.zeros((len(ids), max(1, -(-int(lens.max(initial=0)) // size))), np.int32)
        slots = np.empty(int(counts.sum()), np.int64)
        lacking = np.zeros(len(ids), np.int32)
        # Copies are owed by all caches of the pool: whoever takes them makes them, before anyone else writes.
        with self.pool.lock:
            failed = manager.grow_many(ids, counts, lacking)
            pairs = manager.copies()
            if len(pairs):
                self.pool.kv.copy_blocks(pairs)
            if not failed:
                manager.tables(ids, tables)
                manager.slots(ids, counts, slots)
        if failed:
            self._truncate_to_columns()
            raise OutOfBlocksError(
                f"cache: {slots.size} more tokens in {len(ids)} rows lack {int(lacking.sum())} blocks of the pool's "
                f"{manager.num_blocks}, of which {manager.allocatable_blocks} are free or cached"
            )
        self.step = ForwardStep(self.pool.kv, new, self._real, tables, slots, self.pool.layout.dtype, in_place)

    def end_forward(self) -> None:
        """Keep what the layers have written."""
        step = self.step
        if step is None:
            return
        if len(step.written) != self.pool.kv.num_layers:
            self.roll_back()
            raise InvalidInputError(
                f"cache: expected keys and values of {self.pool.kv.num_layers} layers in a forward, got those of "
                f"{len(step.written)}: does the model's attention go by its attn_implementation?"
            )
        real, counts = step.new.real, step.counts
        tokens = np.zeros(real.shape, np.int64) if step.new.tokens is None else step.new.tokens.copy()
        unknown = real & self._private[:, None]
        tokens[unknown] = self.pool.nameless(int(unknown.sum()))
        self.pool.manager.commit_many(np.array(self._ids, np.uint64), counts, tokens[real], counts)
        self._real, self.step = step.real, None

    def roll_back(self) -> None:
        """Give back what a forward had taken that did not end."""
        if self.step is not None:
            self.step = None
            self._truncate_to_columns()

    def crop(self, columns: int) -> None:
        """Keep the first columns."""
        self.check_open()
        self.roll_back()
        if columns <= 0:
            self.reset()
        elif columns < self.columns:
            self._real = self._real[:, :columns]
            self._truncate_to_columns()

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes what row ``rows[i]`` was; those that are named again share its blocks until they differ."""
        self.check_open()
        self.roll_back()
        kept: set[int] = set()
        ids = []
        for row in rows:
            ids.append(self._fork(row) if row in kept else self._ids[row])
            kept.add(row)
        gone = [seq_id for row, seq_id in enumerate(self._ids) if row not in kept]
        self._ids[:] = ids
        _release(self.pool.manager, gone)
        self._real, self._private = self._real[list(rows)], self._private[list(rows)]

    def repeat(self, repeats: int) -> None:
        """Each row so many times, side by side."""
        if repeats != 1:
            self.select([row for row in range(self.count) for _ in range(repeats)])

    def fork(self) -> Rows:
        """Rows that go on apart, from the same blocks."""
        self.check_open()
        self.roll_back()
        twin = Rows(self.pool)
        twin._ids[:] = [self._fork(row) for row in range(self.count)]
        twin._real, twin._private, twin._namespace = self._real, self._private.copy(), self._namespace
        twin.cached_tokens = self.cached_tokens
        return twin

    def reset(self) -> None:
        """No rows, as before the first forward."""
        self.check_open()
        self.step = None
        gone = self._ids[:]
        self._ids.clear()
        _release(self.pool.manager, gone)
        self._real, self._private = np.zeros((0, 0), np.bool_), np.zeros(0, np.bool_)

    def close(self) -> None:
        """Release the blocks: what is committed stays findable."""
        self.step = None
        self._finalizer()

    def _start(self, batch: int) -> None:
        self._namespace = self.pool.namespace()
        self._ids[:] = [self.pool.start(None, self._namespace)[0] for _ in range(batch)]
        self._real, self._private = np.zeros((batch, 0), np.bool_), np.zeros(batch, np.bool_)

    def _repeats(self, batch: int) -> int:
        """Of a prompt, a forward may have several rows side by side: beams, or answers."""
        if not self.columns:
            self.reset()
            self._start(batch)
        if not batch or batch % self.count:
            raise InvalidInputError(f"cache: expected {self.count} rows, or a multiple of it, got a forward of {batch}")
        return batch // self.count

    def _fork(self, row: int) -> int:
        child = self.pool.new_id()
        self.pool.manager.fork(self._ids[row], child)
        return child

    def _truncate_to_columns(self) -> None:
        for seq_id, length in zip(self._ids, self._real.sum(1), strict=True):
            self.pool.manager.truncate(seq_id, int(length))


def _release(manager: KVManager, ids: list[int]) -> None:
    while ids:
        manager.release(ids.pop())
