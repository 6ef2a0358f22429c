"""Paged attention in plain numpy, to run models by: slow, obvious, and NaN wherever nothing was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leafkv.models import Batch, Model
from leafkv.models.batch import ModelShape

BLOCK_SIZE = 4


class NumpyCache:
    """Keys and values [num_blocks, num_kv_heads, block_size, head_dim] of each layer."""

    def __init__(self, config: ModelShape, num_blocks: int = 64) -> None:
        shape = (num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self._layers = [
            (np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)) for _ in range(config.num_layers)
        ]

    def layer(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return self._layers[index]

    def scales(self, index: int) -> dict[str, Any]:
        return {}


@dataclass
class NumpyPlan:
    """Attention of the last ``counts[i]`` tokens of sequences with these block tables and lengths."""

    tables: list[NDArray[np.int64]]
    counts: list[int]
    lengths: list[int]

    def attend(
        self,
        query: NDArray[np.float32],
        key_cache: NDArray[Any],
        value_cache: NDArray[Any],
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        k_scale: NDArray[np.float32] | None = None,
        v_scale: NDArray[np.float32] | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        assert scale is not None
        assert out is not None
        assert k_scale is v_scale is None
        row = 0
        for table, count, length in zip(self.tables, self.counts, self.lengths, strict=True):
            for position in range(length - count, length):
                first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
                seen = np.arange(first, position + 1)
                blocks, offsets = table[seen // BLOCK_SIZE], seen % BLOCK_SIZE
                keys, values = key_cache[blocks, :, offsets], value_cache[blocks, :, offsets]
                group = query.shape[1] // keys.shape[1]
                for head in range(query.shape[1]):
                    scores = keys[:, head // group] @ query[row, head] * np.float32(scale)
                    weights = np.exp(scores - scores.max())
                    out[row, head] = weights / weights.sum() @ values[:, head // group]
                row += 1
        return out


def run(model: Model, sequences: list[list[int]], chunks: list[int]) -> list[NDArray[np.float32]]:
    """Logits [len(sequence), vocab_size] of each sequence, computed together, ``chunks`` tokens at a time.

    The last chunk size repeats. Blocks of a sequence lie scattered over the cache.
    """
    cache = NumpyCache(model.config)
    order = np.random.default_rng(0).permutation(64)
    per_sequence = len(order) // len(sequences)
    tables = [order[i * per_sequence : (i + 1) * per_sequence] for i in range(len(sequences))]
    done = [0] * len(sequences)
    logits: list[list[NDArray[np.float32]]] = [[] for _ in sequences]
    step = 0
    while any(start < len(tokens) for start, tokens in zip(done, sequences, strict=True)):
        size = chunks[min(step, len(chunks) - 1)]
        step += 1
        live = [i for i, tokens in enumerate(sequences) if done[i] < len(tokens)]
        spans = [range(done[i], min(done[i] + size, len(sequences[i]))) for i in live]
        positions = np.concatenate([np.array(span, dtype=np.int64) for span in spans])
        slots = np.concatenate(
            [tables[i][np.array(span) // BLOCK_SIZE] * BLOCK_SIZE + np.array(span) % BLOCK_SIZE
             for i, span in zip(live, spans, strict=True)]
        )  # fmt: skip
        batch = Batch(
            token_ids=np.array([sequences[i][p] for i, span in zip(live, spans, strict=True) for p in span], np.int32),
            positions=positions,
            slots=slots.astype(np.int64),
            plan=NumpyPlan([tables[i] for i in live], [len(s) for s in spans], [s.stop for s in spans]),
            logit_rows=np.arange(len(positions)),
        )
        result = model.forward(batch, cache)
        row = 0
        for i, span in zip(live, spans, strict=True):
            logits[i].append(result[row : row + len(span)])
            row += len(span)
            done[i] = span.stop
    return [np.concatenate(parts) for parts in logits]
