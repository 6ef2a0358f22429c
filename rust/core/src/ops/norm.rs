//! Root mean square normalisation (Zhang and Sennrich 2019).

use std::ops::Range;

use super::lanes::{self, Lanes, Sink, load};
use super::split::{self, Each};
use super::{Rows, RowsMut};
use crate::simd::{Isa, Simd};
use crate::{Error, Result};

/// Sums that are added up side by side, so that their latency does not matter.
const SUMS: usize = 4;

/// `x / sqrt(mean(x^2) + eps) * weight` of each row; `weight` is one row. `out` may be the very array `x`.
///
/// The squares of a row are added up in float32, in one order for all rows of a length.
///
/// # Errors
/// Shapes do not match, `eps` is no finite number above 0, or this CPU lacks `isa`. Nothing is then written.
pub fn rms_norm(
    isa: Isa,
    x: &Rows<'_>,
    weight: &Rows<'_>,
    eps: f32,
    out: &mut RowsMut<'_>,
    num_threads: Option<usize>,
) -> Result<()> {
    let [rows, columns] = x.shape();
    expect_row("weight", weight, columns)?;
    expect_eps(eps)?;
    out.expect("out", x.shape())?;
    let threads = split::threads(x.shape(), num_threads)?;
    let (x, weight) = (*x, *weight);
    split::run(
        isa,
        rows,
        threads,
        &Norm {
            x,
            weight,
            eps,
            out,
        },
    )
}

/// # Errors
/// These are not one row of `n` elements.
pub(super) fn expect_row(argument: &'static str, rows: &Rows<'_>, n: usize) -> Result<()> {
    match rows.shape() {
        [1, came] if came != n => Err(Error::invalid(
            argument,
            format!("got {came} elements, expected {n}"),
        )),
        _ => rows.expect(argument, [1, n]),
    }
}

/// # Errors
/// A row of zeros would become one of NaN.
pub(super) fn expect_eps(eps: f32) -> Result<()> {
    match eps > 0.0 && eps.is_finite() {
        true => Ok(()),
        false => Err(Error::invalid(
            "eps",
            format!("got {eps} in float32, expected a finite number greater than 0"),
        )),
    }
}

struct Norm<'a> {
    x: Rows<'a>,
    weight: Rows<'a>,
    eps: f32,
    out: &'a RowsMut<'a>,
}

impl Each for Norm<'_> {
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, s: S, rows: Range<usize>) {
        let [_, n] = self.x.shape();
        for row in rows {
            // SAFETY: the row is there, by the caller's promise, and as long as the weight and the result.
            unsafe {
                let (x, weight) = (self.x.row(row), self.weight.row(0));
                norm_row(s, n, x, weight, self.eps, self.out.row(row));
            }
        }
    }
}

/// A row of `n` elements, normalised.
///
/// # Safety
/// `x` and `weight` have so many, and there is room for them.
#[inline(always)]
pub(super) unsafe fn norm_row<S: Simd>(
    s: S,
    n: usize,
    x: *const f32,
    weight: *const f32,
    eps: f32,
    out: impl Sink,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let scaled = Scaled {
            x,
            scale: scale(s, x, n, eps),
            weight,
            out,
        };
        lanes::each(s, n, &scaled);
    }
}

/// `x * scale * weight`.
struct Scaled<O> {
    x: *const f32,
    scale: f32,
    weight: *const f32,
    out: O,
}

impl<O: Sink> Lanes for Scaled<O> {
    #[inline(always)]
    unsafe fn lanes<S: Simd>(&self, s: S, i: usize, lanes: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let x = s.mul(load(s, self.x.add(i), lanes, 0.0), s.splat(self.scale));
            let y = s.mul(x, load(s, self.weight.add(i), lanes, 0.0));
            self.out.put(s, i, lanes, y);
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
///
/// # Safety
/// There are `n` floats.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no iterator may see a vector, see `Kernel`
pub(super) unsafe fn scale<S: Simd>(s: S, x: *const f32, n: usize, eps: f32) -> f32 {
    let mut sums = [s.splat(0.0); SUMS];
    let whole = n - n % (SUMS * S::LANES);
    // SAFETY: the caller's promise.
    unsafe {
        for first in (0..whole).step_by(SUMS * S::LANES) {
            for j in 0..SUMS {
                let x = s.load(x.add(first + j * S::LANES));
                sums[j] = s.fma(x, x, sums[j]);
            }
        }
        for j in 0..SUMS {
            let first = whole + j * S::LANES;
            if first < n {
                let x = load(s, x.add(first), S::LANES.min(n - first), 0.0);
                sums[j] = s.fma(x, x, sums[j]);
            }
        }
    }
    let sum = s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3]));
    1.0 / (s.sum(sum) / n as f32 + eps).sqrt()
}
