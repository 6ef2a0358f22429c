//! Sampling: a token drawn from each row of logits.
//!
//! Temperature, min-p, top-k and top-p only make weights smaller, or zero by a threshold, so that equal ones are kept or
//! dropped together. Randomness is one number of a counter-based generator, a function of (seed, position): a row gives
//! the same token in any batch, on any number of threads.
//!
//! Cost: one pass that computes the weights and sums them up in groups, and one over the groups; top-k and top-p look
//! for their threshold, in time linear in what comes into question.

use std::ops::Range;

use super::Rows;
use super::lanes::{load, store};
use super::split::{self, Each};
use super::top::{NOTHING, Out, Place, find_best, first_of_largest};
use crate::simd::{Isa, Simd, exps};
use crate::{Error, Result};

/// Weights that are summed up first: whose group the token is in is found by the sums.
const GROUP: usize = 64;

/// Vectors whose exponentials are computed together.
const CHAINS: usize = 4;

/// How a token is drawn from a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// Of the row's generator.
    pub seed: u64,
    /// Which number of it is taken.
    pub position: u64,
    /// Divides the logits; above 0.
    pub temperature: f64,
    /// Only so many of the largest logits, and those that equal the last of them; 0 is all.
    pub top_k: usize,
    /// Only the likeliest tokens up to the one that makes their probability so large, and its equals; in (0, 1].
    pub top_p: f64,
    /// Only tokens at least so likely, compared with the likeliest; in [0, 1].
    pub min_p: f64,
}

impl Draw {
    fn check(&self, row: usize) -> Result<()> {
        let refuse = |argument, value: f64, expected| {
            let problem = format!("got {value} for row {row}, expected {expected}");
            Err(Error::invalid(argument, problem))
        };
        if !(self.temperature > 0.0 && self.temperature.is_finite()) {
            return refuse("temperature", self.temperature, "a finite number > 0");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top_p", self.top_p, "a number in (0, 1]");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return refuse("min_p", self.min_p, "a number in [0, 1]");
        }
        Ok(())
    }

    /// What multiplies the logits. Neither 0 nor infinity: logits may be minus infinity, and their differences 0.
    fn scale(&self) -> f32 {
        (1.0 / self.temperature).clamp(f64::from(f32::MIN_POSITIVE), 1e30) as f32
    }
}

/// Draws a token from each row, -1 where a row is no distribution (see `argmax`).
///
/// # Errors
/// `draws` or `out` do not have an entry a row, a number of `draws` is out of its range, or this CPU lacks `isa`. Nothing is
/// then written.
pub fn draw(
    isa: Isa,
    logits: &Rows<'_>,
    draws: &[Draw],
    out: &mut [i64],
    num_threads: Option<usize>,
) -> Result<()> {
    let [rows, columns] = logits.shape();
    if draws.len() != rows {
        let problem = format!("got {}, expected one for each of {rows} rows", draws.len());
        return Err(Error::invalid("draws", problem));
    }
    for (row, draw) in draws.iter().enumerate() {
        draw.check(row)?;
    }
    if columns > u32::MAX as usize {
        return Err(Error::invalid("logits", format!("got {columns} columns")));
    }
    let (logits, tokens) = (*logits, Out::new("out", out, [rows, 1])?);
    let work = DrawEach {
        logits,
        draws,
        tokens,
    };
    let threads = split::threads(logits.shape(), num_threads)?;
    split::run(isa, rows, threads, &work)
}

struct DrawEach<'a> {
    logits: Rows<'a>,
    draws: &'a [Draw],
    tokens: Out<'a, i64>,
}

impl Each for DrawEach<'_> {
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, s: S, rows: Range<usize>) {
        let [_, n] = self.logits.shape();
        let mut scratch = Scratch::default();
        for row in rows {
            // SAFETY: the row is there and this thread's, by the caller's promise.
            unsafe {
                let token = draw_one(s, self.logits.row(row), n, &self.draws[row], &mut scratch);
                self.tokens.row(row)[0] = token;
            }
        }
    }
}

