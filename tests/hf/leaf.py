"""What the tests of `LeafCache` share: prompts, models that are made once, and calls in any version of transformers."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from leafkv.integrations.transformers import KVPool
from tests.hf.models import OWN_ATTENTION, VOCAB, tiny

if TYPE_CHECKING:
    from typing_extensions import Self


@cache
def model_of(family: str, attention: str = "leafkv", **changes: Any) -> Any:
    """A model of a family: equal weights in every attention. Own attention is the one that a family has."""
    return tiny(
        family, attention="eager" if family in OWN_ATTENTION and attention == "leafkv" else attention, **changes
    )


KEYWORD = "cache" if "cache" in inspect.signature(model_of("llama").forward).parameters else "past_key_values"
"""The keyword of a cache, in `generate` and in forwards."""


def prompts(batch: int, length: int, seed: int = 0, pads: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts [batch, length] and their mask; the first ``pads[i]`` tokens of row i are padding."""
    ids = torch.from_numpy(np.random.default_rng(seed).integers(1, VOCAB, (batch, length)))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return ids, mask


def answer(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, kv: Any = None, **options: Any) -> Any:
    """Greedy tokens of ``generate``, 12 by default, with a cache, or with transformers' own."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 12, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, **({} if kv is None else {KEYWORD: kv}), **options)


def step(model: Any, ids: torch.Tensor, kv: Any, **arguments: Any) -> torch.Tensor:
    """Logits of one forward, with no gradient."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids, **{KEYWORD: kv}, **arguments).logits
    return logits


class Columns:
    """How many tokens in all rows a model's forwards were given, within a ``with`` block."""

    def __init__(self, model: Any) -> None:
        self.seen: list[int] = []
        self._model = model

    def __enter__(self) -> Self:
        self._handle = self._model.get_decoder().register_forward_pre_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _note(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        self.seen.append(ids.numel())


def check_idle(pool: KVPool) -> None:
    """No block is held, none is lost."""
    pool.manager.check_invariants()
    stats = pool.manager.stats()
    assert stats.held_blocks == 0
    assert stats.sequences == 0
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
