"""Paged attention on a GPU, in Triton: one mechanism for prefill, chunks, decoding and every mask.

A program computes a tile of query rows of one KV head over a run of *partitions*: `PARTITION` consecutive absolute
positions. A row is a pair of a new token and a head of the KV head's group, so K and V are read once for all of a
group, whatever its size. Tiles are dealt out by what the host knows, the shapes; which sequence a tile belongs to
it finds itself, by a binary search. Where there are fewer tiles than the GPU can hold, the partitions of a tile go
to several programs (split-KV decoding), which leave each partition's maximum, sum and output in scratch, and a
second kernel folds them.

Invariants:

* Partitions are reduced each by itself, from zero, and folded left to right: by whoever, so **the number of splits
  does not enter a result**. Tiles of keys lie at absolute positions. Maxima are rounded up to whole powers of two,
  so to rescale is exact, and a tile that a row does not see leaves the row's bits as they are.
* **A row's output bits depend on its query, the options and its visible keys and values**, not on the batch beside
  it, the blocks that the KV lies in, the chunks of its prompt or the splits, on one GPU and Triton and by dtype and
  head_dim: a row's arithmetic is that of one shape of tile. (The larger of the two shapes of 16-bit dtypes is the
  smaller one twice, in twice the warps, and each warp has the same rows and instructions: a test looks, on a GPU.)
  Nothing is promised across GPUs, or between a GPU and a CPU.
* What a row may not see cannot reach its result, not even as NaN or infinity, and what lies beyond a sequence, in
  its tables or in its last block, is not read. A value that is not finite makes NaN of its dimension for the rows
  that see it, or of all of the row.
* No call waits for the device, or reads from it on the host; scratch comes from torch's allocator on the current
  stream. A call may be captured in a CUDA graph, and serves any lengths up to ``max_kv_len`` (by default what the
  tables can hold).

Dots of 16-bit queries over a cache of their dtype are in it, all others in float32 (not in TF32); an int8 cache's
elements are multiplied as they are, keys in the query's dtype, values in bfloat16, their scales with scores and
weights. Softmax and all sums are in float32.

Cost: KV is read once for every tile of rows. Splits write and read 4 (head_dim + 2) bytes for each row and partition.
"""

# A kernel is not typed; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from leafkv.torch import eager
from leafkv.torch.triton_store import narrow

PARTITION = 256
"""Positions; a multiple of every shape's keys."""

MAX_HEAD_DIM = 512
"""Beyond, tiles would not fit in a GPU's shared memory: `eager` computes."""

MAX_SCRATCH = 1 << 27
"""float32 elements that splits may leave, 512 MiB; a call that would need more is not split."""

FEW_PROCESSORS = 1
"""The multiprocessors of what is no GPU."""


class Shape(NamedTuple):
    """Of a program: rows and keys of a tile, warps."""

    rows: int
    keys: int
    warps: int


