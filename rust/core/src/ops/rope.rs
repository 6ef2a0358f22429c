//! From a layer's projections to attention: rotary position embeddings (Su et al. 2021), and the new keys and values into
//! the cache.

use std::ops::Range;

use super::lanes::{self, Lanes, load, store};
use super::norm::{expect_eps, expect_row, scale};
use super::split::{self, Each};
use super::{Rows, RowsMut};
use crate::attention::{KvLayer, Side, Slot, check_slots};
use crate::simd::{Isa, Simd};
use crate::{Error, Result};

/// What a layer projects its tokens to, and how queries and keys are to be turned.
#[derive(Debug, Clone, Copy)]
pub struct Projected<'a> {
    /// Of each token the heads of queries, of keys and of values, side by side.
    pub qkv: Rows<'a>,
    /// Cosines of each token's angles, one for each pair of a head's elements.
    pub cos: Rows<'a>,
    /// Their sines.
    pub sin: Rows<'a>,
    /// Normalisation before the rotation, as Qwen3 has it.
    pub norms: Option<HeadNorms<'a>>,
}

/// A root mean square normalisation of each head, as [`rms_norm`](super::rms_norm); a weight is one row.
#[derive(Debug, Clone, Copy)]
pub struct HeadNorms<'a> {
    /// Weight of query heads.
    pub query: Rows<'a>,
    /// Weight of key heads.
    pub key: Rows<'a>,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// Turns queries and keys by their positions: of a head of D elements, each pair `(i, i + D/2)` becomes
/// `(x[i] cos[i] - x[i + D/2] sin[i], x[i + D/2] cos[i] + x[i] sin[i])`, each operation rounded. Queries go to `out`, keys
/// and values to the cache as [`write_kv`](crate::attention::write_kv) stores them, which leaves out slot -1; where a
/// slot is named twice, the last one wins.
///
/// # Errors
/// Shapes do not match, a slot is neither -1 nor in the cache, or this CPU lacks `isa`. Nothing is then written.
pub fn rope_write_kv(
    isa: Isa,
    projected: &Projected<'_>,
    layer: &KvLayer<'_>,
    slots: &[i64],
    out: &mut RowsMut<'_>,
    num_threads: Option<usize>,
) -> Result<()> {
    let Projected {
        qkv,
        cos,
        sin,
        norms,
    } = projected;
    let (dims, kv_heads) = (layer.spec().head_dim, layer.spec().num_kv_heads);
    let ([tokens, _], [_, columns]) = (qkv.shape(), out.shape());
    let heads = columns / dims;
    if !dims.is_multiple_of(2) {
        return Err(Error::invalid(
            "key_cache",
            format!("got head_dim {dims}, expected pairs of elements"),
        ));
    }
    // One at least: its place is used for keys on their way.
    out.expect("out", [tokens, heads.max(1) * dims])?;
    qkv.expect("qkv", [tokens, (heads + 2 * kv_heads) * dims])?;
    cos.expect("cos", [tokens, dims / 2])?;
    sin.expect("sin", [tokens, dims / 2])?;
    if let Some(norms) = norms {
        expect_row("q_norm", &norms.query, dims)?;
        expect_row("k_norm", &norms.key, dims)?;
        expect_eps(norms.eps)?;
    }
    if slots.len() != tokens {
        return Err(Error::invalid(
            "slots",
            format!(
                "got {} entries, expected one a token, {tokens}",
                slots.len()
            ),
        ));
    }
    check_slots(layer, slots)?;
    let mut threads = split::threads(qkv.shape(), num_threads)?;
    if threads > 1 && !are_distinct(slots) {
        threads = 1;
    }
    let work = Turn {
        projected,
        layer,
        slots,
        heads,
        out,
    };
    split::run(isa, tokens, threads, &work)
}

/// Whether tokens may be stored in any order.
fn are_distinct(slots: &[i64]) -> bool {
    let mut sorted = slots.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).all(|w| w[0] < w[1] || w[0] == -1)
}

