"""The compiled core: block bookkeeping and paged attention. Import these names from ``leafkv``."""

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AttentionPlan",
    "KVManager",
    "Ready",
    "Stats",
    "WaitFor",
    "__version__",
    "copy_blocks",
    "instruction_set",
    "paged_attention",
    "write_kv",
]

__version__: str

_TokenIds: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64] | NDArray[np.uint32] | array[int]
"""Token ids: a 1-D array of int32, int64 or uint32, an ``array.array``, or a sequence of ints, all >= 0."""

@final
class Ready:
    """`KVManager.begin` admitted the sequence; it now holds the blocks of its prefix hit."""

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV is found in the prefix cache: a multiple of the block size, less than the prompt."""

@final
class WaitFor:
    """`KVManager.begin` did not admit the sequence: a running one is computing a prefix they share.

    Nothing was recorded. Call `begin` again once ``leader`` has committed ``tokens`` tokens, or has ended.
    """

    @property
    def leader(self) -> int:
        """The id of the running sequence."""
    @property
    def tokens(self) -> int:
        """How many tokens the leader must have committed: whole blocks, shared with this prompt."""

@final
class Stats:
    """Counters of a `KVManager`, read at once. Counters only ever rise; blocks are as of now."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def cached_blocks(self) -> int: ...
    @property
    def held_blocks(self) -> int: ...
    @property
    def max_held_blocks(self) -> int:
        """High-water mark of ``held_blocks``."""
    @property
    def sequences(self) -> int: ...
    @property
    def query_tokens(self) -> int:
        """Tokens of all prompts that were begun and then given slots."""
    @property
    def hit_tokens(self) -> int:
        """Those of ``query_tokens`` that were found in the prefix cache."""
    @property
    def evicted_blocks(self) -> int: ...

@final
class KVManager:
    """Block tables, block pool and radix-tree prefix cache of one KV memory.

    Bookkeeping only: it names blocks and slots and never touches the KV itself. Every call is atomic: it
    succeeds, or raises and changes nothing. Safe to call from many threads.

    Args:
        num_blocks: Size of the pool, in blocks, 1 to 2**31 - 1.
        block_size: Tokens per block, >= 1.
        enable_prefix_caching: False keeps nothing after a sequence ends, and shares nothing.
    """

    def __new__(cls, num_blocks: int, block_size: int = 16, *, enable_prefix_caching: bool = True) -> KVManager: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def allocatable_blocks(self) -> int:
        """Free plus evictable blocks: what admission may count on. O(1)."""
    def lookup(self, tokens: _TokenIds, namespace: bytes = b"") -> int:
        """Tokens that `begin` would find cached now. No side effects."""
    def begin(self, seq_id: int, tokens: _TokenIds, namespace: bytes = b"") -> Ready | WaitFor:
        """Start a sequence; on `Ready` it holds its prefix hit (lookup and lock are one act).

        A hit is in whole blocks and leaves at least one token to compute.

        Raises:
            InvalidInputError: ``seq_id`` is live, ``tokens`` is empty, malformed or cannot fit the pool.
        """
    def grow(self, seq_id: int, n: int) -> None:
        """Reserve slots for ``n`` more tokens, all or nothing. May owe block copies, see `copies`.

        Raises:
            OutOfBlocksError: not enough blocks, even after eviction.
        """
    def commit(self, seq_id: int, n: int, new_tokens: _TokenIds = ()) -> None:
        """Declare that the KV of the first ``n`` tokens is written.

        ``new_tokens`` appends ids beyond those known so far (the prompt, then earlier ``new_tokens``). Full
        blocks become findable; where another sequence committed the same block first, this block table is
        re-pointed to it.
        """
    def fork(self, parent_id: int, child_id: int) -> None:
        """Start ``child_id`` with the committed tokens and blocks of ``parent_id`` (copy-on-write)."""
    def truncate(self, seq_id: int, n: int) -> None:
        """Drop everything beyond the first ``n`` tokens: reserved slots, and committed tokens if any."""
    def release(self, seq_id: int) -> None:
        """End a sequence: finish, abort and preempt are this one act. Its full committed blocks stay cached."""
    def copies(self) -> NDArray[np.int32]:
        """Block copies owed, as ``(source, destination)`` rows, shape [N, 2]; each is handed out once.

        Copy them, all sources read before any destination is written, before any other write of the step.
        """
    def tables(self, seq_ids: Sequence[int], out: NDArray[np.int32]) -> None:
        """Write the block table of each sequence to a row of ``out`` [len(seq_ids), >= blocks of the longest].

        Entries past a sequence's blocks keep their value.
        """
    def slots(self, seq_ids: Sequence[int], counts: Sequence[int], out: NDArray[np.int64]) -> None:
        """Write the slots of the next ``counts[i]`` uncommitted tokens of each sequence, one after another.

        ``out`` has shape [sum(counts)]; the tokens must have been reserved by `grow`.
        """
    def block_table(self, seq_id: int) -> NDArray[np.int32]:
        """A copy of one sequence's block table."""
    def num_committed(self, seq_id: int) -> int:
        """Committed tokens of a sequence."""
    def evict(self, n: int) -> int:
        """Evict up to ``n`` cached blocks, least recently used first. Returns how many were evicted."""
    def clear(self, namespace: bytes | None = None) -> int:
        """Forget a namespace (all of them if None). Returns how many cached blocks became free.

        Live sequences of it go on privately and never re-enter the tree.
        """
    def stats(self) -> Stats: ...
    def check_invariants(self) -> None:
        """Verify every internal invariant, at a cost linear in the pool and the tree.

        Raises:
            InvariantError: one is broken.
        """

