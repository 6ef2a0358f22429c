//! The third part of the micro-kernel: weighted sums of a partition's values.
//!
//! A hidden slot may hold NaN: its value is never multiplied, because "times weight 0" would not help (0 * NaN, and
//! fma(0, v, -0)). The tokens that all rows of a tile see run in an unmasked loop; the few others, on the diagonal or at
//! a window's edge, row by row.
#![allow(clippy::needless_range_loop)] // indices name rows and vectors of several arrays at once

use std::marker::PhantomData;
use std::ops::Range;

use crate::simd::Simd;

use super::format::{Format, Parts};
use super::kernel::{FEW_ROWS, Partition, SCORES, repeats};
use super::layout::TILE;
use super::merge::Record;
use super::plan::{PARTITION, intersection};
use super::tiles::{TILES, tile_bytes};

/// Bytes of V that few rows read before their sums change: they stay in the first-level cache.
const RUN_BYTES: usize = 8 * 1024;

/// How many vectors of dimensions may be in flight at once.
struct Widest<S, F, const R: usize>(PhantomData<(S, F)>);

impl<S: Simd, F: Format, const R: usize> Widest<S, F, R> {
    /// Sums, operands and a weight fit the registers; with parts, what they are made of and a mask as well. Eight, or four
    /// and less: each width is code of its own.
    const WIDTH: usize = {
        let parts = Parts::<S, F>::COUNT;
        match (S::REGISTERS - parts) / (R + parts) {
            8.. => 8,
            4.. => 4,
            most => most,
        }
    };
}

/// How many tiles are read at a time. Few rows read V from memory: some tiles, in its order. Many rows read it from the
/// second-level cache and keep their sums: all tiles.
pub(super) fn tiles_at_once<F: Format>(rows: usize, width: usize) -> usize {
    if rows <= FEW_ROWS {
        (RUN_BYTES / tile_bytes::<F>(width)).clamp(1, TILES)
    } else {
        TILES
    }
}

/// Weighted sums of values, into the parts' outputs. `quanta` say what a unit of each row's quantized sums stands for.
///
/// # Safety
/// `Partition` says what its pointers hold; the tiles cover `seen`, the union of what the rows see.
#[inline(always)]
pub(super) unsafe fn values<S: Simd, F: Format, const R: usize>(
    s: S,
    p: &Partition<'_>,
    seen: &Range<usize>,
    sees: &[Range<usize>; R],
    quanta: &[f32; R],
) {
    // Steps that some row sees, and among them those that all rows (that see anything) see wholly.
    let some = seen.start / F::STEP..seen.end.div_ceil(F::STEP);
    let common = intersection(sees, PARTITION);
    let from = common.start.div_ceil(F::STEP).clamp(some.start, some.end);
    let all = from..(common.end / F::STEP).clamp(from, some.end);
    let (tile_bytes, run) = (tile_bytes::<F>(p.width), tiles_at_once::<F>(R, p.width));
    let vectors = p.width / S::LANES;
    let most = Widest::<S, F, R>::WIDTH;
    let chunks = if vectors.is_multiple_of(8) {
        vectors.div_ceil(most)
    } else {
        vectors.div_ceil(most.min(4))
    };
    for start in (0..p.tiles.count).step_by(run) {
        let tiles = start..(start + run).min(p.tiles.count);
        p.tiles.ready_values::<S, F>(s, tiles.clone());
        let mut c = 0;
        for i in 0..chunks {
            let width = (vectors - c).div_ceil(chunks - i);
            let chunk = Chunk {
                p,
                sees,
                some: &some,
                all: &all,
                tiles: tiles.clone(),
                number: i,
                chunks,
                share: (tile_bytes / chunks).next_multiple_of(64),
            };
            macro_rules! pick {
                ($($width:literal),*) => {
                    // SAFETY: the caller's promise.
                    unsafe {
                        $(if const { $width <= Widest::<S, F, R>::WIDTH } && $width == width {
                            if const { repeats::<S, F>(R) } && p.tiles.is_prefetched() {
                                chunk.run::<S, F, $width, false>(s, c);
                            } else {
                                chunk.run::<S, F, $width, true>(s, c);
                            }
                        } else)* {
                            unreachable!("{width} vectors do not fit the registers");
                        }
                    }
                };
            }
            pick!(8, 4, 3, 2, 1);
            c += width;
        }
    }
    if F::QUANTIZED {
        for r in 0..R {
            for d in (0..p.width).step_by(S::LANES) {
                // SAFETY: inside the part.
                unsafe {
                    let at = Record::at(p.parts, p.width, r).output().add(d);
                    s.store(at, s.mul(s.to_f32(s.load_i32(at)), s.splat(quanta[r])));
                }
            }
        }
    }
}

