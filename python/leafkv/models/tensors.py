"""Tensors in the kinds of weights that LeafKV computes with, and the conversions between them.

Quantized kinds are GGUF's: 32 neighbours of a row share a block of bytes. Rows, and these blocks, are converted each by
itself, some at a time: the temporaries stay in the CPU's cache (3x faster), and next to no memory is taken for them.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from leafkv._extras import require
from leafkv.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

BLOCK = 32
"""Columns of a block."""

QUANTIZED = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
"""The quantized kinds, and their bytes in a block."""

_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
CHUNK = 1 << 16
"""Elements converted at a time."""

_FLOAT16_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor in one of the kinds: a view of a mapped file, or an array of its own.

    ``data`` is float32, float16, uint16 (the bits of bfloat16) or, for the quantized kinds, uint8, whose last axis
    is then the bytes of a row. It is C-contiguous, of any alignment, and not to be written to.
    """

    kind: str
    shape: tuple[int, ...]
    """In elements."""
    data: NDArray[Any]

    @classmethod
    def of_bytes(cls, kind: str, shape: tuple[int, ...], raw: NDArray[np.uint8]) -> Tensor:
        """A tensor over little-endian bytes: a view wherever the machine has that order.

        Raises:
            ModelLoadError: they are too few or too many, or do not fill the rows.
        """
        dtype, stored = storage(kind, shape)
        if raw.nbytes != dtype.itemsize * math.prod(stored):
            raise ModelLoadError(f"{raw.nbytes} bytes are no {kind} of shape {shape}")
        return cls(kind, shape, raw.view(dtype.newbyteorder("<")).reshape(stored).astype(dtype, copy=False))

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.data.nbytes

    def to(self, kind: str) -> Tensor:
        """The tensor in another kind, itself if it has it. To float32 is exact; bfloat16 rounds to nearest even.

        Raises:
            ModelLoadError: the columns are not whole blocks of a quantized kind, or it cannot hold the values.
            MissingExtraError: a kind is quantized, and the ``gguf`` library is not installed.
        """
        if kind == self.kind:
            return self
        dtype, stored = storage(kind, self.shape)
        out = np.empty(stored, dtype)
        source, target = (array.reshape(-1, array.shape[-1]) for array in (self.data, out))
        step = max(1, CHUNK // self.shape[-1])
        for row in range(0, len(source), step):
            target[row : row + step] = _encode(_decode(source[row : row + step], self.kind), kind)
        return Tensor(kind, self.shape, out)

    def to_float32(self) -> NDArray[np.float32]:
        """The values as an array."""
        return self.to("float32").data


def storage(kind: str, shape: tuple[int, ...]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and the shape of a tensor's data.

    Raises:
        ModelLoadError: the columns are not whole blocks.
    """
    if kind not in QUANTIZED:
        return np.dtype(_DTYPES[kind]), shape
    if not shape or shape[-1] % BLOCK:
        raise ModelLoadError(f"shape {shape} has no rows of a multiple of {BLOCK}, which {kind} needs")
    return np.dtype(np.uint8), (*shape[:-1], shape[-1] // BLOCK * QUANTIZED[kind])


def summary(tensors: Iterable[Tensor]) -> str:
    """The kinds of the matrices among tensors, most bytes first, and where these bytes are."""
    kinds: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            kinds[tensor.kind] += tensor.nbytes
            places["mapped" if is_mapped(tensor.data) else "in memory"] += tensor.nbytes
    sizes = [f"{nbytes / 1e6:,.1f} MB {place}" for place, nbytes in sorted(places.items(), reverse=True)]
    return ", ".join([" + ".join(kind for kind, _ in kinds.most_common()), *sizes])


def is_mapped(array: NDArray[Any]) -> bool:
    """Whether an array is a view of a mapped file."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


def _decode(data: NDArray[Any], kind: str) -> NDArray[np.float32]:
    if kind in QUANTIZED:
        gguf = require("gguf", "models")
        values: NDArray[np.float32] = gguf.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])
        return values
    if kind == "bfloat16":  # the upper half of a float32
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32, copy=False)


def _encode(values: NDArray[np.float32], kind: str) -> NDArray[Any]:
    if kind in QUANTIZED:
        return _quantize(values, kind)
    return _to_bfloat16(values) if kind == "bfloat16" else values


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Half of what is cut off, less one if the bit before it is even: a tie goes to even. Beyond the largest, the carry
    # makes an infinity.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # A carry must not make an infinity or a zero of NaN; and it must stay one if only low bits said so.
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _quantize(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    # Scales and offsets are float16. Not even the library's arithmetic notices what is beyond it, or NaN.
    if not np.abs(values).max() <= _FLOAT16_MAX:
        raise ModelLoadError(f"there are values that {kind} cannot hold: NaN, infinite, or beyond {_FLOAT16_MAX:g}")
    gguf = require("gguf", "models")
    # Of blocks so small that their scale is zero, the library computes what it then has no use for.
    with np.errstate(all="ignore"):
        found: NDArray[np.uint8] = gguf.quantize(values, gguf.GGMLQuantizationType[kind.upper()])
    return found
