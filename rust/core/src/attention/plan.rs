//! Who computes what in one step: from block tables and lengths to work items.
//!
//! A *work item* is a run of partitions of one KV head and all the query rows that look at it. Rows come in *units*:
//! a few consecutive new tokens of one sequence, with all query heads of the KV head's group. Sequences whose tables
//! name the same blocks put their units into one item for the partitions they share (whole ones, fully visible to all
//! of their rows), found here by comparing block ids. What is left of each is an item of its own; long ones are cut
//! between partitions until there is enough for all threads.
//!
//! Where one item covers a unit, it finishes the unit's rows. Otherwise the item with the unit's first partition folds
//! its run into one record, the others store a record for each partition, and whoever comes last folds them in order
//! (see `merge`). None of these choices can change a bit of the result.
//!
//! A [`Plan`] is made once a step and serves all layers. What depends on the mask is a [`Schedule`], made at the first
//! layer with that mask and kept. Cost: O(tokens / unit + blocks of the tables).

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Error, Result, threads};

use super::scratch::Scratch;

/// Absolute positions in a partition.
pub(super) const PARTITION: usize = 256;

/// Rows of an item: enough to make one read of a partition's KV (from L2 after the first tile of rows) cheap beside
/// the arithmetic on it, few enough for the rows' outputs to stay in L2 too.
const ITEM_ROWS: usize = 96;

/// Where no item has more rows than this, all are soon done with what they read, and may take several KV heads at a time.
const SEVERAL_HEADS_ROWS: usize = 8;

/// Items that each thread should find, so that none ends long after the others.
const ITEMS_PER_THREAD: usize = 4;

/// Cost of reading one token's K and V, counted in rows of arithmetic on them.
const READ_COST: usize = 8;

/// Least cost worth an item of its own: a partition read for one row.
const MIN_ITEM_COST: usize = PARTITION * READ_COST;

/// Work (cost times head_dim, all heads) that one thread does alone: some 2 to 6 microseconds.
const INLINE_WORK: usize = 1 << 17;

/// Work that is shared with threads that are awake, and wakes none: some 15 to 45 microseconds. To wake another takes
/// 10 of them, and the other is there only after 20 more.
const SLEEPY_WORK: usize = 1 << 20;

/// Work that is over before another thread would have noticed that it may run.
const BRIEF_WORK: usize = 1 << 19;
const _: () = assert!(BRIEF_WORK <= SLEEPY_WORK);

/// A segment whose records would take more floats than this is not split: memory is worth more than balance.
const MAX_SPLIT_FLOATS: usize = 1 << 24;

/// What a row may see, besides the keys of its own sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mask {
    /// Keys up to the row's own position; the last row has the last position.
    pub(super) causal: bool,
    /// At most this many last keys; with `causal` only.
    pub(super) window: Option<usize>,
}

#[derive(Debug, Clone)]
pub(super) struct Sequence {
    /// Where its blocks begin in the plan's table.
    table: usize,
    blocks: usize,
    /// Its first row among the query's tokens, and how many there are.
    pub(super) start: usize,
    pub(super) rows: usize,
    pub(super) kv_len: usize,
}

impl Sequence {
    /// The keys that its row `i` sees.
    pub(super) fn visible(&self, i: usize, mask: Mask) -> Range<usize> {
        if !mask.causal {
            return 0..self.kv_len;
        }
        let end = self.kv_len - self.rows + i + 1;
        mask.window.map_or(0, |w| end.saturating_sub(w))..end
    }
}

/// Sizes that a plan is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanShape {
    /// Query heads, a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// Blocks of the cache.
    pub num_blocks: usize,
}

/// Who computes what in one step of attention. Owns copies of all it needs.
#[derive(Debug)]
pub struct Plan {
    pub(super) shape: PlanShape,
    pub(super) tokens: usize,
    pub(super) threads: usize,
    pub(super) sequences: Vec<Sequence>,
    table: Vec<u32>,
    schedules: Mutex<Vec<(Mask, Arc<Schedule>)>>,
    /// Memory for records, one for each call that runs at the same time.
    pub(super) scratch: Mutex<Vec<Scratch>>,
}

