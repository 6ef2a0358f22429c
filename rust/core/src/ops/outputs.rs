//! The kernel: outputs of a piece of work, M x N of them at once.
//!
//! M rows of activations and N rows of weights are read side by side, a vector of each at a time, into M x N vectors of
//! sums: enough of them to hide the latency of an FMA, and as many as a few shuffles turn into a vector of outputs. Rows of
//! many columns are read part by part, so that the activations stay in the first-level cache; sums are kept meanwhile.
#![allow(clippy::needless_range_loop)] // indices name rows and sums of several arrays at once

use std::marker::PhantomData;
use std::ops::Range;

use super::RowsMut;
use super::activations::Activations;
use super::lanes;
use super::linear::LinearOptions;
use super::product::{Product, make_row_plain};
use super::weight::{BLOCK, WeightKind};
use crate::buffer::{self, Buffer, LINE};
use crate::simd::{Kernel, MAX_LANES, Simd};

/// Bytes of activations that weights pass by: what of the first-level cache is safely theirs.
const NEAR: usize = 20 << 10;
/// Rows of activations that are at least to be that near, for a part of their columns if need be.
const NEAR_ROWS: usize = 8;
/// Blocks whose scales are widened before their products begin, at most.
const RUN: usize = 16;
/// Parts of a block, at most.
const MOST_PARTS: usize = BLOCK / 4;

/// The outputs of some rows of activations and neighbouring rows of weights of one kind.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) x: &'a Activations,
    /// The first row, and how many.
    pub(super) row: usize,
    pub(super) rows: usize,
    pub(super) kind: WeightKind,
    pub(super) columns: usize,
    pub(super) weights: *const u8,
    /// Bytes from one row of weights to the next.
    pub(super) stride: usize,
    pub(super) outputs: usize,
    /// Of the first output.
    pub(super) column: usize,
    pub(super) out: &'a RowsMut<'a>,
    pub(super) options: &'a LinearOptions<'a>,
}

/// Bytes of memory, to be brought near.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    start: *const u8,
    bytes: usize,
}

impl Memory {
    pub(super) const NOTHING: Self = Self {
        start: std::ptr::null(),
        bytes: 0,
    };
}

impl Piece<'_> {
    /// Its weights, as they lie there.
    pub(super) fn memory(&self) -> Memory {
        Memory {
            start: self.weights,
            bytes: self.outputs * self.stride,
        }
    }

    /// Computes it, `P` being how its weights are multiplied; `ahead` is what this thread reads next.
    pub(super) fn compute<S: Simd, P: Product>(self, s: S, ahead: Memory, scratch: &mut Buffer) {
        let aligned = |bytes: usize| bytes.is_multiple_of(LINE);
        let plain = P::PLAIN && aligned(self.weights.addr()) && aligned(self.stride);
        let few = self.rows <= P::TILES * MOST_ROWS;
        let stride = buffer::stride(self.columns.div_ceil(BLOCK) * P::Plain::BYTES);
        let kept = NEAR_ROWS * self.outputs * S::LANES;
        if self.columns.is_multiple_of(BLOCK) && (plain || few) {
            return s.vectorize(Outputs::<P> {
                weights: self.weights,
                stride: self.stride,
                sums: scratch.floats(kept),
                ahead,
                piece: self,
                product: PhantomData,
            });
        }
        let sums = scratch.floats(kept + self.outputs * stride / 4);
        let to: *mut u8 = sums.wrapping_add(kept).cast();
        s.vectorize(MakePlain::<P> {
            piece: self,
            to,
            stride,
            product: PhantomData,
        });
        s.vectorize(Outputs::<P::Plain> {
            weights: to,
            stride,
            sums,
            ahead,
            piece: self,
            product: PhantomData,
        });
    }
}

/// M: rows of activations at a time, where there are so many.
const MOST_ROWS: usize = 4;

/// N, for the first of so many rows.
const fn most_outputs<S: Simd, P: Product>(rows: usize) -> usize {
    match (rows, S::REGISTERS) {
        (1, 16) if P::SCALED => 4,
        (2 | 3, 32) | (1, _) => 8,
        (4.., 16) => 3,
        _ => 4,
    }
}

/// Blocks that are done in one go where there is nothing but products to do: some 256 bytes.
const fn run<P: Product>() -> usize {
    256 / P::BYTES
}

/// Whether memory is asked for between two such runs: a single row of activations and plain weights leave no time in them.
const fn between_runs<P: Product>(m: usize) -> bool {
    P::PLAIN && m == 1
}

/// Whether memory is asked for once a block: where registers are few, what is widened would be spilled around the question.
const fn once_a_block<S: Simd, P: Product>() -> bool {
    S::REGISTERS == 16 && !P::PLAIN
}

