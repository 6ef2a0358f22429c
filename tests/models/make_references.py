"""Make ``tests/data/models/references.npz``: logits of the tiny models, computed by transformers in float32.

Needs torch and transformers. Run in ``tests``: ``python -m models.make_references``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from .tiny import CONFIGS, REFERENCES, sequences, write_hf
from .torch_reference import logits_of


def main() -> None:
    """Write the file."""
    arrays = {}
    for name, raw in CONFIGS.items():
        with tempfile.TemporaryDirectory() as directory:
            write_hf(Path(directory), raw)
            for i, logits in enumerate(logits_of(Path(directory), sequences())):
                arrays[f"{name}/{i}"] = logits
    REFERENCES.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(REFERENCES, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
