"""Arrays for operations: the same noise each time, and memory that nothing is aligned in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def noise(*shape: int) -> F32:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def strided(x: F32) -> F32:
    """The same rows, far apart, the last one first in memory, at an odd address."""
    rows, columns = x.shape
    memory = np.zeros((rows, columns + 3), np.float32).view(np.uint8).ravel()
    view = memory[1 : 1 + rows * 4 * (columns + 3) - 12].view()
    array: F32 = np.ndarray((rows, columns), np.float32, view, (rows - 1) * 4 * (columns + 3), (-4 * (columns + 3), 4))
    array[:] = x
    return array
