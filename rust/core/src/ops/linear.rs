//! Products of activations with weights: `out[t][n] = sum over k of x[t][k] * w[n][k]`, from row-major weights as they are.
//!
//! **The arithmetic of an output.** Sum i of as many as there are lanes takes the products of elements k = i, i + lanes, ...,
//! in this order, a [`Simd::fma`] each; the sums are added up by the tree of [`Simd::sum`]; then comes the bias, then what
//! the output held. Where bfloat16 is multiplied as such, it is pairs of elements, a dot product each. No output knows of
//! another: they may be computed in any order, on any thread, in any batch.
//!
//! Both operands are read along their rows, so weights need not be packed, and can be a mapped file. The kernel
//! (`outputs`) makes M x N outputs at once. For one row of activations, weights stream from memory once, and are widened in
//! registers. For many rows, weights that are not plain are widened into scratch, once for all rows of a block.

use std::cell::RefCell;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use super::activations::Activations;
use super::norm::{expect_eps, expect_row};
use super::outputs::{Memory, Piece};
use super::product::{self, Bfloat16, Float32};
use super::weight::{Weight, WeightKind};
use super::{Rows, RowsMut};
use crate::buffer::Buffer;
use crate::simd::{DefaultMode, Dispatch, Isa, Simd, fast_bf16};
use crate::{Error, Result, threads};

/// What activations are rounded to before they are multiplied. Sums are in float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// Not at all; weights are of any kind.
    #[default]
    Float32,
    /// To bfloat16, which the weights are, too.
    Bfloat16,
}

/// What is made of a row of activations before it is multiplied.
#[derive(Debug, Clone, Copy, Default)]
pub enum Input<'a> {
    /// Nothing.
    #[default]
    Plain,
    /// What [`rms_norm`](super::rms_norm) makes of it.
    Normed {
        /// One row.
        weight: Rows<'a>,
        /// Added to the mean of the squares.
        eps: f32,
    },
    /// What [`silu_mul`](super::silu_mul) makes of it: the row is gate and up side by side.
    Gated,
}

/// How [`linear`] multiplies, and what it adds.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinearOptions<'a> {
    /// What is multiplied.
    pub input: Input<'a>,
    /// One row, added to each of the output.
    pub bias: Option<Rows<'a>>,
    /// Add to what the output holds.
    pub add: bool,
    /// Of the products.
    pub precision: Precision,
    /// Threads to use; `None` for all.
    pub num_threads: Option<usize>,
}

/// Bytes of activations in a piece of work: they stay in the second-level cache while weights pass by.
const ROW_BYTES: usize = 192 << 10;
/// Rows of activations in a piece of work that are worth reading weights for.
const LEAST_ROWS: usize = 64;
/// Bytes of weights in a piece of work, as floats, where rows are not very long: the second-level cache holds those of a
/// piece and of the next one, and activations.
const WEIGHT_BYTES: usize = 192 << 10;
/// The same where they pass by few rows of activations: no more, for nobody brings the first piece near.
const STREAM_BYTES: usize = 96 << 10;

/// Products that are shared with threads that are awake, and wake none.
const SLEEPY_WORK: usize = 1 << 20;

/// `out = x * weight^T + bias`, or `out += ...`, under one instruction set and the default floating-point mode.
///
/// # Errors
/// Shapes do not match; an epsilon is no finite number above 0; the precision is bfloat16 and a weight is not; this CPU
/// lacks `isa`. The output is then untouched.
pub fn linear(
    isa: Isa,
    x: &Rows<'_>,
    weight: &Weight<'_>,
    out: &mut RowsMut<'_>,
    options: &LinearOptions<'_>,
) -> Result<()> {
    multiply(isa, x, weight, out, options, fast_bf16(isa))
}

/// The same; with `dot`, bfloat16 is multiplied as such, where that is the precision and the instruction set can.
pub(super) fn multiply(
    isa: Isa,
    x: &Rows<'_>,
    weight: &Weight<'_>,
    out: &mut RowsMut<'_>,
    options: &LinearOptions<'_>,
    dot: bool,
) -> Result<()> {
    check(isa, x, weight, out, options)?;
    let can = matches!(isa, Isa::Avx512Bf16 | Isa::Amx);
    let dot = dot && can && options.precision == Precision::Bfloat16;
    let threads = threads::resolve(options.num_threads)?;
    let (rows, columns) = (x.shape()[0], weight.shape()[1]);
    if rows == 0 {
        return Ok(());
    }
    SCRATCH.with_borrow_mut(|scratch| {
        let call = Call {
            x: Activations::new(isa, x, columns, options, dot, scratch)?,
            rows,
            columns,
            weight,
            out,
            options,
            dot,
            row_block: row_block(rows, columns),
            weight_block: weight_block(rows, columns),
            next: AtomicUsize::new(0),
            threads,
        };
        threads::run(
            threads,
            rows * call.weight.shape()[0] * columns > SLEEPY_WORK,
            || {
                let _mode = DefaultMode::enter();
                isa.dispatch(Work(&call));
            },
        );
        Ok(())
    })
}

fn check(
    isa: Isa,
    x: &Rows<'_>,
    weight: &Weight<'_>,
    out: &RowsMut<'_>,
    options: &LinearOptions<'_>,
) -> Result<()> {
    let ([rows, _], [outputs, inputs]) = (x.shape(), weight.shape());
    let gated = matches!(options.input, Input::Gated);
    x.expect("x", [rows, if gated { 2 * inputs } else { inputs }])?;
    if let Input::Normed { weight, eps } = options.input {
        expect_row("norm", &weight, inputs)?;
        expect_eps(eps)?;
    }
    out.expect("out", [rows, outputs])?;
    if let Some(bias) = options.bias {
        expect_row("bias", &bias, outputs)?;
    }
    let other = |kind: &WeightKind| *kind != WeightKind::Bf16;
    match weight.kinds().find(other) {
        Some(kind) if options.precision == Precision::Bfloat16 => Err(Error::invalid(
            "precision",
            format!("bfloat16 needs weights of bfloat16, got {}", kind.name()),
        )),
        _ => isa.expect_available(),
    }
}

