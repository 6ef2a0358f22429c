"""Where a KV cache's memory comes from, and what writes to it: numpy's arrays, or PyTorch's tensors on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from leafkv import _core
from leafkv._extras import require
from leafkv.errors import InvalidInputError
from leafkv.kv.memory import available_memory

Backend = Literal["numpy", "torch"]

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}
"""KV dtypes by name, and the numpy dtype that holds each."""


class Storage(Protocol):
    """Arrays of one kind in one place."""

    @property
    def device(self) -> Any:
        """The place, as PyTorch names it."""

    @property
    def on_cpu(self) -> bool:
        """Whether the core reads its arrays."""

    def available(self) -> int:
        """Bytes that can be allocated."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new array of a KV dtype."""

    def as_float32(self, array: Any) -> Any:
        """The same bytes as float32."""

    @property
    def write_kv(self) -> Callable[..., None]:
        """Stores keys and values, see `leafkv.write_kv`."""

    @property
    def copy_blocks(self) -> Callable[..., None]:
        """Copies blocks by pairs that are the host's, see `leafkv.copy_blocks`."""


class NumpyStorage:
    """Memory that the operating system zeroes when it is first used: blocks that never are never take any."""

    device = "cpu"
    on_cpu = True
    available = staticmethod(available_memory)
    write_kv = staticmethod(_core.write_kv)
    copy_blocks = staticmethod(_core.copy_blocks)

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Of the dtype that holds ``dtype``."""
        return np.zeros(shape, DTYPES[dtype])

    @staticmethod
    def as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
        """The same bytes."""
        return array.view(np.float32)


def storage_of(backend: str = "numpy", device: Any = "cpu") -> Storage:
    """The storage of a backend on a device.

    Raises:
        InvalidInputError: there is no such backend, or it is not on that device.
        MissingExtraError: PyTorch is not installed.
    """
    if backend not in get_args(Backend):
        raise InvalidInputError(f"backend: expected 'numpy' or 'torch', got {backend!r}")
    if backend == "torch":
        require("torch", "torch")
        from leafkv.torch.storage import TorchStorage  # noqa: PLC0415

        return TorchStorage(device)
    if str(device) != "cpu":
        raise InvalidInputError(f"device: expected 'cpu' with backend 'numpy', got {device!r}")
    return NumpyStorage()
