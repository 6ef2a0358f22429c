"""What tells a model from another one: what it says.

A journal goes on with the model that it was written with, and with no other: weights, configuration, arithmetic, the
dtype of the KV and the CPU's instructions all matter to the tokens that come. All of them are in the bits of the logits
that a model gives to a fixed text, and one step is quickly made.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from leafkv.kv import KVCache
from leafkv.models.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from leafkv.models.batch import Model

TOKENS = 16
"""Of the text: enough for keys and values to matter."""


def fingerprint(
    model: Model, kv_cache_dtype: str, num_threads: int | None = None, cache_options: Mapping[str, Any] | None = None
) -> str:
    """A digest, 16 hexadecimal digits, of the logits that ``model`` gives after each of a few tokens."""
    config = model.config
    sizes = (1, config.num_layers, config.num_kv_heads, config.head_dim, TOKENS)
    cache = KVCache(*sizes, kv_cache_dtype, **(cache_options or {}))
    plan = model.plan(
        np.zeros((1, 1), np.int32),
        np.array([0, TOKENS], np.int32),
        np.array([TOKENS], np.int32),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=TOKENS,
        num_blocks=1,
        num_threads=num_threads,
    )
    positions = np.arange(TOKENS)
    batch = Batch(
        token_ids=(positions * 7919 % config.vocab_size).astype(np.int32),
        positions=positions,
        slots=positions,
        plan=plan,
        logit_rows=positions,
        num_threads=num_threads,
    )
    return blake2b(model.forward(batch, cache).tobytes(), digest_size=8).hexdigest()
