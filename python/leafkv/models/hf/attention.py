"""``attn_implementation="leafkv"``: what transformers calls for the attention of each layer, and for its mask.

A layer's attention is computed by one of three, looked for in this order:

1. the `LayerStep` that :func:`using` has set for the forward that runs in this thread: the engine's;
2. the `LayerStep` that is the attribute ``leafkv_step`` of the key tensor: a `LeafCache` sets it when it gets the keys;
3. :func:`dense`, over the keys and values as they come, which are those of all tokens then: any other cache, or none.

A layer's options (scale, window, softcap, sinks) are read off its call. Every keyword of the call is one that is known:
an option, or one that has no effect on attention, or it is refused by its name, unless it is None.

Masks: transformers composes the mask of a forward from functions, and asks the registered mask function for what the
attention function wants to see of it. A name that is not registered there would mean no mask at all, padding included.
Ours recognises the causal mask and the causal sliding window, and refuses everything else by its name. It returns None
where a query sees all keys up to its own; else a bool tensor [B, S], True for tokens and False for padding, with two
attributes: ``leafkv_window``, the window that was composed, and ``leafkv_first``, the index among the S keys of the
first query. Nothing is read from the device here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from leafkv.errors import InvalidInputError
from leafkv.torch import paged_attention, to_device

NAME = "leafkv"
"""The ``attn_implementation``."""

Options = dict[str, Any]
"""Keywords of `leafkv.torch.AttentionPlan.attend`: scale, sliding_window, softcap, sinks."""

HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",  # refused where it is true
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords of a layer's call that do not change what its attention is."""


class LayerStep(Protocol):
    """What computes the attention of the layers, in one forward."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options, padding: Tensor | None, /
    ) -> Tensor:
        """Take the new keys and values of a layer, and attend to all that it has.

        Args:
            layer: index of the layer.
            query: [B, num_heads, q, head_dim], as transformers hands it over: any strides.
            key: [B, num_kv_heads, q, head_dim], of the new tokens only.
            value: likewise.
            options: of the layer, as `AttentionPlan.attend` takes them.
            padding: None, or the bool tensor [B, S] of the mask function (False for padding), of all S tokens.

        Returns:
            [B, q, num_heads, head_dim].
        """


_STEP: ContextVar[LayerStep | None] = ContextVar("leafkv_step", default=None)


@contextmanager
def using(step: LayerStep) -> Iterator[None]:
    """Within the block, all attention of this thread is ``step``'s. It knows its tokens, so masks are None."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def register() -> None:
    """Make "leafkv" an ``attn_implementation`` of transformers; to do so again changes nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of one layer.

    Args:
        module: the layer's attention.
        query: [B, num_heads, q, head_dim].
        key: [B, num_kv_heads, S, head_dim].
        value: likewise.
        attention_mask: what :func:`mask` has returned.
        dropout: refused, unless it is 0.
        scaling: multiplies the scores.
        sliding_window: a query sees at most this many last keys.
        softcap: bounds the scores.
        s_aux: the sinks [num_heads], which some models call ``sinks``.
        is_causal: refused where it is False, or None and the module's is.
        others: see `HARMLESS`.

    Returns:
        [B, q, num_heads, head_dim], and None: no weights are made.

    Raises:
        InvalidInputError: the layer asks for what LeafKV does not compute; the message names it.
    """
    sinks = others.pop("sinks", None)
    sinks = s_aux if sinks is None else sinks
    _check_call(module, query, key, value, sinks, dropout, is_causal, others)
    window = _window(sliding_window, attention_mask)
    options: Options = {"scale": scaling, "sliding_window": window, "softcap": softcap, "sinks": sinks}
    options = {name: option for name, option in options.items() if option is not None}
    if sinks is not None:
        options["sinks"] = sinks.float()
    padding = _padding(attention_mask)
    step = _STEP.get() or getattr(key, "leafkv_step", None)
    if step is None:
        return dense(query, key, value, padding, options), None
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise InvalidInputError(f"layer_idx: expected {type(module).__name__} to have one, which tells layers apart")
    return step.attend(layer, query, key, value, options, padding), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: Any = None,
    **_: Any,
) -> Tensor | None:
    """The mask function: what the attention function needs to know of the mask that transformers has composed.

    Returns:
        None, or bool [B, kv_length], see the head of this file.

    Raises:
        InvalidInputError: the mask is neither causal nor a causal sliding window, each with padding or without; the
            message names what it is composed of.
    """
    window = recognized(mask_function)
    if _STEP.get() is not None and window is None:
        return None
    if attention_mask is not None and attention_mask.ndim != 2:
        raise InvalidInputError(f"attention_mask: expected [batch, tokens], got shape {tuple(attention_mask.shape)}")
    if hasattr(attention_mask, "leafkv_first"):  # with a static cache, `generate` has asked for it before the forward
        return attention_mask
    first = q_offset - kv_offset
    # A static cache has keys after the last query: they are hidden like padding. Its offset may be a tensor.
    trailing = isinstance(first, torch.Tensor) or first + q_length != kv_length
    if attention_mask is None and window is None and not trailing:
        return None
    if attention_mask is None:
        known = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        missing = kv_offset + kv_length - attention_mask.shape[1]
        known = torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))
        known = known[:, kv_offset : kv_offset + kv_length]
    if trailing:
        known = known & (torch.arange(kv_length, device=known.device) < first + q_length)
    # A tensor of its own: what follows is not said of the caller's. One that is not contiguous `generate` would copy.
    known = known.contiguous().view(known.shape)
    known.leafkv_window, known.leafkv_first = window, first
    return known


