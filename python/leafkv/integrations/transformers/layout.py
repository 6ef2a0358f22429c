"""What the layers of a model hand to a cache: seen in a forward of one token, and refused where blocks cannot hold it.

Configurations name heads and layers in as many ways as there are families, so the model is asked itself. Everything
that is kept besides keys and values of one shape (states of linear attention, latent or shared KV, cross attention)
shows in that forward, or in the configuration, and is refused by its name.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from leafkv.errors import InvalidInputError
from leafkv.models.hf.attention import NAME
from leafkv.models.hf.features import KNOWN_LAYERS, ropes_of

ROTATIONS_BY_LENGTH = {"dynamic", "longrope"}
"""Types of RoPE whose frequencies change once a text is long: keys of its first tokens depend on what follows."""


@dataclass(frozen=True)
class ModelLayout:
    """The KV of one token, and what it is a function of.

    Attributes:
        num_layers: layers that hand over keys and values.
        num_kv_heads: heads that each layer hands over.
        head_dim: elements of a head.
        dtype: of keys and values.
        device: likewise.
        length_limit: from this many tokens on, keys are no function of the tokens before them; None: always are.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    length_limit: int | None


def find_decoder(model: Any) -> Any:
    """The module whose forward has the token ids, and hands the cache to the layers; adapters around it are passed."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InvalidInputError(f"model: expected a model of transformers, got a {type(model).__name__}")
    if hasattr(model, "get_base_model"):  # a model in a PeftModel
        model = model.get_base_model()
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refused(model, "it is an encoder and a decoder: no cross attention")
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def read_layout(decoder: Any) -> ModelLayout:
    """What a decoder's layers hand over.

    Raises:
        InvalidInputError: blocks cannot hold it; the message names what.
    """
    config = decoder.config.get_text_config(decoder=True)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(KNOWN_LAYERS))
    if others:
        raise _refused(decoder, f"layers of type {', '.join(others)}")
    for name in ("use_bidirectional_attention", "attention_chunk_size"):
        if getattr(config, name, None):
            raise _refused(decoder, f"{name}={getattr(config, name)!r}")
    devices = {parameter.device for parameter in decoder.parameters()}
    if len(devices) != 1:
        raise _refused(decoder, f"its parameters are on {len(devices)} devices, expected one")
    seen = _probe(decoder, devices.pop())
    missing = sorted(set(range(config.num_hidden_layers)) - set(seen))
    if missing or len(seen) != config.num_hidden_layers:
        raise _refused(decoder, f"layers {missing} have no KV of their own (shared, or none)")
    shapes = {(key.shape, value.shape, key.dtype, value.dtype, key.device) for key, value in seen.values()}
    if len(shapes) > 1:
        raise _refused(decoder, f"its layers differ in heads or dtype: {sorted(map(str, shapes))}")
    key, value = seen[0]
    if key.shape != value.shape or key.ndim != 4 or key.dtype != value.dtype:
        raise _refused(decoder, f"keys {list(key.shape)} and values {list(value.shape)} differ: no latent attention")
    if key.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise _refused(decoder, f"its dtype {key.dtype}")
    return ModelLayout(len(seen), key.shape[1], key.shape[3], key.dtype, key.device, _length_limit(config))


class _Probe(Cache):  # type: ignore[misc]
    """A cache that keeps what each layer gives it, and the `LayerStep` of all layers."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.attended: set[int] = set()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.seen[layer_idx] = key_states, value_states
        key_states.leafkv_step = self
        return key_states, value_states

    def attend(self, layer: int, query: Tensor, *_: Any) -> Tensor:
        self.attended.add(layer)
        return query.transpose(1, 2)


def _probe(decoder: Any, device: torch.device) -> dict[int, tuple[Tensor, Tensor]]:
    """The keys and values of each layer, of one token."""
    probe = _Probe()
    token = torch.zeros((1, 1), dtype=torch.long, device=device)
    try:
        with torch.no_grad():
            decoder(
                input_ids=token,
                attention_mask=torch.ones_like(token),
                use_cache=True,
                **{cache_keyword(decoder): probe},
            )
    except InvalidInputError:
        raise
    except Exception as error:
        raise _refused(decoder, f"its layers keep more than keys and values ({error})") from error
    if decoder.config._attn_implementation == NAME and probe.attended != set(probe.seen):
        raise _refused(decoder, f"its attention does not go by attn_implementation={NAME!r}, expected another one")
    return probe.seen


def cache_keyword(decoder: Any) -> str:
    """The keyword of a forward's cache: renamed in transformers 5.24."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def _length_limit(config: Any) -> int | None:
    for parameters in ropes_of(config):
        if parameters.get("rope_type") in ROTATIONS_BY_LENGTH:
            named = parameters.get("original_max_position_embeddings")
            limit = named or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            return int(limit)
    return None


def _refused(model: Any, what: str) -> InvalidInputError:
    return InvalidInputError(f"model: {type(model).__name__} cannot be served from LeafKV blocks: {what}")
