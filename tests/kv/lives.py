"""Lives of sequences in a `KVManager`, and a memory that stands for their KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from leafkv._core import Ready

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from leafkv._core import KVManager

    Media = Sequence[tuple[int, int, bytes]]


def begin(manager: KVManager, seq_id: int, tokens: Any, namespace: bytes = b"", media: Media = ()) -> int:
    """Begin a sequence that must be admitted; its hit."""
    answer = manager.begin(seq_id, tokens, namespace, media)
    assert isinstance(answer, Ready)
    return answer.cached_tokens


def run(manager: KVManager, seq_id: int, tokens: Any, namespace: bytes = b"", media: Media = ()) -> int:
    """A whole life, prompt only; the hit."""
    hit = begin(manager, seq_id, tokens, namespace, media)
    manager.grow(seq_id, len(tokens) - hit)
    manager.copies()
    manager.commit(seq_id, len(tokens))
    manager.release(seq_id)
    return hit


def assert_drained(manager: KVManager) -> None:
    manager.check_invariants()
    stats = manager.stats()
    assert (stats.sequences, stats.held_blocks) == (0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks == manager.allocatable_blocks


def kv_of(tokens: Iterable[int], namespace: bytes = b"", media: Media = ()) -> list[int]:
    """A number for the KV of each position. Like KV it depends on everything up to there."""
    spans = {p: span for span in media for p in range(span[0], span[0] + span[1])}
    kv: list[int] = []
    state: object = namespace
    for position, token in enumerate(tokens):
        state = hash((state, token, spans.get(position)))
        kv.append(int(state))
    return kv


class Memory:
    """The KV memory of a manager, with one number for the KV of a token."""

    def __init__(self, manager: KVManager) -> None:
        self.manager = manager
        self.blocks: NDArray[np.int64] = np.zeros((manager.num_blocks, manager.block_size), np.int64)

    def copy(self) -> int:
        """Execute the owed copies; how many there were."""
        pairs = self.manager.copies()
        # The right side is read as a whole before anything is written.
        self.blocks[pairs[:, 1]] = self.blocks[pairs[:, 0]]
        return len(pairs)

    def write(self, seq_id: int, kv: Sequence[int]) -> None:
        """Write the KV of the next tokens, whose slots are reserved."""
        slots = np.empty(len(kv), np.int64)
        self.manager.slots([seq_id], [len(kv)], slots)
        self.blocks.reshape(-1)[slots] = kv

    def read(self, seq_id: int) -> list[int]:
        """The KV of all committed tokens."""
        flat = self.blocks[self.manager.block_table(seq_id)].ravel()
        kv: list[int] = flat[: self.manager.num_committed(seq_id)].tolist()
        return kv