def recognized(function: Callable[..., Any] | None) -> int | None:
    """The window of a mask function of transformers, or None if it is the causal one.

    Raises:
        InvalidInputError: it is neither of these two.
    """
    if function is None or function is masking_utils.causal_mask_function:
        return None
    # Functions made by one factory have one code object, and what they were made of in their closures.
    model = masking_utils.sliding_window_causal_mask_function(1)
    parts = _parts(function)
    if getattr(function, "__code__", None) is model.__code__ and len(parts) == 2 and parts[1] is _parts(model)[1]:
        overlay = parts[0]
        window = overlay.__closure__[0].cell_contents if getattr(overlay, "__closure__", None) else None
        if overlay.__code__ is _parts(model)[0].__code__ and isinstance(window, int):
            return window
    raise InvalidInputError(f"mask: expected a causal mask or a causal sliding window, got {described(function)}")


def described(function: Any) -> str:
    """A mask function in words: the names of the functions that it is composed of."""
    name = getattr(function, "__qualname__", repr(function)).partition(".<locals>")[0]
    parts = _parts(function)
    return f"{name}({', '.join(map(described, parts))})" if parts else name


def _parts(function: Any) -> tuple[Any, ...]:
    """The mask functions that one is composed of."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    groups = [cell if isinstance(cell, tuple) else (cell,) for cell in cells]
    return tuple(part for group in groups for part in group if callable(part) and not isinstance(part, torch.Tensor))


def _check_call(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    name = type(module).__name__
    if dropout:
        raise InvalidInputError(f"dropout: expected 0, as outside of training, got {dropout}")
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (query, key, value, sinks)
    ):
        raise InvalidInputError("requires_grad: LeafKV's attention has no backward; expected torch.no_grad()")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise InvalidInputError(f"is_causal: expected True, got False of {name}")
    if value.shape[-1] != key.shape[-1]:
        raise InvalidInputError(
            f"value: expected heads of {key.shape[-1]} dimensions, as the keys have, got {value.shape[-1]} (latent "
            f"attention is not supported)"
        )
    if others.get("output_attentions"):
        raise InvalidInputError("output_attentions: expected False: no attention weights are made")
    for keyword, given in others.items():
        if given is not None and keyword not in HARMLESS:
            raise InvalidInputError(f"{keyword}: an option of attention that LeafKV does not know, of {name}")


def _window(asked: int | None, attention_mask: Tensor | None) -> int | None:
    """The window of a layer. Some models name it in the call alone, some in the mask alone: both or neither, or one."""
    composed: int | None = getattr(attention_mask, "leafkv_window", None)
    if asked is not None and composed is not None and asked != composed:
        raise InvalidInputError(f"sliding_window: expected {composed}, as in the mask of the layer, got {asked}")
    return composed if asked is None else asked


def _padding(attention_mask: Tensor | None) -> Tensor | None:
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise InvalidInputError(
            f"attention_mask: expected [batch, tokens], got shape {tuple(attention_mask.shape)}: no masks but padding"
        )
    return None if _STEP.get() is not None else attention_mask


def dense(query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, options: Options) -> Tensor:
    """Attention over keys and values [B, num_kv_heads, S, head_dim] of whole sequences, each of them one block."""
    batch, heads, count, dim = query.shape
    rows = query.transpose(1, 2).reshape(batch * count, heads, dim)
    if padding is None:
        tables = np.arange(batch, dtype=np.int32)[:, None]
        starts = np.arange(batch + 1, dtype=np.int32) * count
        lens = np.full(batch, key.shape[2], np.int32)
        out = paged_attention(rows, key, value, *to_device((tables, starts, lens), query.device), **options)
        return out.view(batch, count, heads, dim)
    out = torch.zeros_like(rows).view(batch, count, heads, dim)
    for item, (begin, end, first) in enumerate(_runs(padding, count, key.shape[2])):
        # Of the queries, at positions first and on, those at the tokens of the sequence.
        low, high = max(begin, first), min(end, first + count)
        if low >= high:
            continue
        seen = slice(begin, high)
        arrays = np.zeros((1, 1), np.int32), np.array([0, high - low], np.int32), np.array([high - begin], np.int32)
        out[item, low - first : high - first] = paged_attention(
            rows.view(batch, count, heads, dim)[item, low - first : high - first],
            key[item : item + 1, :, seen],
            value[item : item + 1, :, seen],
            *to_device(arrays, query.device),
            **options,
        )
    return out


def _runs(padding: Tensor, count: int, total: int) -> list[tuple[int, int, int]]:
    """Of each sequence: where its tokens begin and end among all keys, and where the ``count`` queries begin."""
    if padding.shape[1] != total:
        raise InvalidInputError(f"attention_mask: expected one for each of {total} tokens, got {padding.shape[1]}")
    first = int(getattr(padding, "leafkv_first", total - count))
    known = padding.bool().cpu().numpy()
    runs = []
    for row in known:
        (where,) = row.nonzero()
        begin, end = (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)
        if end - begin != len(where):
            raise InvalidInputError("attention_mask: expected padding before or after a sequence, got holes in it")
        runs.append((begin, end, first))
    return runs
