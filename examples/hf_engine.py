"""The engine over a model of Hugging Face transformers: their code, our scheduler, prefix cache and attention.

python examples/hf_engine.py [directory of a model]
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from leafkv import LLM, SamplingParams

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    torch.manual_seed(0)
    tiny = Gemma2Config(**TINY, num_key_value_heads=2, head_dim=8, sliding_window=16)
    model = sys.argv[1] if sys.argv[1:] else AutoModelForCausalLM.from_config(tiny)
    llm = LLM(model, backend="transformers", device="cpu", num_blocks=64)
    rules = torch.randint(3, 64, (100,)).tolist()
    prompts = [[*rules, 10 + i, 20 + i] for i in range(8)]  # all at once: what they share is computed once
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for output in llm.generate(prompts, params):
        print(output.outputs[0].token_ids)
    print(f"{llm.stats().computed_prompt_tokens} of {sum(map(len, prompts))} tokens of the prompts were computed")


if __name__ == "__main__":
    main()
