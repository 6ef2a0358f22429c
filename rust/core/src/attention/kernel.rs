//! One work item: scores, weights and values of all its rows, a partition at a time.
//!
//! The rows of an item are cut into *tiles of rows*, each of which goes through a partition in three passes:
//! 1. scores: per (row, token) one chain over head_dim, ascending, vectorized across tokens;
//! 2. weights: the row's maximum, `exp(score - maximum)`, and their sum in fixed lanes;
//! 3. values: per (row, dimension) one chain over exactly the visible tokens, ascending, from +0.
//!
//! All are independent of the other rows, so a row's bits are too: `R` rows and `V` (or `C`) vectors in flight only
//! say how many chains run at once. A hidden slot may hold NaN: its score is replaced before anyone looks, and its
//! value is never multiplied, because "times weight 0" would not help (0 * NaN, and fma(0, v, -0)). The tokens that
//! all rows of a tile see run in an unmasked loop; the few others, on the diagonal or at a window's edge, row by row.

#![allow(clippy::needless_range_loop)] // indices name rows and vectors of several arrays at once

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::simd::{Kernel, MAX_LANES, Simd, exp};

use super::format::Format;
use super::layout::{KvLayer, KvLayout, Side, TILE, Vectors, VectorsMut};
use super::merge::Record;
use super::pack;
use super::plan::{Item, Mask, PARTITION, Plan, Schedule, Unit};

/// Tiles in a partition.
const TILES: usize = PARTITION / TILE;

/// How far ahead of its use KV is asked for, in bytes. Far enough for memory's latency at full bandwidth.
const PREFETCH_BYTES: usize = 16 * 1024;
const MAX_AHEAD: usize = TILES;

/// One call of attention: what every item needs.
pub(super) struct Call<'a> {
    pub(super) plan: &'a Plan,
    pub(super) schedule: &'a Schedule,
    pub(super) mask: Mask,
    pub(super) scale: f32,
    pub(super) query: Vectors<'a>,
    pub(super) layer: KvLayer<'a>,
    pub(super) out: &'a VectorsMut<'a>,
    pub(super) scratch: Shared<'a>,
}

/// Memory of a call that its threads share: records of units that several items cover, and how many of those items
/// are unfinished.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    records: Buffer,
    pending: Vec<AtomicU32>,
}

impl Scratch {
    /// Makes ready for a call.
    pub(super) fn share(&mut self, plan: &Plan, schedule: &Schedule) -> Shared<'_> {
        let heads = plan.shape.num_kv_heads;
        let width = padded(plan.shape.head_dim);
        self.pending.clear();
        for _ in 0..heads {
            let shared = schedule.units.iter().filter(|u| u.items > 1);
            self.pending
                .extend(shared.map(|u| AtomicU32::new(u.items as u32)));
        }
        Shared {
            records: self
                .records
                .floats(heads * schedule.records * Record::floats(width)),
            pending: &self.pending,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    records: *mut f32,
    pending: &'a [AtomicU32],
}

// SAFETY: items write distinct records; a unit's are read by the thread that finds all of them counted as finished.
unsafe impl Sync for Shared<'_> {}

/// Floats of an output row in scratch: whole vectors under any instruction set.
const fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(MAX_LANES)
}

/// Zeroed memory on cache lines that grows on demand and keeps its address between growths.
#[derive(Debug, Default)]
struct Buffer(Vec<Line>);

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

impl Buffer {
    fn floats(&mut self, n: usize) -> *mut f32 {
        let lines = n.div_ceil(16);
        if self.0.len() < lines {
            // Nothing needs the old contents: free them before taking more.
            self.0 = Vec::new();
            self.0 = vec![Line([0.0; 16]); lines];
        }
        self.0.as_mut_ptr().cast()
    }
}

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

/// A query row and the keys it sees.
#[derive(Clone)]
struct Row {
    token: usize,
    head: usize,
    sees: Range<usize>,
}

/// Rows that go through the micro-kernel together.
#[derive(Clone)]
struct RowTile {
    rows: Range<usize>,
    /// Rows of the micro-kernel, at least as many.
    kernel_rows: usize,
    /// Where its packed queries begin, in words.
    query: usize,
}

