"""Model files mapped into memory, and their tensors as views of them.

A view costs no memory of its own: its pages are those of the system's file cache, read when they are first touched,
shared by all processes that map the file, and given back when memory is short. In return the file must stay as it is
while the model lives: replace it by renaming another, never write into it or cut it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from leafkv.models.tensors import Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_KINDS = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q8_0": "q8_0",
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
}


class Place(NamedTuple):
    """What a file says of one of its tensors. JSON has room for it."""

    type: str
    """As the file's format names it."""
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file."""
    nbytes: int

    @property
    def kind(self) -> str:
        """The kind in which the tensor is read: float32 unless LeafKV computes with what is stored."""
        return _KINDS.get(self.type, "float32")

    def has(self, kind: str) -> bool:
        """Whether the file has the tensor in this kind, so that it can be mapped."""
        return _KINDS.get(self.type) == kind


def map_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, read-only."""
    # A plain ndarray: np.memmap would run Python code for every view that is taken of it.
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r")).view(np.ndarray)


def raw_bytes(file: NDArray[np.uint8], place: Place) -> NDArray[np.uint8]:
    """The bytes of a tensor: a view."""
    return file[place.offset : place.offset + place.nbytes]


def view(file: NDArray[np.uint8], place: Place) -> Tensor:
    """A tensor that is mapped as it is.

    Raises:
        ModelLoadError: its bytes are too few or too many.
    """
    return Tensor.of_bytes(place.kind, place.shape, raw_bytes(file, place))
