"""Loading models for ``backend="transformers"``, and every face of the engine over it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from leafkv import LLM, AsyncEngine, InvalidInputError, JournalError, ModelLoadError, SamplingParams  # noqa: E402
from leafkv.cli.app import app  # noqa: E402
from leafkv.models import LoadedModel, load_model  # noqa: E402

from ..models.tiny import CONFIGS, write_hf  # noqa: E402
from .models import tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # other people's
OPTIONS: dict[str, Any] = {"backend": "transformers", "num_blocks": 64, "num_threads": 1}
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXT = "w5 w9 w33 w2 w60"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", CONFIGS["llama"])


@pytest.fixture(scope="module")
def expected(directory: Path) -> tuple[list[int], str]:
    """What our own code gives."""
    answer = LLM(directory, num_blocks=64).generate([TEXT], SHORT)[0].outputs[0]
    return answer.token_ids, answer.text


def test_a_directory_gives_what_our_own_code_gives(directory: Path, expected: tuple[list[int], str]) -> None:
    llm = LLM(directory, **OPTIONS)
    (output,) = llm.generate([TEXT], SHORT)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == expected
    assert llm.cache.dtype == "float32"
    assert LLM(directory, **OPTIONS, dtype="bfloat16").cache.dtype == "bfloat16"


def test_the_asynchronous_face_and_the_command_line(
    directory: Path, expected: tuple[list[int], str], capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> Any:
        async with AsyncEngine(directory, **OPTIONS) as engine:
            outputs = [output async for output in engine.generate(TEXT, SHORT)]
        return outputs[-1].outputs[0].token_ids

    assert asyncio.run(run()) == expected[0]
    command = ["generate", TEXT, "-n", "12", "--num-blocks", "64", "--threads", "1", "-m", str(directory)]
    app([*command, "--backend", "transformers", "--device", "cpu"], standalone_mode=False)
    shown = capsys.readouterr().out.strip()
    assert shown  # it heeds the end token
    assert expected[1].startswith(shown)
    with pytest.raises(InvalidInputError, match="device: expected a device"):
        app([*command, "--backend", "transformers", "--device", "nowhere"], standalone_mode=False)


def test_a_model_that_is_taken_over_goes_on_to_compute_in_transformers() -> None:
    ids = torch.tensor([[5, 9, 33, 2, 60]])
    model = tiny("mistral").train()
    before = tiny("mistral").generate(ids, max_new_tokens=12, do_sample=False)[0, 5:].tolist()
    llm = LLM(model, **OPTIONS)
    assert llm.get_tokenizer() is None
    (output,) = llm.generate(ids.tolist(), SHORT)
    assert output.outputs[0].token_ids == before
    assert not model.training
    assert model.generate(ids, max_new_tokens=12, do_sample=False)[0, 5:].tolist() == before


def test_end_tokens_are_those_of_generation() -> None:
    model = tiny("llama")
    prompt = [5, 9, 33, 2, 60]
    (free,) = LLM(model, **OPTIONS).generate([prompt], SHORT)
    end = free.outputs[0].token_ids[4]
    model.generation_config.eos_token_id = [3, end, 1 << 20]  # not all are of this vocabulary
    (output,) = LLM(model, **OPTIONS).generate([prompt], SamplingParams(temperature=0.0, max_tokens=12))
    first = free.outputs[0].token_ids.index(end) + 1
    assert output.outputs[0].token_ids == free.outputs[0].token_ids[:first]
    assert output.outputs[0].finish_reason == "stop"


def test_tokenizers_of_any_kind_may_be_given(directory: Path, expected: tuple[list[int], str], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        eos_token="w7",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )
    for given in (directory, str(directory), fast, load_model(directory).tokenizer):
        llm = LLM(model, **OPTIONS, tokenizer=given)
        (output,) = llm.generate([TEXT], SHORT)
        assert (output.outputs[0].token_ids, output.outputs[0].text) == expected
    llm = LLM(model, **OPTIONS, tokenizer=fast)
    assert 7 in llm.engine._eos_token_ids
    (output,) = llm.chat([{"role": "user", "content": TEXT}], SHORT)
    assert output.outputs[0].token_ids == expected[0]
    with pytest.raises(InvalidInputError, match="tokenizer: expected one of the tokenizers library"):
        LLM(model, **OPTIONS, tokenizer=object())
    with pytest.raises(ModelLoadError, match="tokenizer: no tokenizer in"):
        LLM(model, **OPTIONS, tokenizer=tmp_path)


def test_a_journal_goes_on_with_the_backend_that_wrote_it(directory: Path, tmp_path: Path) -> None:
    (whole,) = LLM(directory, **OPTIONS).generate([TEXT], SHORT)
    with LLM(directory, **OPTIONS, journal=tmp_path / "journal") as llm:
        stream = llm.stream(TEXT, SHORT)
        assert len(next(stream).outputs[0].token_ids) == 1
        assert llm.checkpoint() == 1
    with pytest.raises(JournalError, match="backend"):
        LLM.resume(tmp_path / "journal", directory, num_blocks=64)
    with LLM.resume(tmp_path / "journal", directory, **OPTIONS) as llm:
        (output,) = llm.collect()
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids


def test_what_cannot_be_loaded_is_named(directory: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        target = tmp_path / name
        target.mkdir()
        for file in directory.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return target

    weights = copy("weights")
    state = transformers.AutoModelForCausalLM.from_pretrained(directory).state_dict()
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file(
        {name: value for name, value in state.items() if "layers.1.mlp.up" not in name}, weights / "model.safetensors"
    )
    config = copy("config")
    (config / "config.json").write_text("{")
    strange = copy("strange")
    (strange / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    cut = copy("cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:500])
    for source, message in [
        (weights, "weights are missing: model.layers.1.mlp.up_proj.weight"),
        (config, "cannot be loaded by transformers"),
        (strange, "unheard_of"),
        (cut, "cannot be loaded by transformers"),
        (tmp_path / "nowhere", "expected a directory.*: it is not there"),
        (None, r"\.gguf: expected a directory, as transformers writes it.*: it is a file"),
    ]:
        with pytest.raises(ModelLoadError, match=message):
            LLM(source, **OPTIONS)


def test_what_contradicts_a_loaded_model_is_refused_by_name(directory: Path) -> None:
    model = tiny("llama")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "bfloat16"}, "dtype: expected auto or float32, as the model was loaded, got 'bfloat16'"),
        ({"device": "meta"}, "device: expected"),
        ({"device": "nowhere"}, "device: expected a device such as 'cpu' or 'cuda:0', got 'nowhere'"),
    ]
    for options, message in refused:
        with pytest.raises(InvalidInputError, match=message):
            LLM(model, **OPTIONS, **options)
    with pytest.raises(InvalidInputError, match="needs backend='transformers'"):
        LLM(model)
    with pytest.raises(InvalidInputError, match="model: expected a directory or a model of transformers"):
        LLM(3, **OPTIONS)
    with pytest.raises(ModelLoadError, match=r"dtype: expected one of float32, bfloat16, float16, got torch\.float64"):
        LLM(tiny("llama", dtype=torch.float64), **OPTIONS)
    ours: LoadedModel = load_model(directory)
    with pytest.raises(InvalidInputError, match="backend: expected auto or leafkv, as the model was loaded"):
        LLM(ours, **OPTIONS)
