//! The first part of the micro-kernel: scores of one tile of rows with a partition's tokens.
#![allow(clippy::needless_range_loop)] // indices name rows and vectors of several arrays at once

use std::ops::Range;

use crate::simd::Simd;

use super::format::{Format, Parts};
use super::kernel::{FEW_ROWS, Partition, SCORES, repeats};
use super::layout::TILE;

/// Scores of all vectors of tokens that touch `seen`; hidden ones come out as anything.
///
/// # Safety
/// `Partition` says what its pointers hold; the tiles cover `seen`.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd, F: Format, const R: usize, const V: usize>(
    s: S,
    p: &Partition<'_>,
    seen: &Range<usize>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if const { repeats::<S, F>(R) } && p.tiles.is_prefetched() {
            blocks::<S, F, R, V, false>(s, p, seen);
        } else {
            blocks::<S, F, R, V, true>(s, p, seen);
        }
    }
}

/// The same, while the next partition is prefetched, or not.
#[inline(always)]
unsafe fn blocks<S: Simd, F: Format, const R: usize, const V: usize, const AHEAD: bool>(
    s: S,
    p: &Partition<'_>,
    seen: &Range<usize>,
) {
    let (mut x, end) = (seen.start / S::LANES, seen.end.div_ceil(S::LANES));
    // Few rows take packed tiles as they come to them (see `places`).
    if R > FEW_ROWS {
        p.tiles.ready_keys::<S, F>(s, p.tiles.touched(seen));
    }
    // SAFETY: the caller's promise.
    unsafe {
        while x + V <= end {
            block::<S, F, R, V, AHEAD>(s, p, x);
            x += V;
        }
        if const { V > 2 } && x + 2 <= end {
            block::<S, F, R, 2, AHEAD>(s, p, x);
            x += 2;
        }
        if x < end {
            block::<S, F, R, 1, AHEAD>(s, p, x);
        }
    }
}

/// Scores of `V` vectors of tokens, from vector `x` of the partition on.
#[inline(always)]
unsafe fn block<S: Simd, F: Format, const R: usize, const V: usize, const AHEAD: bool>(
    s: S,
    p: &Partition<'_>,
    x: usize,
) {
    let (row, parts) = (TILE * F::LANE, Parts::<S, F>::COUNT);
    // Each tile is prefetched for by the vector that begins it; without one, a line is asked for that is near anyway.
    let prefetches = (V * S::LANES).div_ceil(TILE);
    if R <= FEW_ROWS {
        let tokens = x * S::LANES..(x + V) * S::LANES;
        p.tiles.ready_keys::<S, F>(s, p.tiles.touched(&tokens));
    }
    // SAFETY: the vectors are inside the tiles, words inside the packed queries, scores inside the rows of them.
    unsafe {
        let (mut k, mut ahead, mut begun) = ([std::ptr::null::<u8>(); V], [std::ptr::null(); V], 0);
        for v in 0..V {
            let token = (x + v) * S::LANES;
            let tile = token / TILE - p.tiles.first;
            k[v] = p.tiles.key(tile).add(token % TILE * F::LANE);
            if token.is_multiple_of(TILE) {
                ahead[begun] = p.tiles.ahead_of_key(tile);
                begun += 1;
            }
        }
        ahead[begun..].fill(k[0]);
        // K comes from the second-level cache: what is read next is asked for meanwhile. Many rows take so long that the
        // hardware does most of it by itself.
        let nears = if R > FEW_ROWS { 1 } else { prefetches };
        let (after, last) = ((x + V) * S::LANES / TILE - p.tiles.first, p.tiles.count - 1);
        let mut near = [std::ptr::null(); V];
        for (v, to) in near.iter_mut().enumerate() {
            *to = p.tiles.key((after + v).min(last));
        }

        let mut acc = [[F::zero(s); V]; R];
        for step in 0..p.steps {
            if AHEAD {
                for to in &ahead[..prefetches] {
                    s.prefetch(to.wrapping_add(step * row));
                }
            }
            for to in &near[..nears] {
                s.prefetch_near(to.wrapping_add(step * row));
            }
            for part in 0..parts {
                let mut a = [F::splat(s, 0); V];
                for v in 0..V {
                    a[v] = F::load(s, k[v].add(step * row), part);
                }
                for r in 0..R {
                    let q = F::splat(s, *p.query.add((step * parts + part) * R + r));
                    for v in 0..V {
                        acc[r][v] = F::fma(s, a[v], q, acc[r][v]);
                    }
                }
            }
        }
        for r in 0..R {
            for v in 0..V {
                F::store_sum(s, p.scores.add(r * SCORES + (x + v) * S::LANES), acc[r][v]);
            }
        }
    }
}