/// Claims and runs items until none is left. KV heads are outermost, so that what sequences share stays in the cache.
pub(super) fn run_items<S: Simd, F: Format>(s: S, call: &Call<'_>, next: &AtomicUsize) {
    let items = &call.schedule.items;
    WORKSPACE.with_borrow_mut(|w| {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= items.len() * call.plan.shape.num_kv_heads {
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
    let dim = call.plan.shape.head_dim;
    let steps = dim.div_ceil(F::STEP);
    let width = padded(dim);
    gather_rows(call, item, head, &mut w.rows);
    let words = cut_rows::<S>(w.rows.len(), steps, &mut w.row_tiles);
    let query = w.query.floats(words).cast::<u32>();
    let states = w.states.floats(w.rows.len() * Record::floats(width));
    let parts = w.parts.floats(MAX_ROWS * Record::floats(width));
    let scores = w.scores.floats(MAX_ROWS * PARTITION);
    let (keys, values) = (&mut w.keys, &mut w.values);
    // SAFETY: the buffers were just made that large.
    unsafe {
        pack_query::<F>(call, &w.rows, &w.row_tiles, steps, query);
        for i in 0..w.rows.len() {
            Record::at(states, width, i).clear();
        }
    }

    let sees = union(w.rows.iter().map(|row| &row.sees));
    let mut source = Source::<F>::new(call, item, head, sees.clone(), keys, values);
    for p in item.partitions.clone() {
        let tiles = source.tiles(s, p);
        for rt in &w.row_tiles {
            let mut spans = [const { 0..0 }; MAX_ROWS];
            for (span, row) in spans.iter_mut().zip(&w.rows[rt.rows.clone()]) {
                *span = local(&row.sees, p);
            }
            // SAFETY: the query's words, the records and the scores are the tile of rows' own, `tiles` covers what the
            // rows see.
            unsafe {
                let part = Partition {
                    query: query.add(rt.query),
                    steps,
                    tiles: &tiles,
                    spans: &spans,
                    scores,
                    parts,
                    states: item
                        .leftmost
                        .then(|| Record::at(states, width, rt.rows.start).output()),
                    rows: rt.rows.len(),
                    width,
                };
                part.run::<S, F>(s, rt.kernel_rows);
            }
            if !item.leftmost {
                // SAFETY: this item alone writes these records.
                unsafe { store_parts(call, item, head, p, rt.rows.clone(), parts, width) };
            }
        }
    }

    let mut first = 0;
    for &u in &item.units {
        let unit = &call.schedule.units[u];
        let rows = first..first + unit.tokens.len() * call.plan.group();
        first = rows.end;
        // SAFETY: the records are this item's until it is counted as finished, and the merger's afterwards.
        unsafe {
            finish_unit(
                s,
                call,
                item,
                head,
                unit,
                &w.rows[rows.clone()],
                rows.start,
                states,
                width,
            );
        };
    }
}

/// The rows of an item: unit by unit, token by token, all query heads of the group.
fn gather_rows(call: &Call<'_>, item: &Item, head: usize, rows: &mut Vec<Row>) {
    let group = call.plan.group();
    rows.clear();
    for &u in &item.units {
        let unit = &call.schedule.units[u];
        let sequence = &call.plan.sequences[unit.sequence];
        for i in unit.tokens.clone() {
            rows.extend((0..group).map(|g| Row {
                token: sequence.start + i,
                head: head * group + g,
                sees: sequence.visible(i, call.mask),
            }));
        }
    }
}

/// Cuts rows into tiles for the micro-kernels that exist; returns the words that their packed queries take.
fn cut_rows<S: Simd>(rows: usize, steps: usize, tiles: &mut Vec<RowTile>) -> usize {
    let most = S::ACCUMULATORS / 2;
    let (mut start, mut words) = (0, 0);
    tiles.clear();
    while start < rows {
        let n = (rows - start).min(most);
        let kernel_rows = KERNEL_ROWS.into_iter().find(|&r| r >= n).unwrap_or(n);
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

/// Packs each tile of rows as `[steps][kernel_rows]` words, scaled. Rows that do not exist are zero.
///
/// # Safety
/// `packed` has room for all tiles.
unsafe fn pack_query<F: Format>(
    call: &Call<'_>,
    rows: &[Row],
    tiles: &[RowTile],
    steps: usize,
    packed: *mut u32,
) {
    let dim = call.plan.shape.head_dim;
    for tile in tiles {
        for r in 0..tile.kernel_rows {
            let row = rows[tile.rows.clone()].get(r);
            // SAFETY: the row is in bounds, its elements are below `head_dim`; words are inside the tile's.
            unsafe {
                let q = row.map(|row| call.query.row(row.token, row.head));
                let get = |i: usize| match q {
                    Some(q) if i < dim => q.add(i).read_unaligned() * call.scale,
                    _ => 0.0,
                };
                for step in 0..steps {
                    *packed.add(tile.query + step * tile.kernel_rows + r) = F::word(get, step);
                }
            }
        }
    }
}

/// Stores the parts of some rows of an item in the records of their units.
///
/// # Safety
/// `parts` has a record for each of the rows.
unsafe fn store_parts(
    call: &Call<'_>,
    item: &Item,
    head: usize,
    partition: usize,
    rows: Range<usize>,
    parts: *mut f32,
    width: usize,
) {
    let group = call.plan.group();
    let mut first = 0;
    for &u in &item.units {
        let unit = &call.schedule.units[u];
        let n = unit.tokens.len() * group;
        let (from, to) = (rows.start.max(first), rows.end.min(first + n));
        for i in from..to {
            // SAFETY: row `i` is the unit's, and the schedule made room for its slot.
            unsafe {
                unit_record(
                    call,
                    head,
                    unit,
                    1 + partition - unit.folded,
                    i - first,
                    width,
                )
                .copy_from(Record::at(parts, width, i - rows.start));
            }
        }
        first += n;
    }
}

/// A unit's record: slot 0 is the fold of its first item, slot `1 + i` is the `i`-th partition after it.
unsafe fn unit_record(
    call: &Call<'_>,
    head: usize,
    unit: &Unit,
    slot: usize,
    row: usize,
    width: usize,
) -> Record {
    let rows = unit.tokens.len() * call.plan.group();
    let index = head * call.schedule.records + unit.records + slot * rows + row;
    // SAFETY: the schedule counted it.
    unsafe { Record::at(call.scratch.records, width, index) }
}

/// Writes a unit's rows if this item has all of them, or hands its part over and, if it is the last one, folds all.
///
/// # Safety
/// `states` has the item's rows, of which the unit's begin at `first`.
#[allow(clippy::too_many_arguments)]
unsafe fn finish_unit<S: Simd>(
    s: S,
    call: &Call<'_>,
    item: &Item,
    head: usize,
    unit: &Unit,
    rows: &[Row],
    first: usize,
    states: *mut f32,
    width: usize,
) {
    // SAFETY: the caller's promise, and see `Shared`.
    unsafe {
        let finish = |state: Record, parts: &dyn Fn(usize) -> Record, row: &Row| {
            s.vectorize(Finish {
                state,
                parts,
                count: unit.slots().saturating_sub(1),
                out: call.out.row(row.token, row.head),
                head_dim: call.plan.shape.head_dim,
            });
        };
        if unit.items == 1 {
            for (i, row) in rows.iter().enumerate() {
                let state = Record::at(states, width, first + i);
                finish(state, &|_| state, row);
            }
            return;
        }
        if item.leftmost {
            for i in 0..rows.len() {
                unit_record(call, head, unit, 0, i, width).copy_from(Record::at(
                    states,
                    width,
                    first + i,
                ));
            }
        }
        let pending = &call.scratch.pending[head * call.schedule.counters + unit.counter];
        if pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            for (i, row) in rows.iter().enumerate() {
                let record = |slot| unit_record(call, head, unit, slot, i, width);
                finish(record(0), &|part| record(1 + part), row);
            }
        }
    }
}

/// Folds parts onto a state and writes the row.
struct Finish<'a> {
    state: Record,
    parts: &'a dyn Fn(usize) -> Record,
    count: usize,
    out: *mut f32,
    head_dim: usize,
}

impl Kernel for Finish<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: made by `finish_unit`, which owns the records and the row.
        unsafe {
            for i in 0..self.count {
                self.state.fold(s, (self.parts)(i));
            }
            self.state.finish(s, self.out, self.head_dim);
        }
    }
}

/// The part of `sees` in a partition, counted from its start.
fn local(sees: &Range<usize>, partition: usize) -> Range<usize> {
    let at = |x: usize| x.saturating_sub(partition * PARTITION).min(PARTITION);
    at(sees.start)..at(sees.end)
}

/// The smallest range around all that are not empty.
fn union<'a>(ranges: impl Iterator<Item = &'a Range<usize>>) -> Range<usize> {
    let (mut start, mut end) = (usize::MAX, 0);
    for range in ranges.filter(|r| !r.is_empty()) {
        (start, end) = (start.min(range.start), end.max(range.end));
    }
    start.min(end)..end
}