@triton.jit
def _power(n):
    """2**n of whole numbers n up to 0, exactly; 0 below -126."""
    return ((tl.maximum(n, -127.0) + 127.0).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _base(m):
    """What is taken from scores whose maximum is m: where there are none, any finite number will do."""
    return tl.where(m > float("-inf"), m, 0.0)


@triton.jit
def _fold(most, total, output, m, s, o):
    """(most, total, output) with the next partition's (m, s, o) added: all products are exact, by powers of two."""
    both = tl.maximum(most, m)
    a, b = _power(most - _base(both)), _power(m - _base(both))
    return both, total * a + s * b, output * a[:, None] + o * b[:, None]


@triton.jit
def _finish(
    most, total, output, seen, sinks, out, lse, out_mask, mask,
    SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Divide by the sums, sinks included, and store. Of rows that saw keys, but none with a weight, this makes NaN."""
    empty = seen == 0
    if SINKS:
        sink = tl.load(sinks, mask=mask, other=0.0)
        scaled = sink * 1.4426950408889634
        both = tl.maximum(most, tl.ceil(scaled))
        a = _power(most - _base(both))
        total = total * a + tl.exp2(scaled - _base(both))
        output = output * a[:, None]
        most = both
    output = output / tl.where(empty, 1.0, total)[:, None]
    tl.store(out, narrow(output, out.dtype.element_ty), mask=out_mask)
    if LSE:
        logs = (most + tl.log2(tl.where(total == 0, 1.0, total))) * 0.6931471805599453
        logs = tl.where(total == 0, float("-inf"), logs)
        if SINKS:
            logs = tl.where(empty, sink, logs)
        tl.store(lse, logs, mask=mask)


@triton.jit
def _find(
    starts, num_seqs, index, PER_ROW: tl.constexpr, TILE: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """The last sequence that begins at ``index`` or before: the i-th at starts[i] * PER_ROW // TILE + i * EXTRA."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) * PER_ROW // TILE + middle * EXTRA <= index:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_seqs", "splits", "ring", "tokens", "window"])
def _attend(  # noqa: PLR0912, PLR0915
    query, key_cache, value_cache, tables, starts, lens, out, lse, part_sums, part_out, slopes, sinks, k_scale, v_scale,
    query_token, query_head, k_block, k_head, k_slot, v_block, v_head, v_slot,
    k_scale_block, k_scale_head, v_scale_block, v_scale_head,
    tables_seq, tables_block, out_token, out_head, lse_token, lse_head,
    num_seqs, tokens, splits, ring, window, qk_scale, cap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, PARTITION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    INT8: tl.constexpr, SPLIT: tl.constexpr, LSE: tl.constexpr, QK: tl.constexpr, PV: tl.constexpr,
):  # fmt: skip
    PER_PARTITION: tl.constexpr = PARTITION // KEYS
    DIMS: tl.constexpr = BLOCK_D != HEAD_DIM
    # The last tiles of a prompt see most keys, and begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = _find(starts, num_seqs, tile, GROUP, ROWS, 1)
    first_token = tl.load(starts + seq)
    rows = tl.load(starts + seq + 1) - first_token
    row0 = (tile - (first_token * GROUP // ROWS + seq)) * ROWS
    if row0 >= rows * GROUP:
        return
    kv_len = tl.load(lens + seq)

    # Rows beyond the last one see what that one sees, and are not stored.
    row = row0 + tl.arange(0, ROWS)
    real = row < rows * GROUP
    position = kv_len - rows + tl.minimum(row, rows * GROUP - 1) // GROUP
    token = (first_token + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    in_row = real[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(query + token[:, None] * query_token + head[:, None] * query_head + d[None, :], mask=in_row, other=0.0)
    q = q.to(QK)
    if ALIBI:
        slope = tl.load(slopes + head, mask=real, other=0.0) * 1.4426950408889634

    # Positions [low, high) are seen by some row, [all_low, all_high) by all.
    first = kv_len - rows + row0 // GROUP
    last = kv_len - rows + tl.minimum(row0 + ROWS - 1, rows * GROUP - 1) // GROUP
    low = 0
    all_low = 0
    high = kv_len
    all_high = kv_len
    if CAUSAL:
        high = tl.maximum(tl.minimum(kv_len, last + 1), 0)
        all_high = tl.maximum(tl.minimum(kv_len, first + 1), 0)
    if WINDOW:
        low = tl.maximum(first - window + 1, 0)
        all_low = tl.maximum(last - window + 1, 0)
    # The same in tiles of keys: with masks up to ``clear`` and from ``dim`` on.
    begin = low // KEYS
    end = tl.maximum(tl.cdiv(high, KEYS), begin)
    clear = tl.minimum(tl.maximum(tl.cdiv(all_low, KEYS), begin), end)
    dim = tl.maximum(tl.minimum(all_high // KEYS, end), clear)
    if SPLIT:
        partition = begin // PER_PARTITION
        share = tl.cdiv(tl.cdiv(end, PER_PARTITION) - partition, splits) * PER_PARTITION
        mine = partition * PER_PARTITION + tl.program_id(2) * share
        begin = tl.maximum(begin, mine)
        end = tl.minimum(end, mine + share)
        clear = tl.minimum(tl.maximum(clear, begin), end)
        dim = tl.minimum(tl.maximum(dim, begin), end)
        if begin >= end:
            return

    minus_infinity = tl.full([ROWS], float("-inf"), tl.float32)
    m, s, o = minus_infinity, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)
    most, total, output = m, s, o
    if SPLIT:
        heads = tl.num_programs(1).to(tl.int64) * GROUP
        # Of partition p the sums are at [p % ring, token, head], then comes as much for the maxima.
        part = token * heads + head
        part_stride = tokens.to(tl.int64) * heads

    for phase in tl.static_range(3):
        if phase == 0:
            tile_from, tile_to = begin, clear
        elif phase == 1:
            tile_from, tile_to = clear, dim
        else:
            tile_from, tile_to = dim, end
        if WINDOW or phase > 0:
            for t in range(tile_from, tile_to):
                n = t * KEYS + tl.arange(0, KEYS)
                entry = tables + seq.to(tl.int64) * tables_seq + n // BLOCK_SIZE * tables_block
                if phase != 1:
                    inside = (n >= low) & (n < high)
                    block = tl.load(entry, mask=inside, other=0).to(tl.int64)
                    visible = inside[None, :]
                    if CAUSAL:
                        visible = visible & (n[None, :] <= position[:, None])
                    if WINDOW:
                        visible = visible & (n[None, :] > position[:, None] - window)
                else:
                    block = tl.load(entry).to(tl.int64)
                slot = (n % BLOCK_SIZE).to(tl.int64)
                at_key = key_cache + kv_head * k_head + (block * k_block + slot * k_slot)[:, None] + d[None, :]
                at_value = value_cache + kv_head * v_head + (block * v_block + slot * v_slot)[:, None] + d[None, :]
                if phase != 1:
                    there = inside[:, None] & (d < HEAD_DIM)[None, :]
                    k = tl.load(at_key, mask=there, other=0)
                elif DIMS:
                    k = tl.load(at_key, mask=(d < HEAD_DIM)[None, :], other=0)
                else:
                    k = tl.load(at_key)
                x = tl.dot(q, tl.trans(k.to(QK)), input_precision="ieee")
                # A partition is done with where the next one begins, not where it ends: there the product that adds to
                # ``o`` is not waited for yet.
                if t % PER_PARTITION == 0 and t > begin:
                    if SPLIT:
                        at = part + ((t - 1) // PER_PARTITION % ring).to(tl.int64) * part_stride
                        tl.store(part_sums + at, s, mask=real)
                        tl.store(part_sums + ring.to(tl.int64) * part_stride + at, m, mask=real)
                        tl.store(part_out + at[:, None] * HEAD_DIM + d[None, :], o, mask=in_row)
                    else:
                        most, total, output = _fold(most, total, output, m, s, o)
                    m, s, o = minus_infinity, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)
                if INT8:
                    at_scale = k_scale + block * k_scale_block + kv_head * k_scale_head + slot
                    if phase != 1:
                        x = x * tl.load(at_scale, mask=inside, other=0.0)[None, :]
                    else:
                        x = x * tl.load(at_scale)[None, :]
                x = x * qk_scale
                if CAP:
                    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
                    bounded = (1.0 - e) / (1.0 + e)
                    x = tl.where(x < 0, -bounded, bounded) * cap
                if ALIBI:
                    x = x - slope[:, None] * tl.abs(position[:, None] - n[None, :]).to(tl.float32)
                if phase != 1:
                    x = tl.where(visible, x, float("-inf"))
                new = tl.maximum(m, tl.ceil(tl.max(x, 1)))
                w = tl.exp2(x - _base(new)[:, None])
                a = _power(m - _base(new))
                m = new
                s = s * a + tl.sum(w, 1)
                o = o * a[:, None]
                if phase != 1:
                    v = tl.load(at_value, mask=there, other=0)
                elif DIMS:
                    v = tl.load(at_value, mask=(d < HEAD_DIM)[None, :], other=0)
                else:
                    v = tl.load(at_value)
                if INT8:
                    at_scale = v_scale + block * v_scale_block + kv_head * v_scale_head + slot
                    if phase != 1:
                        w = tl.where(visible, w * tl.load(at_scale, mask=inside, other=0.0)[None, :], 0.0)
                    else:
                        w = w * tl.load(at_scale)[None, :]
                elif phase != 1:
                    # Where it has weight 0, a value that is not finite would make NaN, too.
                    finite = tl.abs(v.to(tl.float32)) < float("inf")
                    odd = tl.min(finite.to(tl.int32), 1) == 0
                    w = tl.where(odd[None, :] & visible, float("nan"), w)
                    v = tl.where(finite, v, 0.0)
                o = tl.dot(w.to(PV), v.to(PV), o, input_precision="ieee")
    if SPLIT:
        at = part + ((end - 1) // PER_PARTITION % ring).to(tl.int64) * part_stride
        tl.store(part_sums + at, s, mask=real)
        tl.store(part_sums + ring.to(tl.int64) * part_stride + at, m, mask=real)
        tl.store(part_out + at[:, None] * HEAD_DIM + d[None, :], o, mask=in_row)
    if not SPLIT:
        most, total, output = _fold(most, total, output, m, s, o)
        seen = position * 0 + kv_len
        if CAUSAL:
            seen = tl.minimum(seen, position + 1)
        _finish(
            most, total, output, seen > 0, sinks + head if SINKS else sinks,
            out + token[:, None] * out_token + head[:, None] * out_head + d[None, :],
            lse + token * lse_token + head * lse_head if LSE else lse, in_row, real, SINKS, LSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "ring", "window"])
def _merge(
    part_sums, part_out, starts, lens, out, lse, sinks, out_token, out_head, lse_token, lse_head,
    num_seqs, ring, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTITION: tl.constexpr, AHEAD: tl.constexpr,
    HEADS: tl.constexpr, SOME: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Fold the partitions, left in scratch by programs of `_attend`, of some heads of one token."""
    row = tl.program_id(0)
    seq = _find(starts, num_seqs, row, 1, 1, 0)
    end_token = tl.load(starts + seq + 1)
    if row >= end_token:
        return
    kv_len = tl.load(lens + seq)
    position = kv_len - end_token + row
    low = 0
    high = kv_len
    if CAUSAL:
        high = tl.maximum(tl.minimum(kv_len, position + 1), 0)
    if WINDOW:
        low = tl.maximum(position - window + 1, 0)
    token = row.to(tl.int64)
    head = tl.program_id(1) * SOME + tl.arange(0, SOME)
    real = head < HEADS
    part = token * HEADS + head
    part_stride = tl.num_programs(0).to(tl.int64) * HEADS
    d = tl.arange(0, BLOCK_D)
    in_row = real[:, None] & (d < HEAD_DIM)[None, :]

    most = tl.full([SOME], float("-inf"), tl.float32)
    total, output = tl.zeros([SOME], tl.float32), tl.zeros([SOME, BLOCK_D], tl.float32)
    end = tl.cdiv(high, PARTITION)
    for some in range(low // PARTITION, end, AHEAD):
        for i in tl.static_range(AHEAD):
            at = part + ((some + i) % ring).to(tl.int64) * part_stride
            there = real & (head * 0 + some + i < end)
            s = tl.load(part_sums + at, mask=there, other=0.0)
            m = tl.load(part_sums + ring.to(tl.int64) * part_stride + at, mask=there, other=float("-inf"))
            o = tl.load(part_out + at[:, None] * HEAD_DIM + d[None, :], mask=in_row & there[:, None], other=0.0)
            most, total, output = _fold(most, total, output, m, s, o)
    _finish(
        most, total, output, head * 0 + high > low, sinks + head if SINKS else sinks,
        out + token * out_token + head[:, None] * out_head + d[None, :],
        lse + token * lse_token + head * lse_head if LSE else lse, in_row, real, SINKS, LSE,
    )  # fmt: skip


def shape_of(dot_bytes: int, head_dim: int, *, many_rows: bool) -> Shape:
    """Of dots of elements of so many bytes. ``many_rows``: there are enough for the larger one, where there are two."""
    if dot_bytes == 4:
        # Products in float32 have no tensor cores: rows that are not there cost as much as others.
        return Shape(16, 32 if head_dim <= 128 else 16, 4)
    if head_dim <= 128:
        return Shape(128, 64, 8) if many_rows else Shape(64, 64, 4)
    return Shape(64, 32, 8) if head_dim <= 256 else Shape(16, 32, 4)


def dot_types(query: Any, cache: Any) -> tuple[Any, Any]:
    """The dtypes in which queries and keys, and weights and values, are multiplied."""
    if query == torch.float32 or (cache not in (query, torch.int8)):
        return tl.float32, tl.float32
    qk = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[query]
    return qk, tl.bfloat16 if cache == torch.int8 else qk


@cache
def _device(index: int | None) -> tuple[int, int]:
    """Its multiprocessors, and the tiles of keys that fit in its shared memory beside the one in use, plus one."""
    if index is None:
        return FEW_PROCESSORS, 2
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, 3 if properties.shared_memory_per_block_optin >= 200 << 10 else 2


def num_splits(programs: int, partitions: int, processors: int) -> int:
    """Into how many parts to split each of so many programs, which have as many partitions each at most."""
    return max(1, min(partitions, 2 * processors // max(1, programs)))


INTERPRETED = not isinstance(_attend, triton.JITFunction)
"""Triton's interpreter (``TRITON_INTERPRET``) runs the kernels. It cannot multiply bfloat16: float32 stands for it."""


def paged_attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    query_starts: Any,
    kv_lens: Any,
    out: Any,
    lse: Any | None,
    *,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    alibi_slopes: Any | None,
    sinks: Any | None,
    k_scale: Any | None,
    v_scale: Any | None,
    max_query_len: int | None = None,
    max_kv_len: int | None = None,
) -> None:
    """Fill ``out``, and ``lse`` unless it is None, as `leafkv.torch.paged_attention` says.

    ``max_query_len`` and ``max_kv_len``, if known, say how to share out the work; no row may lie beyond the latter.
    """
    tokens, heads, head_dim = query.shape
    num_seqs = len(kv_lens)
    num_kv_heads, block_size = key_cache.shape[1:3]
    if tokens == 0 or num_seqs == 0:
        return
    if head_dim > MAX_HEAD_DIM:
        eager.paged_attention(
            query, key_cache, value_cache, block_tables, query_starts, kv_lens, out, lse,
            scale=scale, causal=causal, sliding_window=sliding_window, softcap=softcap, alibi_slopes=alibi_slopes,
            sinks=sinks, k_scale=k_scale, v_scale=v_scale, max_query_len=max_query_len, max_kv_len=max_kv_len,
        )  # fmt: skip
        return
    group = heads // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    capacity = block_tables.shape[1] * block_size
    longest = capacity if max_kv_len is None else min(max_kv_len, capacity)
    window = 0 if sliding_window is None or sliding_window >= longest else sliding_window
    qk, pv = dot_types(query.dtype, key_cache.dtype)
    dot_bytes = qk.primitive_bitwidth // 8
    processors, stages = _device(query.device.index if query.is_cuda else None)

    many_rows = False
    if dot_bytes == 2 and (max_query_len or tokens) * group >= 128:
        many_rows = tokens * group // 128 * num_kv_heads >= processors
    shape = shape_of(dot_bytes, block_d, many_rows=many_rows)
    # A sequence has a tile that is not full, at most.
    tiles = tokens * group // shape.rows + num_seqs
    ring = triton.cdiv(longest, PARTITION)
    if window:
        ring = min(ring, (window + shape.rows) // PARTITION + 2)
    splits = num_splits(tiles * num_kv_heads, ring, processors)
    if ring * tokens * heads * (head_dim + 2) > MAX_SCRATCH:
        splits = 1
    sums = parts = None
    if splits > 1:
        sums = torch.empty((2, ring, tokens, heads), dtype=torch.float32, device=query.device)
        parts = torch.empty((ring, tokens, heads, head_dim), dtype=torch.float32, device=query.device)

    starts, lens = query_starts.contiguous(), kv_lens.contiguous()
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    log2_e = math.log2(math.e)
    scale_strides = [0] * 4 if k_scale is None or v_scale is None else [*k_scale.stride()[:2], *v_scale.stride()[:2]]
    out_strides = [*out.stride()[:2], *((0, 0) if lse is None else lse.stride())]
    if INTERPRETED:
        qk, pv = (tl.float32 if dtype == tl.bfloat16 else dtype for dtype in (qk, pv))
    with torch.cuda.device_of(query):
        _attend[tiles, num_kv_heads, splits](
            query, key_cache, value_cache, block_tables, starts, lens, out, lse, sums, parts, slopes, sinks,
            k_scale, v_scale,
            *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], *scale_strides,
            *block_tables.stride(), *out_strides,
            num_seqs, tokens, splits, ring, window,
            scale * log2_e if softcap is None else scale / softcap, 0.0 if softcap is None else softcap * log2_e,
            group, head_dim, block_size, shape.rows, shape.keys, block_d, PARTITION,
            causal, window > 0, softcap is not None, slopes is not None, sinks is not None,
            k_scale is not None, splits > 1, lse is not None, qk, pv,
            num_warps=shape.warps, num_stages=stages, enable_fp_fusion=False,
        )  # fmt: skip
        if splits > 1:
            # Few rows are shared out one by one; many give a program as much as it holds.
            some = 1
            if tokens * heads >= 8 * processors:
                some = max(1, min(triton.next_power_of_2(heads), 1_024 // block_d))
            _merge[tokens, triton.cdiv(heads, some)](
                sums, parts, starts, lens, out, lse, sinks, *out_strides, num_seqs, ring, window,
                head_dim, block_d, PARTITION, min(8, triton.next_power_of_2(ring)), heads, some,
                causal, window > 0, sinks is not None, lse is not None,
                num_warps=1 if some * block_d <= 256 else 4, enable_fp_fusion=False,
            )  # fmt: skip