/// A few consecutive new tokens of one sequence.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) sequence: usize,
    /// Its tokens among the sequence's new ones.
    pub(super) tokens: Range<usize>,
    /// Positions that any of its rows sees, and their partitions.
    sees: Range<usize>,
    partitions: Range<usize>,
    /// Leading partitions that all of its rows see wholly.
    shareable: usize,
    /// Items that cover it; one alone finishes it and needs no records.
    pub(super) items: usize,
    /// Partitions up to here are folded into record 0, each later one has a record of its own.
    pub(super) folded: usize,
    /// Where its records begin, in rows' records, within those of a KV head.
    pub(super) records: usize,
    /// Which counter of the KV head counts its unfinished items.
    pub(super) counter: usize,
}

impl Unit {
    /// Records a row.
    pub(super) fn slots(&self) -> usize {
        if self.items > 1 {
            1 + self.partitions.end - self.folded
        } else {
            0
        }
    }
}

/// A run of partitions (of one KV head or some, named when it is claimed) and the units that look at it.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) units: Vec<usize>,
    pub(super) partitions: Range<usize>,
    /// Positions in them that any row sees.
    pub(super) sees: Range<usize>,
    cost: usize,
    /// Query rows of a KV head.
    rows: usize,
    /// Whether it begins with its units' first partition.
    pub(super) leftmost: bool,
}

/// The items of a plan under one mask, most expensive first.
#[derive(Debug)]
pub(super) struct Schedule {
    pub(super) units: Vec<Unit>,
    pub(super) items: Vec<Item>,
    /// KV heads that one claim may take of an item: with more, threads would wait for each other in the end.
    pub(super) most_heads: usize,
    /// Rows' records and counters that one KV head needs.
    pub(super) records: usize,
    pub(super) counters: usize,
    /// Whether one thread does it all: there is little, or only one.
    pub(super) inline: bool,
    /// Whether it is worth waking other threads.
    pub(super) wake: bool,
    /// Whether the call is too short for another thread to profit from what this one could let go of.
    pub(super) brief: bool,
}

impl Plan {
    /// Plans one step.
    ///
    /// `block_id(sequence, i)` is entry `i < max_blocks` of a sequence's table; rows `starts[s]..starts[s + 1]` of the
    /// query are sequence `s`'s, and `kv_lens[s]` its tokens of KV. `num_threads` is `None` for all available.
    ///
    /// # Errors
    /// A size is zero or does not divide; `starts` does not begin at 0 or falls; a table is too narrow for its length,
    /// or names a block that the cache does not have among those in use.
    pub fn new(
        shape: PlanShape,
        max_blocks: usize,
        block_id: impl Fn(usize, usize) -> i32,
        starts: &[i32],
        kv_lens: &[i32],
        num_threads: Option<usize>,
    ) -> Result<Self> {
        check_shape(&shape)?;
        let threads = threads::resolve(num_threads)?;
        if starts.len() != kv_lens.len() + 1 {
            return Err(Error::invalid(
                "query_starts",
                format!(
                    "got {} entries, expected one more than kv_lens, which has {}",
                    starts.len(),
                    kv_lens.len()
                ),
            ));
        }
        if starts[0] != 0 {
            return Err(Error::invalid(
                "query_starts",
                format!("begins with {}, expected 0", starts[0]),
            ));
        }
        let mut table = Vec::new();
        let mut sequences = Vec::with_capacity(kv_lens.len());
        for (s, &kv_len) in kv_lens.iter().enumerate() {
            let (start, end) = (starts[s], starts[s + 1]);
            if end < start {
                return Err(Error::invalid(
                    "query_starts",
                    format!("falls from {start} to {end} at sequence {s}"),
                ));
            }
            let kv_len = usize::try_from(kv_len).map_err(|_| {
                Error::invalid("kv_lens", format!("sequence {s} has {kv_len} tokens"))
            })?;
            let blocks = kv_len.div_ceil(shape.block_size);
            if blocks > max_blocks {
                return Err(Error::invalid(
                    "block_tables",
                    format!(
                        "sequence {s} has {kv_len} tokens, which are {blocks} blocks of {}; the table has room for {max_blocks}",
                        shape.block_size
                    ),
                ));
            }
            sequences.push(Sequence {
                table: table.len(),
                blocks,
                start: start as usize,
                rows: (end - start) as usize,
                kv_len,
            });
            for i in 0..blocks {
                let id = block_id(s, i);
                match u32::try_from(id) {
                    Ok(block) if (block as usize) < shape.num_blocks => table.push(block),
                    _ => {
                        return Err(Error::invalid(
                            "block_tables",
                            format!(
                                "entry {i} of sequence {s} is {id}, expected 0 to {}",
                                shape.num_blocks - 1
                            ),
                        ));
                    }
                }
            }
        }
        Ok(Self {
            shape,
            tokens: starts[kv_lens.len()] as usize,
            threads,
            sequences,
            table,
            schedules: Mutex::default(),
            scratch: Mutex::default(),
        })
    }

