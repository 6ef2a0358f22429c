"""Greedy tokens over a LeafCache are those of transformers over its own cache, in every way to generate."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from leafkv.integrations.transformers import KVPool, LeafCache
from tests.hf.leaf import Columns, answer, check_idle, model_of, prompts, step
from tests.hf.models import CONFIGS, OWN_ATTENTION, VOCAB, tiny

FAMILIES = list(CONFIGS)
SERVED = [(family, "leafkv") for family in FAMILIES] + [
    (family, attention)
    for family in ("llama", "mistral", "gemma3", "gpt2", "falcon")
    for attention in ("sdpa", "eager")
]
"""Every family with LeafKV's attention, and each shape of mask with dense tensors."""


def twins(family: str, attention: str = "leafkv") -> tuple[Any, Any]:
    """A model over transformers' cache, and an equal one to be served from blocks."""
    same = family in OWN_ATTENTION or attention == "sdpa"
    served = model_of(family, attention)
    return (served if same else model_of(family, "eager")), served


@pytest.mark.parametrize(("family", "attention"), SERVED)
def test_batch_with_left_padding(family: str, attention: str) -> None:
    reference, model = twins(family, attention)
    ids, mask = prompts(4, 23, pads=(0, 22, 7, 16))
    expected = answer(reference, ids, mask, max_new_tokens=20)
    with KVPool(model, 32, block_size=16) as pool:
        with LeafCache(pool, ids, mask) as kv:
            assert kv.num_cached_tokens == 0
            assert torch.equal(answer(model, ids, mask, kv, max_new_tokens=20), expected)
            assert kv.get_seq_length() == 42  # the last token is never computed
        with LeafCache(pool, ids, mask) as kv:
            assert kv.get_seq_length() == 22
            assert torch.equal(answer(model, ids, mask, kv, max_new_tokens=20), expected)
        check_idle(pool)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_and_several_answers(family: str) -> None:
    reference, model = twins(family)
    ids, mask = prompts(2, 19, seed=1, pads=(0, 5))
    with KVPool(model, 64, block_size=4) as pool:
        answer(model, ids[:, :13], mask[:, :13], LeafCache(pool))
        for options in (
            {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0},
            {"num_return_sequences": 3, "do_sample": True, "top_k": 8},
        ):
            torch.manual_seed(5)
            expected = answer(reference, ids, mask, **options)
            assert len({tuple(row.tolist()) for row in expected[:3]}) > 1
            torch.manual_seed(5)
            with LeafCache(pool, ids, mask) as kv:
                assert kv.num_cached_tokens
                assert torch.equal(answer(model, ids, mask, kv, **options), expected)
                pool.manager.check_invariants()
        check_idle(pool)


