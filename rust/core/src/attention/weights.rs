//! The second part of the micro-kernel: one row's scores to weights.
//!
//! A hidden slot may hold NaN: its score is replaced before anyone looks.
#![allow(clippy::needless_range_loop)] // indices name vectors of several arrays at once

use std::ops::Range;

use crate::simd::{MAX_LANES, Simd, exps, tanh};

use super::format::{Format, MAX_WEIGHT, quantum};
use super::kernel::Partition;
use super::plan::PARTITION;
use super::rows::Row;
use super::tiles::Tiles;

/// Vectors that touch a range of tokens.
fn vectors<S: Simd>(span: &Range<usize>) -> Range<usize> {
    span.start / S::LANES..span.end.div_ceil(S::LANES)
}

/// Whether vectors `x..x + n` are seen as a whole. The usual case needs no lanes selected.
#[inline(always)]
fn seen_wholly<S: Simd>(sees: &Range<usize>, x: usize, n: usize) -> bool {
    sees.start <= x * S::LANES && (x + n) * S::LANES <= sees.end
}

/// The scores of a vector of integer sums, of a query whose unit stands for `quantum`.
#[inline(always)]
unsafe fn scaled<S: Simd>(
    s: S,
    tiles: &Tiles<'_>,
    scores: *const f32,
    x: usize,
    quantum: f32,
) -> S::F32 {
    // SAFETY: the caller's promise.
    unsafe {
        let scale = s.load(tiles.key_scales(x * S::LANES));
        let unit = s.mul(scale, s.splat(quantum));
        s.mul(s.to_f32(s.load_i32(scores.add(x * S::LANES))), unit)
    }
}

/// What the options make of a row's scores, in place; and of the integer sums of quantized caches, scores.
///
/// # Safety
/// `scores` has a partition of them, `sees` is inside the partition.
#[inline(always)]
unsafe fn adjust<S: Simd, F: Format>(
    s: S,
    p: &Partition<'_>,
    row: &Row,
    scores: *mut f32,
    sees: &Range<usize>,
) {
    let (softcap, alibi) = (p.options.softcap, p.options.alibi_slopes.is_some());
    const LANE: [f32; MAX_LANES] = {
        let (mut lanes, mut i) = ([0.0; MAX_LANES], 0);
        while i < MAX_LANES {
            lanes[i] = i as f32;
            i += 1;
        }
        lanes
    };
    // Exact below 2^24 tokens.
    let distance = (row.position - (p.index * PARTITION) as isize) as f32;
    for x in vectors::<S>(sees) {
        // SAFETY: the vector is inside the partition.
        unsafe {
            let at = scores.add(x * S::LANES);
            let mut score = if F::QUANTIZED {
                scaled(s, p.tiles, scores, x, row.quantum)
            } else {
                s.load(at)
            };
            if let Some(cap) = softcap {
                score = s.mul(tanh(s, s.div(score, s.splat(cap))), s.splat(cap));
            }
            if alibi {
                let lane = s.add(s.load(LANE.as_ptr()), s.splat((x * S::LANES) as f32));
                let (from, to) = (s.splat(distance), lane);
                let apart = s.max(s.sub(from, to), s.sub(to, from));
                score = s.fma(apart, s.splat(-row.alibi_slope), score);
            }
            s.store(at, score);
        }
    }
}

/// Makes a row's sums its scores, in place, and returns the largest that it sees. Hidden ones of vectors that it sees a
/// part of become minus infinity.
///
/// # Safety
/// `scores` has a partition of sums, `sees` is inside the partition and not empty.
#[inline(always)]
pub(super) unsafe fn maximum<S: Simd, F: Format>(
    s: S,
    p: &Partition<'_>,
    row: &Row,
    scores: *mut f32,
    sees: &Range<usize>,
) -> f32 {
    let adjusted = p.options.softcap.is_some() || p.options.alibi_slopes.is_some();
    // Integer sums that are no scores yet.
    let quantum = if F::QUANTIZED && !adjusted {
        Some(row.quantum)
    } else {
        None
    };
    let all = vectors::<S>(sees);
    // Maxima do not depend on their order: four chains, for speed. From the lowest number on: where all scores are
    // minus infinity, so are their distances to it, and their weights 0.
    let (mut most, mut x) = ([s.splat(f32::MIN); 4], all.start);
    // SAFETY: the caller's promise.
    unsafe {
        if adjusted {
            adjust::<S, F>(s, p, row, scores, sees);
        }
        while x + 4 <= all.end {
            let whole = seen_wholly::<S>(sees, x, 4);
            for i in 0..4 {
                let score = score(s, p.tiles, scores, sees, x + i, whole, quantum);
                most[i] = s.max(most[i], score);
            }
            x += 4;
        }
        while x < all.end {
            let whole = seen_wholly::<S>(sees, x, 1);
            let score = score(s, p.tiles, scores, sees, x, whole, quantum);
            most[0] = s.max(most[0], score);
            x += 1;
        }
    }
    s.maximum(s.max(s.max(most[0], most[1]), s.max(most[2], most[3])))
}

