"""The KV manager and the KV memory, usable alone: neither knows of models or engines."""

from __future__ import annotations

from leafkv._core import KVManager, Ready, Stats, WaitFor
from leafkv.kv.cache import KVCache
from leafkv.kv.memory import CacheSize, available_memory, size_from_memory
from leafkv.kv.mirror import CacheMirror, HotPrefix
from leafkv.kv.namespaces import namespace

__all__ = [
    "CacheMirror",
    "CacheSize",
    "HotPrefix",
    "KVCache",
    "KVManager",
    "Ready",
    "Stats",
    "WaitFor",
    "available_memory",
    "namespace",
    "size_from_memory",
]
