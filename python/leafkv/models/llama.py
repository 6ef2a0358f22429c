"""The Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 are one decoder with options.

A layer is ``x += attention(norm(x))``, then ``x += mlp(norm(x))``. Options of the configuration: biases
(Qwen2), normalised queries and keys (Qwen3), a sliding window (Mistral), tied embeddings, RoPE scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from leafkv._core import AttentionPlan, embed, linear, rope_write_kv
from leafkv.models.rope import Rope

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from leafkv._core import Weight
    from leafkv.models.batch import Batch, Cache
    from leafkv.models.config import ModelConfig
    from leafkv.models.parameters import Weights

    F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layer:
    """The parameters of one layer; matrices are [out, in]. Names are those of `parameters`."""

    attention_norm: F32
    qkv: Weight
    attention_out: Weight
    mlp_norm: F32
    gate_up: Weight
    down: Weight
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
        found: dict[str, Any] = {field: weights[name] for field, name in names.items() if name in weights}
        return cls(**found)


class LlamaModel:
    """A decoder of the Llama family.

    Args:
        config: shapes and options.
        weights: every array of `leafkv.models.parameters.parameters`; kept, not copied.
        precision: what activations are rounded to before products with weights; all else is float32.
    """

    plan = AttentionPlan

    def __init__(
        self, config: ModelConfig, weights: Weights, precision: Literal["float32", "bfloat16"] = "float32"
    ) -> None:
        self.config = config
        self.precision = precision
        self._embedding: Weight = weights["embedding"]  # type: ignore[assignment]
        self._layers = [Layer.of(weights, i) for i in range(config.num_layers)]
        self._norm: F32 = weights["norm"]  # type: ignore[assignment]
        self._lm_head: Weight = self._embedding if config.tie_word_embeddings else weights["lm_head"]  # type: ignore[assignment]
        self._rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling)

    def forward(self, batch: Batch, cache: Cache) -> F32:
        """Write the batch's keys and values to ``cache``; return logits, float32 [S, vocab_size]."""
        c, rows = self.config, len(batch.token_ids)
        threads: dict[str, Any] = {"num_threads": batch.num_threads}
        product: dict[str, Any] = {"precision": self.precision, **threads}
        # Each is written anew by every layer.
        x, qkv, heads, attended, gate_up = buffers(
            (rows, c.hidden_size),
            (rows, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim),
            (rows, c.num_heads, c.head_dim),
            (rows, c.num_heads * c.head_dim),
            (rows, 2 * c.intermediate_size),
        )
        attended_heads = attended.reshape(heads.shape)
        scale, eps = c.head_dim**-0.5, c.rms_norm_eps
        cos, sin = self._rope.tables(batch.positions)
        embed(self._embedding, batch.token_ids, out=x, **threads)
        for index, layer in enumerate(self._layers):
            keys, values = cache.layer(index)
            scales = cache.scales(index)
            linear(x, layer.qkv, norm=layer.attention_norm, eps=eps, bias=layer.qkv_bias, out=qkv, **product)
            rope_write_kv(
                qkv,
                cos,
                sin,
                keys,
                values,
                batch.slots,
                num_heads=c.num_heads,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=None if layer.q_norm is None else eps,
                out=heads,
                **scales,
                **threads,
            )
            batch.plan.attend(
                heads, keys, values, scale=scale, sliding_window=c.window(index), out=attended_heads, **scales
            )
            linear(attended, layer.attention_out, bias=layer.attention_out_bias, out=x, add=True, **product)

            linear(x, layer.gate_up, norm=layer.mlp_norm, eps=eps, bias=layer.gate_up_bias, out=gate_up, **product)
            linear(gate_up, layer.down, gated=True, bias=layer.down_bias, out=x, add=True, **product)
        return linear(x[batch.logit_rows], self._lm_head, norm=self._norm, eps=eps, **product)


LINE = 64
"""Bytes of a cache line: rows that begin on one are read fastest, and need not be copied."""


def buffers(*shapes: tuple[int, ...]) -> list[NDArray[np.float32]]:
    """Arrays of these shapes to write to, each beginning on a cache line."""
    sizes = [-(-4 * math.prod(shape) // LINE) * LINE for shape in shapes]
    memory = np.empty(sum(sizes) + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    arrays = []
    for shape, size in zip(shapes, sizes, strict=True):
        arrays.append(memory[start : start + 4 * math.prod(shape)].view(np.float32).reshape(shape))
        start += size
    return arrays
