"""Whose code computes a model is asked for by name, and checked before anything is read."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from leafkv import LLM, AsyncEngine, InvalidInputError, MissingExtraError
from leafkv.engine.build import EngineArgs

from .toy import ToyLoaded

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"backend": "vllm"}, "backend: expected one of auto, leafkv, transformers, got 'vllm'"),
    ({"backend": None}, "backend: expected one of auto"),
    ({"device": "cuda"}, "device: expected 'auto' or 'cpu', got 'cuda': other devices need backend='transformers'"),
    ({"dtype": "float16"}, "dtype: expected one of auto, float32, bfloat16, got 'float16'"),
    ({"backend": "leafkv", "tokenizer": "here"}, "tokenizer: expected None"),
    ({"backend": "transformers", "dtype": "float64"}, "dtype: expected one of auto, float32, bfloat16, float16"),
    ({"backend": "transformers", "quantization": "q8_0"}, "quantization: expected None with backend='transformers'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    for make in (EngineArgs, LLM, AsyncEngine):
        with pytest.raises(InvalidInputError, match=message):
            make(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "transformers"}, "backend: expected auto or leafkv, as the model was loaded, got 'transformers'"),
        ({"dtype": "bfloat16"}, "dtype: expected auto or float32, as the model was loaded"),
    ],
)
def test_a_loaded_model_is_what_it_was_loaded_as(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LLM(ToyLoaded(), **options)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_the_extra_that_is_missing_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers"):
        if name != missing and name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, sys.modules[__name__])
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=rf"{missing!r}, which is not installed: pip install 'leafkv\[torch\]'"):
        LLM("anywhere", backend="transformers")


def test_what_only_another_backend_reads_is_refused_and_never_switches_to_it() -> None:
    with pytest.raises(InvalidInputError, match=r"model: expected a path.*needs backend='transformers'"):
        LLM(object())
