"""The operations of a Llama-like decoder on float32 rows: those of the extension, and arrays for them to write to.

Each row's result comes from that row alone, bit for bit, whatever the batch and the number of threads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from leafkv._core import Weight, embed, linear, rope_write_kv

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "Weight",
    "buffers",
    "embed",
    "linear",
    "rope_write_kv",
]

_LINE = 64
"""Bytes of a cache line: rows that begin on one are read fastest, and need not be copied."""


def buffers(*shapes: tuple[int, ...]) -> list[NDArray[np.float32]]:
    """Arrays of these shapes to write to, each beginning on a cache line."""
    sizes = [-(-4 * math.prod(shape) // _LINE) * _LINE for shape in shapes]
    memory = np.empty(sum(sizes) + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    arrays = []
    for shape, size in zip(shapes, sizes, strict=True):
        arrays.append(memory[start : start + 4 * math.prod(shape)].view(np.float32).reshape(shape))
        start += size
    return arrays
