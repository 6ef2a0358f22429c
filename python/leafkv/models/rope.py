"""Rotary position embedding (RoPE, https://arxiv.org/abs/2104.09864) and its context extensions.

Pair i of a head's dimensions turns by ``position * f_i``, where ``f_i = theta ** (-2 i / head_dim)``. A scaling
replaces the frequencies, and may multiply cos and sin by an attention factor. Pairs are
``(i, i + head_dim / 2)``: the half-rotation convention, in which weights are kept in memory whatever the file's
convention was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RopeScaling(Protocol):
    """A change of the frequencies that extends the context a model was trained on."""

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin."""

    def scale(self, frequencies: NDArray[np.float64], theta: float) -> NDArray[np.float64]:
        """The frequencies [head_dim / 2] to use in place of the plain ones."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (https://arxiv.org/abs/2306.15595): frequencies over ``factor``."""

    factor: float

    @property
    def attention_factor(self) -> float:
        """Always 1."""
        return 1.0

    def scale(self, frequencies: NDArray[np.float64], theta: float) -> NDArray[np.float64]:  # noqa: ARG002
        """Frequencies over the factor."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths are interpolated, short ones kept, those between blended.

    With w = original_max_position_embeddings * f / 2 pi, the turns of a pair in the original context:
    f if w > high_freq_factor; f / factor if w < low_freq_factor; else (1 - s) f / factor + s f, where
    s = (w - low_freq_factor) / (high_freq_factor - low_freq_factor).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @property
    def attention_factor(self) -> float:
        """Always 1."""
        return 1.0

    def scale(self, frequencies: NDArray[np.float64], theta: float) -> NDArray[np.float64]:  # noqa: ARG002
        """The blend above: s is clipped to [0, 1], which covers all three cases."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp over dimensions from kept to interpolated frequencies.

    The pair that makes r turns in the original context is
    d(r) = head_dim * ln(original / (2 pi r)) / (2 ln theta). Pairs below d(beta_fast) keep f, those above
    d(beta_slow) take f / factor, and those between blend linearly in the pair's index.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Round the ends of the ramp outwards to whole pairs."""

    def scale(self, frequencies: NDArray[np.float64], theta: float) -> NDArray[np.float64]:
        """The blend above."""
        head_dim = 2 * len(frequencies)

        def pair_of(turns: float) -> float:
            wavelength_ratio = self.original_max_position_embeddings / (2 * math.pi * turns)
            return head_dim * math.log(wavelength_ratio) / (2 * math.log(theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        ramp = np.clip((np.arange(len(frequencies)) - low) / width, 0.0, 1.0)
        scaled: NDArray[np.float64] = ramp * frequencies / self.factor + (1 - ramp) * frequencies
        return scaled


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """A divisor per frequency, as GGUF files store Llama 3.1's scaling (tensor ``rope_freqs.weight``)."""

    factors: tuple[float, ...]

    @property
    def attention_factor(self) -> float:
        """Always 1."""
        return 1.0

    def scale(self, frequencies: NDArray[np.float64], theta: float) -> NDArray[np.float64]:  # noqa: ARG002
        """Frequencies over their factors."""
        return frequencies / np.asarray(self.factors, dtype=np.float64)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's recommendation, 0.1 * mscale * ln(factor) + 1, for an extension (1 for factors up to 1)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class Rope:
    """Cosines and sines of a model's rotation angles."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if scaling is not None:
            frequencies = scaling.scale(frequencies, theta)
        self.frequencies = frequencies.astype(np.float32)
        self.attention_factor = np.float32(1.0 if scaling is None else scaling.attention_factor)

    def tables(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines for ``positions`` [T], each [T, 1, head_dim / 2], ready to broadcast over heads.

        Computed per step rather than looked up: a step's few thousand cosines cost less than the memory of a
        table over a context of 128k tokens.
        """
        # In float32, as the models were trained: float64 angles would be others at large positions.
        angles = positions.astype(np.float32)[:, None, None] * self.frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        if self.attention_factor != 1:
            cos *= self.attention_factor
            sin *= self.attention_factor
        return cos, sin
