"""The compiled core: block bookkeeping, paged attention, and what a decoder computes around it.

Import the names of the first two from ``leafkv``; those of the last are what `leafkv.models` is made with.
"""

from array import array
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias, final, overload

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AttentionPlan",
    "Event",
    "KVManager",
    "Pin",
    "Ready",
    "Snapshot",
    "Stats",
    "WaitFor",
    "Weight",
    "__version__",
    "argmax",
    "block_digests",
    "copy_blocks",
    "draw",
    "embed",
    "instruction_set",
    "linear",
    "paged_attention",
    "rms_norm",
    "rope_write_kv",
    "silu_mul",
    "top_k",
    "write_kv",
]

__version__: str

_TokenIds: TypeAlias = NDArray[np.integer[Any]] | array[int] | Sequence[int]
"""Token ids, 0 to 2**32 - 1: a 1-D array of any integer dtype or an ``array.array`` (fast), or a sequence of ints."""

_Integers: TypeAlias = NDArray[np.integer[Any]] | array[int] | Sequence[int]
"""Sequence ids or counts, likewise. An ``np.int64`` or ``np.uint64`` array is copied as it is."""

_Media: TypeAlias = tuple[int, int, bytes]
"""A span of placeholder tokens for one image, sound …: its start and length in tokens, and a digest of 32 bytes."""

_Floats: TypeAlias = NDArray[Any]
"""float32, float16, or bfloat16: that of ml_dtypes, which numpy's types cannot name, or its bits as uint16."""

_WeightKind: TypeAlias = Literal["float32", "float16", "bfloat16", "q8_0", "q4_0", "q4_1"]
"""How weights are stored, see `Weight`."""

@final
class Ready:
    """`KVManager.begin` admitted the sequence; it now holds the blocks of its prefix hit."""

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV is found in the prefix cache.

        Less than the prompt, and a multiple of the block size unless the manager has partial hits.
        """

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
class Pin:
    """A prefix that stays cached although nobody uses it, see `KVManager.pin`."""

    @property
    def pin_id(self) -> int:
        """What `KVManager.unpin` takes. Never given twice."""
    @property
    def pinned_tokens(self) -> int:
        """Tokens that stay cached: whole blocks, from the start of the prompt."""
    @property
    def partial(self) -> bool:
        """Whether that is less than all whole blocks of the prompt: the rest is not cached, or over the budget."""

@final
class Stats:
    """Counters of a `KVManager`, read at once. Counters only ever rise; blocks are as of now."""

    @property
    def num_blocks(self) -> int:
        """Size of the pool: ``free_blocks + cached_blocks + held_blocks``."""
    @property
    def free_blocks(self) -> int:
        """Blocks with nothing in them."""
    @property
    def cached_blocks(self) -> int:
        """Blocks that a prefix hit can find and eviction can take."""
    @property
    def held_blocks(self) -> int:
        """Blocks of live sequences, of owed copies and of pins."""
    @property
    def max_held_blocks(self) -> int:
        """High-water mark of ``held_blocks``."""
    @property
    def pinned_blocks(self) -> int:
        """Different blocks that are pinned; they are held, too."""
    @property
    def sequences(self) -> int:
        """Live sequences."""
    @property
    def query_tokens(self) -> int:
        """Tokens of all prompts that were begun and then given slots."""
    @property
    def hit_tokens(self) -> int:
        """Those of ``query_tokens`` that were found in the prefix cache."""
    @property
    def partial_hit_tokens(self) -> int:
        """Those of ``hit_tokens`` that were found in a part of a block, which was copied."""
    @property
    def stored_blocks(self) -> int:
        """Blocks that entered the prefix cache."""
    @property
    def evicted_blocks(self) -> int:
        """Blocks that left the prefix cache because their memory was needed."""
    @property
    def dropped_events(self) -> int:
        """Events that were dropped because nobody took them in time."""

@final
class Event:
    """One change of the prefix cache. Blocks are named by their digests, see `block_digests`.

    * ``"stored"``: ``blocks``, each the parent of the next, can be found from now on.
    * ``"reused"``: a prompt was served from ``blocks``, its first ones.
    * ``"removed"``: ``blocks`` cannot be found any more; children before their parents.
    * ``"cleared"``: nothing of ``namespace`` (of any, if it is None) can be found any more.

    Every access makes a new object, so keep what is needed more than once. Events compare by value, and can be pickled.
    """

    def __new__(
        cls,
        number: int,
        kind: Literal["stored", "reused", "removed", "cleared"],
        namespace: bytes | None = None,
        blocks: Sequence[bytes] = (),
        parent: bytes | None = None,
        tokens: _TokenIds = (),
        media: Sequence[_Media] = (),
    ) -> Event: ...
    def __getnewargs__(self) -> tuple[Any, ...]: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    @property
    def number(self) -> int:
        """0, 1, 2, …: a number that is missing is an event that was dropped. In a snapshot: the snapshot's."""
    @property
    def kind(self) -> Literal["stored", "reused", "removed", "cleared"]:
        """What happened: "stored", "reused", "removed" or "cleared"."""
    @property
    def namespace(self) -> bytes | None:
        """The namespace of the blocks. None: all namespaces were cleared."""
    @property
    def blocks(self) -> list[bytes]:
        """The digests of the blocks, 32 bytes each."""
    @property
    def parent(self) -> bytes | None:
        """Of ``"stored"``: the digest of the block before the first one. None at the start of a prompt."""
    @property
    def tokens(self) -> NDArray[np.uint32]:
        """Of ``"stored"``: the tokens of the blocks, uint32 [len(blocks) * block_size]. Otherwise empty."""
    @property
    def media(self) -> list[_Media]:
        """Of ``"stored"``: the media spans that touch the blocks, at their positions in the prompt. Otherwise empty."""