/// Memory that one row after another uses.
#[derive(Default)]
struct Scratch {
    weights: Vec<f32>,
    /// Of each group of weights.
    sums: Vec<f32>,
    /// Bits of weights, which are in the order of the weights.
    candidates: Vec<u32>,
    groups: Vec<Place>,
    best: Vec<Place>,
}

/// # Safety
/// There are `n` floats.
#[inline(always)]
unsafe fn draw_one<S: Simd>(
    s: S,
    x: *const f32,
    n: usize,
    draw: &Draw,
    scratch: &mut Scratch,
) -> i64 {
    // SAFETY: the caller's promise, here and below; a place that was found is below n.
    let (best, least) = unsafe {
        let first = first_of_largest(s, x, n);
        if first == NOTHING {
            return NOTHING;
        }
        let mut least = f32::NEG_INFINITY;
        if 0 < draw.top_k && draw.top_k < n {
            let Scratch { groups, best, .. } = scratch;
            find_best(s, x, n, draw.top_k, groups, best);
            least = best.last().map_or(least, |place| place.value());
        }
        (x.add(first as usize).read_unaligned(), least)
    };
    let Scratch {
        weights,
        sums,
        candidates,
        ..
    } = scratch;
    weights.resize(n, 0.0);
    sums.resize(n.div_ceil(GROUP), 0.0);
    // SAFETY: the caller's promise.
    unsafe { weigh(s, x, best, least, draw, weights) };
    add_up(s, weights, sums, draw.min_p as f32);
    if draw.top_p < 1.0 {
        let least = top_p(weights, sums, draw.top_p, candidates);
        add_up(s, weights, sums, least);
    }
    pick(weights, sums, uniform(draw.seed, draw.position)) as i64
}

/// Weights relative to that of the `best` logit; 0 where the logit is below `least`.
///
/// # Safety
/// There are as many floats as `weights`.
#[inline(always)]
unsafe fn weigh<S: Simd>(
    s: S,
    x: *const f32,
    best: f32,
    least: f32,
    draw: &Draw,
    weights: &mut [f32],
) {
    let (n, scale) = (weights.len(), s.splat(draw.scale()));
    let (best, nothing) = (s.splat(best), s.splat(0.0));
    let to = weights.as_mut_ptr();
    for first in (0..n).step_by(CHAINS * S::LANES) {
        let mut logits = [nothing; CHAINS];
        let mut powers = [nothing; CHAINS];
        for i in 0..CHAINS {
            let at = first + i * S::LANES;
            let lanes = S::LANES.min(n.saturating_sub(at));
            // SAFETY: `lanes` floats are there, by the caller's promise.
            logits[i] = unsafe { load(s, x.add(at.min(n)), lanes, f32::NEG_INFINITY) };
            powers[i] = s.mul(s.sub(logits[i], best), scale);
        }
        let powers = exps(s, powers);
        for i in 0..CHAINS {
            let at = first + i * S::LANES;
            let weight = s.select_below(logits[i], least, nothing, powers[i]);
            let lanes = S::LANES.min(n.saturating_sub(at));
            // SAFETY: `lanes` weights are there.
            unsafe { store(s, to.add(at.min(n)), lanes, weight) };
        }
    }
}

/// Drops the weights below `least`; the sums of groups of the others.
#[inline(always)]
fn add_up<S: Simd>(s: S, weights: &mut [f32], sums: &mut [f32], least: f32) {
    let nothing = s.splat(0.0);
    for (group, sum) in weights.chunks_mut(GROUP).zip(sums) {
        let mut all = nothing;
        let (n, p) = (group.len(), group.as_mut_ptr());
        for i in (0..n).step_by(S::LANES) {
            let lanes = S::LANES.min(n - i);
            // SAFETY: the group has `lanes` more.
            unsafe {
                let weight = load(s, p.add(i), lanes, 0.0);
                let weight = s.select_below(weight, least, nothing, weight);
                store(s, p.add(i), lanes, weight);
                all = s.add(all, weight);
            }
        }
        *sum = s.sum(all);
    }
}