thread_local! {
    /// Activations of this thread's calls, and weights of its pieces of work.
    static SCRATCH: RefCell<Buffer> = RefCell::default();
    static WIDE: RefCell<Buffer> = RefCell::default();
}

/// What the threads of one call share.
struct Call<'a> {
    x: Activations,
    rows: usize,
    columns: usize,
    weight: &'a Weight<'a>,
    out: &'a RowsMut<'a>,
    options: &'a LinearOptions<'a>,
    /// Whether bfloat16 is multiplied as such.
    dot: bool,
    /// Rows of activations and of weights in a piece of work.
    row_block: usize,
    weight_block: usize,
    /// The first piece that nobody has claimed.
    next: AtomicUsize,
    threads: usize,
}

/// Rows in blocks of about the same size.
fn row_block(rows: usize, columns: usize) -> usize {
    let most = (ROW_BYTES / (4 * columns)).max(LEAST_ROWS);
    rows.div_ceil(rows.div_ceil(most)).next_multiple_of(4)
}

/// Weight rows in a piece of work, so many that the kernel, which takes 8 of them at a time for few rows of activations and
/// 3 or 4 for many, leaves none over.
fn weight_block(rows: usize, columns: usize) -> usize {
    let row = 4 * columns;
    if rows < 4 {
        return (STREAM_BYTES / row / 8 * 8).clamp(8, 24);
    }
    match WEIGHT_BYTES / row {
        48.. => 48,
        24.. => 24,
        _ => 12,
    }
}

// SAFETY: what pointers name is readable from any thread, and each output is one piece's.
unsafe impl Sync for Call<'_> {}

impl Call<'_> {
    /// Pieces for one block of rows.
    fn pieces(&self) -> usize {
        let parts = self.weight.parts.iter();
        parts
            .map(|part| part.rows.div_ceil(self.weight_block))
            .sum()
    }

    /// Claims neighbouring pieces: many at first, so that weights are read in long runs, few at the end, so that all threads
    /// end together.
    fn claim(&self) -> std::ops::Range<usize> {
        let all = self.pieces() * self.rows.div_ceil(self.row_block);
        let run = |next: usize| (all.saturating_sub(next) / (2 * self.threads)).max(1);
        let claimed = self
            .next
            .fetch_update(Relaxed, Relaxed, |next| Some(next + run(next)));
        let first = claimed.unwrap_or(all).min(all);
        first..(first + run(first)).min(all)
    }

    fn piece(&self, index: usize) -> Piece<'_> {
        let pieces = self.pieces();
        let (row, mut n) = (index / pieces * self.row_block, index % pieces);
        let (mut part, mut column) = (&self.weight.parts[0], 0);
        for next in &self.weight.parts {
            part = next;
            let pieces = part.rows.div_ceil(self.weight_block);
            if n < pieces {
                break;
            }
            n -= pieces;
            column += part.rows;
        }
        let first = n * self.weight_block;
        let stride = self.weight.stride(part);
        Piece {
            x: &self.x,
            rows: self.row_block.min(self.rows - row),
            weights: part.base.wrapping_add(first * stride),
            stride,
            outputs: self.weight_block.min(part.rows - first),
            kind: part.kind,
            columns: self.columns,
            out: self.out,
            row,
            column: column + first,
            options: self.options,
        }
    }
}

/// One thread's share of a call.
struct Work<'a>(&'a Call<'a>);

impl Dispatch for Work<'_> {
    type Output = ();
    fn run<S: Simd>(self, s: S) {
        // Another buffer than the activations': a caller is one of the threads.
        WIDE.with_borrow_mut(|scratch| {
            let mut claimed = 0..0;
            let mut next = || {
                let index = claimed.next().or_else(|| {
                    claimed = self.0.claim();
                    claimed.next()
                });
                index.map(|index| self.0.piece(index))
            };
            let mut piece = next();
            while let Some(current) = piece {
                // Claimed before it is due: its weights are brought near meanwhile.
                piece = next();
                let ahead = piece.map_or(Memory::NOTHING, |piece| piece.memory());
                self.piece(s.vectors(), current, ahead, scratch);
            }
        });
    }
}

impl Work<'_> {
    fn piece<S: Simd>(&self, s: S, piece: Piece<'_>, ahead: Memory, scratch: &mut Buffer) {
        match piece.kind {
            WeightKind::Bf16 if self.0.dot => piece.compute::<_, Bfloat16>(s, ahead, scratch),
            WeightKind::F32 => piece.compute::<_, Float32<product::F32>>(s, ahead, scratch),
            WeightKind::F16 => piece.compute::<_, Float32<product::F16>>(s, ahead, scratch),
            WeightKind::Bf16 => piece.compute::<_, Float32<product::Bf16>>(s, ahead, scratch),
            WeightKind::Q8_0 => piece.compute::<_, Float32<product::Q8_0>>(s, ahead, scratch),
            WeightKind::Q4_0 => piece.compute::<_, Float32<product::Q4_0>>(s, ahead, scratch),
            WeightKind::Q4_1 => piece.compute::<_, Float32<product::Q4_1>>(s, ahead, scratch),
        }
    }
}
