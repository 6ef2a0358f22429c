"""Loading a model of transformers: from a local directory, or one that is loaded already.

What can be refused is refused by the configuration, before weights are read. Nothing is downloaded, and no code of a
checkpoint is run: its ``model_type`` must be one that transformers itself has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from leafkv.errors import InvalidInputError, LeafKVError, ModelLoadError
from leafkv.models.chat_template import ChatTemplate
from leafkv.models.hf.attention import NAME, register
from leafkv.models.hf.features import DecoderShape, check_class, check_config, context_of
from leafkv.models.hf.model import HFModel
from leafkv.models.tokenizer import Tokenizer
from leafkv.models.tokenizer_hf import tokenizer_from_hf
from leafkv.torch.storage import as_device

if TYPE_CHECKING:
    from leafkv.models.backend import LoadOptions
    from leafkv.models.batch import ModelShape

DTYPES = {getattr(torch, name): name for name in ("float32", "bfloat16", "float16")}

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Of tokenizers without a ``tokenizer.json``: `AutoTokenizer` knows how to read them."""


@dataclass(frozen=True, slots=True)
class LoadedHF:
    """A model of transformers ready to run: a `leafkv.models.backend.Loaded`."""

    model: HFModel
    tokenizer: Tokenizer | None
    config: DecoderShape
    name: str
    """The directory's name."""
    dtype: str
    """Of weights and arithmetic, and the KV dtype "auto"."""
    weights: str
    """In words."""
    quantization: None = None
    backend: str = "transformers"

    @property
    def kv_dtype(self) -> str:
        """The KV dtype "auto"."""
        return self.dtype

    @property
    def cache_options(self) -> dict[str, Any]:
        """Keywords of the `leafkv.KVCache` that it writes to."""
        return {"backend": "torch", "device": str(self.model.device)}


def load_hf(source: Any, options: LoadOptions) -> LoadedHF:
    """Load a decoder of transformers for the engine.

    Args:
        source: a local directory, or a causal language model of transformers. The latter is taken over: it is put into
            evaluation, and its ``attn_implementation`` is "leafkv" from now on, which outside of the engine computes
            what it has computed before, with any cache.
        options: how. The ``device`` "auto" is a GPU where there is one, the ``dtype`` "auto" the checkpoint's; both are
            what a model has that is loaded already.

    Raises:
        InvalidInputError: an option is malformed, or not what the model was loaded with.
        ModelLoadError: the model is missing, cut or malformed, or has what the engine does not do, which is named.
    """
    register()
    if isinstance(source, PreTrainedModel):
        name = Path(str(source.config.name_or_path)).name or source.config.model_type
        with _errors(name):
            _take_over(source, options)
            return _loaded(source, name, options, Path(str(source.config.name_or_path)))
    if not isinstance(source, (str, Path)):
        raise InvalidInputError(
            f"model: expected a directory or a model of transformers with backend='transformers', got {source!r}"
        )
    path = Path(source).expanduser()
    with _errors(str(path)):
        if not path.is_dir():
            what = "is a file" if path.exists() else "is not there"
            raise ModelLoadError(
                f"expected a directory, as transformers writes it, for backend='transformers': it {what}"
            )
        device = _device(options.device)
        return _loaded(_read(path, options.dtype, device), path.resolve().name, options, path)


def _read(path: Path, dtype: str, device: Any) -> Any:
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    check_config(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(f"model_type = {config.model_type!r}: transformers has no causal language model of it")
    check_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    context_of(config)
    model, found = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation=NAME,
        local_files_only=True,
        output_loading_info=True,
    )
    if found["missing_keys"]:  # which transformers would make up
        raise ModelLoadError(f"weights are missing: {', '.join(sorted(found['missing_keys']))}")
    return model.to(device)


def _take_over(model: Any, options: LoadOptions) -> None:
    check_config(model.config)
    check_class(type(model))
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or model.device.type == "meta":
        raise ModelLoadError(f"expected all weights on one device, got {', '.join(sorted(map(str, devices)))}")
    if options.device != "auto" and as_device("device", options.device) != as_device("device", model.device):
        raise InvalidInputError(f"device: expected auto or {model.device}, where the model is, got {options.device!r}")
    dtype = DTYPES.get(model.dtype, str(model.dtype))
    if options.dtype not in ("auto", dtype):
        raise InvalidInputError(f"dtype: expected auto or {dtype}, as the model was loaded, got {options.dtype!r}")
    model.eval()
    model.set_attn_implementation(NAME)


def _loaded(model: Any, name: str, options: LoadOptions, path: Path) -> LoadedHF:
    if model.dtype not in DTYPES:
        raise ModelLoadError(f"dtype: expected one of {', '.join(DTYPES.values())}, got {model.dtype}")
    hf = HFModel(model)
    dtype = DTYPES[model.dtype]
    weights = sum(tensor.nbytes for tensor in model.parameters())
    return LoadedHF(
        model=hf,
        tokenizer=_tokenizer(options.tokenizer, path, hf.config),
        config=hf.config,
        name=name,
        dtype=dtype,
        weights=f"{dtype}, {weights / 1e6:.1f} MB, on {hf.device}",
    )


def _device(device: Any) -> Any:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return as_device("device", device)


def _tokenizer(given: Any, path: Path, shape: ModelShape) -> Tokenizer | None:
    """The tokenizer that is given, or that lies beside the model; None where there is none: prompts are token ids."""
    if given is not None and not isinstance(given, (str, Path)):
        return given if hasattr(given, "decode_stream") else _wrapped(given, shape)
    if given is not None:
        path = Path(given).expanduser()
    if (path / "tokenizer.json").is_file():
        return tokenizer_from_hf(path, shape)
    if any((path / name).is_file() for name in TOKENIZER_FILES):
        return _wrapped(AutoTokenizer.from_pretrained(path, local_files_only=True), shape)
    if given is not None:
        raise ModelLoadError(f"tokenizer: no tokenizer in {path}")
    return None


def _wrapped(tokenizer: Any, shape: ModelShape) -> Tokenizer:
    """A tokenizer of transformers as ours: both are faces of the tokenizers library."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidInputError(
            f"tokenizer: expected one of the tokenizers library, a directory or None, got {type(tokenizer).__name__}"
        )
    source = tokenizer.chat_template
    source = source.get("default") if isinstance(source, dict) else source
    words = {name: str(word) for name, word in tokenizer.special_tokens_map.items() if isinstance(word, str)}
    ends = (*shape.eos_token_ids, *(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)))
    return Tokenizer(
        tokenizers.Tokenizer.from_str(backend.to_str()),  # ours: what is set in one is not set in the other
        bos_token_id=shape.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        chat_template=None if source is None else ChatTemplate(source, words),
    )


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Whatever goes wrong while a model is read is a `ModelLoadError` that names it."""
    try:
        yield
    except InvalidInputError:
        raise
    except ModelLoadError as error:
        raise ModelLoadError(f"{name}: {error}") from error
    except LeafKVError:
        raise
    except Exception as error:  # the library raises whatever its parts do
        raise ModelLoadError(f"{name}: cannot be loaded by transformers: {error}") from error
