"""Every option of the family against transformers itself, from directories that transformers wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from leafkv.models import load_model

from .paged import run
from .tiny import CONFIGS, sequences, write_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # other people's


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    from .torch_reference import logits_of  # noqa: PLC0415

    ours = write_hf(tmp_path / "ours", CONFIGS[name])
    theirs = tmp_path / "theirs"
    model = transformers.AutoModelForCausalLM.from_pretrained(ours, dtype=getattr(torch, dtype))
    model.save_pretrained(theirs, max_shard_size="20kB")  # config.json in its newest spelling, and shards
    (theirs / "tokenizer.json").write_bytes((ours / "tokenizer.json").read_bytes())
    assert (theirs / "model.safetensors.index.json").exists()

    loaded = load_model(theirs).model
    expected = logits_of(theirs, sequences())
    for chunks in ([64], [7, 13, 5], [12, 1]):
        for logits, reference in zip(run(loaded, sequences(), chunks), expected, strict=True):
            np.testing.assert_allclose(logits, reference, rtol=2e-5, atol=2e-5)
