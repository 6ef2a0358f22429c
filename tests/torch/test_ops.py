"""Tensors instead of arrays: the same bits, the same memory, the same errors, and what PyTorch asks of an operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leafkv import InvalidInputError, KVCache, _core
from tests.attention import reference
from tests.attention.test_attention import ALIBI, CAP, DTYPES, SEQUENCES, SINKS, WINDOW, Batch, make

torch = pytest.importorskip("torch")

import leafkv.torch as leaf  # noqa: E402
from leafkv.torch import gpu, ops, plan, transfer  # noqa: E402

OPTIONS: list[dict[str, Any]] = [{}, CAP | ALIBI | SINKS | WINDOW, {"causal": False, "scale": 0.3}]


def tensor(array: Any, dtype: str = "") -> Any:
    """A tensor over an array's memory."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    found = torch.from_numpy(array)
    return found.to(getattr(torch, dtype)) if dtype else found


def tensors(batch: Batch) -> list[Any]:
    return [tensor(array) for array in batch[:6]]


def options_of(batch: Batch, options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in {**batch.scales, **options}.items()
    }


def plan_of(batch: Batch, **options: Any) -> leaf.AttentionPlan:
    blocks, kv_heads, block_size, head_dim = batch.keys.shape
    return leaf.AttentionPlan(
        *batch.step,
        num_heads=batch.query.shape[1],
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=blocks,
        **options,
    )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_bits_of_the_core(dtype: str, options: dict[str, Any]) -> None:
    batch = make(SEQUENCES, dtype)
    want, want_lse = batch.attend(**options, return_lse=True)
    for layout in ("rows", "tiled"):
        query, keys, values, *step = tensors(batch)
        if layout == "tiled":
            keys, values = tensor(reference.tile_keys(batch.keys)), tensor(reference.tile_values(batch.values))
        keywords = options_of(batch, options)
        out, lse = leaf.paged_attention(query, keys, values, *step, **keywords, return_lse=True)
        np.testing.assert_array_equal(out.numpy(), want)
        np.testing.assert_array_equal(lse.numpy(), want_lse)
        into = torch.empty_like(query)
        if layout == "rows":
            planned, lse = plan_of(batch).attend(query, keys, values, **keywords, out=into, return_lse=True)
            assert planned is into
            np.testing.assert_array_equal(lse.numpy(), want_lse)
        else:
            assert leaf.paged_attention(query, keys, values, *step, **keywords, out=into) is into
        np.testing.assert_array_equal(into.numpy(), want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_go_in_and_come_out_as_they_are(dtype: str) -> None:
    """No element is touched on the way: a query that is a slice of a fused projection, a result of the same dtype."""
    batch = make(SEQUENCES, "bf16")
    _, keys, values, *step = tensors(batch)
    fused = torch.randn(len(batch.query), 8, 16).to(getattr(torch, dtype))
    query = fused[:, :4]
    out = leaf.paged_attention(query, keys, values, *step)
    assert out.dtype == query.dtype
    want = leaf.paged_attention(query.float(), keys, values, *step).to(query.dtype)
    assert torch.equal(out, want)
    assert torch.equal(plan_of(batch).attend(query, keys, values), want)


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_a_cache_of_tensors_holds_what_one_of_arrays_holds(dtype: str, source: str) -> None:
    ours = KVCache(6, 2, 2, 8, dtype=dtype, backend="torch")
    theirs = KVCache(6, 2, 2, 8, dtype=dtype)
    assert (ours.layout, ours.device, ours.nbytes) == (theirs.layout, torch.device("cpu"), theirs.nbytes)
    key, value = torch.randn(2, 30, 2, 8).to(getattr(torch, source))
    slots = torch.randperm(96)[:30]
    slots[3] = -1
    ours.write(1, key, value, slots)
    theirs.write(1, key.float().numpy(), value.float().numpy(), slots.numpy())
    pairs = np.array([[0, 5], [5, 0], [1, 2]], np.int32)
    ours.copy_blocks(pairs)
    theirs.copy_blocks(pairs)
    bits = ours.array.view(torch.uint16) if dtype == "bfloat16" else ours.array
    np.testing.assert_array_equal(bits.numpy(), theirs.array)
    assert theirs.array.any()

    query = torch.randn(3, 4, 8)
    step = (np.array([[0, 3], [5, -1]], np.int32), np.array([0, 1, 3], np.int32), np.array([20, 7], np.int32))
    got = leaf.paged_attention(query, *ours.layer(1), *map(torch.from_numpy, step), **ours.scales(1))
    want = _core.paged_attention(query.numpy(), *theirs.layer(1), *step, **theirs.scales(1))
    np.testing.assert_array_equal(got.numpy(), want)
    keys = ours.layer(1)[0]
    keys.zero_()  # a view of the one tensor
    assert not ours.array.reshape(-1).view(torch.uint8)[: 4 * 8].any()


def test_a_tensor_is_written_where_it_lies() -> None:
    cache = torch.zeros(3, 4, 2, 2, 16, 8, dtype=torch.bfloat16)  # [block, layer, head, K or V, token, dim]
    keys, values = cache[:, 1, :, 0], cache[:, 1, :, 1]
    fused = torch.randn(5, 6, 8, dtype=torch.bfloat16)
    leaf.write_kv(fused[:, 2:4], fused[:, 4:], keys, values, torch.arange(30, 35))
    assert torch.equal(cache[1, 1, :, 0, 14], fused[0, 2:4])
    assert torch.equal(cache[2, 1, :, 1, 2], fused[4, 4:])
    assert not cache[:, [0, 2, 3]].any()
    leaf.copy_blocks(cache, torch.tensor([[1, 0]], dtype=torch.int32))
    assert torch.equal(cache[0], cache[1])


def samples() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """An operation, and arguments for it, of each kind."""
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for dtype, options in (("f32", OPTIONS[1]), ("bf16", {}), ("int8", {})):
        batch = make([(20, 3), (5, 1)], dtype)
        arguments = tensors(batch)
        out, lse = torch.empty(4, 4, 16), torch.empty(4, 4) if dtype == "f32" else None
        keywords = options_of(batch, options)
        found.append((ops.paged_attention, (*arguments, out, lse), keywords))
        key, value = torch.randn(2, 3, 2, 16)
        slots = torch.tensor([1, -1, 20])
        found.append((ops.write_kv, (key, value, *arguments[1:3], slots), options_of(batch, {})))
    found.append((ops.copy_blocks, (torch.randn(4, 3), torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)), {}))
    return found


