"""`leafkv generate` and `leafkv chat`: a model in the terminal, streamed."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from leafkv import LLM, SamplingParams
from leafkv.cli.terminal import Timings, load_with_progress, stream_text
from leafkv.errors import LeafKVError

if TYPE_CHECKING:
    from leafkv.engine.outputs import RequestOutput

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Language models on a CPU, over a paged KV cache.",
)
# Text goes to stdout, all else to stderr, so that the output can be piped.
notes = Console(stderr=True, highlight=False)

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A .gguf file or a Hugging Face directory [default: the embedded model]"),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to generate at most")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 picks the likeliest token")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling: the likeliest tokens of this total probability")]
TopK = Annotated[int, typer.Option(help="Only the k likeliest tokens; 0 is all")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable")]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads to use [default: all]")]
Blocks = Annotated[int | None, typer.Option("--num-blocks", help="Size of the KV cache [default: from free memory]")]
Dtype = Annotated[str, typer.Option(help="Of the arithmetic: float32, bfloat16 or auto, which is float32")]
Quantization = Annotated[
    str | None,
    typer.Option(help="Quantize float weights at load: q8_0, q4_0 or q4_1 [default: weights as the file has them]"),
]
KVDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="float32, float16, bfloat16, int8 or auto")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input")],
    model: Model = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    threads: Threads = None,
    num_blocks: Blocks = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVDtype = "auto",
) -> None:
    """Continue a text."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    if prompt == "-":
        prompt = sys.stdin.read() if sys.stdin else ""  # None: closed
    loaded = load_with_progress(model, notes, dtype=dtype, quantization=quantization)
    llm = LLM(loaded, num_threads=threads, num_blocks=num_blocks, kv_cache_dtype=kv_cache_dtype)
    result, timings = stream_text(llm, prompt, params)
    _summarize(result, timings)


@app.command()
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="System message")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    threads: Threads = None,
    num_blocks: Blocks = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVDtype = "auto",
) -> None:
    """Talk with a model. Each turn finds the turns before it in the prefix cache."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    loaded = load_with_progress(model, notes, dtype=dtype, quantization=quantization)
    llm = LLM(loaded, num_threads=threads, num_blocks=num_blocks, kv_cache_dtype=kv_cache_dtype)
    messages = [{"role": "system", "content": system}] if system else []
    notes.print("Write a message. Ctrl-C stops an answer, Ctrl-D ends the chat.", style="dim")
    while (message := _ask()) is not None:
        if not message.strip():
            continue
        turn = [*messages, {"role": "user", "content": message}]
        try:
            result, timings = stream_text(llm, turn, params)
        except KeyboardInterrupt:
            notes.print("\n(stopped)", style="dim")
            continue
        except LeafKVError as error:  # this turn does not fit, say: the chat goes on
            notes.print(f"leafkv: {error}", style="red", markup=False)
            continue
        messages = [*turn, {"role": "assistant", "content": result.outputs[0].text}]
        _summarize(result, timings)


def run() -> None:
    """Run the command line; LeafKV's own errors end it with their message, not with a traceback."""
    # Bytes that are no text are refused with the prompt; characters that the terminal does not know become "?".
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        app()
    except LeafKVError as error:
        sys.exit(f"leafkv: {error}")


def _ask() -> str | None:
    """One line from the user; None at the end of input."""
    try:
        notes.print("\n> ", style="bold green", end="")
        return input()
    except (EOFError, KeyboardInterrupt):
        notes.print()
        return None


def _summarize(result: RequestOutput, timings: Timings) -> None:
    prompt = len(result.prompt_token_ids)
    notes.print(
        f"[{prompt} prompt tokens, {result.num_cached_tokens} from the prefix cache; "
        f"first token after {timings.first_token * 1e3:.0f} ms, then {timings.tokens_per_second:.1f} tokens/s]",
        style="dim",
        markup=False,
    )
