"""`Tokenizer` from a Hugging Face directory: ``tokenizer.json`` as it is, and what lies beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leafkv._extras import require
from leafkv.errors import ModelLoadError
from leafkv.models.chat_template import ChatTemplate
from leafkv.models.config_hf import read_json
from leafkv.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from leafkv.models.batch import ModelShape


def tokenizer_from_hf(directory: Path, config: ModelShape) -> Tokenizer:
    """Read ``tokenizer.json``, and special tokens and the chat template from the files beside it.

    Raises:
        ModelLoadError: a file is missing, cut or malformed.
    """
    file = directory / "tokenizer.json"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelLoadError(f"{file.name} is missing") from error
    try:
        backend = require("tokenizers", "models").Tokenizer.from_str(text)
    except ImportError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"{file.name} is cut or malformed: {error}") from error

    settings_file = directory / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    tokens = _special_tokens(settings)
    end = backend.token_to_id(tokens["eos_token"]) if "eos_token" in tokens else None
    ends = (*config.eos_token_ids, *(() if end is None else (end,)))
    begin = config.bos_token_id
    if begin is None and "bos_token" in tokens:
        begin = backend.token_to_id(tokens["bos_token"])
    source = _template(directory, settings)
    return Tokenizer(
        backend,
        bos_token_id=begin,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        chat_template=None if source is None else ChatTemplate(source, tokens),
    )


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like: strings, or objects with a ``content``."""
    tokens = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(f"tokenizer_config.json: chat_template is a {type(template).__name__}, not a string")
    return template