@pytest.mark.filterwarnings("ignore")  # PyTorch's own
@pytest.mark.parametrize("sample", range(len(samples())))
def test_pytorch_approves_of_the_operations(sample: int) -> None:
    op, arguments, keywords = samples()[sample]
    arguments = tuple(t.nan_to_num() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in arguments)
    torch.library.opcheck(op, arguments, keywords)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_is_the_step(backend: str) -> None:
    """Written, then read, in one graph, over caches that are views of one tensor."""
    batch = make([(20, 3), (5, 1)])
    _, _, _, tables, starts, lens = tensors(batch)
    tables, slots = tables.clamp(min=0), torch.tensor([int(batch.tables[0, 1]) * 16 + 3, -1])
    pool = torch.randn(len(batch.keys), 2, 2, 16, 16)  # [block, K or V, head, token, dim]

    def step(fused: Any, pool: Any) -> Any:
        query, key, value = fused.split([4, 2, 2], dim=1)
        leaf.write_kv(key[:2], value[:2], pool[:, 0], pool[:, 1], slots)
        return leaf.paged_attention(query * 2, pool[:, 0], pool[:, 1], tables, starts, lens, sliding_window=9) + 1

    fused = torch.randn(4, 8, 16)
    pools = [pool.clone(), pool.clone()]
    want = step(fused, pools[0])
    got = torch.compile(step, fullgraph=True, backend=backend)(fused, pools[1])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert torch.equal(*pools)
    assert not torch.equal(pools[0], pool)


