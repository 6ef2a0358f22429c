"""The KV memory of one model, shared by the caches of all its calls, and the hooks that tell a cache of its tokens.

A cache of transformers gets keys and values, and never sees a token. Two hooks on the decoder see them: before a
forward, the cache among its arguments takes slots; after it, what was written is committed. They find the cache in the
call itself, so that forwards in several threads do not mix, and do nothing in forwards with other caches.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from leafkv._checks import MAX_TOKEN_ID
from leafkv._core import Ready
from leafkv.errors import InvalidInputError
from leafkv.integrations.transformers.layout import find_decoder, read_layout
from leafkv.integrations.transformers.rows import Rows
from leafkv.integrations.transformers.weights import WeightsWatch
from leafkv.kv import KVCache, KVManager, namespace
from leafkv.models.hf.attention import NAME

if TYPE_CHECKING:
    from typing_extensions import Self


class KVPool:
    """Blocks of KV for a model of transformers, with a radix tree over them: what one call computed, others find.

    Of the model nothing is changed but that its decoder has two hooks, until the pool is closed or goes. KV is found by
    calls with the same tokens, weights, and active adapters. Who alters weights in a way that PyTorch cannot tell (in
    ``parameter.data``) calls `clear`.

    Args:
        model: a decoder of transformers, or a PEFT model around one.
        num_blocks: blocks of the pool.
        block_size: tokens of a block.
        kv_cache_dtype: "auto", the model's; or "float32", "float16", "bfloat16", "int8".

    Attributes:
        manager: the block tables and the radix tree.
        kv: the KV memory.
        layout: what the model's layers hand over.

    Raises:
        InvalidInputError: the model keeps what blocks cannot hold; the message names it.
        InsufficientMemoryError: the blocks do not fit in free memory.
    """

    def __init__(
        self, model: Any, num_blocks: int = 1024, block_size: int = 16, *, kv_cache_dtype: str = "auto"
    ) -> None:
        self.decoder = find_decoder(model)
        self.layout = read_layout(self.decoder)
        dtype = str(self.layout.dtype).removeprefix("torch.") if kv_cache_dtype == "auto" else kv_cache_dtype
        shape = self.layout.num_layers, self.layout.num_kv_heads, self.layout.head_dim, block_size
        # Other attention gathers from plain rows. LeafKV's own reads what is fastest where the blocks are.
        rows = None if self.attends_in_place else "rows"
        device = self.layout.device
        self.kv = KVCache(num_blocks, *shape, dtype, rows, backend="torch", device=device)  # type: ignore[arg-type]
        self.manager = KVManager(num_blocks, block_size, partial_hits=True)
        self.lock = threading.Lock()
        self._weights = WeightsWatch(self.decoder)
        self._numbers, self._names = itertools.count(), itertools.count()
        self._parameters = tuple(inspect.signature(self.decoder.forward).parameters)
        hooks = _Hooks(self)
        handles = (
            self.decoder.register_forward_pre_hook(hooks.before, with_kwargs=True),
            self.decoder.register_forward_hook(hooks.after, with_kwargs=True, always_call=True),
        )
        self._finalizer = weakref.finalize(self, _remove, handles)
        self._finalizer.atexit = False

    @property
    def attends_in_place(self) -> bool:
        """Whether the model's attention is now LeafKV's."""
        return bool(self.decoder.config._attn_implementation == NAME)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def clear(self) -> None:
        """Forget all KV: nothing of it is found any more. Caches that are open go on by themselves."""
        self.manager.clear()

    def close(self) -> None:
        """Take the hooks off the model, which is then as before. Caches of this pool cannot be used any more."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"KVPool({type(self.decoder).__name__}, {self.kv!r})"

    # What follows is for the pool's caches.

    def namespace(self) -> bytes:
        """What KV depends on besides the tokens, as of now."""
        version, adapters = self._weights.look()
        return namespace("pool", adapter=adapters, weights_version=version)

    def new_id(self) -> int:
        """An id for a sequence."""
        return next(self._numbers)

    def start(self, prompt: NDArray[np.int64] | None, space: bytes) -> tuple[int, int]:
        """A sequence with what is cached of a prompt, or an empty one. Returns its id, and how many tokens it has."""
        first, second = self.new_id(), self.new_id()
        tokens = [0] if prompt is None else prompt
        found = self.manager.begin(first, tokens, space, read_cache=prompt is not None)
        if not isinstance(found, Ready):  # what was cached is gone meanwhile, and somebody computes it again
            found = self.manager.begin(first, tokens, space, read_cache=False)
        # A fork knows committed tokens only: what follows is told by the forwards that compute it.
        self.manager.fork(first, second)
        self.manager.release(first)
        assert isinstance(found, Ready)
        return second, found.cached_tokens

    def nameless(self, count: int) -> NDArray[np.int64]:
        """Token ids that no vocabulary has, none of them given before (of the last two billion)."""
        ids = np.fromiter(itertools.islice(self._names, count), np.int64, count)
        return ids % MAX_TOKEN_ID + (MAX_TOKEN_ID + 1)


class _Hooks:
    """What a decoder calls around its forwards. It does not keep the pool alive."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = weakref.ref(pool)
        self._names = pool._parameters

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        rows = _rows_of(arguments)
        pool = self._pool()
        if rows is None or pool is None:
            return
        if rows.pool.decoder is not module:
            raise InvalidInputError(f"cache: expected one of this {type(module).__name__}, got one of another model")
        if rows.pool is pool:
            rows.begin_forward(arguments, pool.attends_in_place)

    def after(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        rows = _rows_of(dict(zip(self._names, args, strict=False)) | kwargs)
        if rows is None or rows.pool is not self._pool():
            return
        if output is None:  # the forward has failed
            rows.roll_back()
        else:
            rows.end_forward()


def _rows_of(arguments: Mapping[str, Any]) -> Rows | None:
    """The rows of the LeafCache that a forward is given, if it is given one."""
    for name in ("cache", "past_key_values"):
        rows = getattr(arguments.get(name), "rows", None)
        if isinstance(rows, Rows):
            return rows
    return None


def _remove(handles: tuple[Any, ...]) -> None:
    for handle in handles:
        handle.remove()
