//! The gated activation of a Llama-like decoder (SwiGLU, Shazeer 2020).

use std::ops::Range;

use super::lanes::{self, Lanes, Sink, load};
use super::split::{self, Each};
use super::{Rows, RowsMut};
use crate::simd::{Isa, Simd, exp};
use crate::{Error, Result};

/// From here down e^x is 0 in float32.
const LEAST: f32 = -104.0;

/// `silu(gate) * up` of each row, where silu x = x / (1 + e^-x). The first half of a row is gate, the second up.
///
/// silu is -0 at minus infinity, NaN at NaN.
///
/// # Errors
/// Shapes do not match, or this CPU lacks `isa`. Nothing is then written.
pub fn silu_mul(
    isa: Isa,
    gate_up: &Rows<'_>,
    out: &mut RowsMut<'_>,
    num_threads: Option<usize>,
) -> Result<()> {
    let [rows, columns] = gate_up.shape();
    if !columns.is_multiple_of(2) {
        return Err(Error::invalid(
            "gate_up",
            format!("got {columns} columns, expected as many of gate as of up"),
        ));
    }
    out.expect("out", [rows, columns / 2])?;
    let threads = split::threads(gate_up.shape(), num_threads)?;
    let gate_up = *gate_up;
    split::run(isa, rows, threads, &SiluMul { gate_up, out })
}

struct SiluMul<'a> {
    gate_up: Rows<'a>,
    out: &'a RowsMut<'a>,
}

impl Each for SiluMul<'_> {
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, s: S, rows: Range<usize>) {
        let [_, n] = self.out.shape();
        for row in rows {
            // SAFETY: the row is there, by the caller's promise: n elements of gate, of up and of the result.
            unsafe {
                silu_mul_row(s, n, self.gate_up.row(row), self.out.row(row));
            }
        }
    }
}

/// `n` elements of gate and, behind them, as many of up.
///
/// # Safety
/// They are there, and there is room for `n`.
#[inline(always)]
pub(super) unsafe fn silu_mul_row<S: Simd>(s: S, n: usize, gate: *const f32, out: impl Sink) {
    // SAFETY: the caller's promise.
    unsafe {
        let up = gate.add(n);
        lanes::each(s, n, &SwiGlu { gate, up, out });
    }
}

/// `silu(gate) * up`.
struct SwiGlu<O> {
    gate: *const f32,
    up: *const f32,
    out: O,
}

impl<O: Sink> Lanes for SwiGlu<O> {
    #[inline(always)]
    unsafe fn lanes<S: Simd>(&self, s: S, i: usize, lanes: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let gate = load(s, self.gate.add(i), lanes, 0.0);
            let up = load(s, self.up.add(i), lanes, 0.0);
            self.out.put(s, i, lanes, s.mul(silu(s, gate), up));
        }
    }
}

/// `x / (1 + e^-x)`, by way of e^-|x|, which cannot overflow.
#[inline(always)]
fn silu<S: Simd>(s: S, x: S::F32) -> S::F32 {
    // Minus infinity times 0 would be NaN. In this order, NaN stays NaN.
    let x = s.max(s.splat(LEAST), x);
    let e = exp(s, s.select_below(x, 0.0, x, s.sub(s.splat(0.0), x)));
    let one = s.splat(1.0);
    let numerator = s.mul(x, s.select_below(x, 0.0, e, one));
    s.div(numerator, s.add(one, e))
}