@final
class Snapshot:
    """All that the prefix cache had at one moment. Snapshots compare by value, and can be pickled."""

    def __new__(cls, number: int, stored: Sequence[Event] = ()) -> Snapshot: ...
    def __getnewargs__(self) -> tuple[Any, ...]: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    @property
    def number(self) -> int:
        """The number of the first event after it."""
    @property
    def stored(self) -> list[Event]:
        """All blocks, as events of kind ``"stored"``: parents before their children."""

@final
class KVManager:
    """Block tables, block pool and radix-tree prefix cache of one KV memory.

    Bookkeeping only: it names blocks and slots and never touches the KV itself. Every call is atomic: it
    succeeds, or raises and changes nothing. Safe to call from many threads.

    Args:
        num_blocks: Size of the pool, in blocks, 1 to 2**31 - 1.
        block_size: Tokens per block, >= 1.
        enable_prefix_caching: False keeps nothing after a sequence ends, and shares nothing.
        partial_hits: A prefix hit may end inside a block; the tokens that it shares are copied, see `begin`.
        pin_budget: How many different blocks `pin` may hold, less than ``num_blocks``. Prompts must fit in the others.
        event_capacity: How many blocks the buffered `events` may name. 0: no events, at no cost.
    """

    def __new__(
        cls,
        num_blocks: int,
        block_size: int = 16,
        *,
        enable_prefix_caching: bool = True,
        partial_hits: bool = False,
        pin_budget: int = 0,
        event_capacity: int = 0,
    ) -> KVManager: ...
    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
    @property
    def block_size(self) -> int:
        """Tokens per block."""
    @property
    def allocatable_blocks(self) -> int:
        """Free plus evictable blocks: what admission may count on. O(1)."""
    def lookup(self, tokens: _TokenIds, namespace: bytes = b"", media: Sequence[_Media] = ()) -> int:
        """Tokens that `begin` would find cached now. No side effects."""
    def match_prefix(
        self, tokens: _TokenIds, namespace: bytes = b"", media: Sequence[_Media] = ()
    ) -> NDArray[np.int32]:
        """The blocks of the longest cached prefix, int32 [blocks]: all whole blocks, be they all of ``tokens``.

        No side effects: nothing keeps the blocks from being evicted, so this is for looking, not for reading KV.
        """
    def begin(
        self,
        seq_id: int,
        tokens: _TokenIds,
        namespace: bytes = b"",
        media: Sequence[_Media] = (),
        *,
        read_cache: bool = True,
    ) -> Ready | WaitFor:
        """Start a sequence; on `Ready` it holds its prefix hit (lookup and lock are one act).

        A hit leaves at least one token to compute. It is in whole blocks, unless the manager has partial hits: then
        it goes on into the next block, as far as a cached one begins with the same tokens. That block is shared until
        the first `grow`, which gives the sequence its own and owes the copy, see `copies`.

        Args:
            seq_id: A name of the caller's choice, 0 to 2**64 - 1, that no live sequence has.
            tokens: The prompt, at least one token.
            namespace: What KV depends on besides the tokens (model, adapter, tenant): only equal ones share.
            media: Spans ``(start, length, digest)`` of placeholder tokens, sorted, not overlapping. Two prompts are
                the same at a position only if the spans that cover it are equal in all three.
            read_cache: False computes all tokens: no hit, and no `WaitFor`. Others find its blocks as usual.

        Raises:
            InvalidInputError: ``seq_id`` is live, ``tokens`` is empty, malformed or cannot fit the pool, ``media`` is
                wrong.
        """
    def grow(self, seq_id: int, n: int) -> None:
        """Reserve slots for ``n`` more tokens, all or nothing. May owe block copies, see `copies`.

        Raises:
            OutOfBlocksError: not enough blocks, even after eviction.
        """
    def grow_many(self, seq_ids: _Integers, counts: _Integers, lacking: NDArray[np.int32]) -> int:
        """`grow` each sequence by ``counts[i]`` tokens, in this order, each all or nothing.

        ``lacking``, int32 [len(seq_ids)], gets 0 for a sequence that has its slots, otherwise the blocks that it
        lacked: it is as before. Returns how many sequences lack blocks. Nothing changes if an id is unknown or named
        twice.
        """
    def commit(self, seq_id: int, n: int, new_tokens: _TokenIds = ()) -> None:
        """Declare that the KV of the first ``n`` tokens is written.

        ``new_tokens`` appends ids beyond those known so far (the prompt, then earlier ``new_tokens``). Full
        blocks become findable; where another sequence committed the same block first, this block table is
        re-pointed to it.
        """
    def commit_many(
        self,
        seq_ids: _Integers,
        counts: _Integers,
        new_tokens: _TokenIds = (),
        new_counts: _Integers | None = None,
    ) -> None:
        """`commit` the next ``counts[i]`` tokens of each sequence: relative to what it has committed, unlike there.

        ``new_tokens`` has those of all sequences, one after another: ``new_counts[i]`` each, by default none at all,
        or one each. Nothing changes if anything is wrong with one of them.
        """
    def grow_running(
        self, columns: NDArray[np.int64], budget: int, wishes: _Integers | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int32] | None, bool, bool]:
        """Share a budget of tokens out among running sequences, in order, and `grow` each by what it gets.

        ``columns`` is int64 [columns, sequences]. Of each sequence: its id; the tokens of its prompt; its known tokens;
        those of them whose KV is written; the known tokens at which it ends; the last known token; whether it has
        begun; whether an end token ends it; whether each new token is looked at. Further columns are the caller's.

        A sequence gets its known tokens that are not written, or what ``wishes``, int [sequences], says, as far as the
        budget lasts; nothing where it has not begun. Returns these counts, int64 [sequences]; the blocks that each
        sequence lacks for them, int32 [sequences], or None where all have their slots; whether every sequence has
        tokens; and whether any has some of its prompt. Nothing changes if an id is unknown or named twice.
        """
    def commit_running(
        self,
        columns: NDArray[np.int64],
        rows: _Integers | None,
        counts: _Integers,
        new_tokens: _TokenIds,
        new_counts: _Integers,
        ends: _TokenIds,
    ) -> NDArray[np.bool_]:
        """`commit_many` of running sequences, whose columns are brought up to date, see `grow_running`.

        ``counts``, ``new_tokens`` and ``new_counts`` are of the sequences in ``rows``, by default all of them.
        ``ends`` are the tokens that may end a sequence. Returns which items want a look, bool [items]: those that got
        new tokens and are watched, or got several, or their first after the prompt, or one that may be their last.
        Nothing changes if anything is wrong with one of them.
        """
    def fork(self, parent_id: int, child_id: int) -> None:
        """Start ``child_id`` with the committed tokens and blocks of ``parent_id`` (copy-on-write)."""
    def truncate(self, seq_id: int, n: int) -> None:
        """Drop everything beyond the first ``n`` tokens: reserved slots, and committed tokens if any.

        A span of media is dropped as a whole: committed tokens cannot be made to end inside one.
        """
    def release(self, seq_id: int) -> None:
        """End a sequence: finish, abort and preempt are this one act. Its full committed blocks stay cached."""
    def copies(self) -> NDArray[np.int32]:
        """Block copies owed, as int32 ``(source, destination)`` rows, shape [N, 2]; each is handed out once.

        Copy them, all sources read before any destination is written, before any other write of the step.
        """
    def tables(self, seq_ids: _Integers, out: NDArray[np.int32], stamps: NDArray[np.uint64] | None = None) -> None:
        """Write the block table of each sequence to a row of ``out``, int32 [len(seq_ids), >= blocks of the longest].

        Entries past a sequence's blocks keep their value. Arrays that are kept from step to step are updated in
        place: ``stamps``, uint64 [len(seq_ids)], tells what each row contains. 0: not known. A row whose stamp is the
        one given for this very sequence gets only the entries that changed since; any other row is written whole.
        A row that was written has a new stamp. Rows may be moved together with their stamps.
        """
    def slots(self, seq_ids: _Integers, counts: _Integers, out: NDArray[np.int64]) -> None:
        """Write the slots of the next ``counts[i]`` uncommitted tokens of each sequence, one after another.

        ``out`` is int64 [sum(counts)]; the tokens must have been reserved by `grow`.
        """
    def block_table(self, seq_id: int) -> NDArray[np.int32]:
        """A copy of one sequence's block table, int32 [blocks]."""
    def num_committed(self, seq_id: int) -> int:
        """Committed tokens of a sequence."""
    def tokens(self, seq_id: int, start: int = 0) -> NDArray[np.uint32]:
        """The known tokens of a sequence from ``start`` on, uint32 [n]: its prompt, and what `commit` added."""
    def evict(self, n: int) -> int:
        """Evict up to ``n`` cached blocks, least recently used first. Returns how many were evicted."""
    def clear(self, namespace: bytes | None = None) -> int:
        """Forget a namespace (all of them if None) and end its pins. Returns how many cached blocks became free.

        Live sequences of it go on privately and never re-enter the tree.
        """
    def pin(
        self, tokens: _TokenIds, namespace: bytes = b"", media: Sequence[_Media] = (), *, ttl: int | None = None
    ) -> Pin:
        """Keep the cached whole blocks of ``tokens`` from being evicted: as many as ``pin_budget`` allows, in order.

        Pinned blocks count as held. The pin ends by `unpin`, by `clear`, or when ``ttl`` ticks have passed, see
        `time`. A pin of nothing is none: its id is new, and `unpin` of it is False.

        Raises:
            InvalidInputError: the manager has no ``pin_budget``, ``ttl`` is 0, or an argument is malformed.
        """
    def unpin(self, pin_id: int) -> bool:
        """End a pin. False if it has ended already, or never was."""
    @property
    def time(self) -> int:
        """Logical time, by which pins end: one tick per sequence that `begin` admits, or whatever `set_time` counts."""
    def set_time(self, now: int) -> None:
        """Set the logical time, from now on the caller's to count (in milliseconds, say). Pins whose time has come end.

        Raises:
            InvalidInputError: ``now`` is less than ``time``.
        """
    def events(self) -> list[Event]:
        """What changed in the prefix cache since the last call, oldest first. Each event is handed out once.

        The buffer drops the oldest events when it has to: a gap in the numbers says so, and `snapshot` repairs it.
        Empty for ever in a manager without ``event_capacity``.
        """
    def snapshot(self) -> Snapshot:
        """All that is in the prefix cache, and the number of the next event, in one act.

        Raises:
            InvalidInputError: the manager has no ``event_capacity``.
        """
    def stats(self) -> Stats:
        """All counters, read at once."""
    def check_invariants(self) -> None:
        """Verify every internal invariant, at a cost linear in the pool and the tree.

        Raises:
            InvariantError: one is broken.
        """