/// One vector of scores, hidden ones minus infinity, and in place where that changes it. `quantum` says that there are
/// integer sums still.
#[inline(always)]
unsafe fn score<S: Simd>(
    s: S,
    tiles: &Tiles<'_>,
    scores: *mut f32,
    sees: &Range<usize>,
    x: usize,
    whole: bool,
    quantum: Option<f32>,
) -> S::F32 {
    // SAFETY: the caller's promise.
    unsafe {
        let at = scores.add(x * S::LANES);
        let mut score = match quantum {
            Some(quantum) => scaled(s, tiles, scores, x, quantum),
            None => s.load(at),
        };
        if !whole {
            let (from, until) = seen_lanes::<S>(sees, x);
            score = s.select_lanes(from, until, score, s.splat(f32::NEG_INFINITY));
        }
        if quantum.is_some() || !whole {
            s.store(at, score);
        }
        score
    }
}

/// Of a row's weights, the sum; and of quantized ones' products with the values' scales, the largest, and NaN if there
/// is NaN or infinity among them, else 0 (see [`quantum`]).
struct Sums<V> {
    weights: V,
    largest: V,
    bad: V,
}

/// One row's scores to weights, in place, by their maximum; returns the weights' sum. Hidden slots of vectors that it sees
/// a part of get weight 0. Weights of quantized caches are multiplied by the scales of their values and left for
/// [`quantize`]: how many quanta there are in 1 comes second, and what one stands for.
///
/// # Safety
/// As for [`maximum`], which has been there.
#[inline(always)]
pub(super) unsafe fn weights<S: Simd, F: Format>(
    s: S,
    tiles: &Tiles<'_>,
    scores: *mut f32,
    sees: &Range<usize>,
    maximum: f32,
) -> (f32, f32, f32) {
    let all = vectors::<S>(sees);
    let (zero, mut x) = (s.splat(0.0), all.start);
    let mut sums = Sums {
        weights: zero,
        largest: zero,
        bad: zero,
    };
    // SAFETY: the caller's promise. Smaller weights are written below the scores still to be read.
    unsafe {
        while x + 4 <= all.end {
            exponentials::<S, F, 4>(s, tiles, scores, sees, x, maximum, &mut sums);
            x += 4;
        }
        while x < all.end {
            exponentials::<S, F, 1>(s, tiles, scores, sees, x, maximum, &mut sums);
            x += 1;
        }
    }
    let (per_one, quantum) = if F::QUANTIZED {
        quantum(s.maximum(sums.largest), MAX_WEIGHT, s.sum(sums.bad))
    } else {
        (1.0, 1.0)
    };
    (s.sum(sums.weights), per_one, quantum)
}

/// `N` vectors of scores from vector `x` on to weights, or products.
#[inline(always)]
unsafe fn exponentials<S: Simd, F: Format, const N: usize>(
    s: S,
    tiles: &Tiles<'_>,
    scores: *mut f32,
    sees: &Range<usize>,
    x: usize,
    maximum: f32,
    sums: &mut Sums<S::F32>,
) {
    let zero = s.splat(0.0);
    let whole = seen_wholly::<S>(sees, x, N);
    // SAFETY: the caller's promise.
    unsafe {
        let mut weights = [zero; N];
        for i in 0..N {
            let score = s.load(scores.add((x + i) * S::LANES));
            weights[i] = s.sub(score, s.splat(maximum));
        }
        weights = exps(s, weights);
        for i in 0..N {
            let first = (x + i) * S::LANES;
            sums.weights = s.add(sums.weights, weights[i]);
            if !F::QUANTIZED {
                F::store_weights(s, scores.cast(), first, weights[i]);
                continue;
            }
            let mut product = s.mul(weights[i], s.load(tiles.value_scales(first)));
            if !whole {
                // A hidden value's scale may be anything.
                let (from, until) = seen_lanes::<S>(sees, x + i);
                product = s.select_lanes(from, until, product, zero);
            }
            sums.largest = s.max(sums.largest, product);
            // Unlike a product with 0, this takes no multiplier, where adders are others.
            sums.bad = s.add(sums.bad, s.sub(product, product));
            s.store(scores.add(first), product);
        }
    }
}

/// Lanes of vector `x` that are seen.
#[inline(always)]
fn seen_lanes<S: Simd>(sees: &Range<usize>, x: usize) -> (usize, usize) {
    let first = x * S::LANES;
    (
        sees.start.saturating_sub(first),
        (sees.end - first).min(S::LANES),
    )
}

/// Rounds what [`weights`] left to multiples of a quantum, of which `per_one` are 1.
///
/// # Safety
/// As for [`weights`].
#[inline(always)]
pub(super) unsafe fn quantize<S: Simd, F: Format>(
    s: S,
    weights: *mut f32,
    sees: &Range<usize>,
    per_one: f32,
) {
    for x in vectors::<S>(sees) {
        // SAFETY: the caller's promise. Smaller weights are written below the products still to be read.
        unsafe {
            let product = s.load(weights.add(x * S::LANES));
            let weight = s.mul(product, s.splat(per_one));
            F::store_weights(s, weights.cast(), x * S::LANES, weight);
        }
    }
}
