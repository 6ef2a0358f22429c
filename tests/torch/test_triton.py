"""The kernels of GPUs against the definition, in numpy and float64, and beside them what stands in for them in plain
torch.

Without a GPU Triton's interpreter runs the kernels, on shapes that are small enough for it: bfloat16 is multiplied
in float32 there. That they compile is another test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from leafkv.torch import eager  # noqa: E402
from tests.attention import reference  # noqa: E402
from tests.attention.test_attention import ALIBI, CAP, DTYPES, OPTIONS, SINKS, WINDOW, Batch, make, strided  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
MISSING = "" if find_spec("triton") else "triton is not installed"
if not GPU and not MISSING:
    # A kernel is interpreted if the variable is there when Triton, and then the kernel's module, are imported.
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    if isinstance(triton.language.sum, triton.JITFunction):
        MISSING = "triton was imported before its interpreter was asked for: these run in a process of their own, below"
if not MISSING:
    from leafkv.torch import triton_attention, triton_store

    SHAPE_OF = triton_attention.shape_of
if not GPU and find_spec("triton"):
    os.environ.pop("TRITON_INTERPRET")
    if before is not None:
        os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # Triton also looks when it runs a kernel
        if not MISSING:  # it takes as long for a large tile as for a small one
            monkeypatch.setattr(triton_attention, "shape_of", lambda *_, **__: triton_attention.Shape(64, 64, 4))


OURS = pytest.param("triton", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING))
BACKENDS = [OURS, "eager"]

ALL = CAP | ALIBI | SINKS | WINDOW
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def attention_of(backend: str) -> ModuleType:
    return triton_attention if backend == "triton" else eager


def store_of(backend: str) -> ModuleType:
    return triton_store if backend == "triton" else eager


def to_torch(array: NDArray[Any]) -> Any:
    """The same memory on a CPU, a copy on a GPU; and of strides that torch does not know."""
    if array.dtype == np.uint16:
        return to_torch(array.view(np.int16)).view(torch.bfloat16)
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array).to(DEVICE)


def to_numpy(tensor: Any) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.float().cpu().numpy()
    return array


def attend(backend: str, batch: Batch, dtype: str = "f32", **options: Any) -> tuple[NDArray[np.float32], ...]:
    """Outputs and logarithms of the sums, of queries in ``dtype``."""
    query = to_torch(batch.query).to(FLOATS[dtype])
    given: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5,
        "causal": True,
        "sliding_window": None,
        "softcap": None,
        **dict.fromkeys(("alibi_slopes", "sinks", "k_scale", "v_scale")),
        **batch.scales,
        **options,
    }
    tensors = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    out = torch.full_like(query, torch.nan)
    lse = torch.full(query.shape[:2], torch.nan, device=DEVICE)
    caches = to_torch(batch.keys), to_torch(batch.values)
    attention_of(backend).paged_attention(query, *caches, *map(to_torch, batch.step), out, lse, **tensors)
    plain = torch.full_like(query, torch.nan)
    if "sinks" in options:  # not to double the time of all
        attention_of(backend).paged_attention(query, *caches, *map(to_torch, batch.step), plain, None, **tensors)
        assert torch.equal(plain, out)
    return to_numpy(out), to_numpy(lse)


def check(got: tuple[NDArray[np.float32], ...], want: tuple[NDArray[np.float64], ...], out: float = 4e-6) -> None:
    for a, b, tolerance in zip(got, want, (out, 4e-6), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b[np.isfinite(b)]).max(initial=0)))


SEQUENCES = [(40, 9), (300, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_matches_the_definition(backend: str, dtype: str, options: dict[str, Any]) -> None:
    if backend == "triton" and not GPU and dtype != "f32" and len(options) not in (0, 4):
        pytest.skip("in the interpreter all options at once and none are enough for other dtypes than float32")
    batch = make(SEQUENCES, dtype)
    check(attend(backend, batch, **options), batch.want(**options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [("f16", "f16"), ("bf16", "bf16"), ("f16", "int8"), ("bf16", "int8"), ("f16", "bf16"), ("bf16", "f32")],
)
def test_queries_of_16_bits(backend: str, dtype: str, cache: str, options: dict[str, Any]) -> None:
    batch = make([(70, 40), (270, 1)], cache)
    batch = batch._replace(query=to_numpy(torch.from_numpy(batch.query).to(FLOATS[dtype])))
    coarse = dtype == "bf16" or (cache == "int8" and backend == "triton")
    check(attend(backend, batch, dtype, **options), batch.want(**options), 1e-2 if coarse else 1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_parts_of_a_context_add_up_by_their_log_sums(backend: str) -> None:
    batch = make([(300, 1), (300, 2)], "int8")
    whole, total = attend(backend, batch, causal=False)
    first = batch._replace(tables=batch.tables[:, :10], lens=np.array([160, 160], np.int32))
    second = batch._replace(tables=batch.tables[:, 10:], lens=np.array([140, 140], np.int32))
    (a, lse_a), (b, lse_b) = (attend(backend, part, causal=False) for part in (first, second))
    lse = np.logaddexp(lse_a, lse_b)
    np.testing.assert_allclose(lse, total, rtol=0, atol=2e-6)
    merged = a * np.exp(lse_a - lse)[..., None] + b * np.exp(lse_b - lse)[..., None]
    np.testing.assert_allclose(merged, whole, rtol=0, atol=4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "cache"), [("f32", "f32"), ("f16", "f16"), ("bf16", "int8")])
def test_large_scores_are_finite(backend: str, dtype: str, cache: str) -> None:
    batch = make(SEQUENCES, cache)
    batch = batch._replace(query=to_numpy(torch.from_numpy(batch.query).to(FLOATS[dtype])))
    for options in ({}, CAP | SINKS | ALIBI):
        large = {**options, "scale": 1e5}
        for got, want in zip(attend(backend, batch, dtype, **large), batch.want(**large), strict=True):
            assert np.isfinite(got).all()
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-3 if dtype == "f32" else 2e-2)
    assert np.abs(batch.want(scale=1e5)[1]).max() > 1e5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [1, 8, 46, 80, 128, 256, 512, 600])
def test_any_head_dimension(backend: str, head_dim: int) -> None:
    batch = make([(33, 3), (280, 1)], "int8" if head_dim == 46 else "f32", head_dim=head_dim)
    check(attend(backend, batch), batch.want())
    batch = make([(33, 3), (280, 1)], "f16", head_dim=head_dim)
    batch = batch._replace(query=to_numpy(torch.from_numpy(batch.query).half()))
    check(attend(backend, batch, "f16"), batch.want(), 2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("block_size", [1, 3, 32, 256])
def test_any_block_size(backend: str, block_size: int, dtype: str) -> None:
    batch = make(SEQUENCES, dtype, block_size=block_size)
    check(attend(backend, batch), batch.want())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (71, 1)])
def test_any_group_of_heads(backend: str, heads: tuple[int, int]) -> None:
    batch = make([(20, 3), (90, 1)], heads=heads)
    check(attend(backend, batch), batch.want())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("kind", ["interleaved", "layers", "token-major", "different"])
def test_strided_views_are_read_in_place(backend: str, kind: str, dtype: str) -> None:
    batch = make([(40, 3)], dtype)
    keys, values = strided(batch, kind)
    n, h, b, _ = keys.shape
    packed = np.zeros((n, 3, h, 2, b + 1), np.float32)
    scales = {"k_scale": packed[:, 1, :, 0, :b], "v_scale": packed[:, 1, :, 1, 1:]} if batch.scales else {}
    for name, scale in scales.items():
        scale[...] = batch.scales[name]
    query = np.repeat(batch.query, 2, axis=1)[:, ::2]
    tables = np.repeat(batch.tables, 2, axis=1)[:, ::2]
    view = Batch(query, keys, values, tables, *batch.step[1:], scales)
    for got, want in zip(attend(backend, view), attend(backend, batch), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_beyond_16_bits_and_elements_beyond_31(backend: str) -> None:
    batch = make([(40, 3), (20, 20)], "int8", heads=(8, 8), head_dim=128, block_size=32)
    far = 70_000 - len(batch.keys)
    shape = (70_000, *batch.keys.shape[1:])
    assert np.prod(shape) > 2**31
    caches = [torch.empty(shape, dtype=torch.int8, device=DEVICE) for _ in "kv"]  # of which few pages are touched
    scales = [torch.empty(shape[:3], device=DEVICE) for _ in "kv"]
    ones, last = torch.ones((1, 8, 128), device=DEVICE), torch.tensor([70_000 * 32 - 1], device=DEVICE)
    store_of(backend).write_kv(ones, ones, *caches, last, k_scale=scales[0], v_scale=scales[1])
    assert (caches[1][-1, :, -1] == 127).all()
    for cache, near in zip(caches, (batch.keys, batch.values), strict=True):
        cache[far:] = to_torch(near)
    for scale, near in zip(scales, batch.scales.values(), strict=True):
        scale[far:] = to_torch(near)
    query = to_torch(batch.query)
    out = torch.empty_like(query)
    tables = np.where(batch.tables < 0, -1, batch.tables + far).astype(np.int32)
    options: dict[str, Any] = dict.fromkeys(("sliding_window", "softcap", "alibi_slopes", "sinks"))
    attention_of(backend).paged_attention(
        query, *caches, to_torch(tables), *map(to_torch, batch.step[1:]), out, None,
        scale=128**-0.5, causal=True, k_scale=scales[0], v_scale=scales[1], **options,
    )  # fmt: skip
    np.testing.assert_array_equal(to_numpy(out), attend(backend, batch)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_no_key_are_zero(backend: str) -> None:
    for causal in (True, False):
        batch = make([(0, 2), (3, 5), (0, 0)])
        out, lse = attend(backend, batch, causal=causal)
        want = batch.want(causal=causal)
        np.testing.assert_allclose(out, want[0], rtol=0, atol=4e-6)
        seen = lse != -np.inf
        np.testing.assert_allclose(lse[seen], want[1][seen], rtol=0, atol=4e-6)
        empty = [0, 1, 2, 3] if causal else [0, 1]
        assert not out[empty].any()
        np.testing.assert_array_equal(np.unique(np.nonzero(lse == -np.inf)[0]), empty)
        out, lse = attend(backend, batch, causal=causal, **SINKS)
        assert not out[empty].any()
        np.testing.assert_array_equal(lse[empty], [SINKS["sinks"]] * len(empty))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_begins_on_both_sides_of_a_tile(backend: str) -> None:
    batch = make([(300, 9)])
    check(attend(backend, batch, sliding_window=168), batch.want(sliding_window=168))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_is_empty(backend: str) -> None:
    for batch in (make([(5, 0), (0, 0)]), make([])):
        assert attend(backend, batch)[0].shape == (0, 4, 16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "cache"), [("f32", "f32"), ("f16", "f16"), ("f32", "int8")])
@pytest.mark.filterwarnings("ignore:.*(overflow|invalid).*:RuntimeWarning")  # of numpy, in the interpreter
def test_what_a_row_does_not_see_does_not_reach_it(backend: str, dtype: str, cache: str) -> None:
    batch = make([(300, 6)], cache)
    want = attend(backend, batch, dtype, sliding_window=290)
    kv_len, rows = 300, 6
    for at, unseen in ((297, slice(0, 3)), (kv_len - rows - 287, slice(3, 6))):  # after three rows, before three rows
        for odd in (np.nan, np.inf):
            block, offset = batch.tables[0, at // 16], at % 16
            keys, values = batch.keys.copy(), batch.values.copy()
            scales = {name: scale.copy() for name, scale in batch.scales.items()}
            if cache == "int8":
                scales["k_scale"][block, :, offset] = scales["v_scale"][block, :, offset] = odd
            else:
                values[block, :, offset, 3:] = odd
                if odd != np.inf:  # once the values alone
                    keys[block, :, offset] = odd
            changed = batch._replace(keys=keys, values=values, scales=scales)
            got = attend(backend, changed, dtype, sliding_window=290)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(a[unseen], b[unseen])
            assert not np.isfinite(np.delete(got[0], unseen, axis=0)[..., 3:]).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:.*(invalid|All-NaN).*:RuntimeWarning")
def test_keys_that_are_not_finite(backend: str) -> None:
    batch = make([(20, 1), (20, 1), (20, 1)])
    query = np.ones_like(batch.query)
    keys = np.where(np.isfinite(batch.keys), 0, batch.keys).astype(np.float32)
    keys[batch.tables[0, :2], ..., 0] = -np.inf  # nobody has a weight
    keys[batch.tables[1, 0], :, 3, 0] = -np.inf  # one has none
    keys[batch.tables[2, 0], :, 3, 0] = np.inf
    values = np.ones_like(batch.values)
    out, lse = attend(backend, batch._replace(query=query, keys=keys, values=values))
    assert np.isnan(out[[0, 2]]).all()
    assert (lse[0] == -np.inf).all()
    np.testing.assert_allclose(out[1], 1, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse[1], np.log(19), rtol=0, atol=1e-6)


def chain(a: NDArray[Any], b: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Products added up one after the other, as on a GPU; BLAS has other orders for other numbers of rows."""
    total = np.zeros((len(a), b.shape[1]), dtype)
    for i in range(len(b)):
        total += a[:, i, None].astype(dtype) * b[i].astype(dtype)
    return total


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize(
    ("dtype", "cache", "options"),
    [("f32", "f32", ALL), ("f16", "f16", {}), ("bf16", "int8", {"sliding_window": 400})],
    ids=["f32", "f16", "int8"],
)
def test_a_row_is_bit_equal_alone_in_a_batch_in_chunks_and_in_any_splits(
    dtype: str, cache: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not GPU:
        monkeypatch.setattr(np, "matmul", chain)
    batch = make([(530, 1), (530, 20), (20, 4)], cache, heads=(2, 1))
    options = {name: x[[0, 2]] if isinstance(x, np.ndarray) else x for name, x in options.items()}
    together = attend("triton", batch, dtype, **options)
    for splits in (1, 2, 3):
        monkeypatch.setattr(triton_attention, "num_splits", lambda *_, splits=splits: splits)
        for got, want in zip(attend("triton", batch, dtype, **options), together, strict=True):
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    # A row alone, split, and some rows as a chunk.
    for first, end, splits in ((13, 14, 3), (3, 9, 1)):
        monkeypatch.setattr(triton_attention, "num_splits", lambda *_, splits=splits: splits)
        one = batch._replace(
            query=batch.query[first:end],
            tables=batch.tables[1:2],
            starts=np.array([0, end - first], np.int32),
            lens=np.array([530 - (21 - end)], np.int32),
        )
        for got, want in zip(attend("triton", one, dtype, **options), together, strict=True):
            np.testing.assert_array_equal(got.view(np.uint32), want[first:end].view(np.uint32))


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_both_shapes_of_16_bit_dtypes_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(np, "matmul", chain)
    batch = make([(200, 80), (30, 1)], "f16", heads=(2, 1), head_dim=32)
    shapes = [SHAPE_OF(2, 32, many_rows=many) for many in (False, True)]
    assert shapes[0] != shapes[1]
    results = []
    for shape in shapes:
        monkeypatch.setattr(triton_attention, "shape_of", lambda *_, shape=shape, **__: shape)
        results.append(attend("triton", batch, "f16"))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(GPU or bool(MISSING), reason=MISSING or "a GPU has compiled them")
def test_the_kernels_compile_for_gpus() -> None:
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton has no backend for NVIDIA's GPUs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.torch.compile_kernels"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_known_lengths_change_nothing(backend: str) -> None:
    batch = make(SEQUENCES)
    wide = batch._replace(tables=np.concatenate([batch.tables, np.full_like(batch.tables, -1)], axis=1))
    want = attend(backend, batch)
    known: list[dict[str, Any]] = [
        {},
        {"max_query_len": 9, "max_kv_len": 300},
        {"max_query_len": 400, "max_kv_len": 10**6},
    ]
    for lengths in known:
        for got, same in zip(attend(backend, wide, **lengths), want, strict=True):
            np.testing.assert_allclose(got, same, rtol=0, atol=0 if backend == "triton" else 1e-6)


def test_the_fallback_computes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make(SEQUENCES)
    monkeypatch.setattr(eager, "BUDGET", 1 << 12)
    check(attend("eager", batch, **ALL), batch.want(**ALL))


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_may_be_views(backend: str) -> None:
    batch = make(SEQUENCES)
    query = to_torch(batch.query)
    out = torch.full((len(query), 3, 4, 16), torch.nan, device=DEVICE)
    lse = torch.full((len(query), 4, 2), torch.nan, device=DEVICE)
    options: dict[str, Any] = dict.fromkeys(
        ("sliding_window", "softcap", "alibi_slopes", "sinks", "k_scale", "v_scale")
    )
    attention_of(backend).paged_attention(
        query, to_torch(batch.keys), to_torch(batch.values), *map(to_torch, batch.step), out[:, 1], lse[..., 1],
        scale=0.25, causal=True, **options,
    )  # fmt: skip
    check((to_numpy(out[:, 1]), to_numpy(lse[..., 1])), batch.want())
    assert out[:, [0, 2]].isnan().all()
    assert lse[..., 0].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_write_kv_rounds_to_nearest_even(backend: str, dtype: str, given: str) -> None:
    new = np.random.default_rng(0).standard_normal((2, 6, 3, 40), np.float32) * np.float32(100)
    new[0, :, 0, :4] = np.nan, np.inf, -np.inf, 0
    new[1, :, 0, :3] = 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11  # ties
    key, value = (torch.from_numpy(x).to(FLOATS[given]).to(DEVICE) for x in new)
    slots = np.array([33, -1, 0, 47, 16, -1])
    caches = [torch.full((3, 3, 16, 40), -7, dtype=FLOATS[dtype], device=DEVICE) for _ in "kv"]
    store_of(backend).write_kv(key, value, *caches, to_torch(slots), k_scale=None, v_scale=None)
    for cache, x in zip(caches, (key, value), strict=True):
        want = reference.store(np.full((3, 3, 16, 40), -7, np.float32), dtype)
        want[slots[slots >= 0] // 16, :, slots[slots >= 0] % 16] = reference.store(to_numpy(x), dtype)[slots >= 0]
        np.testing.assert_array_equal(to_numpy(cache), reference.load(want).astype(np.float32))
    was = [cache.clone() for cache in caches]
    store_of(backend).write_kv(key[:2], value[:2], *caches, to_torch(np.array([-1, -1])), k_scale=None, v_scale=None)
    store_of(backend).write_kv(key[:0], value[:0], *caches, to_torch(slots[:0]), k_scale=None, v_scale=None)
    for cache, old in zip(caches, was, strict=True):
        assert torch.equal(cache.nan_to_num(5.0), old.nan_to_num(5.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_write_kv_quantizes_each_token_and_head(backend: str, dtype: str) -> None:
    new = np.random.default_rng(0).standard_normal((2, 6, 2, 8), np.float32)
    key, value = (torch.from_numpy(x).to(FLOATS[dtype]) for x in new)
    key[0, 1], key[1, 0, 3], key[2, 0, 5], key[4] = 0, np.inf, np.nan, 1e-42 if dtype == "f32" else 1e-4
    value[3, 0] = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -127, 126.5])  # ties, of scale 1
    slots = np.array([33, 1, 0, 47, 16, -1])
    caches = [torch.zeros((3, 2, 16, 8), dtype=torch.int8, device=DEVICE) for _ in "kv"]
    pool = torch.full((3, 2, 2, 16), -7.0, device=DEVICE)
    scales = [pool[:, :, 0], pool[:, :, 1]]
    store_of(backend).write_kv(
        key.to(DEVICE), value.to(DEVICE), *caches, to_torch(slots), k_scale=scales[0], v_scale=scales[1]
    )
    for new, cache, scale in zip((key, value), caches, scales, strict=True):
        rows, written = new.float().numpy()[:5], slots[:5]
        at = written // 16, slice(None), written % 16
        finite = np.isfinite(rows).all(axis=-1)
        want = np.where(finite, np.abs(rows).max(axis=-1) / np.float32(127), np.float32(np.nan))
        np.testing.assert_array_equal(to_numpy(scale)[at], want)
        elements = cache.cpu().numpy()[at].astype(np.float32)
        normal = finite & (want > 1e-30)
        np.testing.assert_array_equal(elements[normal], np.rint(rows[normal] / want[normal, None]))
        assert not elements[finite & (want == 0)].any()
        assert np.count_nonzero(cache.cpu()) == np.count_nonzero(elements)
    assert int((pool == -7).sum()) == (48 - 5) * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_write_kv_reads_and_writes_views_in_place(backend: str) -> None:
    pool = torch.zeros((3, 4, 2, 2, 16, 8), device=DEVICE)  # [block, layer, head, K or V, token, dimension]
    fused = torch.randn((5, 6, 8), device=DEVICE)
    views = pool[:, 1, :, 0], pool[:, 1, :, 1]
    slots = torch.arange(30, 40, device=DEVICE)[::2]
    store_of(backend).write_kv(fused[:, 2:4], fused[:, 4:], *views, slots, k_scale=None, v_scale=None)
    assert not pool[:, [0, 2, 3]].any()
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(pool[slot // 16, 1, :, 0, slot % 16], fused[i, 2:4])
        assert torch.equal(pool[slot // 16, 1, :, 1, slot % 16], fused[i, 4:])
    assert int(pool.count_nonzero()) == 5 * 4 * 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_copy_blocks(backend: str) -> None:
    pool = torch.arange(5 * 2 * 6, device=DEVICE).reshape(5, 2, 2, 3)
    cache = pool[:, 1]
    before = pool.clone()
    for pairs in ([[0, 1], [1, 0], [1, 4], [3, 3]], []):
        store_of(backend).copy_blocks(cache, torch.tensor(pairs, dtype=torch.int32, device=DEVICE).reshape(-1, 2))
        assert torch.equal(cache, before[[1, 0, 2, 3, 1], 1])
    assert torch.equal(pool[:, 0], before[:, 0])


@pytest.mark.skipif(GPU or not MISSING.startswith("triton was imported"), reason="they ran in this process")
def test_the_kernels_in_a_process_of_their_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-k", "triton", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