@pytest.mark.parametrize("family", FAMILIES)
def test_assisted_decoding(family: str) -> None:
    """Drafts are computed, and cropped where they are wrong: also out of windows, which forget nothing here.

    Greedy tokens do not depend on drafts, so the reference is without. Over a cache that has a part of the prompt,
    assisted decoding computes all of it again. transformers' own is broken in places, whatever the cache: before 5.15
    a lookup may never end, and in 5.15 assistants with a window, or without a right guess, fail.
    """
    reference, model = twins(family)
    ids, _ = prompts(1, 18, seed=2)
    ids[0, 9:] = ids[0, :9]  # something to look up
    length = {"max_new_tokens": 24, "eos_token_id": VOCAB - 1}
    expected = answer(reference, ids, **length)
    assistant = tiny(family, seed=3)
    random = torch.Generator().manual_seed(4)
    assistant.load_state_dict(
        {
            name: weight + 0.15 * weight.std() * torch.randn(weight.shape, generator=random)
            for name, weight in reference.state_dict().items()
        }
    )
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    ways: list[dict[str, Any]] = [{"prompt_lookup_num_tokens": 4}] if version >= (5, 15) else []
    if version != (5, 15):
        ways.append({"assistant_model": assistant})
    with KVPool(model, 32, block_size=4) as pool:
        answer(model, ids, kv=LeafCache(pool), **length)
        for way in ways:
            with LeafCache(pool, ids) as kv, Columns(model) as columns:
                assert torch.equal(answer(model, ids, kv=kv, **length, **way), expected)
                assert kv.get_seq_length() == expected.shape[1] - 1
                assert sum(columns.seen) > kv.get_seq_length()  # some drafts were wrong
        check_idle(pool)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill(family: str) -> None:
    reference, model = twins(family)
    ids, mask = prompts(3, 29, seed=3, pads=(0, 17, 4))
    expected = answer(reference, ids, mask)
    for chunk in (1, 5, 16):
        with KVPool(model, 64, block_size=4) as pool:
            with LeafCache(pool) as kv:
                assert torch.equal(answer(model, ids, mask, kv, prefill_chunk_size=chunk), expected)
            check_idle(pool)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversation(family: str) -> None:
    """The next turn over the same cache, over one that finds the text, and over a copy that goes on apart."""
    reference, model = twins(family)
    ids, mask = prompts(2, 11, seed=4, pads=(0, 3))
    with KVPool(model, 64, block_size=4) as pool:
        with LeafCache(pool) as kv:
            for turn in range(3):
                expected = answer(reference, ids, mask)
                with LeafCache(pool, ids, mask) as found:
                    # All but the last answer's last token and the 5 new ones is computed, and whole blocks are found.
                    done = ids.shape[1] - 6
                    assert found.get_seq_length() == (turn and min(done // 4 * 4, 3 + (done - 3) // 4 * 4))
                    assert torch.equal(answer(model, ids, mask, found), expected)
                apart = copy.deepcopy(kv)
                other = torch.cat([ids[:, :-1], ids[:, -1:] % 7 + 1], 1)
                assert torch.equal(answer(model, other, mask, apart), answer(reference, other, mask))
                apart.close()
                assert torch.equal(answer(model, ids, mask, kv), expected)
                ids = torch.cat([expected, prompts(2, 5, seed=turn)[0]], 1)
                mask = torch.cat([mask, torch.ones(2, 12 + 5, dtype=torch.long)], 1)
        check_idle(pool)


@pytest.mark.parametrize(("family", "attention"), SERVED)
def test_logits_of_forwards(family: str, attention: str) -> None:
    """Forwards by hand: chunks of any size, padding that is left, right and inside, and crops."""
    if attention == "sdpa":
        pytest.skip("a mask that hides all keys is NaN there in some versions")
    reference, model = twins(family, "leafkv" if attention == "eager" else attention)
    model = model_of(family, attention)
    windowed = family in ("mistral", "gemma2", "gemma3", "gpt_oss") and attention == "leafkv"
    ids, mask = prompts(3, 30, seed=5, pads=(0, 9, 2))
    mask[0, 12:14] = 0 if not windowed else 1
    mask[2, 27:] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = reference(ids, attention_mask=mask, position_ids=places).logits
    with KVPool(model, 32, block_size=4) as pool, LeafCache(pool) as kv:
        for start, end, back in ((0, 8, 0), (8, 9, 0), (9, 20, 6), (14, 26, 0), (26, 30, 0)):
            got = step(model, ids[:, start:end], kv, attention_mask=mask[:, :end], position_ids=places[:, start:end])
            real = mask[:, start:end].bool()
            torch.testing.assert_close(got[real], expected[:, start:end][real], atol=2e-4, rtol=1e-4)
            if back:
                kv.crop(-back)
        assert kv.get_seq_length() == 30
        assert int(pool.manager.stats().held_blocks) == sum(-(-int(row.sum()) // 4) for row in mask)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("attention", ["leafkv", "eager"])
def test_kv_dtypes(dtype: str, attention: str) -> None:
    """The KV is the model's by default; int8 is close, and what is found again is what was computed."""
    kind = torch.float32 if dtype == "int8" else getattr(torch, dtype)
    model = tiny("llama", attention=attention, dtype=kind)
    ids, mask = prompts(2, 20, seed=6, pads=(0, 4))
    with KVPool(model, 32, kv_cache_dtype="int8" if dtype == "int8" else "auto") as pool:
        assert pool.kv.dtype == dtype
        places = (mask.cumsum(1) - 1).clamp(min=0)
        with LeafCache(pool) as kv, torch.no_grad():
            expected = model(ids, attention_mask=mask, position_ids=places).logits.float()
            step(model, ids[:, :12], kv, attention_mask=mask[:, :12], position_ids=places[:, :12])
            got = step(model, ids[:, 12:], kv, attention_mask=mask, position_ids=places[:, 12:]).float()
        error = (got - expected[:, 12:]).abs().max()
        assert error < {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15, "int8": 0.15}[dtype]
        with LeafCache(pool, ids, mask) as kv:
            assert kv.get_seq_length() == 16
            again = step(model, ids[:, 16:], kv, attention_mask=mask, position_ids=places[:, 16:]).float()
        torch.testing.assert_close(again[:, -1], got[:, -1], atol=1e-5 if dtype in ("float32", "int8") else 0.1, rtol=0)


def test_cache_methods_of_transformers() -> None:
    """What `generate` does not call: selection and repetition of rows, reset, and what a cache says of itself."""
    model = model_of("llama")
    ids, _ = prompts(3, 10, seed=7)
    last = prompts(4, 1, seed=8)[0]
    with torch.no_grad():
        expected = [
            model(torch.cat([ids[row], last[place]])[None]).logits[0, -1] for place, row in enumerate((2, 2, 0, 0))
        ]
    with KVPool(model, 16, block_size=4) as pool, LeafCache(pool) as kv:
        assert (kv.batch_size, kv.get_seq_length(), kv.is_initialized) == (-1, 0, False)
        step(model, ids, kv)
        assert (kv.batch_size, kv.get_seq_length(), kv.is_initialized) == (3, 10, True)
        assert len(kv) == 2
        assert kv.is_sliding == [False, False]
        assert not kv.is_compileable
        kv.batch_select_indices(torch.tensor([True, False, True]))
        kv.reorder_cache(torch.tensor([1, 0]))
        kv.batch_repeat_interleave(2)
        got = step(model, last, kv)[:, -1]
        torch.testing.assert_close(got, torch.stack(expected), atol=1e-4, rtol=1e-4)
        kv.crop(4)
        assert kv.get_seq_length() == 4
        kv.reset()
        assert kv.get_seq_length() == 0
        torch.testing.assert_close(
            step(model, ids[:1, :4], kv), model_of("llama", "eager")(ids[:1, :4]).logits.detach()
        )
    check_idle(pool)
