"""`leafkv generate` and `leafkv chat`: a model in the terminal, streamed."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from leafkv import LLM, SamplingParams, StructuredOutputsParams
from leafkv.cli.terminal import Timings, load_with_progress, stream_text
from leafkv.errors import InvalidInputError, LeafKVError
from leafkv.models.backend import LoadOptions

if TYPE_CHECKING:
    from leafkv.engine.outputs import RequestOutput
    from leafkv.models.backend import Loaded

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
    typer.Option("--model", "-m", help="A .gguf file or a Hugging Face directory", show_default="the embedded model"),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to generate at most")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 picks the likeliest token")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling: the likeliest tokens of this total probability")]
TopK = Annotated[int, typer.Option(help="Only the k likeliest tokens; 0 is all")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: tokens of the prompt and the answer are less likely")]
PresencePenalty = Annotated[float, typer.Option(help="Above 0: tokens of the answer are less likely")]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, once for each time that a token came")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times")]
JsonSchema = Annotated[
    Path | None,
    typer.Option("--json-schema", help="A file with a JSON schema that the answer follows; needs the extra guided"),
]
Regex = Annotated[str | None, typer.Option(help="A regular expression that the answer matches; needs the extra guided")]
Speculate = Annotated[
    int | None,
    typer.Option(help="Guess so many tokens from the text before and check them at once", show_default="no guesses"),
]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads to use", show_default="all")]
Blocks = Annotated[
    int | None, typer.Option("--num-blocks", help="Size of the KV cache", show_default="from free memory")
]
Dtype = Annotated[
    str, typer.Option(help="Of the arithmetic: float32, bfloat16 or auto (see LLM); float16 with backend transformers")
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Quantize float weights at load: q8_0, q4_0 or q4_1", show_default="weights as the file has them"
    ),
]
Backend = Annotated[str, typer.Option(help="Whose code computes the model: leafkv, which auto is too, or transformers")]
Device = Annotated[str, typer.Option(help="auto, cpu, or with backend transformers a GPU, such as cuda:0")]
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
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    speculate: Speculate = None,
    threads: Threads = None,
    num_blocks: Blocks = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVDtype = "auto",
    backend: Backend = "auto",
    device: Device = "auto",
) -> None:
    """Continue a text."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop,
        structured_outputs=_form(json_schema, regex),
    )
    if prompt == "-":
        prompt = sys.stdin.read() if sys.stdin else ""  # None: closed
    loaded = load_with_progress(model, notes, LoadOptions(dtype, quantization, backend, device))
    llm = _engine(loaded, threads, num_blocks, kv_cache_dtype, speculate)
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
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    speculate: Speculate = None,
    threads: Threads = None,
    num_blocks: Blocks = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVDtype = "auto",
    backend: Backend = "auto",
    device: Device = "auto",
) -> None:
    """Talk with a model. Each turn finds the turns before it in the prefix cache."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop,
        structured_outputs=_form(json_schema, regex),
    )
    loaded = load_with_progress(model, notes, LoadOptions(dtype, quantization, backend, device))
    llm = _engine(loaded, threads, num_blocks, kv_cache_dtype, speculate)
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


def _form(json_schema: Path | None, regex: str | None) -> StructuredOutputsParams | None:
    """What the answer has to look like, if that is said."""
    if json_schema is None and regex is None:
        return None
    schema = None
    if json_schema is not None:
        try:
            schema = json_schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"--json-schema: {json_schema} cannot be read: {error}") from error
    return StructuredOutputsParams(json=schema, regex=regex)


def _engine(
    loaded: Loaded, threads: int | None, num_blocks: int | None, kv_cache_dtype: str, speculate: int | None
) -> LLM:
    return LLM(
        loaded,
        num_threads=threads,
        num_blocks=num_blocks,
        kv_cache_dtype=kv_cache_dtype,
        speculative_config=None if speculate is None else {"num_speculative_tokens": speculate},
    )


def _ask() -> str | None:
    """One line from the user; None at the end of input."""
    try:
        notes.print("\n> ", style="bold green", end="")
        return input()
    except (EOFError, KeyboardInterrupt):
        notes.print()
        return None


def _summarize(result: RequestOutput, timings: Timings) -> None:
    prompt, metrics = len(result.prompt_token_ids), result.metrics
    guesses = f"; {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} guesses right"
    notes.print(
        f"[{prompt} prompt tokens, {result.num_cached_tokens} from the prefix cache; "
        f"first token after {timings.first_token * 1e3:.0f} ms, then {timings.tokens_per_second:.1f} tokens/s"
        f"{guesses if metrics.num_draft_tokens else ''}]",
        style="dim",
        markup=False,
    )
