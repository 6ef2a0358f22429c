//! Activations as the kernel reads them: normed or gated, rounded, on cache lines of their own, and filled up to whole
//! blocks.

use std::ops::Range;

use super::Rows;
use super::lanes::{self, Lanes, Sink, load};
use super::linear::{Input, LinearOptions, Precision};
use super::norm::norm_row;
use super::silu::silu_mul_row;
use super::split::{self, Each};
use super::weight::BLOCK;
use crate::Result;
use crate::buffer::{self, Buffer, LINE};
use crate::simd::{Isa, Simd};

/// Rows of whole blocks of floats, or of bfloat16.
pub(super) struct Activations {
    base: *const u8,
    /// Bytes from a row to the next.
    stride: isize,
}

impl Activations {
    /// What is multiplied, `columns` elements a row: the rows themselves where they will do, else a copy in `scratch`, as
    /// bfloat16 if `narrow`.
    pub(super) fn new(
        isa: Isa,
        x: &Rows<'_>,
        columns: usize,
        options: &LinearOptions<'_>,
        narrow: bool,
        scratch: &mut Buffer,
    ) -> Result<Self> {
        let (base, stride, rows) = (x.start(), x.stride(), x.shape()[0]);
        let aligned = base.addr().is_multiple_of(LINE) && stride % LINE as isize == 0;
        let apart = !buffer::competes(stride.unsigned_abs());
        let as_it_is =
            matches!(options.input, Input::Plain) && options.precision == Precision::Float32;
        if as_it_is && columns.is_multiple_of(BLOCK) && (aligned && apart || rows == 1) {
            return Ok(Self { base, stride });
        }
        let bytes = columns.next_multiple_of(BLOCK) * if narrow { 2 } else { 4 };
        let words = buffer::stride(bytes) / 4;
        let to = scratch.floats(rows * words);
        let copy = Prepared {
            x,
            to,
            words,
            columns,
            input: options.input,
            round: options.precision == Precision::Bfloat16,
            narrow,
        };
        let threads = split::threads(x.shape(), options.num_threads)?;
        split::run(isa, rows, threads, &copy)?;
        Ok(Self {
            base: to.cast_const().cast(),
            stride: (4 * words) as isize,
        })
    }

    /// A row.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> *const u8 {
        self.base.wrapping_offset(row as isize * self.stride)
    }
}

/// The copy, as it is made.
struct Prepared<'a> {
    x: &'a Rows<'a>,
    to: *mut f32,
    words: usize,
    /// Elements of a row.
    columns: usize,
    input: Input<'a>,
    round: bool,
    narrow: bool,
}

// SAFETY: threads write distinct rows.
unsafe impl Sync for Prepared<'_> {}

impl Each for Prepared<'_> {
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, s: S, rows: Range<usize>) {
        let n = self.columns;
        for row in rows {
            // SAFETY: the row is there, and room for all of it, which is whole vectors of any instruction set.
            unsafe {
                let x = self.x.row(row);
                let out = Rounded {
                    to: self.to.add(row * self.words),
                    round: self.round,
                    narrow: self.narrow,
                };
                match self.input {
                    Input::Plain => lanes::each(s, n, &Copy { x, out }),
                    Input::Normed { weight, eps } => norm_row(s, n, x, weight.row(0), eps, out),
                    Input::Gated => silu_mul_row(s, n, x, out),
                }
                for i in (n.next_multiple_of(S::LANES)..n.next_multiple_of(BLOCK)).step_by(S::LANES)
                {
                    out.put(s, i, S::LANES, s.splat(0.0));
                }
            }
        }
    }
}

/// Elements as they are.
struct Copy<O> {
    x: *const f32,
    out: O,
}

impl<O: Sink> Lanes for Copy<O> {
    #[inline(always)]
    unsafe fn lanes<S: Simd>(&self, s: S, i: usize, lanes: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let x = load(s, self.x.add(i), lanes, 0.0);
            self.out.put(s, i, lanes, x);
        }
    }
}

/// A row of the copy: whole vectors, whatever lanes count.
#[derive(Clone, Copy)]
struct Rounded {
    to: *mut f32,
    round: bool,
    narrow: bool,
}

impl Sink for Rounded {
    #[inline(always)]
    unsafe fn put<S: Simd>(self, s: S, i: usize, _: usize, a: S::F32) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.narrow {
                s.store_bf16(self.to.cast(), i, a);
            } else if self.round {
                s.store(self.to.add(i), s.round_bf16(a));
            } else {
                s.store(self.to.add(i), a);
            }
        }
    }
}