    /// Sizes that the plan was made for.
    pub fn shape(&self) -> &PlanShape {
        &self.shape
    }

    /// Query rows' tokens, all sequences together.
    pub fn num_tokens(&self) -> usize {
        self.tokens
    }

    /// Query heads that share a KV head.
    pub(super) fn group(&self) -> usize {
        self.shape.num_heads / self.shape.num_kv_heads
    }

    /// The blocks of a sequence that hold its tokens.
    pub(super) fn blocks(&self, sequence: &Sequence) -> &[u32] {
        &self.table[sequence.table..sequence.table + sequence.blocks]
    }

    /// A sequence with more rows than tokens of KV: those before the first key would see nothing.
    pub(super) fn more_rows_than_keys(&self) -> Option<(usize, &Sequence)> {
        let mut all = self.sequences.iter().enumerate();
        all.find(|(_, s)| s.rows > s.kv_len)
    }

    /// The items under a mask; the same ones at every call.
    pub(super) fn schedule(&self, mask: Mask) -> Arc<Schedule> {
        let mut known = self
            .schedules
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((_, schedule)) = known.iter().find(|(m, _)| *m == mask) {
            return Arc::clone(schedule);
        }
        let schedule = Arc::new(Schedule::new(self, mask));
        known.push((mask, Arc::clone(&schedule)));
        schedule
    }

    /// How many leading partitions two units may share.
    fn common(&self, a: &Unit, b: &Unit) -> usize {
        let [x, y] = [a, b].map(|u| self.blocks(&self.sequences[u.sequence]));
        let blocks = x.iter().zip(y).take_while(|(x, y)| x == y).count();
        let partitions = blocks * self.shape.block_size / PARTITION;
        partitions.min(a.shareable).min(b.shareable)
    }
}

fn check_shape(shape: &PlanShape) -> Result<()> {
    for (argument, n) in [
        ("num_heads", shape.num_heads),
        ("num_kv_heads", shape.num_kv_heads),
        ("head_dim", shape.head_dim),
        ("block_size", shape.block_size),
        ("num_blocks", shape.num_blocks),
    ] {
        if n == 0 || i32::try_from(n).is_err() {
            return Err(Error::invalid(
                argument,
                format!("got {n}, expected 1 to {}", i32::MAX),
            ));
        }
    }
    if !shape.num_heads.is_multiple_of(shape.num_kv_heads) {
        return Err(Error::invalid(
            "num_heads",
            format!(
                "got {}, expected a multiple of num_kv_heads, which is {}",
                shape.num_heads, shape.num_kv_heads
            ),
        ));
    }
    Ok(())
}

/// Units that look at a run of partitions, before it is cut into items.
struct Segment {
    units: Vec<usize>,
    partitions: Range<usize>,
}

impl Schedule {
    /// How many items each unit waits for that several cover, by counter. For one KV head.
    pub(super) fn pending(&self) -> impl Iterator<Item = u32> {
        let split = self.units.iter().filter(|u| u.items > 1);
        split.map(|u| u.items as u32)
    }