def block_digests(
    tokens: _TokenIds, block_size: int, namespace: bytes = b"", media: Sequence[_Media] = ()
) -> list[bytes]:
    """The digests of the whole blocks of ``tokens``, 32 bytes each: names of blocks that every process agrees on.

    A digest stands for the tokens up to the end of its block, the media among them, ``namespace`` and ``block_size``.
    The format is fixed: BLAKE3 over the digest of the block before it, the tokens, and the spans that touch the block.
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
    @overload
    def attend(
        self,
        query: _Floats,
        key_cache: NDArray[Any],
        value_cache: NDArray[Any],
        *,
        scale: float | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: NDArray[np.float32] | None = None,
        sinks: NDArray[np.float32] | None = None,
        k_scale: NDArray[np.float32] | None = None,
        v_scale: NDArray[np.float32] | None = None,
        out: _Floats | None = None,
        return_lse: Literal[False] = False,
    ) -> _Floats: ...
    @overload
    def attend(
        self,
        query: _Floats,
        key_cache: NDArray[Any],
        value_cache: NDArray[Any],
        *,
        scale: float | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: NDArray[np.float32] | None = None,
        sinks: NDArray[np.float32] | None = None,
        k_scale: NDArray[np.float32] | None = None,
        v_scale: NDArray[np.float32] | None = None,
        out: _Floats | None = None,
        return_lse: Literal[True],
    ) -> tuple[_Floats, NDArray[np.float32]]:
        """Attention of every query row over its sequence's KV: options and results are those of `paged_attention`."""

