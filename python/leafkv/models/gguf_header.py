"""The header of a GGUF file: its metadata, and where its tensors are.

`gguf.GGUFReader` parses it. That takes some two seconds for a vocabulary of 50,000 tokens, so the weights cache keeps
the `GGUFHeader`: a warm start does not parse the file at all.

The library trusts the lengths that it finds. Wherever a file is cut, it runs into the end, which is a
`ModelLoadError`; that every tensor lies within the file's data is checked here. Nothing stops it, however, when
the length of an array of numbers is damaged: it then takes that many steps, and memory for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from leafkv._extras import require
from leafkv.errors import ModelLoadError
from leafkv.models.gguf_types import read_tensor
from leafkv.models.mapped import Place, map_file

if TYPE_CHECKING:
    from collections.abc import KeysView
    from pathlib import Path

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFHeader(NamedTuple):
    """What loading needs to know of a file besides its bytes. JSON has room for every value in it."""

    metadata: dict[str, Any]
    places: dict[str, Place]
    """The tensors, as the file names them."""
    rope_factors: list[float] | None
    """The tensor ``rope_freqs.weight``, if there is one; it is not among ``places``."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> GGUFHeader:
        """What JSON has made lists of, as it was: the inverse of ``_asdict``."""
        places = {
            name: Place(kind, tuple(shape), offset, nbytes)
            for name, (kind, shape, offset, nbytes) in fields["places"].items()
        }
        return cls(**{**fields, "places": places})

    @property
    def tensor_names(self) -> KeysView[str]:
        """The tensors, as the file names them."""
        return self.places.keys()


def read_header(path: Path) -> GGUFHeader:
    """Parse a file's header.

    Raises:
        ModelLoadError: it is not a GGUF file, or a cut or damaged one.
    """
    _check_start(path)
    gguf = require("gguf", "models")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # whatever the library comes upon in a place where it expects something else
        raise ModelLoadError(f"cut or damaged file, or newer than the gguf library: {error!r}") from error
    size = len(reader.data)
    for tensor in reader.tensors:
        if not reader.data_offset <= tensor.data_offset <= size - tensor.n_bytes:
            raise ModelLoadError(
                f"cut or damaged file: tensor {tensor.name!r} takes {tensor.n_bytes} bytes from "
                f"{tensor.data_offset}, the file has data from {reader.data_offset} to {size}"
            )
    places = {tensor.name: _place(tensor) for tensor in reader.tensors}
    rope_factors = None
    if factors := places.pop(_ROPE_FACTORS, None):
        rope_factors = read_tensor(map_file(path), factors, _ROPE_FACTORS).to_float32().tolist()
    return GGUFHeader(metadata, places, rope_factors)


def _check_start(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    if not start:
        raise ModelLoadError("the file is empty")
    if start[:4] != _MAGIC:
        raise ModelLoadError(f"not a GGUF file: it starts with {start[:4]!r}, not {_MAGIC!r}")
    version = int.from_bytes(start[4:], "little")
    if len(start) == 8 and version not in _VERSIONS:
        raise ModelLoadError(f"GGUF version {version} is not supported (supported: 2 and 3, little-endian)")


def _place(tensor: Any) -> Place:
    shape = tuple(tensor.shape[::-1].tolist())  # the file has the innermost first
    return Place(tensor.tensor_type.name, shape, tensor.data_offset, tensor.n_bytes)
