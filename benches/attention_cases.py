"""What the benchmarks of paged attention compute: models, batches, and where their KV lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leafkv import AttentionPlan, KVCache


@dataclass(frozen=True)
class Model:
    """The heads of a model's attention."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA = Model("llama", 32, 8, 128)
SMOL = Model("smol", 9, 3, 64)
MHA = Model("mha", 32, 32, 128)


@dataclass(frozen=True)
class Case:
    """``count`` sequences of ``context`` tokens, the last ``new`` to compute, the first ``shared`` common to all."""

    kind: str
    model: Model
    count: int
    new: int
    context: int
    shared: int = 0

    @property
    def name(self) -> str:
        shared = f"-{self.shared}shared" if self.shared else ""
        return f"{self.kind}-{self.model.name}-{self.count}x{self.context}{shared}"

    @property
    def kv_tokens(self) -> int:
        """Different ones."""
        return self.shared + self.count * (self.context - self.shared)

    @property
    def kv_elements(self) -> int:
        """Elements of K and V that a call must read."""
        return self.kv_tokens * self.model.num_kv_heads * self.model.head_dim * 2

    @property
    def operations(self) -> float:
        """Multiplications and additions of the dot products."""
        pairs = self.count * self.new * (2 * self.context - self.new + 1) / 2
        return 4.0 * self.model.num_heads * self.model.head_dim * pairs

    @property
    def query_starts(self) -> NDArray[np.int32]:
        return np.arange(0, self.count * self.new + 1, self.new, dtype=np.int32)

    @property
    def kv_lens(self) -> NDArray[np.int32]:
        return np.full(self.count, self.context, np.int32)

    def plan(self, tables: NDArray[np.int32], memory: KVCache) -> AttentionPlan:
        """Of a step over ``memory``, by its block tables."""
        return AttentionPlan(
            tables,
            self.query_starts,
            self.kv_lens,
            num_heads=self.model.num_heads,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=self.model.head_dim,
            block_size=memory.block_size,
            num_blocks=memory.num_blocks,
        )

    def pages(self, tokens: int, num_pages: int, rng: np.random.Generator) -> NDArray[np.int32]:
        """Which of so many pages hold each sequence, ``[count, context / tokens]``, in random order.

        Where there are fewer than the case has, they are used again, each time in another order.
        """
        shared, needed = self.shared // tokens, -(-self.kv_tokens // tokens)
        passes = [rng.permutation(num_pages) for _ in range(-(-needed // num_pages))]
        ids = np.concatenate(passes)[:needed].astype(np.int32)
        first = np.broadcast_to(ids[:shared], (self.count, shared))
        # In order of rows, which concatenating what was broadcast is not.
        return np.ascontiguousarray(np.concatenate([first, ids[shared:].reshape(self.count, -1)], axis=1))


def cases() -> list[Case]:
    found = []
    for model in (LLAMA, SMOL):
        found += [Case("decode", model, n, 1, context) for n in (1, 8, 32) for context in (512, 4_096, 16_384)]
        found += [Case("prefill", model, 1, n, n) for n in (512, 2_048)]
        found += [Case("chunk", model, 1, 256, 4_096 + 256)]
    found += [Case("decode", model, 32, 1, 4_096 + 128, shared=4_096) for model in (LLAMA, SMOL, MHA)]
    return [*found, Case("decode", MHA, 32, 1, 4_096 + 128)]
