//! The micro-kernel: one tile of rows, one partition; scores, weights, values.
//!
//! 1. scores: per (row, token) one chain over head_dim, ascending, vectorized across tokens;
//! 2. weights: the row's maximum, `exp(score - maximum)`, and their sum in fixed lanes;
//! 3. values: per (row, dimension) one chain over exactly the visible tokens, ascending, from +0.
//!
//! All are independent of the other rows, so a row's bits are too: `R` rows and `V` (or `C`) vectors in flight only
//! say how many chains run at once. A hidden slot may hold NaN: its score is replaced before anyone looks, and its
//! value is never multiplied, because "times weight 0" would not help (0 * NaN, and fma(0, v, -0)). The tokens that
//! all rows of a tile see run in an unmasked loop; the few others, on the diagonal or at a window's edge, row by row.
#![allow(clippy::needless_range_loop)] // indices name rows and vectors of several arrays at once

use std::marker::PhantomData;
use std::ops::Range;

use crate::simd::{Kernel, Simd, exp};

use super::format::Format;
use super::layout::TILE;
use super::merge::Record;
use super::plan::{PARTITION, union};
use super::tiles::{TILES, Tiles};

/// Rows of the largest micro-kernel, and those that exist.
pub(super) const MAX_ROWS: usize = 12;
const KERNEL_ROWS: [usize; 7] = [1, 2, 3, 4, 6, 8, MAX_ROWS];

/// How many of `left` rows the next tile of rows takes, and the rows of its micro-kernel.
pub(super) fn kernel_rows<S: Simd>(left: usize) -> (usize, usize) {
    // Two vectors in flight keep the multipliers busy; more rows need fewer loads.
    let n = left.min(S::ACCUMULATORS / 2);
    let fits = KERNEL_ROWS.into_iter().find(|&r| r >= n);
    (n, fits.unwrap_or(MAX_ROWS))
}

/// A tile of rows and a partition.
pub(super) struct Partition<'a> {
    /// `[steps][R]` words.
    pub(super) query: *const u32,
    pub(super) steps: usize,
    /// All that the rows see of the partition.
    pub(super) tiles: &'a Tiles,
    /// What each row sees of it.
    pub(super) sees: [Range<usize>; MAX_ROWS],
    /// `[R][PARTITION]` words for scores, then weights.
    pub(super) scores: *mut f32,
    /// `[R]` records for this partition's results.
    pub(super) parts: *mut f32,
    /// The first of the rows' states to fold them onto, if that is to be done here.
    pub(super) states: Option<Record>,
    pub(super) rows: usize,
    pub(super) width: usize,
}

impl Partition<'_> {
    /// Runs the micro-kernel of so many rows, times token vectors in flight.
    ///
    /// # Safety
    /// The pointers are valid for what the fields say.
    pub(super) unsafe fn run<S: Simd, F: Format>(self, s: S, kernel_rows: usize) {
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
            (lo[r], hi[r]) = (p.sees[r].start, p.sees[r].end);
        }
        let seen = union(p.sees[..R].iter());
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
                    states.next(r).fold(s, Record::at(p.parts, p.width, r));
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
                let (tile, next) = p.tiles.key(token / TILE - p.tiles.first);
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
                let (v, ahead) = p.tiles.value(tile);
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
