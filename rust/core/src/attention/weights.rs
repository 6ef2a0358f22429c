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

/// What the options make of a row's scores, in place; and of the integer sums of quantized caches, scores.
///
/// # Safety
/// `scores` has a partition of them, `sees` is inside the partition.
#[inline(always)]
pub(super) unsafe fn adjust<S: Simd, F: Format>(
    s: S,
    p: &Partition<'_>,
    row: &Row,
    scores: *mut f32,
    sees: &Range<usize>,
) {
    let (softcap, alibi) = (p.options.softcap, p.options.alibi_slopes.is_some());
    if !F::QUANTIZED && softcap.is_none() && !alibi {
        return;
    }
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
            let mut score = s.load(at);
            if F::QUANTIZED {
                let scale = s.load(p.tiles.key_scales(x * S::LANES));
                let unit = s.mul(scale, s.splat(row.quantum));
                score = s.mul(s.to_f32(s.load_i32(at)), unit);
            }
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

/// The largest score that a row sees. Hidden ones of vectors that it sees a part of become minus infinity.
///
/// # Safety
/// `scores` has a partition of them, `sees` is inside the partition and not empty.
#[inline(always)]
pub(super) unsafe fn maximum<S: Simd>(s: S, scores: *mut f32, sees: &Range<usize>) -> f32 {
    let hidden = s.splat(f32::NEG_INFINITY);
    let all = vectors::<S>(sees);
    // SAFETY: the caller's promise.
    unsafe {
        for x in [all.start, all.end - 1] {
            let at = scores.add(x * S::LANES);
            let (from, until) = seen_lanes::<S>(sees, x);
            s.store(at, s.select_lanes(from, until, s.load(at), hidden));
        }
        // Maxima do not depend on their order: four chains, for speed. From the lowest number on: where all scores are minus
        // infinity, so are their distances to it, and their weights 0.
        let (mut most, mut x) = ([s.splat(f32::MIN); 4], all.start);
        while x + 4 <= all.end {
            for i in 0..4 {
                most[i] = s.max(most[i], s.load(scores.add((x + i) * S::LANES)));
            }
            x += 4;
        }
        while x < all.end {
            most[0] = s.max(most[0], s.load(scores.add(x * S::LANES)));
            x += 1;
        }
        s.maximum(s.max(s.max(most[0], most[1]), s.max(most[2], most[3])))
    }
}

/// One row's scores to weights, in place, by their maximum; returns the weights' sum, and what one unit of a quantized
/// weight stands for. Hidden slots of vectors that it sees a part of get weight 0.
///
/// # Safety
/// As for [`maximum`], which has been there.
#[inline(always)]
pub(super) unsafe fn weights<S: Simd, F: Format>(
    s: S,
    tiles: &Tiles,
    scores: *mut f32,
    sees: &Range<usize>,
    maximum: f32,
) -> (f32, f32) {
    let all = vectors::<S>(sees);
    // SAFETY: the caller's promise. Smaller weights are written below the scores still to be read.
    unsafe {
        let (mut l, mut x) = (s.splat(0.0), all.start);
        while x + 4 <= all.end {
            l = exponentials::<S, F, 4>(s, scores, x, maximum, l);
            x += 4;
        }
        while x < all.end {
            l = exponentials::<S, F, 1>(s, scores, x, maximum, l);
            x += 1;
        }
        let quantum = if F::QUANTIZED {
            quantize::<S, F>(s, tiles, scores, sees)
        } else {
            1.0
        };
        (s.sum(l), quantum)
    }
}

/// `N` vectors of scores from vector `x` on to weights, which are added to `l`.
#[inline(always)]
unsafe fn exponentials<S: Simd, F: Format, const N: usize>(
    s: S,
    scores: *mut f32,
    x: usize,
    maximum: f32,
    mut l: S::F32,
) -> S::F32 {
    // SAFETY: the caller's promise.
    unsafe {
        let mut weights = [l; N];
        for i in 0..N {
            let score = s.load(scores.add((x + i) * S::LANES));
            weights[i] = s.sub(score, s.splat(maximum));
        }
        weights = exps(s, weights);
        for i in 0..N {
            let first = (x + i) * S::LANES;
            l = s.add(l, weights[i]);
            if F::QUANTIZED {
                s.store(scores.add(first), weights[i]);
            } else {
                F::store_weights(s, scores.cast(), first, weights[i]);
            }
        }
    }
    l
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

/// Multiplies weights by the scales of their values, and quantizes the products; returns their unit.
#[inline(always)]
unsafe fn quantize<S: Simd, F: Format>(
    s: S,
    tiles: &Tiles,
    weights: *mut f32,
    sees: &Range<usize>,
) -> f32 {
    let zero = s.splat(0.0);
    let (mut largest, mut bad) = (zero, zero);
    // SAFETY: the caller's promise.
    unsafe {
        for x in vectors::<S>(sees) {
            let at = weights.add(x * S::LANES);
            let (from, until) = seen_lanes::<S>(sees, x);
            let product = s.mul(s.load(at), s.load(tiles.value_scales(x * S::LANES)));
            let product = s.select_lanes(from, until, product, zero);
            largest = s.max(largest, product);
            bad = s.fma(product, zero, bad);
            s.store(at, product);
        }
        let (units, quantum) = quantum(s.maximum(largest), MAX_WEIGHT, s.sum(bad));
        for x in vectors::<S>(sees) {
            let product = s.load(weights.add(x * S::LANES));
            F::store_weights(
                s,
                weights.cast(),
                x * S::LANES,
                s.mul(product, s.splat(units)),
            );
        }
        quantum
    }
}