    fn new(plan: &Plan, mask: Mask) -> Self {
        let mut units = make_units(plan, mask);
        let segments = make_segments(plan, &units);
        let items = make_items(plan, mask, &units, segments);

        for item in &items {
            for &u in &item.units {
                units[u].items += 1;
                if item.leftmost {
                    units[u].folded = item.partitions.end;
                }
            }
        }
        let (mut records, mut counters) = (0, 0);
        for unit in units.iter_mut().filter(|u| u.items > 1) {
            unit.records = records;
            unit.counter = counters;
            records += unit.slots() * unit.tokens.len() * plan.group();
            counters += 1;
        }
        let cost: usize = items.iter().map(|i| i.cost).sum();
        let work = cost * plan.shape.num_kv_heads * plan.shape.head_dim;
        let one_item = items.len() * plan.shape.num_kv_heads == 1;
        let inline = work <= INLINE_WORK || plan.threads == 1 || one_item;
        let threads = if inline { 1 } else { plan.threads };
        let share = item_share(plan, cost, threads);
        let most_heads = match items.first() {
            Some(first) if items.iter().all(|i| i.rows <= SEVERAL_HEADS_ROWS) => {
                (share / first.cost.max(1)).max(1)
            }
            _ => 1,
        };
        Self {
            inline,
            wake: work > SLEEPY_WORK,
            most_heads,
            units,
            items,
            records,
            counters,
            brief: work <= BRIEF_WORK,
        }
    }
}

fn make_units(plan: &Plan, mask: Mask) -> Vec<Unit> {
    let most = (ITEM_ROWS / plan.group()).max(1);
    let mut units = Vec::new();
    for (s, sequence) in plan.sequences.iter().enumerate() {
        for first in (0..sequence.rows).step_by(most) {
            let tokens = first..(first + most).min(sequence.rows);
            // Both ends of what a row sees grow with the row.
            let (top, bottom) = (
                sequence.visible(tokens.start, mask),
                sequence.visible(tokens.end - 1, mask),
            );
            let sees = top.start..bottom.end;
            let partitions = if sees.is_empty() {
                0..0
            } else {
                sees.start / PARTITION..sees.end.div_ceil(PARTITION)
            };
            units.push(Unit {
                sequence: s,
                tokens,
                sees,
                shareable: if bottom.start == 0 {
                    top.end / PARTITION
                } else {
                    0
                },
                items: 0,
                folded: partitions.start,
                partitions,
                records: 0,
                counter: 0,
            });
        }
    }
    units
}

/// Puts units that share leading partitions together. Only sequences of few rows gain by it: to the others, reading
/// KV costs little beside the arithmetic.
fn make_segments(plan: &Plan, units: &[Unit]) -> Vec<Segment> {
    let few = |u: &Unit| {
        u.tokens.len() == plan.sequences[u.sequence].rows
            && u.tokens.len() * plan.group() <= ITEM_ROWS / 2
    };
    let blocks = |u: usize| plan.blocks(&plan.sequences[units[u].sequence]);
    let (mut sharers, others): (Vec<_>, Vec<_>) =
        (0..units.len()).partition(|&u| units[u].shareable > 0 && few(&units[u]));
    // In the order of their tables, those that share a prefix are neighbours.
    sharers.sort_by(|&a, &b| blocks(a).cmp(blocks(b)));
    let common: Vec<usize> = sharers
        .windows(2)
        .map(|pair| plan.common(&units[pair[0]], &units[pair[1]]))
        .collect();

    let mut segments: Vec<_> = others
        .into_iter()
        .map(|u| Segment {
            units: vec![u],
            partitions: units[u].partitions.clone(),
        })
        .collect();
    // Ranges of sharers whose partitions before `from` are dealt with.
    let mut open = Vec::new();
    if !sharers.is_empty() {
        open.push((0..sharers.len(), 0));
    }
    while let Some((range, from)) = open.pop() {
        if range.len() == 1 {
            let u = sharers[range.start];
            let partitions = from..units[u].partitions.end;
            if !partitions.is_empty() {
                segments.push(Segment {
                    units: vec![u],
                    partitions,
                });
            }
            continue;
        }
        let inner = range.start..range.end - 1;
        let shared = common[inner.clone()].iter().copied().min().unwrap_or(0);
        if shared > from {
            segments.push(Segment {
                units: sharers[range.clone()].to_vec(),
                partitions: from..shared,
            });
        }
        let mut start = range.start;
        for i in inner.filter(|&i| common[i] == shared) {
            open.push((start..i + 1, shared));
            start = i + 1;
        }
        open.push((start..range.end, shared));
    }
    segments
}

/// What an item should cost where a KV head costs so much in all: so that each thread finds some.
fn item_share(plan: &Plan, cost: usize, threads: usize) -> usize {
    cost * plan.shape.num_kv_heads / (threads * ITEMS_PER_THREAD)
}

