"""What a KV dtype costs in quality: the perplexity of the embedded model, computed through the paged cache.

Texts are cut into windows of ``--context`` tokens, which are prefilled in chunks: every token's attention reads its
keys and values, its own included, as the cache holds them. Prints a Markdown table.

    python benches/perplexity.py [--context 1024] [--chunk 128] [--model model.gguf] [text files]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leafkv import KVCache
from leafkv.kv.storage import DTYPES
from leafkv.models import Batch, LoadedModel, load_model

BLOCK_SIZE = 16
ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")


def surprises(
    loaded: LoadedModel, tokens: NDArray[np.int32], dtype: str, chunk: int, threads: int
) -> NDArray[np.float64]:
    """Minus the log-probability of each token but the first, given those before it."""
    c = loaded.config
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    cache = KVCache(num_blocks, c.num_layers, c.num_kv_heads, c.head_dim, BLOCK_SIZE, dtype)
    # The blocks of a sequence lie anywhere.
    table = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    found = []
    for start in range(0, len(tokens) - 1, chunk):
        positions = np.arange(start, min(start + chunk, len(tokens) - 1))
        plan = loaded.model.plan(
            table[None],
            np.array([0, len(positions)], np.int32),
            np.array([positions[-1] + 1], np.int32),
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            num_threads=threads,
        )
        slots = table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = Batch(tokens[positions], positions, slots, plan, np.arange(len(positions)), threads)
        logits = loaded.model.forward(batch, cache).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        right = logits[np.arange(len(positions)), tokens[positions + 1]]
        found.append(np.log(np.exp(logits).sum(axis=1)) - right)
    return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity by KV dtype, as a Markdown table.")
    parser.add_argument("texts", nargs="*", type=Path, default=[ROOT / name for name in TEXTS])
    parser.add_argument("--model", help="a .gguf file or a Hugging Face directory [default: the embedded model]")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--chunk", type=int, default=128, help="tokens prefilled at once")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    loaded = load_model(options.model)
    tokens = np.array([t for text in options.texts for t in loaded.tokenizer.encode(text.read_text())], np.int32)
    cuts = range(options.context, len(tokens), options.context)
    windows = [window for window in np.split(tokens, cuts) if len(window) > 1]
    c, baseline = loaded.config, None
    print(f"{loaded.name}: {len(tokens):,} tokens in windows of {options.context}, chunks of {options.chunk}\n")
    print("| KV dtype | bytes a token | perplexity | to float32 |\n|---|--:|--:|--:|")
    for dtype in DTYPES:
        each = [surprises(loaded, window, dtype, options.chunk, options.threads) for window in windows]
        surprise = np.concatenate(each)
        baseline = surprise if baseline is None else baseline
        # The ratio of two perplexities is the mean of the tokens' differences; its error is that mean's.
        change = surprise - baseline
        error = change.std() / len(change) ** 0.5
        size = KVCache.nbytes_of_block(c.num_layers, c.num_kv_heads, c.head_dim, BLOCK_SIZE, dtype) / BLOCK_SIZE
        perplexity = np.exp(surprise.mean())
        print(
            f"| {dtype} | {size:,.0f} | {perplexity:.4f} | {np.expm1(change.mean()):+.3%} ± {error:.3%} |", flush=True
        )


if __name__ == "__main__":
    main()