/// Where an item's tiles come from: the cache itself, or scratch that they are packed into.
struct Source<'a, F: Format> {
    call: &'a Call<'a>,
    head: usize,
    blocks: &'a [u32],
    /// What any row of the item sees, and where the item ends.
    sees: Range<usize>,
    end: usize,
    /// Scratch for K and V of a partition, if they are packed there.
    keys: Option<*mut u8>,
    values: Option<*mut u8>,
    /// Tiles to prefetch ahead, and whether that has begun.
    ahead: usize,
    started: bool,
    format: PhantomData<F>,
}

/// The tiles of one partition in the order of their use (K, V, then the next partition's first K tiles), so that
/// what to prefetch is simply a later entry.
struct Tiles {
    stream: [*const u8; 2 * TILES + MAX_AHEAD],
    len: usize,
    /// The tile of the partition that the stream begins with, and how many there are.
    first: usize,
    count: usize,
    ahead: usize,
    /// Bytes from one step of V to the next.
    value_row: usize,
}

impl Tiles {
    /// Entry `i` of the stream, and the one to prefetch meanwhile.
    #[inline(always)]
    fn at(&self, i: usize) -> (*const u8, *const u8) {
        (
            self.stream[i],
            self.stream[(i + self.ahead).min(self.len - 1)],
        )
    }
}