struct Turn<'a> {
    projected: &'a Projected<'a>,
    layer: &'a KvLayer<'a>,
    slots: &'a [i64],
    heads: usize,
    out: &'a RowsMut<'a>,
}

impl Each for Turn<'_> {
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, s: S, rows: Range<usize>) {
        let spec = self.layer.spec();
        let (dims, kv_heads) = (spec.head_dim, spec.num_kv_heads);
        let (mut query_norm, mut key_norm) = (None, None);
        if let Some(norms) = &self.projected.norms {
            query_norm = Some((&norms.query, norms.eps));
            key_norm = Some((&norms.key, norms.eps));
        }
        let slot = |token: usize| Slot::new(self.layer, *self.slots.get(token)?);
        if let Some(slot) = slot(rows.start) {
            slot.prefetch(s);
        }
        for token in rows {
            if let Some(next) = slot(token + 1) {
                next.prefetch(s);
            }
            // SAFETY: the token is there and this thread's, by the caller's promise; shapes and slots were checked.
            unsafe {
                let (queries, out) = (self.projected.qkv.row(token), self.out.row(token));
                let keys = queries.add(self.heads * dims);
                let values = keys.add(kv_heads * dims);
                if let Some(slot) = slot(token) {
                    for head in 0..kv_heads {
                        // The first query's place is free until its turn.
                        self.turn(s, token, keys.add(head * dims), key_norm, out);
                        slot.write(Side::Key, head, out);
                        slot.write(Side::Value, head, values.add(head * dims));
                    }
                }
                for head in 0..self.heads {
                    let at = head * dims;
                    self.turn(s, token, queries.add(at), query_norm, out.add(at));
                }
            }
        }
    }
}

impl Turn<'_> {
    /// Normalises a head, by weight and epsilon, and turns it.
    ///
    /// # Safety
    /// The token is in bounds; there are `head_dim` floats to read, and room for as many.
    #[inline(always)]
    unsafe fn turn<S: Simd>(
        &self,
        s: S,
        token: usize,
        x: *const f32,
        norm: Option<(&Rows<'_>, f32)>,
        out: *mut f32,
    ) {
        let dims = self.layer.spec().head_dim;
        // SAFETY: the caller's promise; shapes were checked.
        unsafe {
            let mut scaling = None;
            if let Some((weight, eps)) = norm {
                scaling = Some((scale(s, x, dims, eps), weight.row(0)));
            }
            let pairs = Pairs {
                x,
                scaling,
                cos: self.projected.cos.row(token),
                sin: self.projected.sin.row(token),
                half: dims / 2,
                out,
            };
            lanes::each(s, dims / 2, &pairs);
        }
    }
}

/// The rotation of a head's pairs, of what a factor and a weight were applied to before.
struct Pairs {
    x: *const f32,
    scaling: Option<(f32, *const f32)>,
    cos: *const f32,
    sin: *const f32,
    half: usize,
    out: *mut f32,
}

impl Lanes for Pairs {
    #[inline(always)]
    unsafe fn lanes<S: Simd>(&self, s: S, i: usize, lanes: usize) {
        let j = self.half + i;
        // SAFETY: the caller's promise.
        unsafe {
            let mut a = load(s, self.x.add(i), lanes, 0.0);
            let mut b = load(s, self.x.add(j), lanes, 0.0);
            if let Some((factor, weight)) = self.scaling {
                let factor = s.splat(factor);
                a = s.mul(s.mul(a, factor), load(s, weight.add(i), lanes, 0.0));
                b = s.mul(s.mul(b, factor), load(s, weight.add(j), lanes, 0.0));
            }
            let cos = load(s, self.cos.add(i), lanes, 0.0);
            let sin = load(s, self.sin.add(i), lanes, 0.0);
            let first = s.sub(s.mul(a, cos), s.mul(b, sin));
            let second = s.add(s.mul(b, cos), s.mul(a, sin));
            store(s, self.out.add(i), lanes, first);
            store(s, self.out.add(j), lanes, second);
        }
    }
}
