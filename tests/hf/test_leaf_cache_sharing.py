"""What a LeafCache finds of earlier calls: all that is the same, nothing else; and no block is ever lost."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import leafkv
from leafkv.integrations.transformers import KVPool, LeafCache
from tests.hf.leaf import KEYWORD, Columns, answer, check_idle, model_of, prompts, step
from tests.hf.models import tiny


def test_only_the_rest_is_computed() -> None:
    """A prompt that was seen, one that shares its beginning, and an answer that is sent back."""
    model, reference = model_of("llama"), model_of("llama", "eager")
    ids, _ = prompts(1, 37)
    with KVPool(model, 64, block_size=8) as pool:
        turn = answer(model, ids, kv=LeafCache(pool))
        gc.collect()
        check_idle(pool)
        fork = torch.cat([ids[:, :30], prompts(1, 9, seed=1)[0]], 1)
        for text, found in ((ids, 36), (fork, 30), (turn[:, :-1], 47), (turn, 48), (ids[:, :1], 0), (ids[:, :2], 1)):
            with LeafCache(pool, text) as kv, Columns(model) as columns:
                assert kv.num_cached_tokens == found
                assert torch.equal(
                    answer(model, text, kv=kv, max_new_tokens=2), answer(reference, text, max_new_tokens=2)
                )
                assert columns.seen == [text.shape[1] - found, 1]
        check_idle(pool)


def test_batch_shares_within_and_across() -> None:
    """Equal rows are stored once; a batch starts at the column that all rows have."""
    model = model_of("llama")
    ids, mask = prompts(3, 24, seed=2, pads=(0, 0, 8))
    ids[1] = ids[0]
    with KVPool(model, 64, block_size=8) as pool:
        with LeafCache(pool) as kv:
            answer(model, ids, mask, kv, max_new_tokens=2)
            assert pool.manager.stats().held_blocks == 3 + 1 + 1 + 2 + 1
        with LeafCache(pool, ids, mask) as kv:
            assert kv.get_seq_length() == 23
            assert kv.num_cached_tokens == 23 + 23 + 15
        with LeafCache(pool, ids[:, :20], torch.ones_like(mask[:, :20])) as kv:
            assert kv.num_cached_tokens == 0  # row 2 begins with what was padding
        check_idle(pool)


def test_beams_copy_what_they_write() -> None:
    """Beams share their blocks, and a tail that one writes to is copied before: no other beam sees it."""
    model = model_of("llama")
    ids, _ = prompts(1, 14, seed=3)
    last = prompts(4, 1, seed=4)[0]
    with KVPool(model, 16, block_size=8) as pool, LeafCache(pool) as kv:
        step(model, ids, kv)
        before = pool.manager.stats().held_blocks
        got = step(model, last, kv)[:, -1]  # one row becomes four
        assert before == 2
        assert pool.manager.stats().held_blocks == 1 + 4
        expected = torch.cat(
            [step(model_of("llama", "eager"), torch.cat([ids, row[None]], 1), None)[:, -1] for row in last]
        )
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        kv.reorder_cache(torch.tensor([3, 3, 1, 1]))
        nexts = prompts(4, 3, seed=5)[0]
        got = step(model, nexts, kv)[:, -1]
        texts = [torch.cat([ids[0], last[row], nexts[place]])[None] for place, row in enumerate((3, 3, 1, 1))]
        expected = torch.cat([step(model_of("llama", "eager"), text, None)[:, -1] for text in texts])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        pool.manager.check_invariants()


def test_kv_that_is_no_function_of_its_tokens_is_private() -> None:
    """Positions that are none of a text, embeddings, other inputs, training: right over the cache, never found."""
    model, reference = model_of("gpt2"), model_of("gpt2", "eager")
    ids, mask = prompts(2, 20, seed=6, pads=(0, 4))
    with KVPool(model, 64, block_size=4) as pool:
        cases: list[dict[str, Any]] = [
            {"position_ids": torch.arange(7, 27)[None]},
            {"token_type_ids": ids % 5},
            {"inputs_embeds": 2 * model.get_input_embeddings()(ids).detach(), "input_ids": None},
        ]
        for case in cases:
            arguments = {"input_ids": ids} | case
            with torch.no_grad(), LeafCache(pool) as kv:
                got = model(**arguments, **{KEYWORD: kv}).logits
                torch.testing.assert_close(got, reference(**arguments).logits, atol=1e-4, rtol=1e-4)
                # What comes after it is right as well, and private like it.
                places = {"position_ids": torch.full((2, 1), 27)} if "position_ids" in case else {}
                step(model, ids[:, :1], kv, **places)
            assert LeafCache(pool, ids).num_cached_tokens == 0, case
        # Without positions, GPT-2 counts padding: row 1 is at columns, and row 0 at its ranks.
        with LeafCache(pool) as kv:
            step(model, ids, kv, attention_mask=mask)
        assert LeafCache(pool, ids[:1]).num_cached_tokens == 19
        assert LeafCache(pool, ids[1:, 4:]).num_cached_tokens == 0
        pool.clear()
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        try:
            with LeafCache(pool) as kv:
                step(model, ids, kv)
        finally:
            model.eval()
        assert LeafCache(pool, ids).num_cached_tokens == 0
        gc.collect()
        check_idle(pool)


class Adapter(torch.nn.Module):  # type: ignore[misc]
    """A linear layer with an adapter that can be switched, and says so as PEFT's do."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.on = base, True
        self.merged_adapters: list[str] = []

    @property
    def active_adapters(self) -> list[str]:
        return ["one"]

    @property
    def disable_adapters(self) -> bool:
        return not self.on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * (1.5 if self.on else 1.0)