@final
class AttentionPlan:
    """Who computes what in one step of paged attention; made once, used by every layer.

    Args:
        block_tables: int32 [num_seqs, max_blocks], C-contiguous rows.
        query_starts: int32 [num_seqs + 1]; the query rows of sequence i are ``starts[i]:starts[i + 1]``.
        kv_lens: int32 [num_seqs]; tokens of KV per sequence, its new rows included.
        num_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: heads of the KV cache.
        head_dim: dimension of a head.
        block_size: tokens per block.
        num_blocks: blocks of the cache; every id used in ``block_tables`` is below it.
        num_threads: threads to use, or None for all available.
    """

    def __new__(
        cls,
        block_tables: NDArray[np.int32],
        query_starts: NDArray[np.int32],
        kv_lens: NDArray[np.int32],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        num_threads: int | None = None,
    ) -> AttentionPlan: ...
    def attend(
        self,
        query: NDArray[np.float32],
        key_cache: NDArray[Any],
        value_cache: NDArray[Any],
        *,
        scale: float | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Attention of every query row over its sequence's KV, see `paged_attention`."""

def paged_attention(
    query: NDArray[np.float32],
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    block_tables: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    kv_lens: NDArray[np.int32],
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    out: NDArray[np.float32] | None = None,
    num_threads: int | None = None,
) -> NDArray[np.float32]:
    """Attention over a paged KV cache (PagedAttention, Kwon et al. 2023). Bit-equal in any batch.

    Args:
        query: float32 [T, num_heads, head_dim], the new tokens of all sequences, one after another.
        key_cache: one layer's keys, in one of two layouts told apart by their rank:
            *rows* [num_blocks, num_kv_heads, block_size, head_dim], innermost dimension contiguous, any other
            strides; *tiled* [num_blocks, num_kv_heads, block_size * head_dim], see `KVCache`.
            float32, float16, or bfloat16 seen as uint16.
        value_cache: likewise.
        block_tables: int32 [num_seqs, max_blocks].
        query_starts: int32 [num_seqs + 1].
        kv_lens: int32 [num_seqs], new tokens included.
        scale: multiplies the scores; 1 / sqrt(head_dim) by default.
        causal: a row sees the keys up to its own position; the last row is the last position.
        sliding_window: a row sees at most this many last keys, itself included.
        out: float32 [T, num_heads, head_dim] to write to; a new array by default.
        num_threads: threads to use, or None for all available.

    Returns:
        float32 [T, num_heads, head_dim]. A row that sees no key is zero.
    """

def write_kv(
    key: NDArray[np.float32],
    value: NDArray[np.float32],
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    slots: NDArray[np.int64],
) -> None:
    """Store new keys and values, float32 [T, num_kv_heads, head_dim], at ``slots`` [T]; slot -1 is skipped."""

def copy_blocks(cache: NDArray[Any], pairs: NDArray[np.int32]) -> None:
    """Copy whole blocks of ``cache`` (first axis: blocks, each contiguous) by ``(source, destination)`` rows.

    All sources are read before any destination is written, so ``[[a, b], [b, a]]`` swaps. Destinations are unique.
    """

def instruction_set() -> str:
    """The instruction set in use: "avx512-bf16", "avx512", "avx2", "neon" or "scalar".

    The environment variable ``LEAFKV_ISA`` forces one that this CPU has.
    """
