"""Language models of the Llama family, from GGUF files and Hugging Face directories, on the operations of the core."""

from __future__ import annotations

from leafkv.models.batch import Batch, Model
from leafkv.models.config import ModelConfig
from leafkv.models.loader import LoadedModel, load_model

__all__ = ["Batch", "LoadedModel", "Model", "ModelConfig", "load_model"]
