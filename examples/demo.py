"""Generate text with the embedded model, then show what the prefix cache saves on a second prompt."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from leafkv import LLM, SamplingParams
from leafkv.cli.terminal import Timings, load_with_progress, stream_text
from leafkv.engine.outputs import RequestOutput

# Long on purpose: every question below starts with it, and it is computed once.
SYSTEM = """You are Leaf, the assistant of a small public library. Answer in one or two short sentences.
Rules of the house: the library is open from nine in the morning to six in the evening, Monday to Saturday.
A card is free for everyone who lives in the town; visitors may read in the halls but take nothing home.
Up to six books may be borrowed at a time, for four weeks, and a loan can be renewed twice unless another
reader waits for the book. Films and records are lent for one week. Reference works, newspapers of the day
and maps stay in the house. Late books cost ten cents a day, never more than two euros a book, and children
pay nothing. The reading room on the first floor is quiet: no calls, no food, water in closed bottles only.
Computers can be used for one hour a day with a card, printing costs five cents a page. On Wednesdays at four
a story is read aloud in the children's corner, and on the first Friday of each month a writer visits.
Gifts of books are welcome at the desk, where also lost things are kept for three months.
Be kind, be brief, and when the rules do not say, send the reader to the desk on the ground floor."""
QUESTIONS = ("How many books may I borrow at a time?", "What does a late book cost?")


def ask(llm: LLM, question: str) -> tuple[RequestOutput, Timings]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return stream_text(llm, messages, SamplingParams(temperature=0.0, max_tokens=64))


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
    llm.manager.clear()
    console.print(f"\n{QUESTIONS[-1]} (again, with the prefix cache emptied)", style="bold")
    cold, cold_timings = ask(llm, QUESTIONS[-1])
    if cold.outputs[0].token_ids != warm.outputs[0].token_ids:
        raise SystemExit("the answer changed with the prefix cache: please report this")

    saved = (cold_timings.first_token - warm_timings.first_token) * 1e3
    console.print(
        f"\nThe second prompt found {warm.num_cached_tokens} of its {len(warm.prompt_token_ids)} tokens in the "
        f"prefix cache: {warm.num_cached_tokens} tokens and {saved:.0f} ms saved, the same answer.",
        style="green",
    )
    table = Table("", "time to first token", "tokens per second", "blocks used", "prefix hit tokens")
    for name, (result, timings) in zip(("first", "second", "second, cold"), [*runs, (cold, cold_timings)], strict=True):
        length = len(result.prompt_token_ids) + len(result.outputs[0].token_ids) - 1
        table.add_row(
            name,
            f"{timings.first_token * 1e3:.0f} ms",
            f"{timings.tokens_per_second:.1f}",
            f"{-(-length // llm.cache.block_size)} of {llm.cache.num_blocks}",
            f"{result.num_cached_tokens} of {len(result.prompt_token_ids)}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
