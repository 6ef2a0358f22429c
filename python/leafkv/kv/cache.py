"""The KV memory: one array for all layers, in which a block is one contiguous piece.

    array [num_blocks, num_layers, num_kv_heads, 2 (K, V), block_size * head_dim]

So copying, saving or checksumming a block is one operation. A layer's keys and values are strided views that
numpy and Rust read and write in place. Inside a (block, layer, head) the elements lie in one of two layouts:

* ``rows``: ``[block_size, head_dim]``, what everyone expects; any block size and head_dim.
* ``tiled``: tiles of 16 tokens, arranged so that one vector load feeds the dot products of 16 tokens. The
  default where it applies: block sizes that are multiples of 16 (and head_dim a multiple of 2 in bfloat16, of 4 in
  int8).

bfloat16, which numpy lacks (PyTorch has it), is held as uint16. int8 has a float32 scale for each token, head and
side, at the end of the block that they belong to, so the array is of bytes:

    array [num_blocks, block_nbytes]: elements as above, 0 to 3 bytes to align, scales [num_layers, num_kv_heads, 2,
    block_size]
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from leafkv._checks import check_integer
from leafkv.errors import InsufficientMemoryError, InvalidInputError
from leafkv.kv.memory import GIB
from leafkv.kv.storage import DTYPES, Backend, storage_of

Layout = Literal["rows", "tiled"]

STEPS = {"bfloat16": 2, "int8": 4}
"""What head_dim must be a multiple of in the tiled layout, where it must."""

TILE = 16
"""Tokens per tile of the tiled layout."""


class KVCache:
    """Keys and values of ``num_blocks`` blocks, for all layers.

    Args:
        num_blocks: blocks of the pool.
        num_layers: layers of the model.
        num_kv_heads: KV heads of a layer.
        head_dim: elements of a head.
        block_size: tokens per block.
        dtype: "float32", "float16", "bfloat16" or "int8".
        layout: "rows", "tiled", or None for tiled where it applies, which is on CPUs.
        backend: "numpy", or "torch": the array is a tensor, and so is all that is read from it and written to it.
        device: where the tensor is.

    Raises:
        InsufficientMemoryError: the array does not fit in free memory.
        MissingExtraError: PyTorch is not installed (``pip install 'leafkv[torch]'``).
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: str = "float32",
        layout: Layout | None = None,
        *,
        backend: Backend = "numpy",
        device: Any = "cpu",
    ) -> None:
        self.num_blocks = check_integer("num_blocks", num_blocks, 1)
        self.num_layers = check_integer("num_layers", num_layers, 1)
        self.num_kv_heads = check_integer("num_kv_heads", num_kv_heads, 1)
        self.head_dim = check_integer("head_dim", head_dim, 1)
        self.block_size = check_integer("block_size", block_size, 1)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise InvalidInputError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        self._storage = storage_of(backend, device)
        tileable = block_size % TILE == 0 and head_dim % STEPS.get(dtype, 1) == 0
        if layout is None:
            layout = "tiled" if tileable and self._storage.on_cpu else "rows"
        if layout not in get_args(Layout):
            raise InvalidInputError(f"layout: expected 'rows' or 'tiled', got {layout!r}")
        if layout == "tiled" and not tileable:
            raise InvalidInputError(
                f"layout: 'tiled' needs a block_size that is a multiple of {TILE}, and a head_dim that is a multiple "
                f"of 2 in bfloat16, of 4 in int8; got block_size {block_size}, head_dim {head_dim}, dtype {dtype}"
            )
        if layout == "tiled" and not self._storage.on_cpu:
            raise InvalidInputError(f"layout: expected 'rows' on {self.device}, got 'tiled', which is for CPUs")
        self.dtype = dtype
        self.layout: Layout = layout
        self.block_nbytes = self.nbytes_of_block(
            self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, dtype
        )
        self.array = self._allocate()

    @staticmethod
    def nbytes_of_block(
        num_layers: int, num_kv_heads: int, head_dim: int, block_size: int = 16, dtype: str = "float32"
    ) -> int:
        """Bytes of one block: all layers, keys and values, and the scales of int8."""
        tokens = int(num_layers) * int(num_kv_heads) * 2 * int(block_size)
        elements: int = tokens * int(head_dim) * np.dtype(DTYPES[dtype]).itemsize
        return elements if dtype != "int8" else -(-elements // 4) * 4 + tokens * 4

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.block_nbytes

    @property
    def device(self) -> Any:
        """Where the array is."""
        return self._storage.device

    def layer(self, index: int) -> tuple[Any, Any]:
        """Views of one layer's keys and values, for `write_kv`, `paged_attention` or numpy.

        Shape ``[num_blocks, num_kv_heads, block_size, head_dim]`` in the rows layout, and
        ``[num_blocks, num_kv_heads, block_size * head_dim]`` in the tiled one.
        """
        return self._views[index]

    def scales(self, index: int) -> dict[str, Any]:
        """What a layer's views need beside them, as keyword arguments of `write_kv`, `paged_attention` and `attend`.

        For int8: ``k_scale`` and ``v_scale``, float32 views ``[num_blocks, num_kv_heads, block_size]``. Else nothing.
        """
        return self._scales[index]

    def write(self, layer: int, key: Any, value: Any, slots: Any) -> None:
        """Store the keys and values, ``[T, num_kv_heads, head_dim]``, of T tokens at ``slots``, int64 [T].

        They are float32, float16 or bfloat16, and where the cache is: arrays, or tensors.
        """
        self._storage.write_kv(key, value, *self._views[layer], slots, **self._scales[layer])

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks by ``(source, destination)`` rows [N, 2]: all sources are read first."""
        self._storage.copy_blocks(self.array, pairs)

    def __repr__(self) -> str:
        return (
            f"KVCache({self.num_blocks} blocks of {self.block_size} tokens, {self.num_layers} layers, "
            f"{self.num_kv_heads} heads of {self.head_dim}, {self.dtype}, {self.layout}, {self.nbytes / GIB:.2f} GiB "
            f"on {self.device})"
        )

    def _allocate(self) -> Any:
        storage, available = self._storage, self._storage.available()
        if self.nbytes > available:
            raise InsufficientMemoryError(
                f"num_blocks: {self.num_blocks} blocks of {self.block_nbytes / 1024:.1f} KiB take "
                f"{self.nbytes / GIB:.2f} GiB, but {available / GIB:.2f} GiB of memory is free"
            )
        shape = (self.num_blocks, self.num_layers, self.num_kv_heads, 2, self.block_size * self.head_dim)
        # Reshaping what follows never copies: it splits contiguous axes. Slicing it afterwards gives the strided views
        # of a layer.
        if self.dtype == "int8":
            array = storage.zeros((self.num_blocks, self.block_nbytes), "int8")
            per_block = math.prod(shape[1:])
            elements = array[:, :per_block].reshape(shape)
            scales_nbytes = per_block // self.head_dim * 4
            scales = storage.as_float32(array[:, -scales_nbytes:]).reshape(*shape[:-1], self.block_size)
            self._scales: list[dict[str, Any]] = [
                {"k_scale": scales[:, layer, :, 0], "v_scale": scales[:, layer, :, 1]}
                for layer in range(self.num_layers)
            ]
        else:
            array = elements = storage.zeros(shape, self.dtype)
            self._scales = [{} for _ in range(self.num_layers)]
        inner = (self.block_size, self.head_dim) if self.layout == "rows" else (-1,)
        split = elements.reshape(*shape[:-1], *inner)
        self._views = [(split[:, layer, :, 0], split[:, layer, :, 1]) for layer in range(self.num_layers)]
        return array
