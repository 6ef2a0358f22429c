"""The operations of a Llama-like decoder on float32 rows. Each row's result comes from that row alone.

Models call nothing but these, numpy indexing and the paged cache: this file is the seam where faster
implementations go in. ``out`` arrays let a step reuse its buffers from layer to layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]


def linear(x: F32, weight: F32, bias: F32 | None = None, out: F32 | None = None) -> F32:
    """``x`` [T, in] times ``weight`` [out, in] transposed, plus ``bias`` [out]: [T, out]."""
    result: F32 = np.matmul(x, weight.T, out=out)
    if bias is not None:
        result += bias
    return result


def rms_norm(x: F32, weight: F32, eps: float, out: F32 | None = None) -> F32:
    """Root mean square normalisation of the last axis, times ``weight``."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    mean_square += np.float32(eps)
    result: F32 = np.divide(x, np.sqrt(mean_square, out=mean_square), out=out)
    result *= weight
    return result


def silu_mul(gate_up: F32, out: F32 | None = None) -> F32:
    """silu(gate) * up, where ``gate_up`` [T, 2 n] holds gate and up side by side: [T, n]."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :half], gate_up[:, half:]
    result: F32 = np.negative(gate, out=out)
    with np.errstate(over="ignore"):  # exp(-gate) = inf is right: the quotient is zero
        np.exp(result, out=result)
    result += 1
    np.divide(gate, result, out=result)
    result *= up
    return result


def rotate(x: F32, cos: F32, sin: F32, out: F32) -> F32:
    """Turn the pairs ``(i, i + head_dim / 2)`` of ``x`` [T, heads, head_dim]; see `Rope.tables`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    np.multiply(first, cos, out=out[..., :half])
    out[..., :half] -= second * sin
    np.multiply(second, cos, out=out[..., half:])
    out[..., half:] += first * sin
    return out
