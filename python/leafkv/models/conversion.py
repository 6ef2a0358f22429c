"""What `load_model` is asked for: the arithmetic, and what weights are converted to for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from leafkv.errors import InvalidInputError, ModelLoadError
from leafkv.models.tensors import BLOCK, QUANTIZED

if TYPE_CHECKING:
    from leafkv.models.mapped import Place

Precision = Literal["float32", "bfloat16"]

DTYPES = ("auto", "float32", "bfloat16")
QUANTIZATIONS = tuple(QUANTIZED)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What becomes of a model's matrices. Norms and biases are float32 in any case.

    Args:
        dtype: of the arithmetic. "float32" takes weights as they are stored, and widens each when it is used, which is
            exact; "auto" is the same. "bfloat16" takes matrices of bfloat16, and makes bfloat16 of all others.
        quantization: "q8_0", "q4_0" or "q4_1": what matrices of floats are quantized to; None for as they are.
            Types that LeafKV does not compute with, and therefore reads as float32, count as floats.

    Raises:
        InvalidInputError: a value that is none of these, or both at once.
    """

    dtype: str = "auto"
    quantization: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise InvalidInputError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.quantization is None:
            return
        if not isinstance(self.quantization, str) or self.quantization not in QUANTIZATIONS:
            raise InvalidInputError(
                f"quantization: expected None or one of {', '.join(QUANTIZATIONS)}, got {self.quantization!r}"
            )
        if self.dtype == "bfloat16":
            raise InvalidInputError(
                f"quantization: {self.quantization!r} cannot be had together with dtype='bfloat16', whose arithmetic "
                "is with matrices of bfloat16; expected dtype='float32' or 'auto'"
            )

    @property
    def arithmetic(self) -> Precision:
        """The dtype of the arithmetic."""
        return "bfloat16" if self.dtype == "bfloat16" else "float32"

    @property
    def key(self) -> str:
        """Equal for those that convert alike, and a word that file names may have."""
        return self.quantization or self.arithmetic

    def kind_of(self, stored: str) -> str:
        """The kind that a matrix of kind ``stored`` is to have."""
        if self.arithmetic == "bfloat16":
            return "bfloat16"
        return stored if self.quantization is None or stored in QUANTIZED else self.quantization

    def check(self, label: str, place: Place) -> None:
        """Look whether a matrix can be converted, before anything is.

        Raises:
            ModelLoadError: it is quantized in another way, or its columns are not whole blocks.
        """
        if self.quantization is None:
            return
        if place.kind in QUANTIZED and place.kind != self.quantization:
            raise ModelLoadError(
                f"tensor {label!r} is already quantized, to {place.kind}, and cannot be quantized to "
                f"{self.quantization}: expected quantization=None"
            )
        if place.shape[-1] % BLOCK:
            raise ModelLoadError(
                f"tensor {label!r} has {place.shape[-1]} columns, and cannot be quantized to {self.quantization}: "
                f"expected a multiple of {BLOCK}"
            )