/// Cuts segments into items: at most `ITEM_ROWS` rows each, and for the balance of the threads, between partitions.
fn make_items(plan: &Plan, mask: Mask, units: &[Unit], segments: Vec<Segment>) -> Vec<Item> {
    let rows =
        |us: &[usize]| us.iter().map(|&u| units[u].tokens.len()).sum::<usize>() * plan.group();
    let cost = |us: &[usize], partitions: &Range<usize>| {
        let sequence = &plan.sequences[units[us[0]].sequence];
        let seen = sequence.visible(units[us[0]].tokens.end - 1, mask);
        let (start, end) = (partitions.start * PARTITION, partitions.end * PARTITION);
        seen.end.min(end).saturating_sub(seen.start.max(start)) * (READ_COST + rows(us))
    };

    let mut pieces = Vec::new();
    for segment in segments {
        let mut rest = &segment.units[..];
        while !rest.is_empty() {
            let mut n = 1;
            while n < rest.len() && rows(&rest[..=n]) <= ITEM_ROWS {
                n += 1;
            }
            pieces.push((rest[..n].to_vec(), segment.partitions.clone()));
            rest = &rest[n..];
        }
    }

    let heads = plan.shape.num_kv_heads;
    let total: usize = pieces.iter().map(|(us, p)| cost(us, p)).sum();
    let target = item_share(plan, total, plan.threads).max(MIN_ITEM_COST);
    let mut items = Vec::new();
    for (us, partitions) in pieces {
        let num_rows = rows(&us);
        let floats = num_rows * partitions.len() * heads * plan.shape.head_dim;
        let cuts = if plan.threads == 1 || floats > MAX_SPLIT_FLOATS {
            1
        } else {
            cost(&us, &partitions).div_ceil(target)
        };
        let each = partitions.len().div_ceil(cuts.max(1)).max(1);
        let mut start = partitions.start;
        loop {
            let run = start..(start + each).min(partitions.end);
            start = run.end;
            let sees = union(us.iter().map(|&u| &units[u].sees));
            items.push(Item {
                sees: sees.start..sees.end.min(run.end * PARTITION),
                cost: cost(&us, &run),
                rows: num_rows,
                leftmost: run.start == units[us[0]].partitions.start,
                units: us.clone(),
                partitions: run,
            });
            if start >= partitions.end {
                break;
            }
        }
    }
    items.sort_by_key(|item| Reverse(item.cost));
    items
}

/// The part of a range of positions in a partition, counted from its start.
pub(super) fn local(sees: &Range<usize>, partition: usize) -> Range<usize> {
    let at = |x: usize| x.saturating_sub(partition * PARTITION).min(PARTITION);
    at(sees.start)..at(sees.end)
}

/// What is in all ranges that are not empty; at most `0..most`.
pub(super) fn intersection(ranges: &[Range<usize>], most: usize) -> Range<usize> {
    let (mut start, mut end) = (0, most);
    for range in ranges.iter().filter(|r| !r.is_empty()) {
        (start, end) = (start.max(range.start), end.min(range.end));
    }
    start..end.max(start)
}

