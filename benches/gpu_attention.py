"""LeafKV's attention on a GPU beside the device's limits and other engines: a Markdown table.

    python -m benches.gpu_attention --cases 'decode-llama-*'

Everyone has the same numbers and block tables; each result is checked against torch's attention in float32. A
device-to-device copy (bytes read and written) and a matrix product in the query's dtype are timed in turns with the
engines, so shares of them are of the same minutes. Engines that are not installed are left out, with a line that
says so. Without a GPU there is nothing to measure: one line says so.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from benches.attention_cases import LLAMA, SMOL, Case

try:
    import torch
except ImportError:
    sys.exit("gpu_attention: torch is not installed: pip install 'leafkv[torch]'")

BLOCK = 16
COLD = 256 << 20
"""Bytes of KV that a cycle of calls reads at least, from one layer after the other: more than a GPU's caches hold."""

Call = Callable[[int], Any]
"""Attention of one layer, given its index: [tokens, heads, head_dim]."""


def cases() -> list[Case]:
    found = []
    for model in (LLAMA, SMOL):
        found += [Case("decode", model, n, 1, context) for n in (1, 32, 128) for context in (1_024, 8_192)]
        found += [Case("decode", model, 1, 1, 65_536), Case("decode", model, 32, 1, 4_096 + 128, shared=4_096)]
        found += [Case("prefill", model, 1, n, n) for n in (2_048, 8_192)]
        found += [Case("chunk", model, 1, 512, 8_192)]
    return found


