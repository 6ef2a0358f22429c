//! The query rows of an item: where each is, what it sees, where its result goes; and their queries, packed for the
//! micro-kernel.

use std::marker::PhantomData;
use std::ops::Range;

use crate::simd::{Kernel, MATRIX_ROWS, Simd};

use super::call::Call;
use super::float::FloatDtype;
use super::format::{Format, Matrix, Parts, max_query, quantum};
use super::kernel::kernel_rows;
use super::matrix;
use super::merge::Record;
use super::plan::Item;
use super::scratch::padded;

/// A row of the query.
pub(super) struct Row {
    pub(super) query: *const u8,
    pub(super) out: *mut u8,
    /// Where its log-sum-exp goes, or null.
    pub(super) lse: *mut f32,
    /// Positions that it sees, and its own.
    pub(super) sees: Range<usize>,
    pub(super) position: isize,
    /// Its records, if several items cover it: the first for the partitions before `folded`, one for each later one.
    pub(super) records: *mut f32,
    pub(super) folded: usize,
    pub(super) alibi_slope: f32,
    pub(super) sink: f32,
    /// What one unit of its quantized query stands for, the scale included.
    pub(super) quantum: f32,
}

/// Rows that go through the micro-kernel together, and where their packed queries begin.
pub(super) struct RowTile {
    pub(super) rows: Range<usize>,
    pub(super) kernel_rows: usize,
    pub(super) query: usize,
}

/// Appends the rows of an item and KV head: unit by unit, token by token, all query heads of the group.
pub(super) fn gather_rows(call: &Call<'_>, item: &Item, head: usize, rows: &mut Vec<Row>) {
    let group = call.plan.group();
    let heads = call.plan.shape().num_heads;
    let record = Record::floats(padded(call.plan.shape().head_dim));
    for &u in &item.units {
        let unit = &call.schedule.units[u];
        let sequence = &call.plan.sequences[unit.sequence];
        let first = rows.len();
        for i in unit.tokens.clone() {
            let sees = sequence.visible(i, call.mask);
            for g in 0..group {
                let (token, query_head) = (sequence.start + i, head * group + g);
                let index = head * call.schedule.records
                    + unit.records
                    + (rows.len() - first) * unit.slots();
                let per_head =
                    |values: Option<&[f32]>, none| values.map_or(none, |v| v[query_head]);
                rows.push(Row {
                    // SAFETY: `attend` checked both shapes against the plan's.
                    query: unsafe { call.query.row(token, query_head) },
                    // SAFETY: as above.
                    out: unsafe { call.out.row(token, query_head) },
                    lse: if call.lse.is_null() {
                        call.lse
                    } else {
                        call.lse.wrapping_add(token * heads + query_head)
                    },
                    sees: sees.clone(),
                    position: (sequence.kv_len + i) as isize - sequence.rows as isize,
                    records: call.shared.records.wrapping_add(index * record),
                    folded: unit.folded,
                    alibi_slope: per_head(call.options.alibi_slopes, 0.0),
                    sink: per_head(call.options.sinks, f32::NEG_INFINITY),
                    quantum: 1.0,
                });
            }
        }
    }
}

/// Words that a row's packed query takes.
pub(super) fn query_words<S: Simd, F: Format>(head_dim: usize) -> usize {
    if Matrix::<S, F>::USED {
        return matrix::query_words(head_dim);
    }
    head_dim.div_ceil(F::STEP) * Parts::<S, F>::COUNT
}

/// Cuts rows into tiles for the micro-kernels that exist; returns the words that their packed queries take, `words` a
/// row.
pub(super) fn cut_rows<S: Simd, F: Format>(
    rows: usize,
    words: usize,
    tiles: &mut Vec<RowTile>,
) -> usize {
    let (mut start, mut total) = (0, 0);
    tiles.clear();
    while start < rows {
        let (n, kernel_rows) = kernel_rows::<S, F>(rows - start);
        tiles.push(RowTile {
            rows: start..start + n,
            kernel_rows,
            query: total,
        });
        total += kernel_rows * words;
        start += n;
    }
    total
}

