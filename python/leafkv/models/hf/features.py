"""What a model of transformers may be to run in the engine; everything else is refused by its name when it is loaded.

First by its configuration, before weights are read: :func:`check_config`. Then by what it does: :func:`examine` runs a
few tokens through it. Two sequences in one flattened batch, of which only the attention knows that they are two, must
give the logits that the model's own attention gives to each alone. So whatever else looks from one token at another (a
convolution, a recurrent state, n-grams) is found, and whatever a model adds to attention that is not in the call of the
attention function. Those calls say what each layer's attention is: all attend once, in order, with heads of one shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leafkv.errors import LeafKVError, ModelLoadError
from leafkv.models.config import check_int
from leafkv.models.hf import attention
from leafkv.models.hf.attention import Options

KNOWN_LAYERS = ("full_attention", "sliding_attention")
"""Of a configuration's ``layer_types``: those that see tokens up to their own, all or the last ones."""

REFUSED: dict[str, str] = {
    "is_encoder_decoder": "an encoder and a decoder",
    "alibi": "a bias by distance, added by the model's own code",
    "attention_chunk_size": "attention within chunks",
    "attn_temperature_tuning": "a scale by a token's place in the batch",
    "kv_lora_rank": "latent attention, whose keys and values differ in size",
    "num_kv_shared_layers": "layers that use the keys and values of others",
    "use_bidirectional_attention": "tokens that see later ones",
    "add_cross_attention": "attention to another model's output",
}
"""Options of a configuration that are refused unless they are false, zero or None."""

LENGTHS = (5, 7)
"""Of the sequences that a model is tried with."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""How far the logits of two forwards may be apart, relative to how far they are spread (root mean squares)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A model's shape, as the engine wants to know it: a `leafkv.models.batch.ModelShape`."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Tokens of context."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def check_config(config: Any) -> None:
    """Refuse a model by its configuration.

    Raises:
        ModelLoadError: it has what the engine does not do; the message names it.
    """
    text = config.get_text_config(decoder=True)
    for name, what in REFUSED.items():
        if getattr(text, name, None) or getattr(config, name, None):
            value = getattr(text, name, None) or getattr(config, name)
            raise ModelLoadError(f"{name} = {value!r}: {what}: not supported by backend 'transformers'")
    if getattr(text, "is_causal", True) is False:
        raise ModelLoadError("is_causal = False: tokens that see later ones: not supported by backend 'transformers'")
    unknown = {str(kind) for kind in getattr(text, "layer_types", None) or ()}.difference(KNOWN_LAYERS)
    if unknown:
        raise ModelLoadError(f"layer_types: {', '.join(sorted(unknown))}: not supported by backend 'transformers'")
    if "mrope_section" in str(getattr(text, "rope_parameters", None)):
        raise ModelLoadError("mrope_section: positions of more than one axis: not supported by backend 'transformers'")


def check_class(kind: Any) -> None:
    """Refuse a class of models that computes attention by itself, or that has a state besides keys and values."""
    if not getattr(kind, "_supports_attention_backend", False):
        raise ModelLoadError(f"{kind.__name__} computes attention by its own code, not through transformers' interface")
    if getattr(kind, "_is_stateful", False):
        raise ModelLoadError(f"{kind.__name__} has a recurrent state: not supported by backend 'transformers'")


def context_of(config: Any) -> int:
    """Tokens of context: as many as each token's computation does not depend on how many there are.

    Of RoPE that is scaled by "longrope", these are the tokens of the original context: beyond, transformers turns the
    keys of a forward by the longest of its sequences, whosoever they are.
    """
    text = config.get_text_config(decoder=True)
    context = check_int("max_position_embeddings", getattr(text, "max_position_embeddings", None))
    for rope in ropes_of(text):
        if rope.get("rope_type") == "longrope":
            context = min(context, check_int("original_max_position_embeddings", original_context(text, rope)))
    return context


def ropes_of(text: Any) -> list[dict[str, Any]]:
    """The parameters of a decoder's RoPE, or of each of them, where types of layers have one of their own."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [parameters, *(part for part in parameters.values() if isinstance(part, dict))]


def original_context(text: Any, rope: dict[str, Any]) -> Any:
    """The context before it was extended, of which older configurations speak outside of ``rope_parameters``."""
    outside = getattr(text, "original_max_position_embeddings", None)
    return rope.get("original_max_position_embeddings", outside)


