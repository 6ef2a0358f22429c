//! One work item: its rows and their queries, its tiles, a partition at a time through the kernel, and what becomes of
//! the results.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::simd::{Kernel, Simd};

use super::call::Call;
use super::format::Format;
use super::kernel::{MAX_ROWS, Partition, kernel_rows};
use super::merge::Record;
use super::plan::{Item, PARTITION, Unit, local, union};
use super::scratch::{Buffer, padded};
use super::tiles::Source;

/// Memory of one thread, kept from call to call.
#[derive(Default)]
struct Workspace {
    rows: Vec<Row>,
    row_tiles: Vec<RowTile>,
    query: Buffer,
    states: Buffer,
    parts: Buffer,
    scores: Buffer,
    keys: Buffer,
    values: Buffer,
}

thread_local! {
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

/// A row of the query: where it is, what it sees, where its result goes.
struct Row {
    query: *const f32,
    out: *mut f32,
    sees: Range<usize>,
    /// Its records, if several items cover it: the first for the partitions before `folded`, one for each later one.
    records: *mut f32,
    folded: usize,
}

/// Rows that go through the micro-kernel together, and where their packed queries begin.
struct RowTile {
    rows: Range<usize>,
    kernel_rows: usize,
    query: usize,
}

/// Claims and runs items until none is left. KV heads are outermost, so that what sequences share stays in the cache.
pub(super) fn run_items<S: Simd, F: Format>(s: S, call: &Call<'_>, next: &AtomicUsize) {
    let items = &call.schedule.items;
    WORKSPACE.with_borrow_mut(|w| {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= items.len() * call.plan.shape().num_kv_heads {
                return;
            }
            run_item::<S, F>(s, call, &items[i % items.len()], i / items.len(), w);
        }
    });
}

fn run_item<S: Simd, F: Format>(
    s: S,
    call: &Call<'_>,
    item: &Item,
    head: usize,
    w: &mut Workspace,
) {
    let dim = call.plan.shape().head_dim;
    let (steps, width) = (dim.div_ceil(F::STEP), padded(dim));
    gather_rows(call, item, head, &mut w.rows);
    let words = cut_rows::<S>(w.rows.len(), steps, &mut w.row_tiles);
    let query = w.query.floats(words).cast::<u32>();
    let states = w.states.floats(w.rows.len() * Record::floats(width));
    let parts = w.parts.floats(MAX_ROWS * Record::floats(width));
    let scores = w.scores.floats(MAX_ROWS * PARTITION);
    // SAFETY: the buffers were just made that large.
    unsafe {
        for tile in &w.row_tiles {
            pack_query::<F>(call, &w.rows, tile, steps, query.add(tile.query));
        }
        for i in 0..w.rows.len() {
            Record::at(states, width, i).clear();
        }
    }

    let sees = union(w.rows.iter().map(|row| &row.sees));
    let source = Source::<F>::new(call, item, head, sees, &mut w.keys, &mut w.values);
    for p in item.partitions.clone() {
        let tiles = source.tiles(s, p);
        if p == item.partitions.start {
            source.prefetch_first(s, &tiles);
        }
        for row_tile in &w.row_tiles {
            let rows = &w.rows[row_tile.rows.clone()];
            // SAFETY: query, states, parts and scores are the row tile's; `tiles` has all that its rows see; the
            // schedule gave each row a record for each partition that this item stores.
            unsafe {
                let partition = Partition {
                    query: query.add(row_tile.query),
                    steps,
                    tiles: &tiles,
                    sees: std::array::from_fn(|r| {
                        rows.get(r).map_or(0..0, |row| local(&row.sees, p))
                    }),
                    scores,
                    parts,
                    states: item
                        .leftmost
                        .then(|| Record::at(states, width, row_tile.rows.start)),
                    rows: rows.len(),
                    width,
                };
                partition.run::<S, F>(s, row_tile.kernel_rows);
                if !item.leftmost {
                    for (i, row) in rows.iter().enumerate() {
                        Record::at(row.records, width, 1 + p - row.folded)
                            .copy_from(Record::at(parts, width, i));
                    }
                }
            }
        }
    }

    let mut first = 0;
    for &u in &item.units {
        let unit = &call.schedule.units[u];
        let rows = &w.rows[first..][..unit.tokens.len() * call.plan.group()];
        // SAFETY: states has all of the item's rows; the unit's records are this item's until it counts itself as
        // finished, and the last one's afterwards.
        unsafe {
            let states = Record::at(states, width, first);
            finish_unit(s, call, item, head, unit, rows, states);
        }
        first += rows.len();
    }
}