/// A tile of V, from a chunk's columns on; and what to prefetch meanwhile, to the first and the second-level cache.
struct Value {
    tile: *const u8,
    near: *const u8,
    ahead: *const u8,
}

/// Some columns of a run of tiles, and all rows.
struct Chunk<'a, const R: usize> {
    p: &'a Partition<'a>,
    sees: &'a [Range<usize>; R],
    /// Steps of the partition that some row sees, and those that all rows (that see anything) see wholly.
    some: &'a Range<usize>,
    all: &'a Range<usize>,
    tiles: Range<usize>,
    /// Which one of how many chunks of columns it is, and their share of a tile to prefetch, in bytes.
    number: usize,
    chunks: usize,
    share: usize,
}

impl<const R: usize> Chunk<'_, R> {
    /// Tiles that all rows see wholly have a loop of their own: with the others inside, sums would leave the registers
    /// between tiles.
    #[inline(always)]
    unsafe fn run<S: Simd, F: Format, const C: usize, const AHEAD: bool>(&self, s: S, c: usize) {
        let steps = TILE / F::STEP;
        let Range { start, end } = self.tiles;
        let first = self.p.tiles.first;
        let from = (self.all.start.div_ceil(steps) - first).clamp(start, end);
        let until = (self.all.end / steps - first).clamp(from, end);
        for (tiles, whole) in [
            (start..from, false),
            (from..until, true),
            (until..end, false),
        ] {
            // SAFETY: the caller's promise.
            unsafe {
                match whole {
                    _ if tiles.is_empty() => {}
                    true => self.whole::<S, F, C, AHEAD>(s, c, tiles),
                    false => self.partial::<S, F, C, AHEAD>(s, c, tiles),
                }
            }
        }
    }

    /// Adds up tiles that all rows see wholly.
    #[inline(always)]
    unsafe fn whole<S: Simd, F: Format, const C: usize, const AHEAD: bool>(
        &self,
        s: S,
        c: usize,
        tiles: Range<usize>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut acc = self.begin::<S, F, C>(s, c, &tiles);
            for tile in tiles {
                let (v, words) = (self.value::<S, F>(tile, c), self.words::<S, F>(tile));
                // A constant count of steps.
                for t in 0..TILE / F::STEP {
                    self.step::<S, F, C, AHEAD>(s, &mut acc, &v, words, t);
                }
            }
            self.end::<S, F, C>(s, c, &acc);
        }
    }

    /// Adds up tiles that some row sees a part of.
    #[inline(always)]
    unsafe fn partial<S: Simd, F: Format, const C: usize, const AHEAD: bool>(
        &self,
        s: S,
        c: usize,
        tiles: Range<usize>,
    ) {
        let steps = TILE / F::STEP;
        // SAFETY: the caller's promise.
        unsafe {
            let mut acc = self.begin::<S, F, C>(s, c, &tiles);
            for tile in tiles {
                let (v, words) = (self.value::<S, F>(tile, c), self.words::<S, F>(tile));
                let first = (self.p.tiles.first + tile) * steps;
                let clip = |x: usize| x.clamp(first, first + steps) - first;
                let some = clip(self.some.start)..clip(self.some.end);
                let all = clip(self.all.start)..clip(self.all.end);
                self.masked::<S, F, C>(s, &mut acc, &v, words, first, some.start..all.start);
                for t in all.clone() {
                    self.step::<S, F, C, AHEAD>(s, &mut acc, &v, words, t);
                }
                self.masked::<S, F, C>(s, &mut acc, &v, words, first, all.end..some.end);
            }
            self.end::<S, F, C>(s, c, &acc);
        }
    }

    /// The sums of vectors from `c` on before the first of `tiles`.
    #[inline(always)]
    unsafe fn begin<S: Simd, F: Format, const C: usize>(
        &self,
        s: S,
        c: usize,
        tiles: &Range<usize>,
    ) -> [[F::Sum<S>; C]; R] {
        let mut acc = [[F::zero(s); C]; R];
        if tiles.start > 0 {
            for r in 0..R {
                for v in 0..C {
                    // SAFETY: inside the parts.
                    acc[r][v] = unsafe { F::load_sum(s, self.sum(r).add((c + v) * S::LANES)) };
                }
            }
        }
        acc
    }

    /// Keeps the sums of vectors from `c` on.
    #[inline(always)]
    unsafe fn end<S: Simd, F: Format, const C: usize>(
        &self,
        s: S,
        c: usize,
        acc: &[[F::Sum<S>; C]; R],
    ) {
        for r in 0..R {
            for v in 0..C {
                // SAFETY: inside the parts.
                unsafe { F::store_sum(s, self.sum(r).add((c + v) * S::LANES), acc[r][v]) };
            }
        }
    }

    /// Where the sums of a row are kept.
    #[inline(always)]
    unsafe fn sum(&self, r: usize) -> *mut f32 {
        // SAFETY: there are `R` parts.
        unsafe { Record::at(self.p.parts, self.p.width, r).output() }
    }

    /// The first row's weights of a tile.
    #[inline(always)]
    unsafe fn words<S: Simd, F: Format>(&self, tile: usize) -> *const u32 {
        let first = (self.p.tiles.first + tile) * (TILE / F::STEP);
        // SAFETY: inside the row.
        unsafe {
            self.p
                .scores
                .cast::<u32>()
                .add(first * Parts::<S, F>::COUNT)
        }
    }

    /// A tile of the run, from vector `c` on.
    #[inline(always)]
    fn value<S: Simd, F: Format>(&self, tile: usize, c: usize) -> Value {
        let (tiles, i) = (&self.p.tiles, tile - self.tiles.start);
        let column = c * S::LANES * F::LANE;
        // Chunks walk down columns. Where those come from memory, they ask for the next ones in its order, each chunk of
        // each tile for its share.
        let turn = self.number * self.tiles.len() + i;
        let (other, offset) = (turn / self.chunks, turn % self.chunks * self.share);
        let ahead = tiles.ahead_of_value(self.tiles.start + other);
        let near = if R <= FEW_ROWS {
            let next = (self.tiles.end + other).min(tiles.count - 1);
            tiles.value(next).wrapping_add(offset)
        } else {
            tiles
                .value((tile + 1).min(tiles.count - 1))
                .wrapping_add(column)
        };
        Value {
            tile: tiles.value(tile).wrapping_add(column),
            near,
            ahead: ahead.wrapping_add(offset),
        }
    }

    /// One step that all rows see, while the next partition is prefetched, or not.
    #[inline(always)]
    unsafe fn step<S: Simd, F: Format, const C: usize, const AHEAD: bool>(
        &self,
        s: S,
        acc: &mut [[F::Sum<S>; C]; R],
        v: &Value,
        words: *const u32,
        t: usize,
    ) {
        let parts = Parts::<S, F>::COUNT;
        let bytes = C * S::LANES * F::LANE;
        for line in (0..bytes).step_by(64) {
            if AHEAD {
                s.prefetch(v.ahead.wrapping_add(t * bytes + line));
            }
            let row = if R <= FEW_ROWS {
                bytes
            } else {
                self.p.tiles.value_row
            };
            s.prefetch_near(v.near.wrapping_add(t * row + line));
        }
        // SAFETY: the caller's promise.
        unsafe {
            for part in 0..parts {
                let mut a = [F::splat(s, 0); C];
                for c in 0..C {
                    let at = t * self.p.tiles.value_row + c * S::LANES * F::LANE;
                    a[c] = F::load(s, v.tile.add(at), part);
                }
                for r in 0..R {
                    let weight = F::splat(s, *words.add(r * SCORES + t * parts + part));
                    for c in 0..C {
                        acc[r][c] = F::fma(s, a[c], weight, acc[r][c]);
                    }
                }
            }
        }
    }

    /// Steps that each row sees, sees a part of, or does not see.
    #[inline(always)]
    unsafe fn masked<S: Simd, F: Format, const C: usize>(
        &self,
        s: S,
        acc: &mut [[F::Sum<S>; C]; R],
        v: &Value,
        words: *const u32,
        first: usize,
        steps: Range<usize>,
    ) {
        let parts = Parts::<S, F>::COUNT;
        for (t, part) in steps.flat_map(|t| (0..parts).map(move |part| (t, part))) {
            // SAFETY: the caller's promise.
            unsafe {
                let mut a = [F::splat(s, 0); C];
                for c in 0..C {
                    let at = t * self.p.tiles.value_row + c * S::LANES * F::LANE;
                    a[c] = F::load(s, v.tile.add(at), part);
                }
                let token = (first + t) * F::STEP;
                for r in 0..R {
                    let row = &self.sees[r];
                    if row.end <= token || token + F::STEP <= row.start {
                        continue;
                    }
                    let (head, tail) = (row.contains(&token), row.contains(&(token + F::STEP - 1)));
                    let weight = F::splat(s, *words.add(r * SCORES + t * parts + part));
                    for c in 0..C {
                        if let Some(a) = F::seen(s, a[c], part, head, tail) {
                            acc[r][c] = F::fma(s, a, weight, acc[r][c]);
                        }
                    }
                }
            }
        }
    }
}