@overload
def paged_attention(
    query: _Floats,
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    block_tables: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    kv_lens: NDArray[np.int32],
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: NDArray[np.float32] | None = None,
    sinks: NDArray[np.float32] | None = None,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
    out: _Floats | None = None,
    return_lse: Literal[False] = False,
    num_threads: int | None = None,
) -> _Floats: ...
@overload
def paged_attention(
    query: _Floats,
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    block_tables: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    kv_lens: NDArray[np.int32],
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: NDArray[np.float32] | None = None,
    sinks: NDArray[np.float32] | None = None,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
    out: _Floats | None = None,
    return_lse: Literal[True],
    num_threads: int | None = None,
) -> tuple[_Floats, NDArray[np.float32]]:
    """Attention over a paged KV cache (PagedAttention, Kwon et al. 2023). Bit-equal in any batch.

    A row of query head h is ``softmax(x) @ values`` over the keys that it sees, where a key's
    ``x = softcap * tanh(scale * (query @ key) / softcap) - alibi_slopes[h] * distance``; without these two options,
    ``x = scale * (query @ key)``. A sink is one more key: its x is ``sinks[h]``, its value is zero.

    Arithmetic is in float32, on AVX-512 with BF16 in the products of bfloat16 that this instruction set has; halves
    of a query are widened before, a result in halves is rounded last, once. Over an int8 cache, an element is its
    integer times its token's scale; a query row and its weights are rounded to 16 bits, 1.5e-5 of the row's largest
    (queries beyond 516 dimensions a little coarser), and their sums are exact integers.

    Args:
        query: float32, float16 or bfloat16 (or its bits as uint16) [T, num_heads, head_dim], the new tokens of all
            sequences, one after another; innermost dimension contiguous, any other strides, any alignment.
        key_cache: one layer's keys, in one of two layouts told apart by their rank:
            *rows* [num_blocks, num_kv_heads, block_size, head_dim], innermost dimension contiguous, any other
            strides; *tiled* [num_blocks, num_kv_heads, block_size * head_dim], see `KVCache`.
            float32, float16, bfloat16 (or its bits as uint16), or int8, which needs the scales.
        value_cache: likewise, of the same dtype and shape.
        block_tables: int32 [num_seqs, max_blocks].
        query_starts: int32 [num_seqs + 1].
        kv_lens: int32 [num_seqs], new tokens included.
        scale: multiplies the scores; 1 / sqrt(head_dim) by default.
        causal: a row sees the keys up to its own position; the last row is the last position.
        sliding_window: a row sees at most this many last keys, itself included. Needs ``causal``.
        softcap: bounds the scaled scores by plus and minus this number, above 0 (Gemma 2).
        alibi_slopes: float32 [num_heads], finite: what a score loses for each position between its query and its key
            (ALiBi, Press et al. 2022).
        sinks: float32 [num_heads], finite, or minus infinity for none (gpt-oss; StreamingLLM, Xiao et al. 2024).
        k_scale: of an int8 ``key_cache``, and of no other: float32 [num_blocks, num_kv_heads, block_size], innermost
            dimension contiguous, any other strides, any alignment.
        v_scale: likewise, of ``value_cache``.
        out: [T, num_heads, head_dim] to write to, in any of the query's dtypes, whichever the query has: rounded to
            nearest even. A new float32 array by default. Apart from all that is read.
        return_lse: also return, float32 [T, num_heads], the logarithm of the sum that each row was divided by, sinks
            included: ``log(sum(exp(x)))``, minus infinity where there was none. Results over the parts of a context,
            each times ``exp(lse - total)``, where ``total`` is the logaddexp of all lse, add up to that over the whole.
        num_threads: threads to use, or None for all available.

    Returns:
        ``out``, or a pair of it and the logarithms. A row that sees no key is zero; one whose scores are all minus
        infinity (infinite keys), without a sink, is NaN.

    Raises:
        InvalidInputError: an argument is malformed, or does not fit another one. Nothing is then written.
    """

