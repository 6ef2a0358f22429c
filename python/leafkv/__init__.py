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
    HandedOverError,
    InsufficientMemoryError,
    InvalidInputError,
    InvariantError,
    JournalError,
    LeafKVError,
    MissingExtraError,
    ModelLoadError,
    OutOfBlocksError,
    QueueFullError,
    QueueTimeoutError,
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
        EngineStats,
        Logprob,
        RequestMetrics,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
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
    "EngineStats",
    "EventGapError",
    "HandedOverError",
    "InsufficientMemoryError",
    "InvalidInputError",
    "InvariantError",
    "JournalError",
    "KVCache",
    "KVManager",
    "LeafKVError",
    "Logprob",
    "MissingExtraError",
    "ModelLoadError",
    "OutOfBlocksError",
    "QueueFullError",
    "QueueTimeoutError",
    "Ready",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Stats",
    "StructuredOutputsParams",
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
        "EngineStats",
        "Logprob",
        "RequestMetrics",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputsParams",
    }
)


def __getattr__(name: str) -> Any:
    # Who uses the KV manager or the attention alone does not load the engine.
    if name in _ENGINE_NAMES:
        return getattr(import_module("leafkv.engine"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