/// The weight of the likeliest token with which they reach the share `top_p` of all; 0 if they do so with the last one.
fn top_p(weights: &[f32], sums: &[f32], top_p: f64, candidates: &mut Vec<u32>) -> f32 {
    let total: f64 = sums.iter().copied().map(f64::from).sum();
    let mut missing = top_p * total;
    // All weights below this one are less than what may be left out: it is never one of them.
    let least = ((1.0 - top_p) * total / weights.len() as f64) as f32 * 0.999;
    candidates.clear();
    for (group, &sum) in weights.chunks(GROUP).zip(sums) {
        if sum >= least {
            let likely = group.iter().filter(|&&weight| weight >= least);
            candidates.extend(likely.map(|weight| weight.to_bits()));
        }
    }
    // The half with the larger weights either has enough, or all of it is needed.
    let mut rest = candidates.as_mut_slice();
    while rest.len() > 1 {
        let half = rest.len() / 2;
        rest.select_nth_unstable_by(half, |a, b| b.cmp(a));
        let (larger, smaller) = rest.split_at_mut(half);
        let sum: f64 = larger
            .iter()
            .map(|&bits| f64::from(f32::from_bits(bits)))
            .sum();
        if sum >= missing {
            rest = larger;
        } else {
            missing -= sum;
            rest = smaller;
        }
    }
    rest.first().map_or(0.0, |&bits| f32::from_bits(bits))
}

/// The first token with which the sum of weights exceeds the share `uniform`, in [0, 1), of all.
fn pick(weights: &[f32], sums: &[f32], uniform: f64) -> usize {
    let total: f64 = sums.iter().copied().map(f64::from).sum();
    let mut rest = uniform * total;
    let mut last = 0;
    for (index, (group, &sum)) in weights.chunks(GROUP).zip(sums).enumerate() {
        if sum == 0.0 {
            continue;
        }
        let sum = f64::from(sum);
        if rest >= sum {
            rest -= sum;
            last = index;
            continue;
        }
        last = index;
        for (at, &weight) in group.iter().enumerate() {
            let weight = f64::from(weight);
            if rest < weight {
                return index * GROUP + at;
            }
            rest -= weight;
        }
        break;
    }
    // Rounding has left a little over: it is the last token's.
    let group = &weights[last * GROUP..weights.len().min((last + 1) * GROUP)];
    let at = group.iter().rposition(|&weight| weight > 0.0);
    last * GROUP + at.unwrap_or(0)
}

/// A number in [0, 1): the first that numpy's `Philox(key=seed, counter=position)` gives (Salmon et al. 2011, Philox4x64-10).
fn uniform(seed: u64, position: u64) -> f64 {
    const MULTIPLIERS: [u64; 2] = [0xD2E7_470E_E14C_6C93, 0xCA5A_8263_9512_1157];
    const WEYL: [u64; 2] = [0x9E37_79B9_7F4A_7C15, 0xBB67_AE85_84CA_A73B];
    const ROUNDS: usize = 10;
    let multiply = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        [(product >> 64) as u64, product as u64]
    };
    let (first, carry) = position.overflowing_add(1);
    let (mut counter, mut key) = ([first, u64::from(carry), 0, 0], [seed, 0]);
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let [high0, low0] = multiply(MULTIPLIERS[0], counter[0]);
        let [high1, low1] = multiply(MULTIPLIERS[1], counter[2]);
        counter = [
            high1 ^ counter[1] ^ key[0],
            low1,
            high0 ^ counter[3] ^ key[1],
            low0,
        ];
    }
    (counter[0] >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
}
