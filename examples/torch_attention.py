"""Paged attention over PyTorch tensors, on a GPU if there is one: a step of decoding, beside PyTorch's attention."""

from __future__ import annotations

import torch

import leafkv.torch as leaf
from leafkv import KVCache


def main() -> None:
    device, kv_heads, dim, length = "cuda" if torch.cuda.is_available() else "cpu", 2, 64, 100
    cache = KVCache(16, 1, kv_heads, dim, backend="torch", device=device, dtype="bfloat16")
    table = torch.randperm(16, device=device)[:7]  # the blocks of a sequence, wherever they are
    position = torch.arange(length, device=device)
    key, value = torch.randn(2, length, kv_heads, dim, device=device, dtype=torch.bfloat16)
    cache.write(0, key, value, table[position // 16] * 16 + position % 16)

    query = torch.randn(1, 8, dim, device=device, dtype=torch.bfloat16)
    starts, lens = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0, 1], [length]))
    attend = torch.compile(leaf.paged_attention, backend="aot_eager")  # or call it as it is
    out = attend(query, *cache.layer(0), table[None].int(), starts, lens)

    heads = (x.transpose(0, 1).float() for x in (query, key, value))
    want = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(0, 1)
    print(f"{device}: largest difference {(out - want).abs().max():.4f}")


if __name__ == "__main__":
    main()
