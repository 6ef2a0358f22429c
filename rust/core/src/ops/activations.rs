//! Activations as the kernel reads them: on cache lines of their own, rounded, and filled up to whole blocks.

use std::ops::Range;

use super::linear::Precision;
use super::split::{self, Each};
use super::weight::BLOCK;
use super::{Rows, lanes};
use crate::Result;
use crate::buffer::{Buffer, LINE};
use crate::simd::{Isa, Simd};

/// Rows of whole blocks of floats, or of bfloat16.
pub(super) struct Activations {
    base: *const u8,
    /// Bytes from a row to the next.
    stride: isize,
}

impl Activations {
    /// The rows themselves where they will do, else a copy in `scratch`; as bfloat16 if `narrow`.
    pub(super) fn new(
        isa: Isa,
        x: &Rows<'_>,
        precision: Precision,
        narrow: bool,
        threads: usize,
        scratch: &mut Buffer,
    ) -> Result<Self> {
        let [rows, columns] = x.shape();
        let (base, stride) = (x.start(), x.stride());
        let aligned = base.addr().is_multiple_of(LINE) && stride % LINE as isize == 0;
        let whole = columns.is_multiple_of(BLOCK);
        if precision == Precision::Float32 && whole && (aligned || rows == 1) {
            return Ok(Self { base, stride });
        }
        let words = columns.next_multiple_of(BLOCK) / if narrow { 2 } else { 1 };
        // Whole cache lines a row: blocks of bfloat16 are just that.
        let to = scratch.floats(rows * words);
        let copy = Rounded {
            x,
            to: to.cast(),
            words,
            round: precision == Precision::Bfloat16,
            narrow,
        };
        let threads = split::threads(x.shape(), Some(threads))?;
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
struct Rounded<'a> {
    x: &'a Rows<'a>,
    to: *mut u32,
    words: usize,
    round: bool,
    narrow: bool,
}

// SAFETY: threads write distinct rows.
unsafe impl Sync for Rounded<'_> {}

impl Each for Rounded<'_> {
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, s: S, rows: Range<usize>) {
        let [_, columns] = self.x.shape();
        for row in rows {
            // SAFETY: the row is there, and room for all of it, which is whole vectors of any instruction set.
            unsafe {
                let (from, to) = (self.x.row(row), self.to.add(row * self.words));
                for i in (0..columns.next_multiple_of(BLOCK)).step_by(S::LANES) {
                    let lanes = columns.saturating_sub(i).min(S::LANES);
                    let a = lanes::load(s, from.wrapping_add(i), lanes, 0.0);
                    if self.narrow {
                        s.store_bf16(to, i, a);
                    } else if self.round {
                        s.store(to.add(i).cast(), s.round_bf16(a));
                    } else {
                        s.store(to.add(i).cast(), a);
                    }
                }
            }
        }
    }
}
