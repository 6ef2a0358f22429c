"""Paged attention, `write_kv` and `copy_blocks` in plain torch: any device, and what stands in for Triton.

Sequences are padded to one length and gathered through their block tables, as many at a time as a budget of elements
allows; arithmetic is in float32 (in TF32, where a process allows that for its products). What a row may not see is
cleared, not multiplied by zero: 0 * NaN is NaN.

Cost: KV is copied before it is read, and scores are written out. Without ``max_query_len`` the longest query is
read from the device, which waits for it; with it nothing waits.
"""

from __future__ import annotations

from typing import Any

import torch

BUDGET = 1 << 25
"""Elements of gathered keys, or of scores, at a time: 128 MiB each."""


def paged_attention(  # noqa: PLR0915
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
    """Fill ``out``, and ``lse`` unless it is None, as `leafkv.torch.paged_attention` says."""
    tokens, heads, head_dim = query.shape
    num_seqs, num_blocks = block_tables.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    if tokens == 0:
        return
    rows = query_starts[1:] - query_starts[:-1]
    longest = int(rows.max()) if max_query_len is None else min(max_query_len, tokens)
    if max_kv_len is not None:
        num_blocks = min(num_blocks, -(-max_kv_len // block_size))
    context, group, device = num_blocks * block_size, heads // num_kv_heads, query.device
    key_at = torch.arange(context, device=device)
    # One row more than there are, for what padding computes.
    outputs = torch.zeros((tokens + 1, heads, head_dim), device=device)
    logs = torch.zeros((tokens + 1, heads), device=device)
    # Sequences at a time, by what their KV takes, and rows of each, by what their scores take.
    some = max(1, BUDGET // max(1, context * num_kv_heads * head_dim))
    step = max(1, BUDGET // max(1, min(some, num_seqs) * heads * context))

    def per_head(vector: Any) -> Any:
        return vector.view(1, num_kv_heads, group, 1, 1)

    for first in range(0, num_seqs, some):
        here = slice(first, first + some)
        present = key_at < kv_lens[here, None]
        table = block_tables[here, :num_blocks].long().clamp(min=0)
        keys = _gather(key_cache, k_scale, table, present)
        values = _gather(value_cache, v_scale, table, present)
        odd = ~values.isfinite()
        values = values.masked_fill(odd, 0.0)
        for start in range(0, longest, step):
            row = torch.arange(start, min(start + step, longest), device=device)
            real = row < rows[here, None]
            index = (query_starts[:-1][here, None] + row).clamp(max=tokens - 1).long()
            position = kv_lens[here, None] - rows[here, None] + row
            distance = (position[:, :, None] - key_at)[:, None, None]  # [sequence, 1, 1, row, key]
            visible = present[:, None, None, None, :]
            if causal:
                visible = visible & (distance >= 0)
            if sliding_window is not None:
                visible = visible & (distance < sliding_window)
            # [sequence, KV head, head of its group, row, dimension]
            q = query[index].float().unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4)
            scores = q @ keys[:, :, None].mT * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores = scores - per_head(alibi_slopes) * distance.abs()
            scores = scores.masked_fill(~visible, float("-inf"))
            seen = visible.any(-1, keepdim=True)
            largest = scores.amax(-1, keepdim=True) if context else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
            if sinks is not None:
                largest = torch.maximum(largest, per_head(sinks))
            # Where nothing has a weight, any finite number will do.
            largest = largest.masked_fill(largest == -torch.inf, 0.0)
            weights = torch.exp(scores - largest)
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + torch.exp(per_head(sinks) - largest)
            result = (weights @ values[:, :, None]) / total
            # Who sees a value that is not finite gets NaN, and nobody else.
            poisoned = visible.float() @ odd[:, :, None].float() > 0
            result = result.masked_fill(poisoned, torch.nan).masked_fill(~seen, 0.0)
            sums = (largest + total.log()).squeeze(-1)
            if sinks is not None:
                sums = torch.where(seen.squeeze(-1), sums, per_head(sinks).squeeze(-1))
            into = torch.where(real, index, tokens)
            outputs[into] = result.permute(0, 3, 1, 2, 4).flatten(2, 3)
            logs[into] = sums.permute(0, 3, 1, 2).flatten(2, 3)
    out.copy_(outputs[:tokens])
    if lse is not None:
        lse.copy_(logs[:tokens])


def _gather(cache: Any, scales: Any | None, table: Any, present: Any) -> Any:
    """float32 [sequence, KV head, token, dimension], zero where no token is."""
    kv = cache[table].permute(0, 2, 1, 3, 4).flatten(2, 3).float()
    if scales is not None:
        kv = kv * scales[table].permute(0, 2, 1, 3).flatten(2, 3)[..., None]
    return kv.masked_fill(~present[:, None, :, None], 0.0)


def write_kv(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *, k_scale: Any | None, v_scale: Any | None
) -> None:
    """Store ``key`` and ``value`` at ``slots``, as `leafkv.torch.write_kv` says."""
    if len(slots) == 0:
        return
    block_size = key_cache.shape[2]
    written = slots >= 0
    # To leave out the tokens without a slot, one would have to wait for their number. So they are written, too: as the
    # first that has a slot, where that one goes, or, if none has, as what is there.
    token = torch.where(written, torch.arange(len(slots), device=slots.device), written.int().argmax())
    slot = slots[token].clamp(min=0)
    at = (slot // block_size, slice(None), slot % block_size)
    for new, cache, scales in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        stored = new[token]
        if scales is not None:
            stored, scale = quantize(stored)
            scales[at] = torch.where(written.any(), scale, scales[at])
        cache[at] = torch.where(written.any(), stored.to(cache.dtype), cache[at])


def quantize(x: Any) -> tuple[Any, Any]:
    """int8 nearest to the rows ``x`` [..., D], ties to even, and their scales [...]: NaN where a row is not finite."""
    x = x.float()
    scale = x.abs().amax(-1) / 127
    scale = scale.masked_fill(~x.isfinite().all(-1), torch.nan)
    # The quotients of subnormal scales may be larger than 127, those of NaN are none.
    elements = (x / scale.masked_fill(scale == 0, 1.0)[..., None]).round().clamp(-127, 127).nan_to_num(0.0)
    return elements.to(torch.int8), scale


def copy_blocks(cache: Any, pairs: Any) -> None:
    """Copy blocks of ``cache`` by rows (source, destination): all sources are read before one is written."""
    source, destination = pairs.long().unbind(1)
    cache.index_copy_(0, destination, cache.index_select(0, source))
