"""``attn_implementation="leafkv"`` in transformers itself: the model's own attention, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import masking_utils as masks  # noqa: E402

from leafkv.errors import InvalidInputError  # noqa: E402
from leafkv.models.hf import attention  # noqa: E402
from leafkv.models.hf.versions import check_version  # noqa: E402

from .models import CONFIGS, OWN_ATTENTION, VOCAB, WINDOW, tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # other people's
FAMILIES = [family for family in CONFIGS if family not in OWN_ATTENTION]
attention.register()


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]], *, left: bool) -> dict[str, Any]:
    longest = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        pad = [0] * (longest - len(row))
        ids.append(pad + row if left else row + pad)
        ones = [1] * len(row)
        mask.append(pad + ones if left else ones + pad)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("family", FAMILIES)
def test_with_caches_of_transformers_it_computes_what_eager_does(family: str) -> None:
    """Dense keys and values: no cache, a dynamic one, a static one, padding on either side, longer than any window."""
    ours, theirs = tiny(family, attention=attention.NAME), tiny(family)
    rows = texts(WINDOW + 9, 4, WINDOW)
    with torch.no_grad():
        for left in (True, False):
            inputs = padded(rows, left=left)
            got, expected = (model(**inputs).logits for model in (ours, theirs))
            known = inputs["attention_mask"].bool()
            torch.testing.assert_close(got[known], expected[known], rtol=1e-4, atol=1e-4)
        inputs = padded(rows, left=True)
        for kind in ("dynamic", "static"):
            options = {"max_new_tokens": 14, "do_sample": False, "cache_implementation": kind, "disable_compile": True}
            answers = [model.generate(**inputs, **options).tolist() for model in (ours, theirs)]
            assert answers[0] == answers[1], kind


def test_masks_are_recognized_or_refused_by_name() -> None:
    causal, window = masks.causal_mask_function, masks.sliding_window_causal_mask_function(5)
    assert attention.recognized(causal) is None
    assert attention.recognized(window) == 5
    for function, name in [
        (masks.bidirectional_mask_function, "bidirectional_mask_function"),
        (masks.chunked_causal_mask_function(4, torch.zeros(1)), r"chunked_overlay, causal_mask_function"),
        (masks.and_masks(causal, window), r"and_masks\(causal_mask_function, and_masks\(sliding_window_overlay"),
        (masks.or_masks(causal, lambda *_: True), r"or_masks\(causal_mask_function, test_masks_are"),
        (masks.and_masks(masks.sliding_window_overlay(5), lambda *_: True), "got and_masks"),
        (masks.and_masks(causal, masks.packed_sequence_mask_function(torch.zeros(1, 2))), "packed_sequence"),
    ]:
        with pytest.raises(InvalidInputError, match=name):
            attention.recognized(function)


def test_what_a_forward_asks_for_and_leafkv_does_not_compute_is_refused() -> None:
    model = tiny("llama", attention=attention.NAME)
    ids = torch.tensor(texts(6))
    ones = torch.ones(1, 6, dtype=torch.long)
    holes = torch.tensor([[1, 1, 0, 1, 1, 1]])
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    refused: list[tuple[dict[str, Any], str]] = [
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, r"attention_mask: expected \[batch, tokens\], got shape"),
        ({"attention_mask": holes}, "attention_mask: expected padding before or after a sequence, got holes"),
        ({"position_ids": packed}, "mask: expected a causal mask"),
        ({"is_causal": False}, "bidirectional_mask_function"),
        ({"output_attentions": True, "attention_mask": ones}, "output_attentions: expected False"),
        ({"position_bias": torch.zeros(1)}, "position_bias: an option of attention that LeafKV does not know"),
        ({"cu_seq_lens_q": torch.tensor([0, 6])}, "cu_seq_lens_q: an option"),
    ]
    with torch.no_grad():
        model(ids, use_cache=False, position_bias=None)
        for options, message in refused:
            with pytest.raises(InvalidInputError, match=message):
                model(ids, use_cache=False, **options)
    with pytest.raises(InvalidInputError, match="requires_grad: LeafKV's attention has no backward"):
        model(ids)
    model.config.attention_dropout = 0.5
    training = tiny("llama", attention=attention.NAME, attention_dropout=0.5).train()
    with torch.no_grad(), pytest.raises(InvalidInputError, match="dropout: expected 0"):
        training(ids)


def test_options_of_a_layer_that_contradict_its_mask_or_its_shape_are_refused() -> None:
    class Layer:
        layer_idx = 0

    query = torch.zeros(1, 2, 4, 8)
    window = attention.mask(1, 4, 4, mask_function=masks.sliding_window_causal_mask_function(3))
    assert window is not None
    ones: Any = {"module": Layer(), "query": query, "key": query, "value": query, "attention_mask": window}
    assert attention.attention(**ones, sliding_window=3)[0].shape == (1, 4, 2, 8)
    with pytest.raises(InvalidInputError, match="sliding_window: expected 3, as in the mask of the layer, got 4"):
        attention.attention(**ones, sliding_window=4)
    with pytest.raises(InvalidInputError, match="value: expected heads of 8 dimensions"):
        attention.attention(**{**ones, "value": query[..., :4]})
    with pytest.raises(InvalidInputError, match="is_causal: expected True, got False of Layer"):
        attention.attention(**ones, is_causal=False)


def test_a_window_that_the_mask_alone_tells_of_is_kept() -> None:
    """Some layers leave it out of the call, as the mask has it already."""
    query = torch.randn(1, 2, 9, 8)
    window = attention.mask(1, 9, 9, mask_function=masks.sliding_window_causal_mask_function(3))
    named, unnamed = (attention.attention(None, query, query, query, mask, sliding_window=asked)[0]
                      for mask, asked in ((None, 3), (window, None)))  # fmt: skip
    whole = attention.attention(None, query, query, query, None)[0]
    assert torch.equal(named, unnamed)
    assert not torch.equal(named, whole)


@pytest.mark.parametrize("version", ["4.57.1", "5.7.9", "6.0.0", "nightly"])
def test_other_versions_of_transformers_are_refused_by_name(version: str) -> None:
    for good in ("5.8.0", "5.24.0", "5.99.dev0"):
        check_version(good)
    with pytest.raises(
        InvalidInputError, match=f"transformers: expected version 5.8 or newer, below 6.0, got {version}"
    ):
        check_version(version)
