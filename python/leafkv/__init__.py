"""LeafKV: a paged KV cache with a radix-tree prefix cache, and the attention that reads it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from leafkv._core import (
    AttentionPlan,
    Ready,
    Stats,
    WaitFor,
    __version__,
    copy_blocks,
    instruction_set,
    paged_attention,
    write_kv,
)
from leafkv.errors import (
    EngineDeadError,
    EventGapError,
    InsufficientMemoryError,
    InvalidInputError,
    InvariantError,
    LeafKVError,
    MissingExtraError,
    ModelLoadError,
    OutOfBlocksError,
    UnknownSequenceError,
)
from leafkv.kv import CacheMirror, KVCache, KVManager, namespace

if TYPE_CHECKING:
    from leafkv.engine import (
        LLM,
        AsyncEngine,
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        CompletionOutput,
        RequestOutput,
        SamplingParams,
    )

__all__ = [
    "LLM",
    "AsyncEngine",
    "AttentionPlan",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CacheMirror",
    "CompletionOutput",
    "EngineDeadError",
    "EventGapError",
    "InsufficientMemoryError",
    "InvalidInputError",
    "InvariantError",
    "KVCache",
    "KVManager",
    "LeafKVError",
    "MissingExtraError",
    "ModelLoadError",
    "OutOfBlocksError",
    "Ready",
    "RequestOutput",
    "SamplingParams",
    "Stats",
    "UnknownSequenceError",
    "WaitFor",
    "__version__",
    "copy_blocks",
    "instruction_set",
    "namespace",
    "paged_attention",
    "write_kv",
]

_ENGINE_NAMES = frozenset(
    {
        "LLM",
        "AsyncEngine",
        "BeamSearchOutput",
        "BeamSearchParams",
        "BeamSearchSequence",
        "CompletionOutput",
        "RequestOutput",
        "SamplingParams",
    }
)


def __getattr__(name: str) -> Any:
    # Who uses the KV manager or the attention alone does not load the engine.
    if name in _ENGINE_NAMES:
        return getattr(import_module("leafkv.engine"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
