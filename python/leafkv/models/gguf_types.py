"""Tensors of a mapped GGUF file, of every type that LeafKV computes with or the ``gguf`` library can dequantize."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from leafkv._extras import require
from leafkv.errors import ModelLoadError
from leafkv.models.mapped import raw_bytes, view
from leafkv.models.tensors import CHUNK, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from leafkv.models.mapped import Place


def read_tensor(file: NDArray[np.uint8], place: Place, label: str) -> Tensor:
    """A tensor, mapped if LeafKV computes with its type, otherwise dequantized to float32.

    Raises:
        ModelLoadError: the library cannot dequantize this type.
    """
    if place.has(place.kind):
        return view(file, place)
    gguf = require("gguf", "models")
    kind = gguf.GGMLQuantizationType[place.type]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = raw_bytes(file, place).reshape(-1, block_bytes)
    values = np.empty((len(blocks), per_block), dtype=np.float32)
    step = max(1, CHUNK // per_block)
    for start in range(0, len(blocks), step):
        try:
            found = gguf.dequantize(blocks[start : start + step].reshape(1, -1), kind)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"tensor {label!r} is of type {place.type}, which the gguf library cannot dequantize"
            ) from error
        values[start : start + step] = found.reshape(-1, per_block)
    return Tensor("float32", place.shape, values.reshape(place.shape))
