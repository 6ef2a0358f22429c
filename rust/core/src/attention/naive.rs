//! The oracle: attention as its definition reads, in f64, one row after another. Slow on purpose.

use super::layout::{KvLayer, Side};
use super::plan::Plan;
use super::{Options, Vectors};
use crate::Result;

/// What [`attend`](super::attend) should compute, `[tokens, heads, head_dim]`.
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
    options: &Options,
) -> Result<Vec<f64>> {
    let mask = plan.mask(options)?;
    let spec = layer.spec();
    let [tokens, heads, dim] = query.shape();
    assert_eq!(
        [tokens, heads, dim],
        [plan.num_tokens(), plan.shape().num_heads, spec.head_dim]
    );
    let mut out = vec![0.0; tokens * heads * dim];
    for sequence in &plan.sequences {
        let blocks = plan.blocks(sequence);
        let element = |side, token: usize, head, d| {
            let block = blocks[token / spec.block_size] as usize;
            f64::from(layer.element(side, block, head, token % spec.block_size, d))
        };
        for i in 0..sequence.rows {
            for head in 0..heads {
                let (token, kv_head) = (sequence.start + i, head / plan.group());
                // SAFETY: `token` and `head` are below the query's shape.
                let q = unsafe { query.row(token, head) };
                let sees = sequence.visible(i, mask);
                let scores: Vec<f64> = sees
                    .clone()
                    .map(|t| {
                        // SAFETY: `d < head_dim`.
                        let q = |d| f64::from(unsafe { q.add(d).read_unaligned() });
                        let dot: f64 = (0..dim)
                            .map(|d| q(d) * element(Side::Key, t, kv_head, d))
                            .sum();
                        dot * f64::from(options.scale)
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for (t, weight) in sees.zip(weights) {
                    for d in 0..dim {
                        out[(token * heads + head) * dim + d] +=
                            weight / sum * element(Side::Value, t, kv_head, d);
                    }
                }
            }
        }
    }
    Ok(out)
}
