"""Paged attention and its memory over torch tensors: on CPUs the Rust kernel, in place; on GPUs Triton kernels.

The functions are those of `leafkv` under the same names, with tensors in place of arrays. A CPU tensor is seen as a
numpy view, of which no element is touched; CUDA tensors never leave their device, and are used on the current stream.
"""

from __future__ import annotations

from leafkv._extras import require

require("torch", "torch")

from leafkv.torch.functions import copy_blocks, paged_attention, write_kv  # noqa: E402
from leafkv.torch.plan import AttentionPlan  # noqa: E402
from leafkv.torch.transfer import to_device  # noqa: E402

__all__ = ["AttentionPlan", "copy_blocks", "paged_attention", "to_device", "write_kv"]
