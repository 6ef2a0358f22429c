"""Generate text with the embedded model, then show what the prefix cache saves on a second prompt."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from leafkv import LLM, SamplingParams
from leafkv.cli.terminal import Timings, load_with_progress, stream_text
from leafkv.engine.outputs import RequestOutput

# Long on purpose: every question below starts with it, and it is computed once.
SYSTEM = """You are Leaf, a friendly guide to the animals of the world. You answer in one or two short
sentences, in plain words, for children of about ten years. Never use lists. Some facts you know by heart.
The blue whale is the largest animal that has ever lived, longer than three buses; it eats krill, and its
heart is as big as a small car. The cheetah is the fastest animal on land, and runs at up to one hundred
kilometres an hour for a short time. The giraffe is the tallest animal, and sleeps only a few hours a day.
The ostrich is the largest bird; it cannot fly, but it runs fast. The peregrine falcon is the fastest bird
when it dives. Bees dance to tell each other where flowers are. An octopus has three hearts and eight arms,
and can change its colour. Bats are the only mammals that can really fly, and find their way in the dark by
sound. Emperor penguins keep their eggs warm on their feet during the long winter of Antarctica. A tortoise
can live for more than one hundred and fifty years. When you do not know an answer, say so, and tell the
child to ask a teacher or to look in a book at the library.""".replace("\n", " ")
QUESTIONS = ("Which animal is the fastest on land?", "Which bird is the largest?")


def ask(llm: LLM, question: str) -> tuple[RequestOutput, Timings]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return stream_text(llm, messages, SamplingParams(temperature=0.0, max_tokens=48))


def blocks(llm: LLM, result: RequestOutput) -> int:
    """Blocks that hold the KV of a request: that of its last token is never needed."""
    tokens = len(result.prompt_token_ids) + len(result.outputs[0].token_ids) - 1
    return -(-tokens // llm.cache.block_size)


def main() -> None:
    console = Console(highlight=False)
    started = time.perf_counter()
    llm = LLM(load_with_progress(None, console))
    console.print(f"Model ready in {time.perf_counter() - started:.1f} s. {llm.cache}", style="dim")

    runs = []
    for question in QUESTIONS:
        console.print(f"\n{question}", style="bold")
        runs.append(ask(llm, question))
    warm, warm_timings = runs[-1]

    # The same question once more with an empty cache: what the hit saved is measured, not estimated.
    llm.reset_prefix_cache()
    console.print(f"\n{QUESTIONS[-1]} (again, with the prefix cache emptied)", style="bold")
    cold, cold_timings = ask(llm, QUESTIONS[-1])
    # Attention is bit-equal either way; numpy's matrix products may round a near-tie of two tokens differently.
    same = cold.outputs[0].token_ids == warm.outputs[0].token_ids
    answer = "the same answer" if same else "an answer that parts from it at a near-tie"

    saved = (cold_timings.first_token - warm_timings.first_token) * 1e3
    console.print(
        f"\nThe second prompt found {warm.num_cached_tokens} of its {len(warm.prompt_token_ids)} tokens in the "
        f"prefix cache: {warm.num_cached_tokens} tokens and {saved:.0f} ms saved, {answer}.",
        style="green",
    )
    runs.append((cold, cold_timings))
    table = Table("", *("first", "second", "second, cold"))
    table.add_row("time to first token", *(f"{timings.first_token * 1e3:.0f} ms" for _, timings in runs))
    table.add_row("tokens per second", *(f"{timings.tokens_per_second:.1f}" for _, timings in runs))
    table.add_row("blocks used", *(f"{blocks(llm, result)} of {llm.cache.num_blocks}" for result, _ in runs))
    hits = (f"{result.num_cached_tokens} of {len(result.prompt_token_ids)}" for result, _ in runs)
    table.add_row("prefix hit tokens", *hits)
    console.print(table)


if __name__ == "__main__":
    main()