impl<'a, F: Format> Source<'a, F> {
    fn new(
        call: &'a Call<'a>,
        item: &Item,
        head: usize,
        sees: Range<usize>,
        keys: &mut Buffer,
        values: &mut Buffer,
    ) -> Self {
        let spec = call.layer.spec();
        let width = padded(spec.head_dim);
        let tile_bytes = TILE * spec.head_dim * spec.dtype.size();
        let rows = spec.layout == KvLayout::Rows;
        let floats = |row: usize| TILES * TILE * row * F::LANE / F::STEP / size_of::<f32>();
        Self {
            call,
            head,
            blocks: call
                .plan
                .blocks(&call.plan.sequences[call.schedule.units[item.units[0]].sequence]),
            sees,
            end: item.partitions.end,
            keys: rows.then(|| {
                keys.floats(floats(spec.head_dim.next_multiple_of(2)))
                    .cast()
            }),
            values: (rows || spec.head_dim != width).then(|| values.floats(floats(width)).cast()),
            ahead: if rows {
                0
            } else {
                (PREFETCH_BYTES / tile_bytes).clamp(1, MAX_AHEAD)
            },
            started: false,
            format: PhantomData,
        }
    }

    /// Absolute tiles of a partition that any row sees.
    fn range(&self, partition: usize) -> Range<usize> {
        let sees = local(&self.sees, partition);
        let base = partition * TILES;
        base + sees.start / TILE..base + sees.end.div_ceil(TILE)
    }

    /// Where a tile lies in a tiled cache.
    fn direct(&self, side: Side, tile: usize) -> *const u8 {
        let spec = self.call.layer.spec();
        let (block, inside) = (tile * TILE / spec.block_size, tile * TILE % spec.block_size);
        // SAFETY: the plan checked the table's entries; heads are the spec's; `inside` is below the block's size.
        unsafe {
            self.call
                .layer
                .head(side, self.blocks[block] as usize, self.head)
                .add(inside * spec.head_dim * spec.dtype.size())
        }
    }

