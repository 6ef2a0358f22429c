//! Rows of a matrix of weights as float32: what tokens are to a model.

use std::ops::Range;

use super::RowsMut;
use super::product::{self, Float32, Widen};
use super::split::{self, Each};
use super::weight::{Weight, WeightKind};
use crate::simd::{Isa, Simd};
use crate::{Error, Result};

/// Row `ids[t]` of `weight` to row t of `out`: what it stands for, exactly.
///
/// # Errors
/// Shapes do not match, there is no such row, or this CPU lacks `isa`. The output is then untouched.
pub fn embed(
    isa: Isa,
    weight: &Weight<'_>,
    ids: &[u32],
    out: &mut RowsMut<'_>,
    num_threads: Option<usize>,
) -> Result<()> {
    let [rows, columns] = weight.shape();
    out.expect("out", [ids.len(), columns])?;
    if let Some(t) = ids.iter().position(|&id| id as usize >= rows) {
        let problem = format!("item {t} is {}, expected less than {rows}", ids[t]);
        return Err(Error::invalid("token_ids", problem));
    }
    let threads = split::threads([ids.len(), columns], num_threads)?;
    split::run(isa, ids.len(), threads, &Embed { weight, ids, out })
}

struct Embed<'a> {
    weight: &'a Weight<'a>,
    ids: &'a [u32],
    out: &'a RowsMut<'a>,
}

impl Each for Embed<'_> {
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, s: S, rows: Range<usize>) {
        for t in rows {
            let (part, row) = self.weight.row(self.ids[t] as usize);
            let columns = self.weight.shape()[1];
            // SAFETY: the row is there, as was checked, and row t of the output is this thread's.
            unsafe {
                let out = self.out.row(t);
                match part.kind {
                    WeightKind::F32 => widen::<S, product::F32>(s, row, columns, out),
                    WeightKind::F16 => widen::<S, product::F16>(s, row, columns, out),
                    WeightKind::Bf16 => widen::<S, product::Bf16>(s, row, columns, out),
                    WeightKind::Q8_0 => widen::<S, product::Q8_0>(s, row, columns, out),
                    WeightKind::Q4_0 => widen::<S, product::Q4_0>(s, row, columns, out),
                    WeightKind::Q4_1 => widen::<S, product::Q4_1>(s, row, columns, out),
                }
            }
        }
    }
}

/// # Safety
/// A row of so many columns at `row`, and room for them at `out`.
#[inline(always)]
unsafe fn widen<S: Simd, W: Widen>(s: S, row: *const u8, columns: usize, out: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { product::make_row_plain::<S, Float32<W>>(s, row, columns, out.cast()) };
}