def write_kv(
    key: _Floats,
    value: _Floats,
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    slots: NDArray[np.int64],
    *,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
) -> None:
    """Store new keys and values, [T, num_kv_heads, head_dim], at ``slots`` [T]; slot -1 is skipped.

    Both are float32, both float16 or both bfloat16 (or its bits as uint16); innermost dimension contiguous, any other
    strides, any alignment. Elements are rounded to the caches' dtype, to nearest even; those of that dtype are
    copied, NaN bit by bit. int8 is quantized for each token and head by itself: the scale, ``max(abs(x)) / 127``,
    goes to ``k_scale`` and ``v_scale``, see `paged_attention`; an element is the nearest integer to x / scale. A row
    with NaN or infinity gets the scale NaN.

    Raises:
        InvalidInputError: an argument is malformed, or does not fit another one. Nothing is then written.
    """

def copy_blocks(cache: NDArray[Any], pairs: NDArray[np.int32]) -> None:
    """Copy whole blocks of ``cache`` (first axis: blocks, each contiguous) by ``(source, destination)`` rows.

    All sources are read before any destination is written, so ``[[a, b], [b, a]]`` swaps. Destinations are unique.
    """

@final
class Weight:
    """A matrix of weights in numpy arrays, which it reads in place and keeps alive. They must not be written to.

    Args:
        parts: ``(kind, array)`` pairs, whose rows follow one another; each contiguous, at any alignment, a mapped file
            for example. ``float32``: float32 [rows, columns]; ``float16``: float16; ``bfloat16``: bfloat16 of
            ml_dtypes, or uint16, the bits.
            ``q8_0``, ``q4_0``, ``q4_1``: uint8 [rows, bytes of a row], blocks of 32 columns as GGUF files have them
            (34, 18, 20 bytes), which begin with a float16 scale d. Elements q are 8-bit integers, standing for d q,
            or 4 bits wide, standing for d (q - 8), or, with a float16 offset m behind d, d q + m.

    Raises:
        InvalidInputError: there is no part, one is malformed, or they differ in columns.
    """

    def __new__(cls, parts: Sequence[tuple[str, NDArray[Any]]]) -> Weight: ...
    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""

    @property
    def kinds(self) -> tuple[_WeightKind, ...]:
        """The kind of each part."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""

def linear(
    x: NDArray[np.float32],
    weight: Weight,
    *,
    norm: NDArray[np.float32] | None = None,
    eps: float | None = None,
    gated: bool = False,
    bias: NDArray[np.float32] | None = None,
    out: NDArray[np.float32] | None = None,
    add: bool = False,
    precision: Literal["float32", "bfloat16"] = "float32",
    num_threads: int | None = None,
) -> NDArray[np.float32]:
    """``x`` times ``weight`` transposed, plus ``bias``: what a linear layer computes.

    **Bit-equal in any batch**: under one instruction set, a row's result depends on that row, the weights and the
    options alone. Weights of any kind are what they stand for in float32, exactly; sums are in float32, in one order.
    With precision "bfloat16" on AVX-512 with BF16 it depends on the CPU's maker, too: on AMD's, pairs are multiplied as
    such, on Intel's they are widened, which is faster there.

    Args:
        x: float32 [T, columns], rows contiguous, at any stride and alignment.
        weight: a matrix [rows, columns].
        norm: float32 [columns]; with ``eps``, ``rms_norm(x, norm, eps)`` is multiplied, bit for bit, in one call.
        eps: goes with ``norm``; a finite number greater than 0.
        gated: ``x`` is [T, 2 columns], and ``silu_mul(x)`` is multiplied, likewise.
        bias: float32 [rows].
        out: float32 [T, rows] to write to, apart from all that is read; a new array by default.
        add: add to what ``out`` holds.
        precision: "bfloat16" rounds ``x`` to bfloat16 first, to nearest even, and needs weights of that kind: faster
            where the CPU multiplies them as they are.
        num_threads: threads to use, or None for all available.

    Returns:
        float32 [T, rows].

    Raises:
        InvalidInputError: an argument is malformed, or does not fit another one. Nothing is then written.
    """

def embed(
    weight: Weight,
    token_ids: _TokenIds,
    *,
    out: NDArray[np.float32] | None = None,
    num_threads: int | None = None,
) -> NDArray[np.float32]:
    """Rows ``token_ids`` [T] of ``weight`` as float32 [T, columns]: what they stand for, exactly.

    Raises:
        InvalidInputError: an argument is malformed, or there is no such row. Nothing is then written.
    """

def rms_norm(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: float,
    *,
    out: NDArray[np.float32] | None = None,
    num_threads: int | None = None,
) -> NDArray[np.float32]:
    """``x / sqrt(mean(x**2) + eps) * weight`` of each row (RMSNorm, Zhang and Sennrich 2019).

    Bit-equal in any batch, as all operations on rows here: a row's result depends on that row and the weights alone.

    Args:
        x: float32 [T, n], rows contiguous, at any stride and alignment.
        weight: float32 [n], contiguous.
        eps: added to the mean; a finite number greater than 0.
        out: float32 [T, n] to write to, ``x`` itself or apart from all that is read; a new array by default.
        num_threads: threads to use, or None for all available.

    Returns:
        float32 [T, n].

    Raises:
        InvalidInputError: an argument is malformed, or does not fit another one. Nothing is then written.
    """

def silu_mul(
    gate_up: NDArray[np.float32],
    *,
    out: NDArray[np.float32] | None = None,
    num_threads: int | None = None,
) -> NDArray[np.float32]:
    """``silu(gate) * up`` of each row, where ``silu(x) = x / (1 + exp(-x))`` (SwiGLU, Shazeer 2020).

    Args:
        gate_up: float32 [T, 2 n], gate and up side by side; rows contiguous, at any stride and alignment.
        out: float32 [T, n] to write to, apart from ``gate_up``; a new array by default.
        num_threads: threads to use, or None for all available.

    Returns:
        float32 [T, n]. ``silu`` of minus infinity is -0.

    Raises:
        InvalidInputError: an argument is malformed, or does not fit another one. Nothing is then written.
    """

def rope_write_kv(
    qkv: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    slots: NDArray[np.int64],
    *,
    num_heads: int,
    out: NDArray[np.float32] | None = None,
    q_norm: NDArray[np.float32] | None = None,
    k_norm: NDArray[np.float32] | None = None,
    eps: float | None = None,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
    num_threads: int | None = None,
) -> NDArray[np.float32]:
    """Turn queries and keys by their positions (RoPE, Su et al. 2021), and store keys and values as `write_kv` does.

    Each pair ``(x[i], x[i + head_dim / 2])`` of a head becomes ``(x[i] * cos[i] - x[i + head_dim / 2] * sin[i],
    x[i + head_dim / 2] * cos[i] + x[i] * sin[i])``, every operation rounded to float32.

    Args:
        qkv: float32 [T, (num_heads + 2 * num_kv_heads) * head_dim]: of each token the heads of queries, of keys and of
            values, side by side. Rows are contiguous, at any stride and alignment.
        cos: float32 [T, head_dim / 2] or [T, 1, head_dim / 2], of each token's angles.
        sin: likewise.
        key_cache: one layer's keys, as `paged_attention` takes them.
        value_cache: likewise.
        slots: int64 [T], where each token's keys and values go; -1 is skipped. Where a slot is named twice, the last
            one wins.
        num_heads: heads of queries.
        out: float32 [T, num_heads, head_dim] to write to, apart from all else; a new array by default. A token's heads
            are contiguous.
        q_norm: float32 [head_dim], the weight of an `rms_norm` of each query head before it is turned (Qwen3). Needs
            ``k_norm`` and ``eps``.
        k_norm: likewise, of keys.
        eps: of both; a finite number greater than 0.
        k_scale: of an int8 cache, see `paged_attention`.
        v_scale: likewise.
        num_threads: threads to use, or None for all available.

    Returns:
        The queries, float32 [T, num_heads, head_dim].

    Raises:
        InvalidInputError: an argument is malformed, or does not fit another one. Nothing is then written.
    """

def argmax(logits: NDArray[np.float32], *, num_threads: int | None = None) -> NDArray[np.int64]:
    """The index of each row's largest element, the lowest among equals: int64 [S] for float32 [S, vocab_size].

    It is -1 where a row is no distribution: where it holds NaN or infinity, or nothing but minus infinity.

    Raises:
        InvalidInputError: an argument is malformed.
    """

def top_k(
    logits: NDArray[np.float32], k: int, *, num_threads: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The ``k`` largest elements of each row, and their indices: float32 and int64 [S, k] for float32 [S, vocab_size].

    The largest comes first, the lowest index first among equals. Where a row is no distribution (see `argmax`), they
    are NaN and -1.

    Raises:
        InvalidInputError: an argument is malformed, or ``k`` is not in 1 to vocab_size.
    """

def draw(
    logits: NDArray[np.float32],
    draws: Sequence[tuple[int, int, float, int, float, float]],
    *,
    num_threads: int | None = None,
) -> NDArray[np.int64]:
    """Sampling: a token drawn from each row of ``logits``: int64 [S] for float32 [S, vocab_size].

    Args:
        logits: -1 is drawn from a row that is no distribution (see `argmax`).
        draws: for each row ``(seed, position, temperature, top_k, top_p, min_p)``. The logits are divided by the
            temperature, above 0. Then tokens are dropped: those less likely than ``min_p``, in [0, 1], times the
            likeliest; all but the ``top_k`` largest logits and what equals the last of them (0: none); all but the
            likeliest that make up the share ``top_p``, in (0, 1], and what equals the last of them. The random number
            is the first one of numpy's ``Philox(key=seed, counter=position)``.
        num_threads: threads to use, or None for all available. They do not matter to what is drawn, nor do other rows.

    Raises:
        InvalidInputError: an argument is malformed.
    """

def instruction_set() -> str:
    """The instruction set in use: "amx", "avx512-bf16", "avx512", "avx2", "neon" or "scalar".

    The environment variable ``LEAFKV_ISA`` forces one that this CPU has.
    """