    /// Packs a tile of a rows cache; of its tokens, those that some row sees.
    fn pack(&self, side: Side, tile: usize, to: *mut u8) {
        let spec = self.call.layer.spec();
        let tokens = tile * TILE..((tile + 1) * TILE).min(self.sees.end);
        let mut rows = [std::ptr::null(); TILE];
        for (row, t) in rows.iter_mut().zip(tokens.clone()) {
            let block = self.blocks[t / spec.block_size] as usize;
            // SAFETY: as in `direct`.
            *row = unsafe {
                self.call
                    .layer
                    .row(side, block, self.head, t % spec.block_size)
            };
        }
        let rows = &rows[..tokens.len()];
        // SAFETY: the rows are whole, and `new` made room for the tile.
        unsafe {
            match side {
                Side::Key => pack::key_tile::<F>(rows, spec.head_dim, to),
                Side::Value => {
                    pack::value_tile::<F>(rows, spec.head_dim, padded(spec.head_dim), to);
                }
            }
        }
    }

    /// The tiles of a partition, packed where need be.
    fn tiles<S: Simd>(&mut self, s: S, partition: usize) -> Tiles {
        let spec = self.call.layer.spec();
        let (range, width) = (self.range(partition), padded(spec.head_dim));
        let mut tiles = Tiles {
            stream: [std::ptr::null(); 2 * TILES + MAX_AHEAD],
            len: 0,
            first: range.start - partition * TILES,
            count: range.len(),
            ahead: self.ahead,
            value_row: F::LANE
                * if self.values.is_some() {
                    width
                } else {
                    spec.head_dim
                },
        };
        let mut push = |p: *const u8| {
            tiles.stream[tiles.len] = p;
            tiles.len += 1;
        };
        for (i, tile) in range.clone().enumerate() {
            push(match self.keys {
                None => self.direct(Side::Key, tile),
                Some(keys) => {
                    // SAFETY: `i < TILES`, for which `new` made room.
                    let to =
                        unsafe { keys.add(i * TILE * spec.head_dim.div_ceil(F::STEP) * F::LANE) };
                    self.pack(Side::Key, tile, to);
                    to
                }
            });
        }
        for (i, tile) in range.clone().enumerate() {
            push(match self.values {
                None => self.direct(Side::Value, tile),
                Some(values) => {
                    // SAFETY: as above.
                    let to = unsafe { values.add(i * TILE * width * F::LANE / F::STEP) };
                    if spec.layout == KvLayout::Rows {
                        self.pack(Side::Value, tile, to);
                    } else {
                        let from = self.direct(Side::Value, tile);
                        // SAFETY: both are whole tiles.
                        unsafe { pack::widen_value_tile::<F>(from, spec.head_dim, width, to) };
                    }
                    to
                }
            });
        }
        if self.ahead > 0 && partition + 1 < self.end {
            for tile in self.range(partition + 1).take(self.ahead) {
                push(self.direct(Side::Key, tile));
            }
        }
        self.prefetch_first(s, &tiles);
        tiles
    }

    /// Asks for the first tiles of an item, which nobody ran ahead of.
    fn prefetch_first<S: Simd>(&mut self, s: S, tiles: &Tiles) {
        let spec = self.call.layer.spec();
        let tile_bytes = TILE * spec.head_dim * spec.dtype.size();
        if self.ahead > 0 && !std::mem::replace(&mut self.started, true) {
            for p in &tiles.stream[..self.ahead.min(tiles.len)] {
                for line in (0..tile_bytes).step_by(64) {
                    s.prefetch(p.wrapping_add(line));
                }
            }
        }
    }
}

/// Rows of the largest micro-kernel, and those that exist.
const MAX_ROWS: usize = 12;
const KERNEL_ROWS: [usize; 7] = [1, 2, 3, 4, 6, 8, 12];

