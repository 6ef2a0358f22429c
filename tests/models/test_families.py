"""Every option of the family against logits that transformers computed, kept in ``references.npz``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from leafkv.models import load_model

from .paged import run
from .tiny import CONFIGS, REFERENCES, sequences, write_hf

CHUNKINGS = {"whole": [64], "chunked": [5, 11, 3], "prefill-then-decode": [12, 1]}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = load_model(write_hf(tmp_path / name, CONFIGS[name])).model
    with np.load(REFERENCES) as references:
        expected = [references[f"{name}/{i}"] for i in range(2)]
    for chunks in CHUNKINGS.values():
        for logits, reference in zip(run(model, sequences(), chunks), expected, strict=True):
            np.testing.assert_allclose(logits, reference, rtol=2e-5, atol=2e-5)


def test_only_wanted_rows_are_computed(tmp_path: Path) -> None:
    from leafkv.models import Batch  # noqa: PLC0415

    from .paged import NumpyCache, NumpyPlan  # noqa: PLC0415

    model = load_model(write_hf(tmp_path / "m", CONFIGS["llama"])).model
    tokens = sequences()[0][:6]
    every = run(model, [tokens], [6])[0]
    steps = np.arange(6)
    plan = NumpyPlan([np.arange(2)], [6], [6])
    batch = Batch(np.array(tokens, np.int32), steps, steps, plan, logit_rows=np.array([4, 1]))
    wanted = model.forward(batch, NumpyCache(model.config))
    np.testing.assert_allclose(wanted, every[[4, 1]], rtol=1e-5, atol=1e-6)
    assert wanted.dtype == np.float32
    batch.logit_rows = np.array([], dtype=np.int64)
    assert model.forward(batch, NumpyCache(model.config)).shape == (0, 64)