/// Weights made plain: widened, or moved to cache lines of their own, and filled up with zeros to whole blocks.
struct MakePlain<'a, P> {
    piece: Piece<'a>,
    to: *mut u8,
    stride: usize,
    product: PhantomData<P>,
}

impl<P: Product> Kernel for MakePlain<'_, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.piece.columns;
        let whole = columns.div_ceil(BLOCK) * BLOCK;
        for n in 0..self.piece.outputs {
            // SAFETY: a row of weights has so many columns; there is room for whole blocks of them.
            unsafe {
                let to = self.to.add(n * self.stride);
                let row = self.piece.weights.add(n * self.piece.stride);
                make_row_plain::<S, P>(s, row, columns, to);
                let bytes = |columns: usize| columns * (P::Plain::BYTES / BLOCK);
                to.add(bytes(columns))
                    .write_bytes(0, bytes(whole - columns));
            }
        }
    }
}

/// All outputs of a piece, from weights that need not be where the piece has them.
struct Outputs<'a, P> {
    piece: Piece<'a>,
    weights: *const u8,
    stride: usize,
    /// Room for vectors of sums, of `NEAR_ROWS` rows by all outputs.
    sums: *mut f32,
    /// What is read from memory next.
    ahead: Memory,
    product: PhantomData<P>,
}

/// Some rows of activations, and some of their columns, in blocks.
struct Section {
    rows: Range<usize>,
    blocks: Range<usize>,
}

impl<P: Product> Kernel for Outputs<'_, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (rows, blocks, near) = (self.piece.rows, self.blocks(), NEAR / P::X_BYTES);
        let (group, part) = if blocks * rows.min(NEAR_ROWS) <= near {
            let group = (near / blocks).next_multiple_of(MOST_ROWS);
            (group, blocks)
        } else {
            let parts = blocks.div_ceil(near / NEAR_ROWS);
            (NEAR_ROWS, blocks.div_ceil(parts))
        };
        let mut ahead = Ahead::new(self.ahead, self.steps::<S>());
        for first in (0..rows).step_by(group) {
            for block in (0..blocks).step_by(part) {
                let section = Section {
                    rows: first..rows.min(first + group),
                    blocks: block..blocks.min(block + part),
                };
                // SAFETY: the rows are the piece's, and no more than `NEAR_ROWS` where `sums` are needed.
                unsafe {
                    match S::REGISTERS {
                        32 => self.section::<S, 4, 8>(s, &section, &mut ahead),
                        _ => self.section::<S, 3, 4>(s, &section, &mut ahead),
                    }
                }
            }
        }
    }
}