/// The smallest range around all that are not empty.
pub(super) fn union<'a>(ranges: impl Iterator<Item = &'a Range<usize>>) -> Range<usize> {
    let (mut start, mut end) = (usize::MAX, 0);
    for range in ranges.filter(|r| !r.is_empty()) {
        (start, end) = (start.min(range.start), end.max(range.end));
    }
    start.min(end)..end
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CAUSAL: Mask = Mask {
        causal: true,
        window: None,
    };

    /// A plan of sequences `(KV tokens, new rows)` over `table(sequence, entry)`.
    fn plan(
        block_size: usize,
        group: usize,
        sequences: &[(usize, usize)],
        threads: usize,
        table: impl Fn(usize, usize) -> i32,
    ) -> Plan {
        let mut starts = vec![0];
        for (_, rows) in sequences {
            starts.push(starts[starts.len() - 1] + *rows as i32);
        }
        let lens: Vec<_> = sequences.iter().map(|s| s.0 as i32).collect();
        let shape = PlanShape {
            num_heads: 2 * group,
            num_kv_heads: 2,
            head_dim: 64,
            block_size,
            num_blocks: 1 << 20,
        };
        Plan::new(shape, 1 << 16, table, &starts, &lens, Some(threads)).unwrap()
    }

    #[test]
    fn a_prefix_in_the_same_blocks_is_read_once() {
        // 1,024 tokens of 16 sequences, within them 512 more of the first eight, then 40 of each one's own.
        let table = |s: usize, i: usize| match i * 16 {
            ..1024 => i as i32,
            1024..1536 if s < 8 => 1000 + i as i32,
            _ => (s * 5000 + i) as i32,
        };
        let lens: Vec<_> = (0..16)
            .map(|s| (if s < 8 { 1576 } else { 1064 }, 1))
            .collect();
        let schedule = plan(16, 3, &lens, 1, table).schedule(CAUSAL);
        let mut reads: Vec<_> = schedule
            .items
            .iter()
            .map(|item| (item.units.len(), item.partitions.clone()))
            .collect();
        reads.sort_by_key(|(units, p)| (Reverse(*units), p.start));
        assert_eq!(reads[..2], [(16, 0..4), (8, 4..6)]);
        assert!(
            reads[2..]
                .iter()
                .all(|(units, p)| *units == 1 && p.len() == 1)
        );
        assert_eq!(reads.len(), 18);
    }

    #[test]
    fn one_long_sequence_is_cut_for_all_threads() {
        let long = plan(16, 1, &[(100_000, 1)], 8, |_, i| i as i32);
        let items = &long.schedule(CAUSAL).items;
        assert!(items.len() >= 8, "{} items", items.len());
        let lens: Vec<_> = items.iter().map(|i| i.partitions.len()).collect();
        assert!(
            lens.iter().max().unwrap() <= &(2 * lens.iter().min().unwrap()),
            "{lens:?}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn items_cover_what_each_row_sees_once(
            block_size in prop_oneof![Just(64), Just(100), Just(256), Just(300)],
            group in prop_oneof![Just(1), Just(3), Just(40)],
            sequences in prop::collection::vec((0..1500_usize, 0..60_usize, any::<[bool; 24]>()), 1..7),
            threads in 1..9_usize,
            window in prop_oneof![Just(None), (1..900_usize).prop_map(Some)],
        ) {
            let lens: Vec<_> = sequences.iter().map(|s| (s.0, s.1.min(s.0))).collect();
            // Two blocks an entry to choose from: prefixes are often shared.
            let plan = plan(block_size, group, &lens, threads, |s, i| i32::from(sequences[s].2[i]));
            let mask = Mask { causal: true, window };
            let schedule = plan.schedule(mask);

            let tokens: usize = schedule.units.iter().map(|u| u.tokens.len()).sum();
            prop_assert_eq!(tokens, plan.tokens);
            let mut records = 0;
            for (u, unit) in schedule.units.iter().enumerate() {
                let mine: Vec<_> = schedule.items.iter().filter(|i| i.units.contains(&u)).collect();
                let mut runs: Vec<_> = mine.iter().map(|i| i.partitions.clone()).collect();
                runs.sort_by_key(|r| r.start);
                prop_assert_eq!(runs[0].start, unit.partitions.start);
                prop_assert_eq!(runs[runs.len() - 1].end, unit.partitions.end);
                prop_assert!(runs.windows(2).all(|w| w[0].end == w[1].start));
                prop_assert_eq!(mine.iter().filter(|i| i.leftmost).count(), 1);
                prop_assert_eq!(runs[0].end, unit.folded);
                prop_assert_eq!(runs.len(), unit.items);
                if unit.items > 1 {
                    prop_assert_eq!(unit.records, records);
                    records += unit.slots() * unit.tokens.len() * group;
                }
            }
            prop_assert_eq!(records, schedule.records);
            for item in schedule.items.iter().filter(|i| i.units.len() > 1) {
                let blocks = |u: &usize| plan.blocks(&plan.sequences[schedule.units[*u].sequence]);
                let (start, end) = (item.partitions.start * PARTITION, item.partitions.end * PARTITION);
                let shared = start / block_size..end.div_ceil(block_size);
                for u in &item.units {
                    let unit = &schedule.units[*u];
                    prop_assert_eq!(&blocks(u)[shared.clone()], &blocks(&item.units[0])[shared.clone()]);
                    for i in unit.tokens.clone() {
                        let sees = plan.sequences[unit.sequence].visible(i, mask);
                        prop_assert!(sees.start <= start && end <= sees.end);
                    }
                }
            }
        }
    }
}
