//! The oracle: attention as its definition reads, in f64, one row after another. Slow on purpose.

use super::layout::{KvLayer, Side};
use super::plan::Plan;
use super::{Options, Vectors};
use crate::Result;

/// What [`attend`](super::attend) should compute.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// `[tokens, heads, head_dim]`.
    pub out: Vec<f64>,
    /// `[tokens, heads]`: the logarithm of the sum that a row was divided by.
    pub lse: Vec<f64>,
}

/// What [`attend`](super::attend) should compute.
///
/// # Errors
/// `options` contradict themselves or the plan.
///
/// # Panics
/// Shapes differ from the plan's.
pub fn attend(
    plan: &Plan,
    query: &Vectors<'_>,
    layer: &KvLayer<'_>,
    options: &Options<'_>,
) -> Result<Attention> {
    plan.mask(options)?;
    let spec = layer.spec();
    let [tokens, heads, dim] = query.shape();
    assert_eq!(tokens, plan.num_tokens());
    let mut out = vec![0.0; tokens * heads * dim];
    let mut lse = vec![f64::NEG_INFINITY; tokens * heads];
    for sequence in &plan.sequences {
        let blocks = plan.blocks(sequence);
        let element = |side, token: usize, head, d| {
            let block = blocks[token / spec.block_size] as usize;
            f64::from(layer.element(side, block, head, token % spec.block_size, d))
        };
        // The mask and the mapping of heads are spelled out once more: an oracle shares no logic with what it judges.
        let distance = |row: usize, token: usize| {
            (sequence.kv_len + row) as i64 - sequence.rows as i64 - token as i64
        };
        let sees = |row: usize, token: usize| {
            let distance = distance(row, token);
            let inside = |window: usize| distance < window as i64;
            !options.causal || distance >= 0 && options.sliding_window.is_none_or(inside)
        };
        for row in 0..sequence.rows {
            for head in 0..heads {
                let kv_head = head / (heads / spec.num_kv_heads);
                let q = |d| f64::from(query.element(sequence.start + row, head, d));
                let visible: Vec<_> = (0..sequence.kv_len).filter(|&t| sees(row, t)).collect();
                let score = |&t: &usize| {
                    let products = (0..dim).map(|d| q(d) * element(Side::Key, t, kv_head, d));
                    let mut score = products.sum::<f64>() * f64::from(options.scale);
                    if let Some(cap) = options.softcap.map(f64::from) {
                        score = cap * (score / cap).tanh();
                    }
                    let slope = options.alibi_slopes.map_or(0.0, |s| f64::from(s[head]));
                    score - slope * distance(row, t).abs() as f64
                };
                let scores: Vec<_> = visible.iter().map(score).collect();
                let sink = options.sinks.map(|s| f64::from(s[head]));
                let sink = sink.filter(|&s| s > f64::NEG_INFINITY);
                if visible.is_empty() && sink.is_none() {
                    continue;
                }
                let all = || scores.iter().copied().chain(sink);
                let max = all().fold(f64::NEG_INFINITY, f64::max);
                // Minus infinity is a weight of 0. Where there is nothing else, nothing has to be taken off: 0 / 0 is NaN.
                let max = if max == f64::NEG_INFINITY { 0.0 } else { max };
                let sum: f64 = all().map(|x| (x - max).exp()).sum();
                let index = (sequence.start + row) * heads + head;
                lse[index] = max + sum.ln();
                let out = &mut out[index * dim..][..dim];
                for (&t, score) in visible.iter().zip(scores) {
                    for (d, out) in out.iter_mut().enumerate() {
                        *out += (score - max).exp() / sum * element(Side::Value, t, kv_head, d);
                    }
                }
            }
        }
    }
    Ok(Attention { out, lse })
}
