"""From the host to a device in one copy, however many arrays a step has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes: each array begins at a multiple."""


def to_device(arrays: Sequence[NDArray[Any]], device: Any) -> list[Tensor]:
    """Tensors on ``device`` with what is in ``arrays``, whose dtypes PyTorch knows.

    On a CPU they are the arrays' own memory. On a GPU they are parts of one tensor, filled by one copy from pinned
    memory, on the current stream: the host does not wait for it, and may write to ``arrays`` at once.
    """
    device = torch.device(device)
    if not is_gpu(device):
        return [torch.from_numpy(array) for array in arrays]
    starts = list(accumulate((-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))
    # PyTorch keeps pinned memory from being used again while a copy from it is under way.
    staging = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = staging.numpy()
    for start, array in zip(starts, arrays, strict=False):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = staging.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def is_gpu(device: torch.device) -> bool:
    """Whether the device has a memory of its own, and kernels of its own."""
    return bool(device.type != "cpu")
