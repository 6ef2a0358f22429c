"""A tiny deterministic model that runs on the real KV manager, cache and attention.

Its next token depends on every token of the context *as read back through the paged cache*: with queries of zero,
attention is the mean of the visible values, and the values are small integers, so mean x length is their exact
sum. The values of layer 1 depend on the sums of layer 0, as in a real model: the KV of a token is that of its whole
prefix. A wrong block, slot, order or position, or stale KV, changes what follows. :func:`reference` computes the
same from the tokens alone, with no cache at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leafkv import AttentionPlan
from leafkv.kv import KVCache
from leafkv.models.batch import Batch

VOCAB = 61
EOS = 7
DIM = 8
PRIME = 997

_rng = np.random.default_rng(20261129)
BY_TOKEN = _rng.integers(-4, 5, (VOCAB, DIM))
BY_POSITION = _rng.integers(-4, 5, (53, DIM))
BY_STATE = _rng.integers(-8, 9, (PRIME, DIM))
LOGITS = _rng.standard_normal((PRIME, VOCAB)).astype(np.float32)
MIX = _rng.integers(1, PRIME, DIM)


def first_values(tokens: NDArray[Any], positions: NDArray[Any]) -> Any:
    return BY_TOKEN[tokens] + BY_POSITION[positions % len(BY_POSITION)]


def state(sums: NDArray[Any]) -> Any:
    return (sums * MIX).sum(axis=-1) % PRIME


def reference_logits(tokens: Sequence[int]) -> NDArray[np.float32]:
    """The logits after ``tokens``."""
    ids = np.array(tokens)
    first = first_values(ids, np.arange(len(ids))).cumsum(axis=0)
    logits: NDArray[np.float32] = LOGITS[state(BY_STATE[state(first)].sum(axis=0))]
    return logits


def reference(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """The greedy answer to ``prompt``."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(int(reference_logits(tokens).argmax()))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


@dataclass
class ToyConfig:
    vocab_size: int = VOCAB
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = DIM
    max_position_embeddings: int = 4096
    eos_token_ids: tuple[int, ...] = (EOS,)


@dataclass
class ToyModel:
    plan = AttentionPlan
    config: ToyConfig = field(default_factory=ToyConfig)
    before_forward: Callable[[Batch], None] = lambda batch: None
    """Called with each batch: a test looks, aborts or raises here."""
    after_forward: Callable[[NDArray[np.float32]], None] = lambda logits: None
    """Called with the logits, which a test may spoil."""

    def forward(self, batch: Batch, cache: KVCache) -> NDArray[np.float32]:
        self.before_forward(batch)
        visible = batch.positions + 1
        sums = self._layer(0, first_values(batch.token_ids, batch.positions), visible, batch, cache)
        sums = self._layer(1, BY_STATE[state(sums)], visible, batch, cache)
        logits: NDArray[np.float32] = LOGITS[state(sums[batch.logit_rows])]
        self.after_forward(logits)
        return logits

    def _layer(self, index: int, values: NDArray[Any], visible: NDArray[Any], batch: Batch, cache: KVCache) -> Any:
        rows = values.astype(np.float32)[:, None, :]
        cache.write(index, rows, rows, batch.slots)
        query = np.zeros((len(rows), self.config.num_heads, DIM), np.float32)
        mean = batch.plan.attend(query, *cache.layer(index), **cache.scales(index))[:, 0]
        return np.rint(mean * visible[:, None]).astype(np.int64)


class ToyTokenizer:
    """One character per token, and a stream that holds nothing back; ``eos`` is a special token."""

    vocab_size = VOCAB
    bos_token_id = None
    eos_token_ids = (EOS,)
    added_ids = special_ids = frozenset({EOS})
    decodes_in_order = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - ord("A") for c in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("A") + i) for i in ids if not (skip_special_tokens and i == EOS))

    def apply_chat_template(self, messages: list[Any], add_generation_prompt: bool = True) -> str:
        return "".join(m["content"] for m in messages) + "Z" * add_generation_prompt

    def decode_stream(self, skip_special_tokens: bool = True) -> Any:
        decode = self.decode

        class Stream:
            def step(self, token: int) -> str:
                return decode([token], skip_special_tokens)

            def held(self) -> str:
                return ""

            def finish(self) -> str:
                return ""

        return Stream()


@dataclass
class ToyLoaded:
    """What ``load_model`` gives, for :class:`leafkv.LLM`."""

    model: ToyModel = field(default_factory=ToyModel)
    tokenizer: Any = field(default_factory=ToyTokenizer)
    name: str = "toy"

    @property
    def config(self) -> ToyConfig:
        return self.model.config


def fail(error: BaseException) -> Callable[[object], None]:
    """A hook that raises."""

    def raise_it(_: object) -> None:
        raise error

    return raise_it
