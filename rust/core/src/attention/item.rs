//! One work item, for one KV head or some: its rows and their queries, its tiles, a partition at a time through the kernel,
//! and what becomes of the results.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::buffer::Buffer;
use crate::simd::{Kernel, Simd};

use super::call::Call;
use super::float::FloatDtype;
use super::format::{Format, Matrix};
use super::kernel::{MAX_ROWS, Partition, SCORES, places};
use super::matrix;
use super::merge::Record;
use super::plan::{Item, Unit};
use super::rows::{PackQuery, Row, RowTile, cut_rows, gather_rows, query_words};
use super::scratch::padded;
use super::tiles::{Source, TileBuffers};

/// How many rows ahead those of the output are asked for.
const OUT_AHEAD: usize = 8;

/// KV heads that a job takes at most.
const MAX_HEADS: usize = 4;

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
    /// Tiles to prefetch.
    ahead: Vec<*const u8>,
}

thread_local! {
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

/// An item, for some KV heads.
struct Job<'a> {
    item: &'a Item,
    heads: Range<usize>,
}

impl<'a> Job<'a> {
    /// The `i`-th job of a call, of `heads` heads each. Heads are outermost, so that what sequences share stays in the
    /// cache.
    fn nth(call: &Call<'a>, i: usize, heads: usize) -> Option<Self> {
        let items = &call.schedule.items;
        let first = i.checked_div(items.len())? * heads;
        (first < call.plan.shape().num_kv_heads).then(|| Self {
            item: &items[i % items.len()],
            heads: first..first + heads,
        })
    }

    /// How many heads a job takes: several of an int8 cache, in which the scales of a block's heads are neighbours.
    /// (Others gain nothing by it.)
    fn heads<F: Format>(call: &Call<'_>) -> usize {
        let all = call.plan.shape().num_kv_heads;
        let most = if F::QUANTIZED {
            MAX_HEADS.min(call.schedule.most_heads)
        } else {
            1
        };
        (1..=most)
            .rev()
            .find(|n| all.is_multiple_of(*n))
            .unwrap_or(1)
    }
}

/// Claims and runs jobs until none is left.
pub(super) fn run_items<S: Simd, F: Format>(s: S, call: &Call<'_>, next: &AtomicUsize) {
    let heads = Job::heads::<F>(call);
    let claim = || Job::nth(call, next.fetch_add(1, Ordering::Relaxed), heads);
    WORKSPACE.with_borrow_mut(|w| {
        let mut job = claim();
        if let Some(Job { item, heads }) = &job {
            let source = Source::new(call, item);
            w.ahead.clear();
            source.list(s, item.partitions.start, heads.clone(), &mut w.ahead);
            source.prefetch(s, &w.ahead);
        }
        while let Some(current) = job {
            job = run_item::<S, F>(s, call, &current, claim, w);
        }
    });
}

/// Runs a job; returns the next one, which `claim` gives when its memory is worth asking for.
fn run_item<'a, S: Simd, F: Format>(
    s: S,
    call: &'a Call<'a>,
    job: &Job<'a>,
    claim: impl FnOnce() -> Option<Job<'a>>,
    w: &mut Workspace,
) -> Option<Job<'a>> {
    let Job { item, heads } = job;
    let dim = call.plan.shape().head_dim;
    let (steps, width) = (dim.div_ceil(F::STEP), padded(dim));
    w.rows.clear();
    for head in heads.clone() {
        gather_rows(call, item, head, &mut w.rows);
    }
    // Of each head.
    let num_rows = w.rows.len() / heads.len();
    let row_words = query_words::<S, F>(dim);
    let words = cut_rows::<S, F>(num_rows, row_words, &mut w.row_tiles);
    let query = w.query.floats(heads.len() * words).cast::<u32>();
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
    // Rows of different tokens lie far apart: without this, each would be waited for.
    for row in &w.rows {
        s.prefetch_run(row.query, dim * call.query.dtype().size());
    }
    for h in 0..heads.len() {
        for tile in &w.row_tiles {
            s.vectorize(PackQuery::<F> {
                scale: call.options.scale,
                head_dim: dim,
                dtype: call.query.dtype(),
                rows: &mut w.rows[h * num_rows..][tile.rows.clone()],
                kernel_rows: tile.kernel_rows,
                row,
                words: row_words,
                packed: query.wrapping_add(h * words + tile.query),
                format: PhantomData,
            });
        }
    }
    for i in 0..w.rows.len() {
        // SAFETY: the buffer was just made that large.
        unsafe { Record::at(states, width, i).clear() };
    }

    let source = Source::new(call, item);
    let places = places::<S, F>(&w.row_tiles, width);
    let (mut claim, mut upcoming) = (Some(claim), None);
    for p in item.partitions.clone() {
        w.ahead.clear();
        if p + 1 < item.partitions.end {
            source.list(s, p + 1, heads.clone(), &mut w.ahead);
        } else {
            upcoming = claim.take().and_then(|claim| claim());
            if let Some(Job { item, heads }) = &upcoming {
                let first = item.partitions.start;
                Source::new(call, item).list(s, first, heads.clone(), &mut w.ahead);
            }
        }
        // Each head asks for as many tiles as it has.
        let mut asks = w.ahead.chunks((2 * source.count(p)).max(1));
        for (h, head) in heads.clone().enumerate() {
            let ahead = asks.next().unwrap_or(&[]);
            let mut tiles = source.tiles::<S, F>(p, head, ahead, places, &mut w.tiles);
            for row_tile in &w.row_tiles {
                let rows = &w.rows[h * num_rows..][row_tile.rows.clone()];
                // SAFETY: query, states, parts and scores are the row tile's; `tiles` has all that its rows see; the
                // schedule gave each row a record for each partition that this item stores.
                unsafe {
                    let first = h * num_rows + row_tile.rows.start;
                    let partition = Partition {
                        options: &call.options,
                        index: p,
                        rows,
                        query: query.add(h * words + row_tile.query),
                        steps,
                        tiles: &tiles,
                        scores,
                        parts,
                        spare,
                        states: item.leftmost.then(|| Record::at(states, width, first)),
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
    }
    if let Some(claim) = claim {
        // Rows that see nothing have no partitions.
        upcoming = claim();
    }

    let mut first = 0;
    for (head, &u) in heads
        .clone()
        .flat_map(|h| item.units.iter().map(move |u| (h, u)))
    {
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
            dtype: call.out.dtype(),
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
    /// Of the output.
    dtype: FloatDtype,
}

impl Kernel for Finish<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = padded(self.head_dim);
        for (i, row) in self.rows.iter().enumerate() {
            if let Some(Row { out, .. }) = self.rows.get(i + OUT_AHEAD) {
                s.prefetch_run(*out, self.head_dim * self.dtype.size());
            }
            // SAFETY: `finish_unit` owns the states, the records and the rows of the output.
            unsafe {
                let record = |slot| Record::at(row.records, width, slot);
                let state = self
                    .states
                    .map_or_else(|| record(0), |states| states.next(i));
                for part in 0..self.parts {
                    state.fold(s, record(1 + part));
                }
                // Nobody needs the state afterwards.
                let wide = self.dtype.wide(row.out, state.output());
                state.finish(s, row.sink, wide, row.lse, self.head_dim);
                self.dtype.narrow(s, wide, self.head_dim, row.out);
            }
        }
    }
}
