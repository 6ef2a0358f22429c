"""What transformers computes, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def logits_of(directory: Path, sequences: list[list[int]]) -> list[NDArray[np.float32]]:
    """Logits [len(sequence), vocab_size] of each sequence by the model in ``directory``, which must fit exactly."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0].numpy() for tokens in sequences]