/// A tile of rows and a partition.
struct Partition<'a> {
    /// `[steps][R]` words.
    query: *const u32,
    steps: usize,
    tiles: &'a Tiles,
    /// What each row sees of the partition.
    spans: &'a [Range<usize>; MAX_ROWS],
    /// `[R][PARTITION]` words for scores, then weights.
    scores: *mut f32,
    /// `[R]` records for this partition's results.
    parts: *mut f32,
    /// The rows' states to fold them onto, if that is to be done here.
    states: Option<*mut f32>,
    rows: usize,
    width: usize,
}

impl Partition<'_> {
    /// Picks the micro-kernel: rows times token vectors in flight.
    unsafe fn run<S: Simd, F: Format>(self, s: S, kernel_rows: usize) {
        macro_rules! pick {
            ($($rows:literal x $vectors:literal),*) => {
                match kernel_rows {
                    $($rows => s.vectorize(Tile::<F, $rows, $vectors>(self, PhantomData)),)*
                    _ => unreachable!("no micro-kernel of {kernel_rows} rows"),
                }
            };
        }
        if S::ACCUMULATORS >= 24 {
            pick!(1 x 4, 2 x 4, 3 x 2, 4 x 2, 6 x 2, 8 x 2, 12 x 2);
        } else {
            pick!(1 x 4, 2 x 4, 3 x 2, 4 x 2, 6 x 2);
        }
    }
}

/// The micro-kernel for `R` rows and `V` vectors of tokens.
struct Tile<'a, F, const R: usize, const V: usize>(Partition<'a>, PhantomData<F>);

impl<F: Format, const R: usize, const V: usize> Kernel for Tile<'_, F, R, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self(p, _) = self;
        let (mut lo, mut hi) = ([0; R], [0; R]);
        for r in 0..R {
            (lo[r], hi[r]) = (p.spans[r].start, p.spans[r].end);
        }
        let seen = union(p.spans[..R].iter());
        // SAFETY: `Partition` says what its pointers hold; `tiles` covers `seen`.
        unsafe {
            if seen.is_empty() {
                for r in 0..R {
                    Record::at(p.parts, p.width, r).set_statistics(f32::NEG_INFINITY, 0.0);
                }
                return;
            }
            scores::<S, F, R, V>(s, &p, &seen);
            for r in 0..R {
                let (m, l) = weights::<S, F>(s, p.scores.add(r * PARTITION), lo[r]..hi[r]);
                Record::at(p.parts, p.width, r).set_statistics(m, l);
            }
            values::<S, F, R>(s, &p, &seen, &lo, &hi);
            if let Some(states) = p.states {
                for r in 0..p.rows {
                    Record::at(states, p.width, r).fold(s, Record::at(p.parts, p.width, r));
                }
            }
        }
    }
}

/// Scores of all vectors of tokens that touch `seen`; hidden ones come out as anything.
#[inline(always)]
unsafe fn scores<S: Simd, F: Format, const R: usize, const V: usize>(
    s: S,
    p: &Partition<'_>,
    seen: &Range<usize>,
) {
    let row = TILE * F::LANE;
    let mut x = seen.start / (V * S::LANES) * V;
    while x * S::LANES < seen.end {
        // SAFETY: vectors are clamped to those that touch `seen`, which the tiles cover; scores have room for all of a
        // partition's vectors, of which `V` divides the number.
        unsafe {
            let (mut k, mut ahead) = ([std::ptr::null(); V], [std::ptr::null::<u8>(); V]);
            for v in 0..V {
                let token =
                    (x + v).clamp(seen.start / S::LANES, (seen.end - 1) / S::LANES) * S::LANES;
                let (tile, next) = p.tiles.at(token / TILE - p.tiles.first);
                k[v] = tile.add(token % TILE * F::LANE);
                ahead[v] = next;
            }
            let mut acc = [[s.splat(0.0); V]; R];
            for step in 0..p.steps {
                let mut a = [F::splat(s, 0); V];
                for v in 0..V {
                    a[v] = F::load(s, k[v].add(step * row));
                    if v * S::LANES % TILE == 0 {
                        s.prefetch(ahead[v].wrapping_add(step * row));
                    }
                }
                for r in 0..R {
                    let q = F::splat(s, *p.query.add(step * R + r));
                    for v in 0..V {
                        acc[r][v] = F::fma(s, a[v], q, acc[r][v]);
                    }
                }
            }
            for r in 0..R {
                for v in 0..V {
                    s.store(p.scores.add(r * PARTITION + (x + v) * S::LANES), acc[r][v]);
                }
            }
        }
        x += V;
    }
}