def test_other_weights_are_other_kv() -> None:
    """Adapters that are switched, a step of training, weights that are replaced: each misses, and each is found again
    by its own, where it comes back."""
    model = tiny("llama", attention="leafkv")
    ids, _ = prompts(1, 20, seed=7)
    layer = model.model.layers[1].self_attn
    layer.v_proj = adapter = Adapter(layer.v_proj)

    def found() -> int:
        with LeafCache(pool, ids) as kv:
            count = kv.num_cached_tokens
            assert torch.equal(answer(model, ids, kv=kv), answer(model, ids))
        return count

    with KVPool(model, 64, block_size=4) as pool:
        assert (found(), found()) == (0, 19)
        adapter.on = False
        assert (found(), found()) == (0, 19)
        adapter.on = True
        assert found() == 19
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.1)
        assert (found(), found()) == (0, 19)
        model.load_state_dict(model.state_dict())
        assert (found(), found()) == (0, 19)
        layer.v_proj = adapter.base
        assert (found(), found()) == (0, 19)
        pool.clear()
        assert (found(), found()) == (0, 19)
        # A cache in use goes on with what it has, and what is computed with other weights is its own.
        with LeafCache(pool, ids) as kv:
            with torch.no_grad():
                model.model.layers[0].self_attn.k_proj.weight.mul_(1.1)
            text = answer(model, ids, kv=kv)
        assert LeafCache(pool, text).num_cached_tokens == 0
        gc.collect()
        check_idle(pool)


def test_frequencies_that_depend_on_length() -> None:
    """Dynamic RoPE turns keys of a long text otherwise: those are not shared with a short one, nor the other way.

    It also replaces a tensor of the model, after which all is computed anew; and once more when it goes back, which
    it never does in 5.8.
    """
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    changes: dict[str, Any] = {"rope_parameters": rope, "max_position_embeddings": 24}
    model, reference = tiny("llama", attention="leafkv", **changes), tiny("llama", **changes)
    ids, _ = prompts(1, 40, seed=8)
    with KVPool(model, 64, block_size=4) as pool:
        for length, found in ((16, 0), (16, 15), (40, 0), (40, 0), (16, 0), (16, None), (16, 15)):
            text = ids[:, :length]
            expected = answer(reference, text, max_new_tokens=4)
            with LeafCache(pool, text) as kv:
                assert found is None or kv.num_cached_tokens == found
                assert torch.equal(answer(model, text, kv=kv, max_new_tokens=4), expected)
        check_idle(pool)


def test_pool_that_is_too_small() -> None:
    """What lacks room is refused with nothing lost: the cache goes on when there is some, and closes."""
    model = model_of("llama")
    ids, _ = prompts(2, 24, seed=9)
    with KVPool(model, 8, block_size=4) as pool:
        with LeafCache(pool) as kv:
            with pytest.raises(leafkv.OutOfBlocksError, match="lack"):
                answer(model, ids, kv=kv)
            assert pool.manager.stats().held_blocks == 0
            step(model, ids[:, :16], kv)
            with pytest.raises(leafkv.OutOfBlocksError, match="lack 2 blocks"):
                step(model, ids[:, 16:17], kv)
            pool.manager.check_invariants()
            assert kv.get_seq_length() == 16
            kv.batch_select_indices(torch.tensor([1]))
            got = step(model, ids[1:, 16:], kv)
            torch.testing.assert_close(
                got, step(model_of("llama", "eager"), ids[1:], None)[:, 16:], atol=1e-4, rtol=1e-4
            )
        check_idle(pool)
        # What is cached makes room for what comes.
        with LeafCache(pool) as kv:
            answer(model, ids[:1], kv=kv, max_new_tokens=9)
        check_idle(pool)


