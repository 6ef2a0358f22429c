//! Paged attention on the CPU: one mechanism for prefill, chunks, decoding and shared prefixes.
//!
//! [`Plan`] says who computes what in one step, [`attend`] computes one layer by it; [`write_kv`] and [`copy_blocks`]
//! fill the cache. [`naive`] is the oracle that the rest is tested against.
//!
//! **The invariant.** Under one instruction set and KV dtype, the bits of a row's result depend on its query, the options
//! and its visible keys and values alone: never on the batch, the chunking, the blocks' placement or size, the layout, the
//! instruction's tile, how work is split, the number of threads, or the floating-point modes that they are in.
//! Absolute positions are cut into partitions of 256; each row's arithmetic inside one is its own (`kernel`), and its
//! partitions are folded left to right (`merge`).

mod call;
mod float;
mod format;
mod item;
mod kernel;
mod layout;
mod matrix;
mod merge;
pub mod naive;
mod pack;
mod plan;
mod rows;
mod scores;
mod scratch;
mod store;
mod tiles;
mod values;
mod weights;

use std::sync::PoisonError;
use std::sync::atomic::AtomicUsize;

pub use float::{Float, FloatDtype};
pub use layout::{
    KvArray, KvDtype, KvLayer, KvLayout, KvSpec, Scales, Side, TILE, Vectors, VectorsMut,
};
pub use plan::{Plan, PlanShape};
pub use store::{Blocks, copy_blocks, write_kv};
pub(crate) use store::{Slot, check_slots};

use crate::simd::{DefaultMode, Dispatch, Isa, Simd};
use crate::{Error, Result, threads};
use call::Call;
use format::Format;
use merge::Record;
use plan::Mask;
use scratch::padded;

/// What attention computes besides the shapes: `softmax(softcap(scale * q . k) + bias) . v` over the keys that a row
/// sees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options<'a> {
    /// Multiplies the scores.
    pub scale: f32,
    /// A row sees the keys up to its own position; the last row of a sequence has its last position.
    pub causal: bool,
    /// A row sees at most this many last keys, itself included. Needs `causal`.
    pub sliding_window: Option<usize>,
    /// A scaled score x becomes `softcap * tanh(x / softcap)` (Gemma 2).
    pub softcap: Option<f32>,
    /// Of each query head: `slope * distance` is taken off the scores (ALiBi, Press et al. 2022).
    pub alibi_slopes: Option<&'a [f32]>,
    /// Of each query head: the score of one more key, whose value is zero (attention sinks, as gpt-oss has them).
    /// Minus infinity is none.
    pub sinks: Option<&'a [f32]>,
}

impl<'a> Options<'a> {
    /// Causal attention without further options.
    pub const fn new(scale: f32) -> Self {
        Self {
            scale,
            causal: true,
            sliding_window: None,
            softcap: None,
            alibi_slopes: None,
            sinks: None,
        }
    }

    /// # Errors
    /// An option is malformed or contradicts another.
    fn check(&self, heads: usize) -> Result<()> {
        if let Some(cap) = self.softcap.filter(|c| !(c.is_finite() && *c > 0.0)) {
            return Err(Error::invalid(
                "softcap",
                format!("got {cap}, expected a finite number above 0"),
            ));
        }
        let per_head = [
            ("alibi_slopes", self.alibi_slopes, false),
            ("sinks", self.sinks, true),
        ];
        for (argument, values, infinite) in per_head {
            let Some(values) = values else { continue };
            if values.len() != heads {
                return Err(Error::invalid(
                    argument,
                    format!(
                        "got {} entries, expected one a query head, {heads}",
                        values.len()
                    ),
                ));
            }
            let bad = |x: &&f32| !(x.is_finite() || infinite && **x == f32::NEG_INFINITY);
            if let Some(x) = values.iter().find(bad) {
                return Err(Error::invalid(
                    argument,
                    format!("got {x}, expected finite numbers"),
                ));
            }
        }
        Ok(())
    }

    fn mask(&self) -> Result<Mask> {
        if !self.scale.is_finite() {
            return Err(Error::invalid(
                "scale",
                format!("got {}, expected a finite number", self.scale),
            ));
        }
        match self.sliding_window {
            Some(0) => {
                return Err(Error::invalid(
                    "sliding_window",
                    "got 0, expected at least 1",
                ));
            }
            Some(_) if !self.causal => {
                return Err(Error::invalid("sliding_window", "needs causal attention"));
            }
            _ => {}
        }
        Ok(Mask {
            causal: self.causal,
            window: self.sliding_window,
        })
    }
}

impl Plan {
    /// Whether a call of [`attend`] by this plan takes microseconds: not worth making way for another thread.
    ///
    /// # Errors
    /// As [`attend`], for `options`.
    pub fn is_brief(&self, options: &Options<'_>) -> Result<bool> {
        let mask = self.mask(options)?;
        Ok(self.schedule(mask).brief)
    }