/// One row's scores to weights, in place; returns their maximum and the weights' sum. Hidden slots of vectors that it
/// sees a part of get weight 0.
#[inline(always)]
unsafe fn weights<S: Simd, F: Format>(s: S, row: *mut f32, span: Range<usize>) -> (f32, f32) {
    if span.is_empty() {
        return (f32::NEG_INFINITY, 0.0);
    }
    let hidden = s.splat(f32::NEG_INFINITY);
    let (first, end) = (span.start / S::LANES, span.end.div_ceil(S::LANES));
    // SAFETY: inside the row's PARTITION scores. Weights of 16 bits are written below the scores still to be read.
    unsafe {
        for x in [first, end - 1] {
            let at = row.add(x * S::LANES);
            let from = span.start.saturating_sub(x * S::LANES);
            let until = (span.end - x * S::LANES).min(S::LANES);
            s.store(at, s.select_lanes(from, until, s.load(at), hidden));
        }
        let mut m = hidden;
        for x in first..end {
            m = s.max(m, s.load(row.add(x * S::LANES)));
        }
        let m = s.maximum(m);
        let mut l = s.splat(0.0);
        for x in first..end {
            let weight = exp(s, s.sub(s.load(row.add(x * S::LANES)), s.splat(m)));
            l = s.add(l, weight);
            F::store_weights(s, row.cast(), x * S::LANES, weight);
        }
        (m, s.sum(l))
    }
}

/// Weighted sums of values, into the parts' outputs.
#[inline(always)]
unsafe fn values<S: Simd, F: Format, const R: usize>(
    s: S,
    p: &Partition<'_>,
    seen: &Range<usize>,
    lo: &[usize; R],
    hi: &[usize; R],
) {
    // Steps that some row sees, and among them those that all rows (that see anything) see wholly.
    let some = seen.start / F::STEP..seen.end.div_ceil(F::STEP);
    let (mut from, mut until) = (0, PARTITION);
    for r in 0..R {
        if lo[r] < hi[r] {
            from = from.max(lo[r]);
            until = until.min(hi[r]);
        }
    }
    let from = from.div_ceil(F::STEP).clamp(some.start, some.end);
    let all = from..(until / F::STEP).clamp(from, some.end);
    let chunk = Chunk {
        p,
        some,
        all,
        lo,
        hi,
    };

    // Few rows read V from memory: tile by tile, in its order. Many rows read it from L2 and keep their sums.
    let run = if R <= 4 { 1 } else { TILES };
    let vectors = p.width / S::LANES;
    for start in (0..p.tiles.count).step_by(run) {
        let tiles = start..(start + run).min(p.tiles.count);
        let mut c = 0;
        while c < vectors {
            let left = vectors - c;
            // SAFETY: as in `run`.
            unsafe {
                if R * 8 <= S::ACCUMULATORS && left >= 8 {
                    chunk.run::<S, F, 8>(s, &tiles, c);
                    c += 8;
                } else if R * 4 <= S::ACCUMULATORS && left >= 4 {
                    chunk.run::<S, F, 4>(s, &tiles, c);
                    c += 4;
                } else if left >= 2 {
                    chunk.run::<S, F, 2>(s, &tiles, c);
                    c += 2;
                } else {
                    chunk.run::<S, F, 1>(s, &tiles, c);
                    c += 1;
                }
            }
        }
    }
}

/// `C` vectors of dimensions, all rows, a run of tiles.
struct Chunk<'a, const R: usize> {
    p: &'a Partition<'a>,
    some: Range<usize>,
    all: Range<usize>,
    lo: &'a [usize; R],
    hi: &'a [usize; R],
}

