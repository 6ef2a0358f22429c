"""The toy model of the engine's tests as a model of transformers: the same tokens, by another backend.

Its attention goes through transformers' interface, as that of a real model: the mean of the visible values. All of its
arithmetic is exact, so what :func:`tests.engine.toy.reference` says holds here, too, to the last bit.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from leafkv.kv import KVCache
from leafkv.models.batch import Batch
from leafkv.models.hf import attention
from leafkv.models.hf.model import HFModel, Planned

from ..engine.toy import BY_POSITION, BY_STATE, BY_TOKEN, DIM, EOS, LOGITS, MIX, PRIME, VOCAB, ToyLoaded, ToyModel


def eager(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **_: Any
) -> tuple[Any, None]:
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3) * scaling
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (weights @ value.repeat_interleave(query.shape[1] // key.shape[1], 1)).transpose(1, 2), None


class ToyHFConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "leafkv_toy"

    def __init__(self, **options: Any) -> None:
        self.vocab_size, self.num_hidden_layers, self.max_position_embeddings = VOCAB, 2, 4096
        super().__init__(eos_token_id=EOS, **options)


class ToyHF(PreTrainedModel):  # type: ignore[misc]
    config_class = ToyHFConfig
    _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding = torch.nn.Embedding(VOCAB, 1)
        self.heads = torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))
        for layer, module in enumerate(self.heads):
            module.layer_idx, module.is_causal = layer, True
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.embedding

    def forward(
        self,
        input_ids: Any,
        position_ids: Any = None,
        attention_mask: Any = None,
        logits_to_keep: Any = slice(None),
        **options: Any,
    ) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        embedded = self.embedding(input_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{EMPTY: None},
        )
        tables = (torch.from_numpy(table) for table in (BY_TOKEN, BY_POSITION, BY_STATE, LOGITS))
        by_token, by_position, by_state, logits = tables
        first = by_token[input_ids.long()] + by_position[position_ids % len(by_position)]
        sums = self._layer(0, first, position_ids, mask, options)
        sums = self._layer(1, by_state[_state(sums)], position_ids, mask, options)
        return CausalLMOutputWithPast(logits=logits[_state(sums)][:, logits_to_keep])

    def _layer(self, index: int, values: Any, positions: Any, mask: Any, options: Any) -> Any:
        rows = values.float()[:, None]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        query = torch.zeros_like(rows).expand(-1, 2, -1, -1)
        mean = attend(self.heads[index], query, rows, rows, mask, scaling=DIM**-0.5, **options)[0][:, :, 0]
        return (mean * (positions + 1)[..., None]).round().long()


EMPTY = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def _state(sums: Any) -> Any:
    return (sums * torch.from_numpy(MIX)).sum(-1) % PRIME


@cache
def shared() -> HFModel:
    attention.register()
    return HFModel(ToyHF._from_config(ToyHFConfig(), attn_implementation=attention.NAME).eval())


def put_in_place_of_the_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `ToyModel` computes by the backend for transformers, and its hooks are called as ever."""

    def forward(self: ToyModel, batch: Batch, cache: KVCache) -> NDArray[np.float32]:
        self.before_forward(batch)
        logits = shared().forward(batch, cache)
        self.after_forward(logits)
        return logits

    monkeypatch.setattr(ToyModel, "forward", forward)
    monkeypatch.setattr(ToyModel, "plan", Planned)
    monkeypatch.setattr(ToyLoaded, "cache_options", {"backend": "torch", "device": "cpu"}, raising=False)
    monkeypatch.setattr(ToyLoaded, "backend", "transformers", raising=False)