def test_blocks_come_back() -> None:
    """By close, by a failed forward, by a cache that is dropped, by a pool that is: exactly once."""
    model = tiny("llama", attention="leafkv")
    hooks = len(model.model._forward_hooks), len(model.model._forward_pre_hooks)
    config = model.config.to_dict()
    ids, _ = prompts(1, 10, seed=10)
    pool = KVPool(model, 16, block_size=4)
    kv = LeafCache(pool)
    step(model, ids, kv)
    failing = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, ids, kv)
    failing.remove()
    assert kv.get_seq_length() == 10
    kv.crop(-1)
    assert pool.manager.stats().held_blocks == 3
    got = step(model, ids[:, 9:], kv)
    torch.testing.assert_close(got, step(model, ids, None)[:, 9:], atol=1e-4, rtol=1e-4)
    del kv  # at once: nothing of it is in a cycle
    check_idle(pool)
    kv = LeafCache(pool, ids)
    kv.close()
    kv.close()
    check_idle(pool)
    pool.close()
    pool.close()
    with pytest.raises(leafkv.InvalidInputError, match="closed"):
        LeafCache(pool)
    alone = LeafCache(model)
    step(model, ids, alone)
    del alone
    gc.collect()
    assert (len(model.model._forward_hooks), len(model.model._forward_pre_hooks)) == hooks
    assert model.config.to_dict() == config
    assert torch.equal(answer(model, ids), answer(model_of("llama", "eager"), ids))


def test_threads() -> None:
    """Caches of one pool in forwards at the same time: each answer is its own, and no block is lost."""
    model = tiny("llama", attention="leafkv")
    base = prompts(1, 12, seed=11)[0]
    texts = [torch.cat([base, prompts(1, 5 + index, seed=index)[0]], 1) for index in range(6)]
    expected = [answer(model, text) for text in texts]
    failures: list[Any] = []
    with KVPool(model, 48, block_size=4) as pool:

        def work(start: int) -> None:
            try:
                for turn in range(6):
                    index = (start + turn) % 6
                    with LeafCache(pool, texts[index]) as kv:
                        if not torch.equal(answer(model, texts[index], kv=kv), expected[index]):
                            failures.append(index)
            except Exception as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(start,)) for start in (0, 2, 4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert failures == []
        check_idle(pool)


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon"])
@pytest.mark.parametrize("seed", range(3))
def test_random_interleavings(family: str, seed: int) -> None:
    """Caches that come, go on, are cropped, copied and closed over a tiny pool, in any order: as if each were alone."""
    model, reference = model_of(family), model_of(family, "eager")
    random = np.random.default_rng(seed)
    alive: list[tuple[LeafCache, torch.Tensor]] = []
    refused = hits = 0
    with KVPool(model, 12, block_size=4) as pool:
        for _ in range(60):
            act = random.choice(["new", "go", "crop", "copy", "close"], p=[0.35, 0.3, 0.1, 0.1, 0.15])
            if act == "new" and len(alive) < 4:
                text = torch.from_numpy(random.integers(1, 3, (1, int(random.integers(2, 18)))))
                alive.append((LeafCache(pool, text), text))
                hits += alive[-1][0].num_cached_tokens > 0
            elif alive:
                place = int(random.integers(len(alive)))
                kv, text = alive[place]
                if act == "go":
                    text = torch.cat(
                        [text, torch.from_numpy(random.integers(1, 3, (1, int(random.integers(1, 4)))))], 1
                    )
                elif act == "crop":
                    kv.crop(-min(2, kv.get_seq_length()))
                    text = text[:, : max(kv.get_seq_length(), 1)]
                elif act == "copy" and len(alive) < 4:
                    alive.append((copy.deepcopy(kv), text))
                elif act == "close":
                    alive.pop(place)
                    kv.close()
                    continue
                alive[place] = kv, text
            for place, (kv, text) in enumerate(alive):
                start = kv.get_seq_length()
                if start < text.shape[1]:
                    try:
                        got = step(model, text[:, start:], kv)
                    except leafkv.OutOfBlocksError:
                        refused += 1
                        alive.pop(place)
                        kv.close()
                        break
                    expected = step(reference, text, None)[:, start:]
                    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
            pool.manager.check_invariants()
        assert hits
        assert refused or pool.manager.stats().evicted_blocks
        for kv, _text in alive:
            kv.close()
        check_idle(pool)
