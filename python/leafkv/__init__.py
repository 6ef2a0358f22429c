"""LeafKV: a paged KV cache with a radix-tree prefix cache, and the attention that reads it."""

from __future__ import annotations

from leafkv._core import __version__
from leafkv.errors import (
    InsufficientMemoryError,
    InvalidInputError,
    InvariantError,
    LeafKVError,
    MissingExtraError,
    ModelLoadError,
    OutOfBlocksError,
    UnknownSequenceError,
)

__all__ = [
    "InsufficientMemoryError",
    "InvalidInputError",
    "InvariantError",
    "LeafKVError",
    "MissingExtraError",
    "ModelLoadError",
    "OutOfBlocksError",
    "UnknownSequenceError",
    "__version__",
]
