"""The Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 are one decoder with options.

A layer is ``x += attention(norm(x))``, then ``x += mlp(norm(x))``. Options of the configuration: biases
(Qwen2), normalised queries and keys (Qwen3), a sliding window (Mistral), tied embeddings, RoPE scaling.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from leafkv.models.ops import linear, rms_norm, rotate, silu_mul
from leafkv.models.rope import Rope

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from leafkv.models.batch import Batch, Cache
    from leafkv.models.config import ModelConfig
    from leafkv.models.parameters import Weights

    F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layer:
    """The parameters of one layer; matrices are [out, in]. Names are those of `parameters`."""

    attention_norm: F32
    qkv: F32
    attention_out: F32
    mlp_norm: F32
    gate_up: F32
    down: F32
    qkv_bias: F32 | None = None
    q_norm: F32 | None = None
    k_norm: F32 | None = None
    attention_out_bias: F32 | None = None
    gate_up_bias: F32 | None = None
    down_bias: F32 | None = None

    @classmethod
    def of(cls, weights: Weights, index: int) -> Layer:
        """Layer ``index`` out of a model's parameters."""
        names = {field.name: f"layers.{index}.{field.name}" for field in fields(cls)}
        return cls(**{field: weights[name] for field, name in names.items() if name in weights})


class LlamaModel:
    """A decoder of the Llama family in float32.

    Args:
        config: shapes and options.
        weights: every array of `leafkv.models.parameters.parameters`; kept, not copied.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._embedding = weights["embedding"]
        self._layers = [Layer.of(weights, i) for i in range(config.num_layers)]
        self._norm = weights["norm"]
        self._lm_head = self._embedding if config.tie_word_embeddings else weights["lm_head"]
        self._rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling)

    def forward(self, batch: Batch, cache: Cache) -> F32:
        """Write the batch's keys and values to ``cache``; return logits, float32 [S, vocab_size]."""
        c = self.config
        x = self._embedding[batch.token_ids]
        cos, sin = self._rope.tables(batch.positions)
        step = _Buffers.of(c, len(x))
        for index, layer in enumerate(self._layers):
            rms_norm(x, layer.attention_norm, c.rms_norm_eps, out=step.normed)
            query, key, value = self._qkv(layer, step, cos, sin)
            cache.write(index, key, value, batch.slots)
            batch.plan.attend(
                query,
                *cache.layer(index),
                scale=c.head_dim**-0.5,
                sliding_window=c.window(index),
                out=step.attended,
                **cache.scales(index),
            )
            attended = step.attended.reshape(len(x), -1)
            x += linear(attended, layer.attention_out, layer.attention_out_bias, out=step.hidden)

            rms_norm(x, layer.mlp_norm, c.rms_norm_eps, out=step.normed)
            linear(step.normed, layer.gate_up, layer.gate_up_bias, out=step.gate_up)
            silu_mul(step.gate_up, out=step.gated)
            x += linear(step.gated, layer.down, layer.down_bias, out=step.hidden)
        return linear(rms_norm(x[batch.logit_rows], self._norm, c.rms_norm_eps), self._lm_head)

    def _qkv(self, layer: Layer, step: _Buffers, cos: F32, sin: F32) -> tuple[F32, F32, F32]:
        """Queries and keys, turned by their positions, and values: each [T, heads, head_dim]."""
        c = self.config
        linear(step.normed, layer.qkv, layer.qkv_bias, out=step.qkv)
        heads = step.qkv.reshape(len(step.qkv), -1, c.head_dim)
        query, key, value = np.split(heads, (c.num_heads, c.num_heads + c.num_kv_heads), axis=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rms_norm(query, layer.q_norm, c.rms_norm_eps)
            key = rms_norm(key, layer.k_norm, c.rms_norm_eps)
        np.copyto(step.value, value)
        return rotate(query, cos, sin, out=step.query), rotate(key, cos, sin, out=step.key), step.value


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Arrays that a step's layers write to, one after another."""

    normed: F32
    qkv: F32
    query: F32
    key: F32
    value: F32
    attended: F32
    hidden: F32
    gate_up: F32
    gated: F32

    @classmethod
    def of(cls, c: ModelConfig, rows: int) -> _Buffers:
        def empty(*shape: int) -> F32:
            return np.empty((rows, *shape), dtype=np.float32)

        return cls(
            normed=empty(c.hidden_size),
            qkv=empty((c.num_heads + 2 * c.num_kv_heads) * c.head_dim),
            query=empty(c.num_heads, c.head_dim),
            key=empty(c.num_kv_heads, c.head_dim),
            value=empty(c.num_kv_heads, c.head_dim),
            attended=empty(c.num_heads, c.head_dim),
            hidden=empty(c.hidden_size),
            gate_up=empty(2 * c.intermediate_size),
            gated=empty(c.intermediate_size),
        )
