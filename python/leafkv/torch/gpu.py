"""GPU tensors: checked by what the host knows of them, and handed to Triton's kernels; to PyTorch's own without it.

Nothing here waits for the device. Kernels are launched on the current stream.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from leafkv.errors import InvalidInputError
from leafkv.torch.checks import check_attention, check_blocks, check_store

SETTING = "LEAFKV_GPU_KERNELS"
"""The environment variable that chooses: "triton", or "torch"."""


@cache
def kernels() -> tuple[ModuleType, ModuleType]:
    """The modules that have `paged_attention`, and that have `write_kv` and `copy_blocks`."""
    choice = os.environ.get(SETTING) or ("triton" if importlib.util.find_spec("triton") else "torch")
    if choice not in ("triton", "torch"):
        raise InvalidInputError(f"{SETTING}: expected 'triton' or 'torch', got {choice!r}")
    names = ("triton_attention", "triton_store") if choice == "triton" else ("eager", "eager")
    attention, store = (import_module(f"leafkv.torch.{name}") for name in names)
    return attention, store


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_threads: int | None = None,  # noqa: ARG001 - of CPUs
    max_query_len: int | None = None,
    max_kv_len: int | None = None,
) -> None:
    """Paged attention over a cache of rows, into ``out`` and ``lse``.

    ``max_query_len`` and ``max_kv_len`` are what is at most in ``query_starts`` and ``kv_lens``, if that is known.
    """
    tensors = (query, key_cache, value_cache, block_tables, query_starts, kv_lens, out, lse)
    options: dict[str, Any] = {
        "scale": max(query.shape[-1], 1) ** -0.5 if scale is None else scale,
        "causal": causal,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    check_attention(*tensors, **options)
    if query.numel():
        kernels()[0].paged_attention(*tensors, **options, max_query_len=max_query_len, max_kv_len=max_kv_len)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Store keys and values in a cache of rows."""
    check_store(key, value, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale)
    if key.numel():
        kernels()[1].write_kv(key, value, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale)


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks."""
    check_blocks(cache, pairs)
    if cache.numel() and pairs.numel():
        kernels()[1].copy_blocks(cache, pairs)