    fn mask(&self, options: &Options<'_>) -> Result<Mask> {
        options.check(self.shape().num_heads)?;
        let mask = options.mask()?;
        match self.more_rows_than_keys() {
            Some((s, sequence)) if mask.causal => Err(Error::invalid(
                "kv_lens",
                format!(
                    "sequence {s} has {} tokens of KV and more new rows; with causal=True its new tokens count among them",
                    sequence.kv_len
                ),
            )),
            _ => Ok(mask),
        }
    }
}

/// Attention of every query row over its sequence's keys and values, by a plan, under one instruction set and the default
/// floating-point mode, whatever the caller's is.
///
/// Query and output are of any [`FloatDtype`] each. Arithmetic is in float32: a query is widened, a result rounded, to
/// nearest even, at the very end.
///
/// A row that sees no key (without `causal`, in a sequence without KV) is zero. A score of minus infinity, which an infinite
/// key may have, is a weight of 0; a row that sees no other score, nor has a sink, is NaN, as softmax is.
///
/// `lse`, `[tokens, heads]`, takes the logarithm of the sum that each row was divided by (sinks included): minus infinity
/// where there was none.
///
/// # Errors
/// The query, the output, `lse` or the cache do not have the plan's shape; `options` contradict themselves; with `causal`, a
/// sequence has more rows than keys; this CPU lacks `isa`. The output is then untouched.
pub fn attend(
    plan: &Plan,
    isa: Isa,
    query: &Vectors<'_>,
    layer: &KvLayer<'_>,
    out: &mut VectorsMut<'_>,
    lse: Option<&mut [f32]>,
    options: &Options<'_>,
) -> Result<()> {
    let shape = plan.shape();
    let rows = [plan.num_tokens(), shape.num_heads, shape.head_dim];
    for (argument, came) in [("query", query.shape()), ("out", out.shape())] {
        if came != rows {
            return Err(Error::invalid(
                argument,
                format!("got shape {came:?}, expected {rows:?}"),
            ));
        }
    }
    let lse_len = rows[0] * rows[1];
    if let Some(came) = lse.as_ref().map(|lse| lse.len()).filter(|n| *n != lse_len) {
        return Err(Error::invalid(
            "lse",
            format!("got {came} entries, expected {lse_len}"),
        ));
    }
    let spec = layer.spec();
    let cache = [
        spec.num_blocks,
        spec.num_kv_heads,
        spec.block_size,
        spec.head_dim,
    ];
    let planned = [
        shape.num_blocks,
        shape.num_kv_heads,
        shape.block_size,
        shape.head_dim,
    ];
    if cache != planned {
        return Err(Error::invalid(
            "key_cache",
            format!(
                "got [blocks, KV heads, block size, head_dim] = {cache:?}, the plan was made for {planned:?}"
            ),
        ));
    }
    let mask = plan.mask(options)?;
    isa.expect_available()?;

    let schedule = plan.schedule(mask);
    let mut scratch = lock(&plan.scratch).pop().unwrap_or_default();
    let call = Call {
        plan,
        schedule: &schedule,
        mask,
        options: *options,
        query: *query,
        layer: *layer,
        out,
        lse: lse.map_or(std::ptr::null_mut(), <[f32]>::as_mut_ptr),
        shared: scratch.share(
            shape.num_kv_heads * schedule.records * Record::floats(padded(shape.head_dim)),
            (0..shape.num_kv_heads).flat_map(|_| schedule.pending()),
        ),
    };
    let next = AtomicUsize::new(0);
    let work = || {
        let _mode = DefaultMode::enter();
        isa.dispatch(Work {
            call: &call,
            next: &next,
        });
    };
    let threads = if schedule.inline { 1 } else { plan.threads };
    threads::run(threads, schedule.wake, work);
    lock(&plan.scratch).push(scratch);
    Ok(())
}

/// One thread's share of a call.
struct Work<'a> {
    call: &'a Call<'a>,
    next: &'a AtomicUsize,
}

impl Dispatch for Work<'_> {
    type Output = ();
    fn run<S: Simd>(self, s: S) {
        match self.call.layer.spec().dtype {
            KvDtype::F32 => self.items::<_, format::F32>(s.vectors()),
            KvDtype::F16 => self.items::<_, format::F16>(s.vectors()),
            KvDtype::Bf16 => self.items::<_, format::Bf16>(s),
            KvDtype::Int8 => self.items::<_, format::Int8>(s.vectors()),
        }
    }
}

impl Work<'_> {
    fn items<S: Simd, F: Format>(self, s: S) {
        s.matrix_begin();
        item::run_items::<S, F>(s, self.call, self.next);
        s.matrix_end();
    }
}

fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
