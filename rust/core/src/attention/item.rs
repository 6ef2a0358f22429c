//! One work item: its rows and their queries, its tiles, a partition at a time through the kernel, and what becomes of
//! the results.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::simd::{Kernel, Simd};

use super::call::Call;
use super::format::{Format, Matrix};
use super::kernel::{MAX_ROWS, Partition, SCORES};
use super::matrix;
use super::merge::Record;
use super::plan::{Item, Unit};
use super::rows::{PackQuery, Row, RowTile, cut_rows, gather_rows, query_words};
use super::scratch::{Buffer, padded};
use super::tiles::{Source, TileBuffers};

/// Memory of one thread, kept from call to call.
#[derive(Default)]
struct Workspace {
    rows: Vec<Row>,
    row_tiles: Vec<RowTile>,
    row: Buffer,
    row_words: Buffer,
    query: Buffer,
    states: Buffer,
    parts: Buffer,
    scores: Buffer,
    spare: Buffer,
    tiles: TileBuffers,
}

thread_local! {
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

/// An item, for one KV head.
#[derive(Clone, Copy)]
struct Job<'a> {
    item: &'a Item,
    head: usize,
}

/// Claims and runs items until none is left. KV heads are outermost, so that what sequences share stays in the cache.
pub(super) fn run_items<S: Simd, F: Format>(s: S, call: &Call<'_>, next: &AtomicUsize) {
    let items = &call.schedule.items;
    let claim = || {
        let i = next.fetch_add(1, Ordering::Relaxed);
        (i < items.len() * call.plan.shape().num_kv_heads).then(|| Job {
            item: &items[i % items.len()],
            head: i / items.len(),
        })
    };
    WORKSPACE.with_borrow_mut(|w| {
        let mut job = claim();
        if let Some(Job { item, head }) = job {
            Source::<F>::new(call, item, head).prefetch(s, item.partitions.start);
        }
        while let Some(current) = job {
            job = run_item::<S, F>(s, call, current, claim, w);
        }
    });
}

/// Runs an item; returns the next one, which `claim` gives when its memory is worth asking for.
fn run_item<'a, S: Simd, F: Format>(
    s: S,
    call: &'a Call<'a>,
    Job { item, head }: Job<'a>,
    claim: impl FnOnce() -> Option<Job<'a>>,
    w: &mut Workspace,
) -> Option<Job<'a>> {
    let dim = call.plan.shape().head_dim;
    let (steps, width) = (dim.div_ceil(F::STEP), padded(dim));
    gather_rows(call, item, head, &mut w.rows);
    let row_words = query_words::<S, F>(dim);
    let words = cut_rows::<S, F>(w.rows.len(), row_words, &mut w.row_tiles);
    let query = w.query.floats(words).cast::<u32>();
    let states = w.states.floats(w.rows.len() * Record::floats(width));
    let parts = w.parts.floats(MAX_ROWS * Record::floats(width));
    let scores = w.scores.floats(MAX_ROWS * SCORES);
    let row = w.row.floats(width);
    let row_words = w.row_words.floats(width.max(row_words)).cast();
    let spare = if Matrix::<S, F>::USED {
        w.spare.floats(matrix::spare_floats(width))
    } else {
        std::ptr::null_mut()
    };
    for tile in &w.row_tiles {
        s.vectorize(PackQuery::<F> {
            scale: call.options.scale,
            head_dim: dim,
            rows: &mut w.rows[tile.rows.clone()],
            kernel_rows: tile.kernel_rows,
            row,
            words: row_words,
            packed: query.wrapping_add(tile.query),
            format: PhantomData,
        });
    }
    for i in 0..w.rows.len() {
        // SAFETY: the buffer was just made that large.
        unsafe { Record::at(states, width, i).clear() };
    }

    let source = Source::<F>::new(call, item, head);
    let (mut claim, mut upcoming) = (Some(claim), None);
    for p in item.partitions.clone() {
        if p + 1 == item.partitions.end {
            upcoming = claim.take().and_then(|claim| claim());
        }
        let next = upcoming.map(|job| Source::new(call, job.item, job.head));
        let mut tiles = source.tiles(s, p, next.as_ref(), &mut w.tiles);
        for row_tile in &w.row_tiles {
            let rows = &w.rows[row_tile.rows.clone()];
            // SAFETY: query, states, parts and scores are the row tile's; `tiles` has all that its rows see; the
            // schedule gave each row a record for each partition that this item stores.
            unsafe {
                let partition = Partition {
                    options: &call.options,
                    index: p,
                    rows,
                    query: query.add(row_tile.query),
                    steps,
                    tiles: &tiles,
                    scores,
                    parts,
                    spare,
                    states: item
                        .leftmost
                        .then(|| Record::at(states, width, row_tile.rows.start)),
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
            tiles.prefetched();
        }
    }
    if let Some(claim) = claim {
        // Rows that see nothing have no partitions.
        upcoming = claim();
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
    upcoming
}

/// Writes a unit's rows if this item has all of them; else hands over what it has and, as the last one, folds all.
///
/// # Safety
/// `states` is the first of the unit's states, `rows` are its rows; see also [`Shared`](super::scratch::Shared).
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
                state.finish(s, row.sink, row.out, row.lse, self.head_dim);
            }
        }
    }
}
