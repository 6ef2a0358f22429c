"""Lives of sequences in a `KVManager`, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leafkv._core import Ready

if TYPE_CHECKING:
    from leafkv._core import KVManager


def begin(manager: KVManager, seq_id: int, tokens: Any, namespace: bytes = b"") -> int:
    """Begin a sequence that must be admitted; its hit."""
    answer = manager.begin(seq_id, tokens, namespace)
    assert isinstance(answer, Ready)
    return answer.cached_tokens


def run(manager: KVManager, seq_id: int, tokens: Any, namespace: bytes = b"") -> int:
    """A whole life, prompt only; the hit."""
    hit = begin(manager, seq_id, tokens, namespace)
    manager.grow(seq_id, len(tokens) - hit)
    manager.commit(seq_id, len(tokens))
    manager.release(seq_id)
    return hit


def assert_drained(manager: KVManager) -> None:
    manager.check_invariants()
    stats = manager.stats()
    assert (stats.sequences, stats.held_blocks) == (0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks == manager.allocatable_blocks