def test_bad_input_is_refused_by_name() -> None:
    batch = make([(40, 3), (20, 1)])
    good = dict(
        zip(
            ("query", "key_cache", "value_cache", "block_tables", "query_starts", "kv_lens"),
            tensors(batch),
            strict=True,
        )
    )
    elsewhere = {name: t.to("meta") for name, t in good.items()}
    wants = torch.randn(4, 4, 16, requires_grad=True)
    bad: list[tuple[str, dict[str, Any]]] = [
        *[(name, {name: t}) for name, t in elsewhere.items() if name != "query"],
        ("key_cache", {"query": elsewhere["query"]}),
        *[(name, {name: batch.query}) for name in good],
        *[(name, {name: None}) for name in good],
        ("out", {"out": batch.query}),
        ("out", {"out": elsewhere["query"]}),
        ("out", {"out": torch.empty(4, 4, 16, dtype=torch.float64)}),
        ("sinks", {"sinks": [0.0] * 4}),
        ("query", {"query": wants}),
        ("query", {"query": good["query"].double()}),
        ("query", {"query": good["query"].transpose(1, 2)}),
        ("query", {"query": good["query"][0]}),
        ("key_cache", {"key_cache": good["key_cache"].mT}),
        ("value_cache", {"value_cache": good["value_cache"].half()}),
        ("k_scale", {"k_scale": torch.ones(5, 2, 16), "v_scale": torch.ones(5, 2, 16)}),
        ("block_tables", {"block_tables": good["block_tables"].long()}),
        ("sliding_window", {"sliding_window": 0}),
        ("sliding_window", {"sliding_window": 5, "causal": False}),
        ("softcap", {"softcap": 0.0}),
        ("scale", {"scale": float("nan")}),
    ]
    for argument, changes in bad:
        with pytest.raises(InvalidInputError, match=rf"^{argument}: "):
            leaf.paged_attention(**good | changes)
    with torch.no_grad():
        leaf.paged_attention(**good | {"query": wants})

    attend = plan_of(batch).attend
    layer = {name: good[name] for name in ("query", "key_cache", "value_cache")}
    for argument, changes in bad:
        if changes.keys() <= layer.keys() | {"out", "sinks", "sliding_window", "causal", "softcap", "scale"}:
            with pytest.raises(InvalidInputError, match=rf"^{argument}: "):
                attend(**layer | changes)
    with pytest.raises(InvalidInputError, match=r"^query: "):
        attend(**{name: t.to("meta") for name, t in layer.items()})
    for argument, arguments in {
        "slots": (good["query"][:, :2], good["query"][:, :2], good["key_cache"], good["value_cache"], torch.arange(3)),
        "value": (
            good["query"][:, :2],
            good["query"][:, :2].half(),
            good["key_cache"],
            good["value_cache"],
            torch.arange(4),
        ),
        "pairs": (good["key_cache"], torch.tensor([[0, 99]], dtype=torch.int32)),
    }.items():
        call: Any = leaf.copy_blocks if argument == "pairs" else leaf.write_kv
        with pytest.raises(InvalidInputError, match=rf"^{'key' if argument == 'slots' else argument}: "):
            call(*arguments)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("backend", {"backend": "jax"}),
        ("device", {"device": "cuda"}),
        ("device", {"backend": "torch", "device": "gpu"}),
        ("device", {"backend": "torch", "device": "meta"}),
        ("device", {"backend": "torch", "device": "cuda:99"}),
        ("device", {"backend": "torch", "device": 1.5}),
    ],
)
def test_a_cache_is_where_it_can_be(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{argument}: expected"):
        KVCache(2, 1, 1, 8, **options)


def test_what_the_gpu_gets_is_checked_on_the_host() -> None:
    """Shapes, dtypes and strides; on a CPU, nothing else is looked at either."""
    batch, int8 = make([(40, 3), (20, 1)]), make([(40, 3), (20, 1)], "int8")
    names = ("query", "key_cache", "value_cache", "block_tables", "query_starts", "kv_lens")
    good = dict(zip(names, tensors(batch), strict=True)) | {"out": torch.empty(4, 4, 16)}
    as_int8 = dict(zip(names, tensors(int8), strict=True)) | options_of(int8, {})
    four = torch.ones(4)
    bad: list[tuple[str, dict[str, Any]]] = [
        ("query", {"query": good["query"].double()}),
        ("query", {"query": good["query"][..., ::2]}),
        ("query", {"query": good["query"][0]}),
        ("num_heads", {"query": good["query"][:, :3]}),
        ("key_cache", {"key_cache": good["key_cache"].double()}),
        ("key_cache", {"key_cache": good["key_cache"].flatten(2), "value_cache": good["value_cache"].flatten(2)}),
        ("key_cache", {"key_cache": good["key_cache"][..., :8], "value_cache": good["value_cache"][..., :8]}),
        ("key_cache", {"key_cache": good["key_cache"][:0], "value_cache": good["value_cache"][:0]}),
        ("key_cache", {"key_cache": good["key_cache"].mT}),
        ("value_cache", {"value_cache": good["value_cache"][1:]}),
        ("value_cache", {"value_cache": good["value_cache"].bfloat16()}),
        ("block_tables", {"block_tables": good["block_tables"].long()}),
        ("block_tables", {"block_tables": good["block_tables"][0]}),
        ("block_tables", {"block_tables": good["block_tables"].repeat(1, 2)[:, ::2]}),
        ("query_starts", {"query_starts": good["query_starts"][:2]}),
        ("kv_lens", {"kv_lens": good["kv_lens"].float()}),
        ("kv_lens", {"kv_lens": good["kv_lens"].repeat(2)[::2]}),
        ("out", {"out": good["out"].half()}),
        ("out", {"out": good["out"][:3]}),
        ("alibi_slopes", {"alibi_slopes": four[:3]}),
        ("sinks", {"sinks": four.half()}),
        ("k_scale", {"k_scale": as_int8["k_scale"]}),
        ("k_scale", {name: as_int8[name] for name in ("key_cache", "value_cache", "v_scale")}),
        ("v_scale", {name: as_int8[name] for name in ("key_cache", "value_cache", "k_scale")}),
        (
            "v_scale",
            {name: as_int8[name] for name in ("key_cache", "value_cache", "k_scale")}
            | {"v_scale": as_int8["v_scale"][1:]},
        ),
        ("scale", {"scale": float("inf")}),
        ("softcap", {"softcap": -1.0}),
        ("sliding_window", {"sliding_window": 0}),
        ("sliding_window", {"sliding_window": 4, "causal": False}),
        ("causal", {"causal": 1}),
    ]
    for argument, changes in bad:
        with pytest.raises(InvalidInputError, match=rf"^{argument}: "):
            gpu.paged_attention(**good | changes)
    key, keys, slots = torch.ones(3, 2, 16), good["key_cache"], torch.arange(3)
    stores: list[tuple[str, tuple[Any, ...]]] = [
        ("key", (key.double(), key, keys, keys, slots)),
        ("key", (key[:, :1], key[:, :1], keys, keys, slots)),
        ("key", (key[0], key, keys, keys, slots)),
        ("value", (key, key.half(), keys, keys, slots)),
        ("value", (key, key[:2], keys, keys, slots)),
        ("slots", (key, key, keys, keys, slots.int())),
        ("slots", (key, key, keys, keys, slots[:2])),
        ("key_cache", (key[..., :8], key[..., :8], keys, keys, slots)),
    ]
    for argument, arguments in stores:
        with pytest.raises(InvalidInputError, match=rf"^{argument}: "):
            gpu.write_kv(*arguments)
    one = torch.zeros(1, 2, dtype=torch.int32)
    copies: list[tuple[str, tuple[Any, ...]]] = [
        ("cache", (keys[..., :8], one)),
        ("cache", (torch.ones(()), one)),
        ("cache", (torch.ones(8).as_strided((3, 4), (2, 1)), one)),
        ("pairs", (keys, one.long())),
        ("pairs", (keys, one[0])),
        ("pairs", (keys, torch.zeros(1, 3, dtype=torch.int32))),
    ]
    for argument, arguments in copies:
        with pytest.raises(InvalidInputError, match=rf"^{argument}: "):
            gpu.copy_blocks(*arguments)


def test_arrays_reach_a_device_as_parts_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "is_gpu", lambda _: True)
    arrays: list[Any] = [
        np.arange(7, dtype=np.int32),
        np.arange(6).reshape(2, 3),
        np.empty((0, 4), np.int32),
        np.ones(3, np.float32),
    ]
    arrays.append(np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2])
    parts = transfer.to_device(arrays, "cpu")
    for part, array in zip(parts, arrays, strict=True):
        np.testing.assert_array_equal(part.numpy(), array)
        assert part.numpy().dtype == array.dtype
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


def test_the_kernels_of_a_gpu_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.kernels.cache_clear()
    monkeypatch.setenv(gpu.SETTING, "cutlass")
    with pytest.raises(InvalidInputError, match=rf"^{gpu.SETTING}: expected 'triton' or 'torch', got 'cutlass'"):
        gpu.kernels()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_for_a_gpu_gives_the_same(dtype: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one: its path, with PyTorch's operations on the CPU in the place of kernels."""
    monkeypatch.setenv(gpu.SETTING, "torch")
    gpu.kernels.cache_clear()
    for module in (plan, transfer):
        monkeypatch.setattr(module, "is_gpu", lambda _: True)
    batch = make(SEQUENCES, dtype)
    planned = plan_of(batch)
    got = planned.attend(*tensors(batch)[:3], **options_of(batch, options), return_lse=True)
    for result, want in zip(got, batch.want(**options), strict=True):
        np.testing.assert_allclose(result.numpy(), want, rtol=0, atol=2e-5 * max(1.0, np.abs(want).max()))
    with pytest.raises(InvalidInputError, match=r"^query: expected shape"):
        planned.attend(*[t[1:] if i == 0 else t for i, t in enumerate(tensors(batch)[:3])])
    gpu.kernels.cache_clear()
