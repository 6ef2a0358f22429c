"""`generate` of Hugging Face transformers over LeafKV's cache: later calls find a prefix that earlier ones computed.

python examples/hf_generate.py [directory of a model]
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from leafkv.integrations.transformers import KVPool, LeafCache

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    torch.manual_seed(0)
    if sys.argv[1:]:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="leafkv")
    else:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY), attn_implementation="leafkv").eval()
    pool = KVPool(model, num_blocks=64)
    rules = torch.randint(3, 64, (1, 100))  # what all prompts begin with
    for question in torch.randint(3, 64, (3, 1, 10)):
        ids = torch.cat([rules, question], dim=1)
        with LeafCache(pool, ids) as cache:
            options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            answer = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **options)
            print(f"{cache.num_cached_tokens} of {ids.shape[1]} tokens were found;", answer[0, ids.shape[1] :].tolist())


if __name__ == "__main__":
    main()
