//! The query rows of an item: where each is, what it sees, where its result goes; and their queries, packed for the
//! micro-kernel.

use std::ops::Range;

use crate::simd::Simd;

use super::call::Call;
use super::format::{Format, Parts, max_query};
use super::kernel::kernel_rows;
use super::merge::Record;
use super::plan::Item;
use super::scratch::padded;

/// A row of the query.
pub(super) struct Row {
    query: *const f32,
    pub(super) out: *mut f32,
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

/// The rows of an item: unit by unit, token by token, all query heads of the group.
pub(super) fn gather_rows(call: &Call<'_>, item: &Item, head: usize, rows: &mut Vec<Row>) {
    let group = call.plan.group();
    let heads = call.plan.shape().num_heads;
    let record = Record::floats(padded(call.plan.shape().head_dim));
    rows.clear();
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

/// Cuts rows into tiles for the micro-kernels that exist; returns the words that their packed queries take, `words` a
/// row.
pub(super) fn cut_rows<S: Simd>(rows: usize, words: usize, tiles: &mut Vec<RowTile>) -> usize {
    let (mut start, mut total) = (0, 0);
    tiles.clear();
    while start < rows {
        let (n, kernel_rows) = kernel_rows::<S>(rows - start);
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

/// Packs the queries of a row tile, scaled, as `[steps][parts][kernel_rows]` words. Rows that do not exist are zero.
///
/// # Safety
/// `packed` has room for them.
#[inline(always)]
pub(super) unsafe fn pack_query<S: Simd, F: Format>(
    call: &Call<'_>,
    rows: &mut [Row],
    tile: &RowTile,
    packed: *mut u32,
) {
    let dim = call.plan.shape().head_dim;
    let (steps, parts) = (dim.div_ceil(F::STEP), Parts::<S, F>::COUNT);
    let rows = &mut rows[tile.rows.clone()];
    for r in 0..tile.kernel_rows {
        let Some(row) = rows.get_mut(r) else {
            for i in 0..steps * parts {
                // SAFETY: the caller's promise.
                unsafe { *packed.add(i * tile.kernel_rows + r) = 0 };
            }
            continue;
        };
        let query = row.query;
        // SAFETY: the row has `head_dim` elements.
        let element = |d: usize| unsafe { query.add(d).read_unaligned() } * call.options.scale;
        let mut units = 1.0;
        if F::QUANTIZED {
            let largest = (0..dim).fold(0.0, |m: f32, d| m.max(element(d).abs()));
            // Infinity and NaN are not lost: 0 times either is NaN.
            let bad: f32 = (0..dim).map(|d| element(d) * 0.0).sum();
            let largest = largest.max(f32::MIN_POSITIVE * 1e6);
            units = max_query(dim) / largest;
            row.quantum = largest / max_query(dim) + bad;
        }
        let get = |d: usize| if d < dim { element(d) * units } else { 0.0 };
        for step in 0..steps {
            let words = F::words::<S>(get, step);
            for (part, word) in words[..parts].iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe { *packed.add((step * parts + part) * tile.kernel_rows + r) = *word };
            }
        }
    }
}
