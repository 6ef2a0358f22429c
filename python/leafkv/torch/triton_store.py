"""`write_kv` and `copy_blocks` on a GPU.

`write_kv` is one launch: a program stores the keys and values of some heads of one token, where they lie in a cache
of any strides. Elements are rounded to nearest even; int8 is what `eager.quantize` makes of the row, bit for bit.
Offsets are 64-bit. Nothing waits for the device, so a launch may be captured in a CUDA graph.
"""

# A kernel is not typed; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from leafkv.torch.eager import copy_blocks

__all__ = ["copy_blocks", "write_kv"]

ELEMENTS = 2_048
"""That a program stores, more or less."""


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """``x``, float32, as ``dtype``, rounded to nearest even: also in Triton's interpreter, which cuts bfloat16 off."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)  # noqa: PLR0124
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505
        return x.to(dtype)


@triton.jit
def _store(new, cache, scales, mask, scale_mask, INT8: tl.constexpr):
    x = tl.load(new, mask=mask, other=0.0)
    if INT8:
        x = x.to(tl.float32)
        finite = tl.abs(x) < float("inf")
        odd = tl.min(finite.to(tl.int32), 1) == 0
        scale = tl.div_rn(tl.max(tl.where(finite, tl.abs(x), 0.0), 1), 127.0)
        whole = tl.div_rn(tl.where(odd[:, None], 0.0, x), tl.where(scale == 0, 1.0, scale)[:, None])
        whole = tl.minimum(tl.maximum(whole, -127.0), 127.0)
        # In float32, numbers of this size are integers: adding it rounds to nearest even.
        whole = (whole + 12582912.0) - 12582912.0
        tl.store(cache, whole.to(tl.int8), mask=mask)
        tl.store(scales, tl.where(odd, float("nan"), scale), mask=scale_mask)
    elif cache.dtype.element_ty == x.dtype:
        tl.store(cache, x, mask=mask)
    else:
        tl.store(cache, narrow(x.to(tl.float32), cache.dtype.element_ty), mask=mask)


@triton.jit
def _write_kv(
    key, value, key_cache, value_cache, k_scale, v_scale, slots,
    key_token, key_head, value_token, value_head, slots_token,
    k_block, k_head, k_slot, v_block, v_head, v_slot,
    k_scale_block, k_scale_head, v_scale_block, v_scale_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slots_token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    some = head < HEADS
    mask = some[:, None] & (d < HEAD_DIM)
    row = head[:, None]
    _store(
        key + token * key_token + row * key_head + d,
        key_cache + block * k_block + row * k_head + offset * k_slot + d,
        k_scale + block * k_scale_block + head * k_scale_head + offset if INT8 else k_scale,
        mask, some, INT8,
    )  # fmt: skip
    _store(
        value + token * value_token + row * value_head + d,
        value_cache + block * v_block + row * v_head + offset * v_slot + d,
        v_scale + block * v_scale_block + head * v_scale_head + offset if INT8 else v_scale,
        mask, some, INT8,
    )  # fmt: skip


def write_kv(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *, k_scale: Any | None, v_scale: Any | None
) -> None:
    """Store ``key`` and ``value`` at ``slots``, as `leafkv.torch.write_kv` says."""
    tokens, heads, head_dim = key.shape
    if tokens == 0:
        return
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads), max(1, ELEMENTS // block_d))
    scale_strides = [0] * 4 if k_scale is None or v_scale is None else [*k_scale.stride()[:2], *v_scale.stride()[:2]]
    with torch.cuda.device_of(key):
        _write_kv[tokens, triton.cdiv(heads, block_h)](
            key, value, key_cache, value_cache, k_scale, v_scale, slots,
            *key.stride()[:2], *value.stride()[:2], slots.stride(0), *key_cache.stride()[:3], *value_cache.stride()[:3],
            *scale_strides,
            heads, head_dim, key_cache.shape[2], block_h, block_d, k_scale is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
