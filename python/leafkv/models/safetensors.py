"""Reading safetensors files, one or a sharded set, mapped into memory.

The ``safetensors`` library checks the header and the file's length. The bytes are mapped here: numpy has no
bfloat16, which most checkpoints are made of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from leafkv._extras import require
from leafkv.errors import ModelLoadError
from leafkv.models.mapped import Place, map_file, raw_bytes, view
from leafkv.models.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_FLOATS = ("F64", "F32", "F16", "BF16")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class _Stored(NamedTuple):
    file: NDArray[np.uint8]
    place: Place


class SafetensorsFiles:
    """The tensors of a Hugging Face directory: ``model.safetensors``, or the shards that an index names.

    Raises:
        ModelLoadError: a file is missing, cut or malformed.
    """

    def __init__(self, directory: Path) -> None:
        self._tensors: dict[str, _Stored] = {}
        for path, names in _files(directory):
            found = _map(path)
            if names is not None and (missing := names - found.keys()):
                raise ModelLoadError(f"{path.name} lacks the tensor {min(missing)!r}, which {INDEX} puts there")
            self._tensors |= {name: found[name] for name in (found if names is None else names)}

    @property
    def places(self) -> Mapping[str, Place]:
        """Every tensor's type, shape and place, by name."""
        return {name: tensor.place for name, tensor in self._tensors.items()}

    def label(self, name: str) -> str:
        """The name itself."""
        return name

    def read(self, name: str) -> Tensor:
        """A tensor, mapped; rounded to float32 if it is float64.

        Raises:
            ModelLoadError: its dtype is not a float.
        """
        file, place = self._tensors[name]
        if place.type not in _FLOATS:
            raise ModelLoadError(
                f"tensor {name!r} has dtype {place.type}, which is not supported (supported: {', '.join(_FLOATS)})"
            )
        if place.type == "F64":
            return Tensor("float32", place.shape, raw_bytes(file, place).view("<f8").astype("f4").reshape(place.shape))
        return view(file, place)


def _files(directory: Path) -> list[tuple[Path, set[str] | None]]:
    """The files to read, and the names wanted of each (None: all)."""
    if (single := directory / SINGLE).exists():
        return [(single, None)]
    index = directory / INDEX
    if not index.exists():
        raise ModelLoadError(f"there is neither {SINGLE} nor {INDEX} in the directory")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            shards.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{INDEX} is cut or malformed: {error!r}") from error
    for file in shards:
        if Path(file).name != file:
            raise ModelLoadError(f"{INDEX} names {file!r}, which is not a file of the directory")
    return [(directory / file, names) for file, names in sorted(shards.items())]


def _map(path: Path) -> dict[str, _Stored]:
    library = require("safetensors", "models")
    if not path.exists():
        raise ModelLoadError(f"{path.name} is missing, which {INDEX} names")
    try:
        with library.safe_open(path, framework="numpy"):
            pass  # opening it checks the header, the offsets and the file's length
    except Exception as error:
        raise ModelLoadError(f"{path.name} is cut or not a safetensors file: {error}") from error
    data = map_file(path)
    length = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        found[name] = _Stored(data, Place(entry["dtype"], tuple(entry["shape"]), 8 + length + start, stop - start))
    return found