/// The rows of an item: unit by unit, token by token, all query heads of the group.
fn gather_rows(call: &Call<'_>, item: &Item, head: usize, rows: &mut Vec<Row>) {
    let group = call.plan.group();
    let record = Record::floats(padded(call.plan.shape().head_dim));
    rows.clear();
    for &u in &item.units {
        let unit = &call.schedule.units[u];
        let sequence = &call.plan.sequences[unit.sequence];
        let first = rows.len();
        for i in unit.tokens.clone() {
            for g in 0..group {
                let (token, query_head) = (sequence.start + i, head * group + g);
                let index = head * call.schedule.records
                    + unit.records
                    + (rows.len() - first) * unit.slots();
                rows.push(Row {
                    // SAFETY: `attend` checked both shapes against the plan's.
                    query: unsafe { call.query.row(token, query_head) },
                    // SAFETY: as above.
                    out: unsafe { call.out.row(token, query_head) },
                    sees: sequence.visible(i, call.mask),
                    records: call.shared.records.wrapping_add(index * record),
                    folded: unit.folded,
                });
            }
        }
    }
}

/// Cuts rows into tiles for the micro-kernels that exist; returns the words that their packed queries take.
fn cut_rows<S: Simd>(rows: usize, steps: usize, tiles: &mut Vec<RowTile>) -> usize {
    let (mut start, mut words) = (0, 0);
    tiles.clear();
    while start < rows {
        let (n, kernel_rows) = kernel_rows::<S>(rows - start);
        tiles.push(RowTile {
            rows: start..start + n,
            kernel_rows,
            query: words,
        });
        words += kernel_rows * steps;
        start += n;
    }
    words
}

/// Packs the queries of a row tile as `[steps][kernel_rows]` words, scaled. Rows that do not exist are zero.
///
/// # Safety
/// `packed` has room for them.
unsafe fn pack_query<F: Format>(
    call: &Call<'_>,
    rows: &[Row],
    tile: &RowTile,
    steps: usize,
    packed: *mut u32,
) {
    let dim = call.plan.shape().head_dim;
    for r in 0..tile.kernel_rows {
        let row = rows[tile.rows.clone()].get(r);
        let get = |d: usize| match row {
            // SAFETY: the row has `head_dim` elements.
            Some(row) if d < dim => unsafe { row.query.add(d).read_unaligned() * call.scale },
            _ => 0.0,
        };
        for step in 0..steps {
            // SAFETY: the caller's promise.
            unsafe { *packed.add(step * tile.kernel_rows + r) = F::word(get, step) };
        }
    }
}

/// Writes a unit's rows if this item has all of them; else hands over what it has and, as the last one, folds all.
///
/// # Safety
/// `states` is the first of the unit's states, `rows` are its rows; see also [`Shared`].
unsafe fn finish_unit<S: Simd>(
    s: S,
    call: &Call<'_>,
    item: &Item,
    head: usize,
    unit: &Unit,
    rows: &[Row],
    states: Record,
) {
    let head_dim = call.plan.shape().head_dim;
    let finish = |states: Option<Record>, parts: usize| {
        s.vectorize(Finish {
            rows,
            states,
            parts,
            head_dim,
        });
    };
    if unit.items == 1 {
        return finish(Some(states), 0);
    }
    if item.leftmost {
        for (i, row) in rows.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { Record::at(row.records, padded(head_dim), 0).copy_from(states.next(i)) };
        }
    }
    let pending = &call.shared.pending[head * call.schedule.counters + unit.counter];
    if pending.fetch_sub(1, Ordering::AcqRel) == 1 {
        finish(None, unit.slots() - 1);
    }
}

/// Folds the stored parts of rows onto their states and writes the rows. Without `states`, they are the rows' first
/// records.
struct Finish<'a> {
    rows: &'a [Row],
    states: Option<Record>,
    parts: usize,
    head_dim: usize,
}

impl Kernel for Finish<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = padded(self.head_dim);
        for (i, row) in self.rows.iter().enumerate() {
            // SAFETY: `finish_unit` owns the states, the records and the rows of the output.
            unsafe {
                let record = |slot| Record::at(row.records, width, slot);
                let state = self
                    .states
                    .map_or_else(|| record(0), |states| states.next(i));
                for part in 0..self.parts {
                    state.fold(s, record(1 + part));
                }
                state.finish(s, row.out, self.head_dim);
            }
        }
    }
}
