"""The operations as PyTorch knows them, ``torch.ops.leafkv``: `torch.compile` takes them, and so does a fake tensor.

All of them write to tensors that they are given, and return nothing: memory is PyTorch's to allocate and plan.
"""

from __future__ import annotations

from typing import Any

import torch

from leafkv.torch import cpu, gpu

_LIBRARY = torch.library.Library("leafkv", "DEF")  # what is registered lives as long as this does

_OPTIONS = "float? scale=None, bool causal=True, int? sliding_window=None, float? softcap=None"
_SCHEMAS = {
    "paged_attention": "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor query_starts, "
    f"Tensor kv_lens, Tensor(a!) out, Tensor(b!)? lse=None, *, {_OPTIONS}, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, int? num_threads=None",
    "write_kv": "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, *, "
    "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None",
    "copy_blocks": "Tensor(a!) cache, Tensor pairs",
}


def _writes_nothing_yet(*_: Any, **__: Any) -> None:
    """What an operation is to fake tensors: shapes are those of the arguments."""


for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(f"{_name}({_schema}) -> ()")
    _LIBRARY.impl(_name, getattr(cpu, _name), "CPU")
    _LIBRARY.impl(_name, getattr(gpu, _name), "CUDA")
    torch.library.register_fake(f"leafkv::{_name}", _writes_nothing_yet, lib=_LIBRARY)

paged_attention = torch.ops.leafkv.paged_attention.default
write_kv = torch.ops.leafkv.write_kv.default
copy_blocks = torch.ops.leafkv.copy_blocks.default