@dataclass
class Data:
    """A case on the device: queries, caches of all layers [block, KV head, token, dimension], block tables."""

    case: Case
    dtype: Any
    query: Any
    caches: list[Any]  # pairs
    scales: list[dict[str, Any]]
    tables: Any
    starts: Any
    lens: Any

    @classmethod
    def of(cls, case: Case, kind: str) -> Data:
        model = case.model
        dtype = torch.float16 if kind == "f16" else torch.bfloat16
        torch.manual_seed(0)
        pages = case.kv_tokens // BLOCK
        tables = case.pages(BLOCK, pages, np.random.default_rng(1))
        shape = (pages, model.num_kv_heads, BLOCK, model.head_dim)
        itemsize = 1 if kind == "int8" else 2
        layers = -(-COLD // (case.kv_elements * itemsize))
        caches, scales = [], []
        for _ in range(layers):
            if kind == "int8":
                caches.append(tuple(torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda") for _ in "kv"))
                scales.append({name: torch.rand(shape[:3], device="cuda") / 64 for name in ("k_scale", "v_scale")})
            else:
                caches.append(tuple(torch.randn(shape, dtype=dtype, device="cuda") for _ in "kv"))
                scales.append({"k_scale": None, "v_scale": None})
        query = torch.randn((case.count * case.new, model.num_heads, model.head_dim), dtype=dtype, device="cuda")
        step = (torch.from_numpy(x).cuda() for x in (tables, case.query_starts, case.kv_lens))
        return cls(case, dtype, query, caches, scales, *step)

    def dense(self, layer: int) -> tuple[Any, Any]:
        """K and V of the sequences side by side, [sequence, KV head, token, dimension], in the query's dtype."""
        found = []
        for cache, name in zip(self.caches[layer], ("k_scale", "v_scale"), strict=True):
            kv = cache[self.tables.long()]
            scale = self.scales[layer][name]
            if scale is not None:
                kv = (kv.float() * scale[self.tables.long()][..., None]).to(self.dtype)
            found.append(kv.permute(0, 2, 1, 3, 4).flatten(2, 3))
        return found[0], found[1]

    def reference(self) -> Any:
        """The first sequence's last row, in float32."""
        keys, values = (x[0].float() for x in self.dense(0))
        group = self.case.model.num_heads // self.case.model.num_kv_heads
        q = self.query[self.case.new - 1].float().unflatten(0, (-1, group))
        weights = torch.softmax(q @ keys.mT * self.case.model.head_dim**-0.5, -1)
        return (weights @ values).flatten(0, 1)


def leafkv(data: Data) -> Call:
    from leafkv.torch import triton_attention  # noqa: PLC0415

    out = torch.empty_like(data.query)
    options: dict[str, Any] = dict.fromkeys(("sliding_window", "softcap", "alibi_slopes", "sinks"))
    options |= {"scale": data.case.model.head_dim**-0.5, "causal": True}
    options |= {"max_query_len": data.case.new, "max_kv_len": data.case.context}

    def call(layer: int) -> Any:
        keys, values = data.caches[layer]
        triton_attention.paged_attention(
            data.query, keys, values, data.tables, data.starts, data.lens, out, None, **options, **data.scales[layer]
        )
        return out

    return call


def sdpa(data: Data) -> Call:
    """torch's own, over K and V that lie side by side, which no paged cache has; to gather them is not timed."""
    case = data.case
    if data.scales[0]["k_scale"] is not None:
        raise NotImplementedError("no int8")
    dense = [data.dense(layer) for layer in range(len(data.caches))]
    query = data.query.unflatten(0, (case.count, case.new)).transpose(1, 2)
    mask = None
    if 1 < case.new < case.context:
        at = torch.arange(case.context, device="cuda")
        mask = at <= at[-case.new :, None]

    def call(layer: int) -> Any:
        keys, values = dense[layer]
        whole = case.new == case.context
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=whole, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return call


def flashinfer(data: Data) -> Call:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # noqa: PLC0415

    if data.scales[0]["k_scale"] is not None:
        raise NotImplementedError("no int8")
    case, model = data.case, data.case.model
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "HND")
    per = case.context // BLOCK
    indptr = torch.arange(0, case.count * per + 1, per, dtype=torch.int32, device="cuda")
    last = torch.full((case.count,), BLOCK, dtype=torch.int32, device="cuda")
    wrapper.plan(
        data.starts, indptr, data.tables.flatten(), last, model.num_heads, model.num_kv_heads, model.head_dim, BLOCK,
        causal=True, q_data_type=data.dtype,
    )  # fmt: skip
    return lambda layer: wrapper.run(data.query, data.caches[layer])


def flash_attn(data: Data) -> Call:
    """FlashAttention 2, whose blocks are of 256 tokens: the same tokens, copied."""
    from flash_attn import flash_attn_with_kvcache  # noqa: PLC0415

    if data.scales[0]["k_scale"] is not None:
        raise NotImplementedError("no int8")
    case = data.case
    if case.context % 256:
        raise NotImplementedError("blocks of 256 tokens")
    blocks = [
        tuple(x.transpose(1, 2).unflatten(1, (-1, 256)).flatten(0, 1).contiguous() for x in data.dense(layer))
        for layer in range(len(data.caches))
    ]
    table = torch.arange(len(blocks[0][0]), dtype=torch.int32, device="cuda").reshape(case.count, -1)
    query = data.query.unflatten(0, (case.count, case.new))

    def call(layer: int) -> Any:
        out = flash_attn_with_kvcache(query, *blocks[layer], cache_seqlens=data.lens, block_table=table, causal=True)
        return out.flatten(0, 1)

    return call


ENGINES: dict[str, Callable[[Data], Call]] = {
    "LeafKV": leafkv,
    "torch SDPA, contiguous": sdpa,
    "FlashInfer": flashinfer,
    "flash-attn": flash_attn,
}


def milliseconds(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def compare(case: Case, kind: str, names: list[str], rounds: int) -> list[str]:
    """Rows of the table."""
    data = Data.of(case, kind)
    layers = len(data.caches)
    reference = data.reference()
    running: dict[str, tuple[Call, float]] = {}
    for name in names:
        try:
            call = ENGINES[name](data)
            got = call(0)[case.new - 1].float()
        except (ImportError, NotImplementedError, RuntimeError, torch.OutOfMemoryError) as why:
            print(f"{case.name} {kind}: {name} left out: {' '.join(str(why).split())[:120]}", file=sys.stderr)
            continue
        error = float((got - reference).abs().max())
        if not error < 0.02 * max(1.0, float(reference.abs().max())):
            raise AssertionError(f"{case.name} {kind}: {name} is off by {error:.2g}")
        for layer in range(min(3, layers)):
            call(layer)
        running[name] = (call, error)
    source = torch.empty(COLD, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn((8_192, 8_192), dtype=data.dtype, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in (*running, "copy", "product")}
    for i in range(rounds):
        samples["copy"].append(milliseconds(lambda: target.copy_(source)))
        samples["product"].append(milliseconds(lambda: a @ a))
        for name in list(running) if i % 2 else reversed(running):
            call = running[name][0]
            samples[name].append(milliseconds(lambda: call(i % layers)))  # noqa: B023
    itemsize, scales = (1, 8 / case.model.head_dim / 2) if kind == "int8" else (2, 0.0)
    copy = 2 * COLD / median(samples["copy"][1:])
    product = 2 * 8_192**3 / median(samples["product"][1:])
    rows = []
    for name, (_, error) in running.items():
        time = median(samples[name])
        moved, done = case.kv_elements * (itemsize + scales) / time, case.operations / time
        ratio = time / median(samples["LeafKV"]) if "LeafKV" in running else float("nan")
        memory = f"{moved / 1e6:.0f} | {moved / copy:.0%}"
        compute = f"{done / 1e9:.1f} | {done / product:.0%}"
        rows.append(
            f"| {case.name} | {kind} | {name} | {time:.3f} | {memory} | {compute} | {ratio:.2f} | {error:.0e} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="*", help="a pattern of names, such as 'decode-llama-*'")
    parser.add_argument("--kinds", default="bf16;f16;int8", help="dtypes of the KV, parted by ;")
    parser.add_argument("--engines", default="*", help="a pattern of names")
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_attention: no GPU here, nothing is measured")
        return
    names = [name for name in ENGINES if fnmatch.fnmatch(name, arguments.engines)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| case | KV | engine | ms | GB/s | of a copy | TFLOP/s | of a product | time / LeafKV's | error |")
    print("|---|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for case in cases():
        if not fnmatch.fnmatch(case.name, arguments.cases):
            continue
        for kind in arguments.kinds.split(";"):
            print("\n".join(compare(case, kind, names, arguments.rounds)), flush=True)


if __name__ == "__main__":
    main()