impl<const R: usize> Chunk<'_, R> {
    #[inline(always)]
    unsafe fn run<S: Simd, F: Format, const C: usize>(&self, s: S, tiles: &Range<usize>, c: usize) {
        let p = self.p;
        let steps = TILE / F::STEP;
        let column = c * S::LANES * F::LANE;
        // SAFETY: steps are inside the tiles, columns inside the padded rows, sums inside the parts.
        unsafe {
            let sum = |r: usize, v: usize| {
                Record::at(p.parts, p.width, r)
                    .output()
                    .add((c + v) * S::LANES)
            };
            let mut acc = [[s.splat(0.0); C]; R];
            if tiles.start > 0 {
                for r in 0..R {
                    for v in 0..C {
                        acc[r][v] = s.load(sum(r, v));
                    }
                }
            }
            for tile in tiles.clone() {
                let (v, ahead) = p.tiles.at(p.tiles.count + tile);
                let first = (p.tiles.first + tile) * steps;
                let (v, ahead) = (v.add(column), ahead.wrapping_add(column));
                let clip = |x: usize| x.clamp(first, first + steps) - first;
                let (some, all) = (
                    clip(self.some.start)..clip(self.some.end),
                    clip(self.all.start)..clip(self.all.end),
                );
                let weights = p.scores.cast::<u32>().add(first);
                if all.len() == steps {
                    // A constant count of steps is worth a loop of its own.
                    for t in 0..steps {
                        self.step::<S, F, C>(s, &mut acc, v, ahead, weights, t);
                    }
                } else {
                    self.masked::<S, F, C>(s, &mut acc, v, weights, first, some.start..all.start);
                    for t in all.clone() {
                        self.step::<S, F, C>(s, &mut acc, v, ahead, weights, t);
                    }
                    self.masked::<S, F, C>(s, &mut acc, v, weights, first, all.end..some.end);
                }
            }
            for r in 0..R {
                for v in 0..C {
                    s.store(sum(r, v), acc[r][v]);
                }
            }
        }
    }

    /// One step that all rows see.
    #[inline(always)]
    unsafe fn step<S: Simd, F: Format, const C: usize>(
        &self,
        s: S,
        acc: &mut [[S::F32; C]; R],
        v: *const u8,
        ahead: *const u8,
        weights: *const u32,
        t: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut a = [F::splat(s, 0); C];
            for c in 0..C {
                let at = t * self.p.tiles.value_row + c * S::LANES * F::LANE;
                a[c] = F::load(s, v.add(at));
                if c * S::LANES * F::LANE % 64 == 0 {
                    s.prefetch(ahead.wrapping_add(at));
                }
            }
            for r in 0..R {
                let weight = F::splat(s, *weights.add(r * PARTITION + t));
                for c in 0..C {
                    acc[r][c] = F::fma(s, a[c], weight, acc[r][c]);
                }
            }
        }
    }

    /// Steps that each row sees, half sees or does not see.
    #[inline(always)]
    unsafe fn masked<S: Simd, F: Format, const C: usize>(
        &self,
        s: S,
        acc: &mut [[S::F32; C]; R],
        v: *const u8,
        weights: *const u32,
        first: usize,
        steps: Range<usize>,
    ) {
        for t in steps {
            // SAFETY: the caller's promise.
            unsafe {
                let mut a = [F::splat(s, 0); C];
                for c in 0..C {
                    a[c] = F::load(
                        s,
                        v.add(t * self.p.tiles.value_row + c * S::LANES * F::LANE),
                    );
                }
                let token = (first + t) * F::STEP;
                for r in 0..R {
                    let sees = |token| self.lo[r] <= token && token < self.hi[r];
                    let (head, tail) = (sees(token), sees(token + F::STEP - 1));
                    if head || tail {
                        let weight = F::splat(s, *weights.add(r * PARTITION + t));
                        for c in 0..C {
                            let a = if head && tail {
                                a[c]
                            } else {
                                F::keep_half(s, a[c], tail)
                            };
                            acc[r][c] = F::fma(s, a, weight, acc[r][c]);
                        }
                    }
                }
            }
        }
    }
}