/// Packs the queries of a row tile, scaled, as `[steps][parts][kernel_rows]` words, or as a matrix unit wants them:
/// for each 16 rows `[steps / 16][16][16]`. Rows that do not exist are zero, or on a matrix unit anything.
pub(super) struct PackQuery<'a, F> {
    pub(super) scale: f32,
    pub(super) head_dim: usize,
    /// Of the queries.
    pub(super) dtype: FloatDtype,
    /// Rows of the tile, and how many its kernel has.
    pub(super) rows: &'a mut [Row],
    pub(super) kernel_rows: usize,
    /// A row of `padded(head_dim)` floats, and one of as many words, or of as many as a packed query has.
    pub(super) row: *mut f32,
    pub(super) words: *mut u32,
    pub(super) packed: *mut u32,
    pub(super) format: PhantomData<F>,
}

impl<F: Format> Kernel for PackQuery<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let words = query_words::<S, F>(self.head_dim);
        let width = padded(self.head_dim);
        for r in 0..self.kernel_rows {
            // SAFETY: the rows have `head_dim` elements, the buffers what the fields say.
            unsafe {
                if let Some(row) = self.rows.get(r) {
                    let query = self.dtype.widen(s, row.query, self.head_dim, self.row);
                    self.scale_row(s, query);
                    let mut units = 1.0;
                    if F::QUANTIZED {
                        (units, self.rows[r].quantum) = self.quantize(s);
                    }
                    for d in (0..width).step_by(S::LANES) {
                        let x = s.mul(s.load(self.row.add(d)), s.splat(units));
                        F::store_weights(s, self.words, d, x);
                    }
                } else if Matrix::<S, F>::USED {
                    // There each row is on its own.
                    return;
                } else {
                    self.words.write_bytes(0, words);
                }
                if Matrix::<S, F>::USED {
                    let filled = (width / F::STEP).min(words);
                    self.words.add(filled).write_bytes(0, words - filled);
                    self.place_lines(r, words);
                } else {
                    self.place_words(r, words);
                }
            }
        }
    }
}

impl<F> PackQuery<'_, F> {
    /// Row `r` as one of `[words][kernel_rows]`.
    #[inline(always)]
    unsafe fn place_words(&self, r: usize, words: usize) {
        let mut to = self.packed.wrapping_add(r);
        for i in 0..words {
            // SAFETY: inside the row and the packed query.
            unsafe { *to = *self.words.add(i) };
            to = to.wrapping_add(self.kernel_rows);
        }
    }

    /// Row `r` as one of `[words / 16][16][16]`, for each 16 rows.
    #[inline(always)]
    unsafe fn place_lines(&self, r: usize, words: usize) {
        let (group, row) = (r / MATRIX_ROWS * words, r % MATRIX_ROWS);
        for line in (0..words).step_by(MATRIX_ROWS) {
            // SAFETY: inside the row and the packed query.
            unsafe {
                let to = self.packed.add((group + line + row) * MATRIX_ROWS);
                to.copy_from_nonoverlapping(self.words.add(line), MATRIX_ROWS);
            }
        }
    }

    /// Scales a query into the row, where it may lie already, and pads it with zeros.
    #[inline(always)]
    unsafe fn scale_row<S: Simd>(&self, s: S, query: *const f32) {
        let whole = self.head_dim / S::LANES * S::LANES;
        let mut bad = s.splat(0.0);
        // SAFETY: inside the query and the row.
        unsafe {
            for d in (0..whole).step_by(S::LANES) {
                let x = s.mul(s.load(query.add(d)), s.splat(self.scale));
                bad = s.fma(x, s.splat(0.0), bad);
                s.store(self.row.add(d), x);
            }
            for d in whole..padded(self.head_dim) {
                *self.row.add(d) = if d < self.head_dim {
                    query.add(d).read_unaligned() * self.scale
                } else {
                    0.0
                };
            }
            if whole < self.head_dim || s.sum(bad).is_nan() {
                for d in 0..self.head_dim {
                    // One kind of NaN, which no rounding turns into a number.
                    let x = &mut *self.row.add(d);
                    *x = if x.is_nan() { f32::NAN } else { *x };
                }
            }
        }
    }

    /// How many units there are in 1 of the row's elements, and what one stands for.
    #[inline(always)]
    unsafe fn quantize<S: Simd>(&self, s: S) -> (f32, f32) {
        let zero = s.splat(0.0);
        let (mut largest, mut bad) = (zero, zero);
        for d in (0..padded(self.head_dim)).step_by(S::LANES) {
            // SAFETY: inside the row.
            let x = unsafe { s.load(self.row.add(d)) };
            largest = s.max(largest, s.max(x, s.sub(zero, x)));
            bad = s.fma(x, zero, bad);
        }
        quantum(s.maximum(largest), max_query(self.head_dim), s.sum(bad))
    }
}
