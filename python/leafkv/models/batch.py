"""What the engine hands to a model, and what a model promises: one flattened, unpadded batch per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray


class ModelShape(Protocol):
    """What the engine wants to know of a model: `leafkv.models.ModelConfig`, say."""

    @property
    def vocab_size(self) -> int:
        """Tokens, and logits."""

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""

    @property
    def head_dim(self) -> int:
        """Elements of a head."""

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of context that the model is made for."""

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""


class Attention(Protocol):
    """Attention over a paged cache, planned once a step: `leafkv._core.AttentionPlan`, or a stand-in."""

    def attend(
        self,
        query: NDArray[np.float32],
        key_cache: NDArray[Any],
        value_cache: NDArray[Any],
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        k_scale: NDArray[np.float32] | None = None,
        v_scale: NDArray[np.float32] | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Causal attention of every row of ``query`` [T, num_heads, head_dim] over its sequence."""


class Cache(Protocol):
    """The part of `leafkv.kv.cache.KVCache` that a model uses."""

    def layer(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of one layer, to write to and to attend over, as `leafkv._core.write_kv` takes them."""

    def scales(self, index: int) -> dict[str, Any]:
        """Of one layer: ``k_scale`` and ``v_scale``; empty where the cache has none."""


@dataclass(slots=True)
class Batch:
    """The new tokens of one step, all sequences one after another: T of them, S of which are sampled from."""

    token_ids: NDArray[np.int32]
    """[T], each in ``[0, vocab_size)``: the caller has checked."""
    positions: NDArray[np.int64]
    """[T], each token's position in its sequence."""
    slots: NDArray[np.int64]
    """[T], where each token's key and value go."""
    plan: Attention
    """Who attends to what, for these T rows: what the model's own ``plan`` has made."""
    logit_rows: NDArray[np.int64]
    """[S], the rows whose logits are wanted."""
    num_threads: int | None = None
    """Threads to use; None for all. The plan has its own."""


class Model(Protocol):
    """A decoder that keeps its keys and values in a paged cache."""

    @property
    def config(self) -> ModelShape:
        """Its shape."""

    @property
    def plan(self) -> Callable[..., Any]:
        """What makes a batch's plan, by the arguments of `leafkv.AttentionPlan`, which it is for models on CPUs."""

    def forward(self, batch: Batch, cache: Cache) -> NDArray[np.float32]:
        """Write the batch's keys and values to ``cache``; return logits, float32 [S, vocab_size]."""
