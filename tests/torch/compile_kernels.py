"""Compile the kernels for GPUs that need not be there: what Triton's interpreter does not check. Run by
`test_triton.py`."""

# ruff: noqa: T201

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from leafkv.torch import triton_attention, triton_store

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int8: "*i8"}
OPTIONS = dict.fromkeys(("CAUSAL", "WINDOW", "CAP", "ALIBI", "SINKS", "SPLIT", "LSE"), False) | {"CAUSAL": True}
ALL = dict.fromkeys(OPTIONS, True)


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: Any) -> Any:
    """Compiled as for a call whose tensors and strides are aligned; integers that are not named are int32."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    strides = ("query_", "k_", "v_", "out_", "key_", "value_")
    aligned = [n for n in names if signature[n].startswith("*") or (signature[n] == "i32" and n.startswith(strides))]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def attend(
    query: Any, cache: Any, head_dim: int, capability: int, *, many_rows: bool = False, stages: int = 2, **chosen: Any
) -> Any:
    qk, pv = triton_attention.dot_types(query, cache)
    block_d = max(16, triton.next_power_of_2(head_dim))
    shape = triton_attention.shape_of(qk.primitive_bitwidth // 8, block_d, many_rows=many_rows)
    constants = OPTIONS | {
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "BLOCK_D": block_d,
        "PARTITION": triton_attention.PARTITION,
        "INT8": cache == torch.int8,
        "QK": qk,
        "PV": pv,
        "tables_block": 1,
        **chosen,
    }
    types = {"query": POINTERS[query], "out": POINTERS[query], "qk_scale": "fp32", "cap": "fp32"}
    types |= dict.fromkeys(("key_cache", "value_cache"), POINTERS[cache])
    types |= dict.fromkeys(("tables", "starts", "lens"), "*i32")
    optional = {"lse": "LSE", "slopes": "ALIBI", "sinks": "SINKS", "part_sums": "SPLIT", "part_out": "SPLIT"}
    for name, option in (optional | {"k_scale": "INT8", "v_scale": "INT8"}).items():
        if constants[option]:
            types[name] = "*fp32"
        else:
            constants[name] = None
    return build(
        triton_attention._attend, types, constants, capability,
        num_warps=shape.warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip


def merge(dtype: Any, head_dim: int, capability: int) -> Any:
    pointers = ("part_sums", "part_out", "lse", "sinks")
    types = dict.fromkeys(pointers, "*fp32") | {"starts": "*i32", "lens": "*i32", "out": POINTERS[dtype]}
    constants: dict[str, Any] = {"HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim))}
    constants |= {"PARTITION": triton_attention.PARTITION, "AHEAD": 8, "HEADS": 32, "SOME": 1}
    constants |= dict.fromkeys(("CAUSAL", "WINDOW", "SINKS", "LSE"), True)
    return build(triton_attention._merge, types, constants, capability, num_warps=1, enable_fp_fusion=False)


def write_kv(given: Any, cache: Any, capability: int) -> Any:
    types = {"key": POINTERS[given], "value": POINTERS[given], "slots": "*i64"}
    types |= {"key_cache": POINTERS[cache], "value_cache": POINTERS[cache]}
    constants: dict[str, Any] = {"HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "BLOCK_H": 8, "BLOCK_D": 128}
    constants["INT8"] = cache == torch.int8
    for name in ("k_scale", "v_scale"):
        if constants["INT8"]:
            types[name] = "*fp32"
        else:
            constants[name] = None
    return build(triton_store._write_kv, types, constants, capability, num_warps=4, enable_fp_fusion=False)


def assemble(kernel: Any, capability: int) -> str:
    """What the assembler says of it: registers, what is spilled, and products that had to wait."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        # Several are there, for several generations of PTX.
        for assembler in sorted(folder.glob("ptxas*")):
            name = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
            command = [str(assembler), "-v", "--gpu-name", name, str(source), "-o", str(Path(scratch, "kernel.cubin"))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stderr
    return ""


def main() -> None:
    """One kernel with all options, one with none; two must fit in a multiprocessor's shared memory."""
    bf16, int8, f32 = torch.bfloat16, torch.int8, torch.float32
    for capability, kernel, most in (
        (80, attend(bf16, int8, 64, 80, **ALL), 99 << 9),
        (90, attend(bf16, bf16, 128, 90, stages=3), 227 << 9),
        (80, merge(bf16, 128, 80), 0),
        (80, write_kv(f32, int8, 80), 4 << 10),
        (90, write_kv(f32, bf16, 90), 0),
    ):
        said = assemble(kernel, capability) if capability >= 90 else ""
        assert kernel.metadata.shared <= most, kernel.metadata
        # Triton must wait for a product before its sum is read: the assembler would, but says so.
        assert "serialized" not in said, said
        print(capability, kernel.metadata.shared, " ".join(said.split())[-200:])


if __name__ == "__main__":
    main()