impl<P: Product> Outputs<'_, P> {
    fn blocks(&self) -> usize {
        self.piece.columns.div_ceil(BLOCK)
    }

    /// Steps of all tiles together, or nearly so many.
    fn steps<S: Simd>(&self) -> usize {
        let Piece { rows, outputs, .. } = self.piece;
        let (m, n) = (rows.min(MOST_ROWS), most_outputs::<S, P>(rows));
        let tiles = rows / m * (outputs / n).max(1);
        tiles
            * match between_runs::<P>(m) {
                // So that a quarter is asked for: the hardware sees the rest coming, and is slower if all of it is.
                true => 4 * self.blocks().div_ceil(run::<P>()),
                false if once_a_block::<S, P>() => self.blocks(),
                false if P::SCALED => self.blocks() * n,
                false => self.blocks() * P::parts::<S>(),
            }
    }

    /// Rows of activations: `MOST_ROWS` at a time with N of weights, what is left by twos (with N2) and ones.
    ///
    /// # Safety
    /// The rows and blocks are the piece's; there is room for sums if the blocks are not all.
    #[inline(always)]
    unsafe fn section<S: Simd, const N: usize, const N2: usize>(
        &self,
        s: S,
        section: &Section,
        ahead: &mut Ahead,
    ) {
        let Range { start: first, end } = section.rows;
        let twos = first + (end - first) / MOST_ROWS * MOST_ROWS;
        let one = twos + (end - twos) / 2 * 2;
        // SAFETY: the caller's promise.
        unsafe {
            self.pass::<S, MOST_ROWS, N>(s, first..twos, section, ahead);
            self.pass::<S, 2, N2>(s, twos..one, section, ahead);
            // What widens weights needs registers, too.
            if P::SCALED && S::REGISTERS == 16 {
                self.pass::<S, 1, 4>(s, one..end, section, ahead);
            } else {
                self.pass::<S, 1, 8>(s, one..end, section, ahead);
            }
        }
    }

    /// All weights, by some of the rows, a multiple of M.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn pass<S: Simd, const M: usize, const N: usize>(
        &self,
        s: S,
        rows: Range<usize>,
        section: &Section,
        ahead: &mut Ahead,
    ) {
        if rows.is_empty() {
            return;
        }
        let outputs = self.piece.outputs;
        let whole = outputs / N * N;
        // SAFETY: as above; outputs are the piece's.
        unsafe {
            for n in (0..whole).step_by(N) {
                for row in rows.clone().step_by(M) {
                    self.tile::<S, M, N>(s, row, n, section, ahead);
                }
            }
            for n in whole..outputs {
                for row in rows.clone().step_by(M) {
                    self.tile::<S, M, 1>(s, row, n, section, ahead);
                }
            }
        }
    }

    /// M x N outputs from `row` and `n` on, or sums on the way to them.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize, const N: usize>(
        &self,
        s: S,
        row: usize,
        n: usize,
        section: &Section,
        ahead: &mut Ahead,
    ) {
        let piece = &self.piece;
        debug_assert!(
            N == 1 || N == most_outputs::<S, P>(M),
            "prefetching goes by it"
        );
        let kept = |m: usize| {
            let first = (row + m - section.rows.start) * piece.outputs + n;
            self.sums.wrapping_add(first * S::LANES)
        };
        // SAFETY: as above; sums are as many floats as `values` has.
        unsafe {
            let mut sums = [[s.splat(0.0); N]; M];
            if section.blocks.start > 0 {
                for m in 0..M {
                    for i in 0..N {
                        sums[m][i] = s.load(kept(m).add(i * S::LANES));
                    }
                }
            }
            let blocks = section.blocks.clone();
            let sums = self.products::<S, M, N>(s, row, n, blocks, sums, ahead);
            if section.blocks.end < self.blocks() {
                for m in 0..M {
                    for i in 0..N {
                        s.store(kept(m).add(i * S::LANES), sums[m][i]);
                    }
                }
                return;
            }
            let mut values = [[0.0_f32; N]; M];
            let floats: *mut f32 = values.as_mut_ptr().cast();
            for done in (0..M * N).step_by(S::LANES) {
                let mut some = [s.splat(0.0); MAX_LANES];
                for i in 0..S::LANES.min(M * N - done) {
                    some[i] = sums[(done + i) / N][(done + i) % N];
                }
                let some = s.sums(&some);
                if done + S::LANES <= M * N {
                    s.store(floats.add(done), some);
                } else {
                    lanes::store(s, floats.add(done), M * N - done, some);
                }
            }
            let column = piece.column + n;
            for m in 0..M {
                let out: *mut [f32; N] = piece.out.row(piece.row + row + m).add(column).cast();
                let mut value = values[m];
                if let Some(bias) = piece.options.bias {
                    let bias: *const [f32; N] = bias.row(0).add(column).cast();
                    let bias = bias.read_unaligned();
                    for i in 0..N {
                        value[i] += bias[i];
                    }
                }
                if piece.options.add {
                    let old = out.read_unaligned();
                    for i in 0..N {
                        value[i] += old[i];
                    }
                }
                out.write_unaligned(value);
            }
        }
    }

    /// Vectors of sums, and the products of some blocks.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn products<S: Simd, const M: usize, const N: usize>(
        &self,
        s: S,
        row: usize,
        n: usize,
        blocks: Range<usize>,
        mut sums: [[S::F32; N]; M],
        ahead: &mut Ahead,
    ) -> [[S::F32; N]; M] {
        let (mut x, mut w) = ([self.weights; M], [self.weights; N]);
        for m in 0..M {
            x[m] = self.piece.x.row(self.piece.row + row + m);
        }
        for i in 0..N {
            w[i] = self.weights.wrapping_add((n + i) * self.stride);
        }
        if P::SCALED {
            // SAFETY: as above; all rows have so many blocks.
            return unsafe { Self::scaled_blocks::<S, M, N>(s, x, w, blocks, sums, ahead) };
        }
        for b in blocks {
            if between_runs::<P>(M) && b.is_multiple_of(run::<P>()) {
                ahead.step(s);
            }
            let x = x.map(|row| row.wrapping_add(b * P::X_BYTES));
            let w = w.map(|row| row.wrapping_add(b * P::BYTES));
            // SAFETY: as above.
            sums = unsafe { Self::block::<S, M, N>(s, x, w, sums, ahead) };
        }
        sums
    }

    /// The products of a block, part by part of all rows.
    ///
    /// # Safety
    /// There is a block at each pointer.
    #[inline(always)]
    unsafe fn block<S: Simd, const M: usize, const N: usize>(
        s: S,
        x: [*const u8; M],
        w: [*const u8; N],
        mut sums: [[S::F32; N]; M],
        ahead: &mut Ahead,
    ) -> [[S::F32; N]; M] {
        for part in 0..P::parts::<S>() {
            if !between_runs::<P>(M) && (part == 0 || !once_a_block::<S, P>()) {
                ahead.step(s);
            }
            // SAFETY: the caller's promise.
            unsafe {
                // What is fewer is held in registers, while the others pass by.
                if M <= N {
                    let mut a = [P::x(s, x[0], part); M];
                    for m in 1..M {
                        a[m] = P::x(s, x[m], part);
                    }
                    for i in 0..N {
                        let v = P::w(s, w[i], part, &[0.0; 2]);
                        for m in 0..M {
                            sums[m][i] = P::add(s, v, a[m], sums[m][i]);
                        }
                    }
                } else {
                    let mut v = [P::w(s, w[0], part, &[0.0; 2]); N];
                    for i in 1..N {
                        v[i] = P::w(s, w[i], part, &[0.0; 2]);
                    }
                    for m in 0..M {
                        let a = P::x(s, x[m], part);
                        for i in 0..N {
                            sums[m][i] = P::add(s, v[i], a, sums[m][i]);
                        }
                    }
                }
            }
        }
        sums
    }

    /// The products of some blocks with scales, which are widened before.
    ///
    /// # Safety
    /// There are so many blocks at each pointer.
    #[inline(always)]
    unsafe fn scaled_blocks<S: Simd, const M: usize, const N: usize>(
        s: S,
        x: [*const u8; M],
        w: [*const u8; N],
        blocks: Range<usize>,
        mut sums: [[S::F32; N]; M],
        ahead: &mut Ahead,
    ) -> [[S::F32; N]; M] {
        let mut scales = [[[0.0; 2]; RUN]; N];
        let Range { start, end } = blocks;
        for first in (start..end).step_by(RUN) {
            let run = RUN.min(end - first);
            // SAFETY: the caller's promise.
            unsafe {
                // Through memory on purpose: from there, loads broadcast them without the shuffle unit.
                for i in 0..N {
                    for b in 0..run {
                        scales[i][b] = P::scale(s, w[i].add((first + b) * P::BYTES));
                    }
                }
                for b in 0..run {
                    let x = x.map(|row| row.wrapping_add((first + b) * P::X_BYTES));
                    let w = w.map(|row| row.wrapping_add((first + b) * P::BYTES));
                    let scales = scales.each_ref().map(|scales| &scales[b]);
                    sums = Self::scaled_block::<S, M, N>(s, x, w, scales, sums, ahead);
                }
            }
        }
        sums
    }

    /// Those of a block, one row of weights after the other: widening has much in common for a block of one.
    ///
    /// # Safety
    /// There is a block at each pointer.
    #[inline(always)]
    unsafe fn scaled_block<S: Simd, const M: usize, const N: usize>(
        s: S,
        x: [*const u8; M],
        w: [*const u8; N],
        scales: [&[f32; 2]; N],
        mut sums: [[S::F32; N]; M],
        ahead: &mut Ahead,
    ) -> [[S::F32; N]; M] {
        let parts = P::parts::<S>();
        // Beside the sums, widening takes some registers.
        let held = M * (N + parts) + 6 <= S::REGISTERS;
        // SAFETY: the caller's promise.
        unsafe {
            let mut a = [[P::x(s, x[0], 0); MOST_PARTS]; M];
            if held {
                for m in 0..M {
                    for part in 0..parts {
                        a[m][part] = P::x(s, x[m], part);
                    }
                }
            }
            for i in 0..N {
                if i == 0 || !once_a_block::<S, P>() {
                    ahead.step(s);
                }
                for part in 0..parts {
                    let v = P::w(s, w[i], part, scales[i]);
                    for m in 0..M {
                        let a = if held {
                            a[m][part]
                        } else {
                            P::x(s, x[m], part)
                        };
                        sums[m][i] = P::add(s, v, a, sums[m][i]);
                    }
                }
            }
        }
        sums
    }
}

/// Memory to bring near in step with the kernel: beside many products a line now and then is free, several at once are not.
struct Ahead {
    next: *const u8,
    end: *const u8,
    /// For each step, and of steps that have been done: in 1/256 of a byte.
    step: usize,
    due: usize,
}

impl Ahead {
    /// All of it, in so many steps.
    fn new(memory: Memory, steps: usize) -> Self {
        Self {
            next: memory.start,
            end: memory.start.wrapping_add(memory.bytes),
            step: (memory.bytes << 8).div_ceil(steps.max(1)),
            due: 0,
        }
    }

    #[inline(always)]
    fn step<S: Simd>(&mut self, s: S) {
        self.due += self.step;
        while self.due >= LINE << 8 {
            self.due -= LINE << 8;
            if self.next < self.end {
                s.prefetch(self.next);
                self.next = self.next.wrapping_add(LINE);
            }
        }
    }
}
