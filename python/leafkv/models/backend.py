"""Whose code computes a model, where, and in which numbers.

"leafkv" is our own code, for CPUs; "transformers" is the model code of that library, over our cache and attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from leafkv._extras import require
from leafkv.errors import InvalidInputError
from leafkv.models.conversion import Conversion
from leafkv.models.loader import embedded_model, load_model

if TYPE_CHECKING:
    from leafkv.models.batch import Model, ModelShape
    from leafkv.models.parameters import Progress
    from leafkv.models.tokenizer import Tokenizer

BACKENDS = ("auto", "leafkv", "transformers")
"""Names of backends; "auto" is "leafkv", whatever else is installed."""

TORCH_DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Dtypes of backend "transformers"; "auto" is the checkpoint's own."""


class Loaded(Protocol):
    """A model ready to run, by whatever code: a `leafkv.models.LoadedModel`, or that of another backend.

    What else an engine asks for has a default: ``name``, ``dtype``, ``quantization``, ``weights`` (in words),
    ``backend``, ``kv_dtype`` (the KV dtype "auto") and ``cache_options`` (keywords of its `leafkv.KVCache`).
    """

    @property
    def model(self) -> Model:
        """What computes logits."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where there is none: prompts are token ids then."""

    @property
    def config(self) -> ModelShape:
        """The model's."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded.

    Args:
        dtype: of the arithmetic, see `load_model`.
        quantization: of the weights, see `load_model`.
        backend: "auto", "leafkv" or "transformers".
        device: "auto" or "cpu"; of backend "transformers" also a device of PyTorch, such as "cuda:0".
        tokenizer: of backend "transformers": a directory or a tokenizer, in place of the model's own.

    Raises:
        InvalidInputError: a value is none of these, or does not go with the backend.
    """

    dtype: str = "auto"
    quantization: str | None = None
    backend: str = "auto"
    device: Any = "auto"
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.backend, str) or self.backend not in BACKENDS:
            raise InvalidInputError(f"backend: expected one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if not self.by_transformers:
            Conversion(self.dtype, self.quantization)  # which checks them
            if str(self.device) not in {"auto", "cpu"}:
                raise InvalidInputError(
                    f"device: expected 'auto' or 'cpu', got {self.device!r}: other devices need backend='transformers'"
                )
            if self.tokenizer is not None:
                raise InvalidInputError("tokenizer: expected None: to choose one needs backend='transformers'")
            return
        if not isinstance(self.dtype, str) or self.dtype not in TORCH_DTYPES:
            raise InvalidInputError(f"dtype: expected one of {', '.join(TORCH_DTYPES)}, got {self.dtype!r}")
        if self.quantization is not None:
            raise InvalidInputError(
                f"quantization: expected None with backend='transformers', got {self.quantization!r}: weights are as "
                "the checkpoint has them"
            )

    @property
    def by_transformers(self) -> bool:
        """Whether the model's code is that of transformers."""
        return self.backend == "transformers"

    def load(self, source: Any, progress: Progress | None = None) -> Loaded:
        """Load a model.

        Args:
            source: what the backend reads: a path, a model of transformers, or None for the embedded default.
            progress: see `load_model`; transformers has its own.

        Raises:
            InvalidInputError: ``source`` is nothing that the backend reads, or was not loaded with such an option.
            ModelLoadError: the model cannot be read, or has what the engine does not do.
            MissingExtraError: a library that it takes is not installed.
        """
        if self.by_transformers:
            for module in ("torch", "transformers"):
                require(module, "torch")
            from leafkv.models.hf.loader import load_hf  # noqa: PLC0415 (needs the extra)

            return load_hf(embedded_model() if source is None else source, self)
        if not isinstance(source, (str, Path, type(None))):
            raise InvalidInputError(
                f"model: expected a path, a loaded model or None, got {source!r} (a model of transformers needs "
                "backend='transformers')"
            )
        return load_model(source, dtype=self.dtype, quantization=self.quantization, progress=progress)