def examine(model: Any) -> DecoderShape:
    """Try a model, whose ``attn_implementation`` is "leafkv", and say what it is, by three forwards of few tokens.

    Raises:
        ModelLoadError: it does what the engine does not do.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    context = context_of(model.config)
    lengths = [min(length, context) for length in LENGTHS]
    tokens = [torch.arange(length, device=model.device) * 37 % (rows - 1) + 1 for length in lengths]
    recorder = _Recorder(lengths)
    try:
        with torch.inference_mode():
            with attention.using(recorder):
                logits = forward(model, torch.cat(tokens), torch.cat([torch.arange(length) for length in lengths]))
            expected = torch.cat(_alone(model, tokens))
    except LeafKVError as error:
        raise ModelLoadError(f"{type(model).__name__}: {error}") from error
    except Exception as error:  # whatever a model's code raises
        raise ModelLoadError(f"{type(model).__name__}: a first forward failed: {error!r}") from error
    shape = recorder.shape(check_int("num_hidden_layers", model.config.get_text_config(decoder=True).num_hidden_layers))
    spread = (expected - expected.mean()).square().mean().sqrt()
    distance = float((logits - expected).square().mean().sqrt() / spread)
    if not distance <= TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16]):
        raise ModelLoadError(
            f"{type(model).__name__}: two sequences in one batch differ from each alone, by {distance:.2g} of the "
            f"logits' spread: its tokens depend on each other otherwise than by the attention that LeafKV computes"
        )
    vocab_size = logits.shape[-1]
    if vocab_size > rows:
        raise ModelLoadError(f"{type(model).__name__}: {vocab_size} logits for a vocabulary of {rows} tokens")
    begin, ends = _special(model, vocab_size)
    return DecoderShape(
        vocab_size=vocab_size, max_position_embeddings=context, bos_token_id=begin, eos_token_ids=ends, **shape
    )


def forward(model: Any, token_ids: Tensor, positions: Tensor, **options: Any) -> Tensor:
    """Logits of a flattened batch, float32 [rows, vocab_size]. No cache is transformers' affair, and no padding."""
    output = model(
        input_ids=token_ids[None],
        position_ids=positions.to(token_ids.device)[None],
        # Not None: transformers would look for packed sequences, and so wait for the device.
        attention_mask=torch.ones_like(token_ids)[None],
        use_cache=False,
        return_dict=True,
        **options,
    )
    logits: Tensor = output.logits[0].float()
    return logits


def _alone(model: Any, sequences: list[Tensor]) -> list[Tensor]:
    """The logits of each sequence by the model's own attention, mask and positions."""
    model.set_attn_implementation("eager")
    try:
        return [model(sequence[None], use_cache=False, return_dict=True).logits[0].float() for sequence in sequences]
    finally:
        model.set_attn_implementation(attention.NAME)


def _special(model: Any, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """The tokens that begin and end a text, which generation has, else the configuration."""
    text = model.config.get_text_config(decoder=True)
    generation = getattr(model, "generation_config", None)

    def ids(name: str) -> list[int]:
        found = getattr(generation, name, None)
        found = getattr(text, name, None) if found is None else found
        every = found if isinstance(found, (list, tuple)) else [found]
        return [token for token in every if token is not None and 0 <= token < vocab_size]

    return next(iter(ids("bos_token_id")), None), tuple(dict.fromkeys(ids("eos_token_id")))


class _Recorder:
    """Attention over whole sequences that lie one after another in a batch; it keeps what it was asked for."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self._layers: list[int] = []
        self._shapes: list[tuple[int, int, int]] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options, padding: Tensor | None
    ) -> Tensor:
        self._layers.append(layer)
        self._shapes.append((query.shape[1], key.shape[1], query.shape[3]))
        split = [each.split(self._lengths, dim=2) for each in (query, key, value)]
        return torch.cat([attention.dense(q, k, v, padding, options) for q, k, v in zip(*split, strict=True)], dim=1)

    def shape(self, num_layers: int) -> dict[str, int]:
        """What all layers have in common."""
        if self._layers != [*range(num_layers)]:
            raise ModelLoadError(
                f"num_hidden_layers: expected each of {num_layers} layers to attend once, in order, got {self._layers}"
            )
        if len(set(self._shapes)) > 1:
            raise ModelLoadError(
                "num_heads, num_kv_heads, head_dim: expected the same in all layers, got "
                + ", ".join(map(str, dict.fromkeys(self._shapes)))
            )
        heads, kv_heads, dim = self._shapes[0]
        return {"num_layers": num_layers, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
