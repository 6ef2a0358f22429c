"""A KV cache's memory as tensors: on CPUs over numpy's arrays, whose memory is zeroed when it is first used."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leafkv.errors import InvalidInputError
from leafkv.kv.memory import available_memory
from leafkv.torch.functions import copy_blocks, write_kv
from leafkv.torch.transfer import to_device

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int8")}
"""KV dtypes by name."""


class TorchStorage:
    """Tensors on ``device``."""

    write_kv = staticmethod(write_kv)

    def __init__(self, device: Any) -> None:
        self.device = as_device("device", device)
        self.on_cpu = self.device.type == "cpu"

    def available(self) -> int:
        """On a GPU: bytes that are free there, or kept by PyTorch for whoever asks next."""
        if self.on_cpu:
            return available_memory()
        free = int(torch.cuda.mem_get_info(self.device)[0])
        return free + int(torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A new tensor."""
        if self.on_cpu:
            of = DTYPES[dtype]
            return torch.from_numpy(np.zeros(math.prod(shape) * of.itemsize, np.uint8)).view(of).view(shape)
        return torch.zeros(shape, dtype=DTYPES[dtype], device=self.device)

    @staticmethod
    def as_float32(array: Tensor) -> Tensor:
        """The same bytes."""
        return array.view(torch.float32)

    def copy_blocks(self, cache: Tensor, pairs: NDArray[np.int32] | Tensor) -> None:
        """Copy blocks by pairs that are the host's, or the device's."""
        copy_blocks(cache, pairs if isinstance(pairs, Tensor) else to_device([pairs], self.device)[0])


def as_device(name: str, device: Any) -> torch.device:
    """A device that is there: a CPU, or a CUDA GPU, with its number.

    Raises:
        InvalidInputError: it is none.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(f"{name}: expected a device such as 'cpu' or 'cuda:0', got {device!r}") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise InvalidInputError(f"{name}: expected 'cpu' or a CUDA device, got {device!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = found.index if found.index is not None or not count else torch.cuda.current_device()
    if index is None or index >= count:
        raise InvalidInputError(f"{name}: expected a device that is there, got {device!r}, and {count} GPUs are")
    return torch.device("cuda", index)
