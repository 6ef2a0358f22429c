"""The command line and the examples, run as a user runs them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leafkv import LLM, SamplingParams, StructuredOutputsParams

from .models.tiny import CONFIGS, write_gguf

ROOT = Path(__file__).resolve().parents[1]
LEAFKV = Path(sys.executable).parent / "leafkv"


def run(*command: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], input=stdin, capture_output=True, text=True, check=False)


def test_generate_writes_the_text_alone_to_stdout() -> None:
    done = run(LEAFKV, "generate", "The capital of France is", "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == " Paris.\n\nThe\n"
    assert "5 prompt tokens, 0 from the prefix cache" in done.stderr


def test_generate_reads_standard_input() -> None:
    done = run(LEAFKV, "generate", "-", "-n", "1", stdin="The capital of France is")
    assert done.stdout == " Paris\n", done.stderr


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=64)


SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 8}},
    "required": ["word"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("options", "params"),
    [
        (("--stop", "green", "--stop", "cakes,"), {"stop": ["green", "cakes,"]}),
        (("--json-schema", "FILE"), {"structured_outputs": StructuredOutputsParams(json=SCHEMA)}),
        (("--regex", "[A-Z][a-z]{4}"), {"structured_outputs": StructuredOutputsParams(regex="[A-Z][a-z]{4}")}),
        (("--repetition-penalty", "1.5"), {"repetition_penalty": 1.5}),
        (("--presence-penalty", "2"), {"presence_penalty": 2.0}),
        (("--frequency-penalty", "2"), {"frequency_penalty": 2.0}),
        (("--speculate", "4"), {}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_options_of_an_answer(options: tuple[str, ...], params: dict[str, Any], llm: LLM, tmp_path: Path) -> None:
    """They do what the parameters of the same name do, in both commands."""
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    options = tuple(str(tmp_path / "schema.json") if option == "FILE" else option for option in options)
    prompt = "Say it again: red cakes, green tea, red cakes, green tea, red cakes, green tea, red"
    limits: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
    messages: Any = [{"role": "user", "content": prompt}]
    for command, asked in ((("generate", prompt), prompt), (("chat",), messages)):
        (expected,) = llm.generate(asked, SamplingParams(**limits, **params), use_tqdm=False)
        (plain,) = llm.generate(asked, SamplingParams(**limits), use_tqdm=False)
        assert (expected.outputs[0].text != plain.outputs[0].text) == bool(params), "the case shows nothing"
        done = run(LEAFKV, *command, "-t", "0", "-n", "24", "--top-p", "1", "--num-blocks", "64", *options,
                   stdin=prompt + "\n")  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected.outputs[0].text + "\n"
        assert ("guesses right" in done.stderr) == (not params)


def test_help_shows_every_default() -> None:
    """Also those that are no value: of square brackets in a help text, rich makes nothing."""
    for command in ("generate", "chat"):
        done = run(LEAFKV, command, "--help")
        assert done.returncode == 0, done.stderr
        text = " ".join(done.stdout.replace("\u2502", " ").split())
        for default in ("the embedded model", "from free memory", "weights as the file has them", "no guesses"):
            assert f"[default: ({default})]" in text


def test_dtype_and_quantization(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", CONFIGS["llama"] | {"intermediate_size": 64})
    for options, said in (
        (("--quantization", "q8_0"), "weights q8_0"),
        (("--dtype", "bfloat16"), "arithmetic in bfloat16"),
    ):
        generate = ("generate", "AB", "-n", "3", "--num-blocks", "8", "--model", model, *options)
        chat = ("chat", "-t", "0", "-n", "3", "--num-blocks", "64", "--model", model, *options)
        for command in (generate, chat):
            done = run(LEAFKV, *command, stdin="")
            assert done.returncode == 0, done.stderr
            assert said in " ".join(done.stderr.split())


def test_chat_finds_its_earlier_turns_in_the_cache() -> None:
    turns = "What is the capital of France?\n\nAnd of Spain?\n"
    done = run(LEAFKV, "chat", "-t", "0", "-n", "16", "--num-blocks", "64", stdin=turns)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    counts = [line for line in done.stderr.splitlines() if "from the prefix cache" in line]
    assert len(counts) == 2, done.stderr  # the empty line is no turn
    assert ", 0 from" in counts[0]
    assert ", 0 from" not in counts[1]


def test_a_turn_that_does_not_fit_leaves_the_chat_going() -> None:
    turns = "word " * 400 + "\nWhat is the capital of France?\n"
    done = run(LEAFKV, "chat", "-t", "0", "-n", "16", "--num-blocks", "8", stdin=turns)
    assert done.returncode == 0, done.stderr
    assert "leafkv: " in done.stderr
    assert "Paris" in done.stdout


def test_input_that_is_no_text_and_output_that_the_terminal_does_not_know() -> None:
    """Both in the strictest environment: no traceback, and a chat goes on."""
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([str(LEAFKV), "generate", "-"], input=b"caf\xe9", env=env, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"leafkv: prompt: not valid Unicode text" in b" ".join(done.stderr.split())
    chat = [str(LEAFKV), "chat", "-t", "0", "-n", "1"]
    done = subprocess.run(chat, input=b"caf\xe9\nHello\n", env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b" prompt tokens, " in done.stderr

    env = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    text = ["generate", "\u65e5\u672c\u8a9e \u65e5\u672c\u8a9e \u65e5\u672c", "-n", "4"]
    done = subprocess.run([str(LEAFKV), *text], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "x", "--model", "no/such.gguf"), "no/such.gguf"),
        (("generate", "x", "--max-tokens", "0"), "max_tokens"),
        (("generate", "x", "--temperature", "nan"), "temperature"),
        (("generate", ""), "prompt"),
        (("generate", "x", "--kv-cache-dtype", "int3"), "int3"),
        (("generate", "x", "--dtype", "float16"), "dtype: expected one of auto, float32, bfloat16, got 'float16'"),
        (("chat", "--quantization", "int4"), "quantization: expected None or one of q8_0, q4_0, q4_1, got 'int4'"),
        (("chat", "--quantization", "q4_0"), "already quantized"),
        (("generate", "x", "--stop", ""), "stop: expected strings of at least one character"),
        (("chat", "--json-schema", "no/such.json"), "--json-schema: no/such.json cannot be read"),
        (("generate", "x", "--json-schema", sys.executable), "--json-schema: "),
        (("generate", "x", "--json-schema", str(ROOT / "README.md")), "expected a JSON schema"),
        (("generate", "x", "--regex", "["), "invalid regex"),
        (("chat", "--json-schema", str(ROOT / "README.md"), "--regex", "a"), "expected one of json, regex and choice"),
        (("chat", "--speculate", "0"), "num_speculative_tokens: expected an integer >= 1, got 0"),
    ],
)
def test_errors_are_one_line_without_a_traceback(arguments: tuple[str, ...], message: str) -> None:
    done = run(LEAFKV, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


WITHOUT_GUIDED = """
import sys
sys.modules["llguidance"] = None
from leafkv.cli import main
main()
"""


def test_a_form_names_the_extra_it_needs() -> None:
    done = run(sys.executable, "-c", WITHOUT_GUIDED, "generate", "AB", "-n", "2", "--num-blocks", "8", "--regex", "a+")
    assert done.returncode == 1
    assert "pip install 'leafkv[guided]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_without_the_extra_guided_all_else_works() -> None:
    done = run(sys.executable, "-c", WITHOUT_GUIDED, "generate", "The capital of France is", "-n", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == " Paris.\n\nThe\n"


EXAMPLES_SAY = {
    "async_stream": ("' Berlin'", "tokens in"),
    "cache_mirror": ("worker 0 has reused a prefix",),
    "demo": ("tokens in the", "time to first token"),
    "guided_json": ("Anna, 34, Oslo",),
    "torch_attention": ("largest difference 0.0",),
    "hf_engine": ("144 of 816 tokens of the prompts were computed",),
    "hf_generate": ("0 of 110 tokens were found", "100 of 110 tokens were found"),
    "resume": ("Killed after 6 tokens.", "24 tokens in the end, as in a process that nobody kills"),
}


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example(example: Path) -> None:
    if "import torch" in example.read_text():
        pytest.importorskip("torch")
    done = run(sys.executable, "-W", "error", example)
    assert done.returncode == 0, done.stderr
    for text in EXAMPLES_SAY[example.stem]:
        assert text in " ".join(done.stdout.split()), done.stdout
    if example.stem == "async_stream":
        pieces = (line.split(maxsplit=1) for line in done.stdout.splitlines())
        answer = "".join(ast.literal_eval(text) for country, text in pieces if country == "France")
        assert answer.startswith(" Paris.\n\nThe answer is:")
