//! How a row of weights meets a row of activations, 32 elements at a time, by kind of weights and precision.

use super::weight::{BLOCK, WeightKind};
use crate::simd::Simd;

/// What a block of 32 elements of both is as vectors.
pub(super) trait Product {
    /// One multiplication's share of the activations.
    type X<S: Simd>: Copy;
    /// And of the weights.
    type W<S: Simd>: Copy;
    /// The same of weights that need no widening.
    type Plain: Product;
    /// Whether these are such.
    const PLAIN: bool;
    /// Whether a block has a scale.
    const SCALED: bool = false;
    /// Where there are no more tiles of rows of activations than these, each reads weights as they are: that is then faster
    /// than making them plain first.
    const TILES: usize = match (Self::PLAIN, Self::SCALED) {
        (true, _) => 8,
        (_, false) => 4,
        _ => 2,
    };
    /// Bytes of a block of weights.
    const BYTES: usize;
    /// And of activations.
    const X_BYTES: usize;

    /// Multiplications of vectors that a block takes.
    fn parts<S: Simd>() -> usize;
    /// # Safety
    /// There is a whole block of activations.
    unsafe fn x<S: Simd>(s: S, block: *const u8, part: usize) -> Self::X<S>;
    /// The scale and the offset of a block of weights.
    ///
    /// # Safety
    /// There is a whole block.
    unsafe fn scale<S: Simd>(s: S, block: *const u8) -> [f32; 2];
    /// # Safety
    /// There is a whole block.
    unsafe fn w<S: Simd>(s: S, block: *const u8, part: usize, scale: &[f32; 2]) -> Self::W<S>;
    fn add<S: Simd>(s: S, w: Self::W<S>, x: Self::X<S>, sum: S::F32) -> S::F32;
    /// # Safety
    /// There is a whole block of each.
    unsafe fn make_plain<S: Simd>(s: S, block: *const u8, to: *mut u8);
}

/// Weights that have a value in float32. No product with a scale needs rounding: only the sum with an offset does, once.
pub(super) trait Widen {
    const KIND: WeightKind;

    /// # Safety
    /// There is a whole block.
    #[inline(always)]
    unsafe fn scale<S: Simd>(_: S, _: *const u8) -> [f32; 2] {
        [0.0; 2]
    }
    /// Vector `part` of a block.
    ///
    /// # Safety
    /// There is a whole block.
    unsafe fn widen<S: Simd>(s: S, block: *const u8, part: usize, scale: &[f32; 2]) -> S::F32;
}

/// Arithmetic in float32: lanes are neighbouring elements.
pub(super) struct Float32<W>(W);

impl<W: Widen> Product for Float32<W> {
    type X<S: Simd> = S::F32;
    type W<S: Simd> = S::F32;
    type Plain = Float32<F32>;
    const PLAIN: bool = matches!(W::KIND, WeightKind::F32);
    const SCALED: bool = W::KIND.is_quantized();
    const BYTES: usize = W::KIND.block_bytes();
    const X_BYTES: usize = 4 * BLOCK;

    #[inline(always)]
    fn parts<S: Simd>() -> usize {
        BLOCK / S::LANES
    }
    #[inline(always)]
    unsafe fn x<S: Simd>(s: S, block: *const u8, part: usize) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { s.load(block.cast::<f32>().add(part * S::LANES)) }
    }
    #[inline(always)]
    unsafe fn scale<S: Simd>(s: S, block: *const u8) -> [f32; 2] {
        // SAFETY: the caller's promise.
        unsafe { W::scale(s, block) }
    }
    #[inline(always)]
    unsafe fn w<S: Simd>(s: S, block: *const u8, part: usize, scale: &[f32; 2]) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { W::widen(s, block, part, scale) }
    }
    #[inline(always)]
    fn add<S: Simd>(s: S, w: S::F32, x: S::F32, sum: S::F32) -> S::F32 {
        s.fma(w, x, sum)
    }
    #[inline(always)]
    unsafe fn make_plain<S: Simd>(s: S, block: *const u8, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            let scale = W::scale(s, block);
            for part in 0..Self::parts::<S>() {
                let to = to.cast::<f32>().add(part * S::LANES);
                s.store(to, W::widen(s, block, part, &scale));
            }
        }
    }
}

/// Arithmetic in bfloat16: both sides are pairs, whose products are added up in float32 as the instruction set does it. Only
/// for those that do it in one part.
pub(super) struct Bfloat16;

impl Product for Bfloat16 {
    type X<S: Simd> = S::Bf16;
    type W<S: Simd> = S::Bf16;
    type Plain = Self;
    const PLAIN: bool = true;
    const BYTES: usize = 2 * BLOCK;
    const X_BYTES: usize = 2 * BLOCK;

    #[inline(always)]
    fn parts<S: Simd>() -> usize {
        debug_assert_eq!(S::BF16_PARTS, 1);
        BLOCK / 2 / S::LANES
    }
    #[inline(always)]
    unsafe fn x<S: Simd>(s: S, block: *const u8, part: usize) -> S::Bf16 {
        // SAFETY: the caller's promise: a vector is LANES pairs.
        unsafe { s.load_bf16(block.add(part * S::LANES * 4), 0) }
    }
    #[inline(always)]
    unsafe fn scale<S: Simd>(_: S, _: *const u8) -> [f32; 2] {
        [0.0; 2]
    }
    #[inline(always)]
    unsafe fn w<S: Simd>(s: S, block: *const u8, part: usize, _: &[f32; 2]) -> S::Bf16 {
        // SAFETY: as above: they are stored alike.
        unsafe { Self::x(s, block, part) }
    }
    #[inline(always)]
    fn add<S: Simd>(s: S, w: S::Bf16, x: S::Bf16, sum: S::F32) -> S::F32 {
        s.dot_bf16(w, x, sum)
    }
    #[inline(always)]
    unsafe fn make_plain<S: Simd>(_: S, block: *const u8, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { block.copy_to_nonoverlapping(to, Self::BYTES) };
    }
}

/// Makes a row plain, and no more than the row.
///
/// # Safety
/// There are so many columns, and room for them.
#[inline(always)]
pub(super) unsafe fn make_row_plain<S: Simd, P: Product>(
    s: S,
    row: *const u8,
    columns: usize,
    to: *mut u8,
) {
    let (blocks, rest) = (columns / BLOCK, columns % BLOCK);
    // SAFETY: the caller's promise; the rest of a block is of a kind whose elements are whole bytes, none of them more than
    // a float's.
    unsafe {
        for b in 0..blocks {
            P::make_plain(s, row.add(b * P::BYTES), to.add(b * P::Plain::BYTES));
        }
        if rest > 0 {
            let (mut from, mut plain) = ([0_u8; 4 * BLOCK], [0_u8; 4 * BLOCK]);
            let bytes = |block: usize| rest * (block / BLOCK);
            row.add(blocks * P::BYTES)
                .copy_to_nonoverlapping(from.as_mut_ptr(), bytes(P::BYTES));
            P::make_plain(s, from.as_ptr(), plain.as_mut_ptr());
            plain
                .as_ptr()
                .copy_to_nonoverlapping(to.add(blocks * P::Plain::BYTES), bytes(P::Plain::BYTES));
        }
    }
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;
pub(super) struct Q8_0;
pub(super) struct Q4_0;
pub(super) struct Q4_1;

// SAFETY of every `unsafe` below: the caller's promise of a whole block, of which `part` is a vector.
#[allow(clippy::undocumented_unsafe_blocks)]
mod kinds {
    use super::*;

    impl Widen for F32 {
        const KIND: WeightKind = WeightKind::F32;
        #[inline(always)]
        unsafe fn widen<S: Simd>(s: S, block: *const u8, part: usize, _: &[f32; 2]) -> S::F32 {
            unsafe { s.load(block.cast::<f32>().add(part * S::LANES)) }
        }
    }

    impl Widen for F16 {
        const KIND: WeightKind = WeightKind::F16;
        #[inline(always)]
        unsafe fn widen<S: Simd>(s: S, block: *const u8, part: usize, _: &[f32; 2]) -> S::F32 {
            unsafe { s.load_f16(block.cast::<u16>().add(part * S::LANES)) }
        }
    }

    impl Widen for Bf16 {
        const KIND: WeightKind = WeightKind::Bf16;
        #[inline(always)]
        unsafe fn widen<S: Simd>(s: S, block: *const u8, part: usize, _: &[f32; 2]) -> S::F32 {
            unsafe { s.load_bf16_wide(block.cast::<u16>().add(part * S::LANES)) }
        }
    }

    impl Widen for Q8_0 {
        const KIND: WeightKind = WeightKind::Q8_0;
        #[inline(always)]
        unsafe fn scale<S: Simd>(s: S, block: *const u8) -> [f32; 2] {
            unsafe { s.load_f16_pair(block.cast()) }
        }
        #[inline(always)]
        unsafe fn widen<S: Simd>(s: S, block: *const u8, part: usize, scale: &[f32; 2]) -> S::F32 {
            let q = unsafe { s.load_i8_wide(block.add(2 + part * S::LANES)) };
            s.mul(q, s.splat(scale[0]))
        }
    }

    impl Widen for Q4_0 {
        const KIND: WeightKind = WeightKind::Q4_0;
        #[inline(always)]
        unsafe fn scale<S: Simd>(s: S, block: *const u8) -> [f32; 2] {
            let [scale, _] = unsafe { s.load_f16_pair(block.cast()) };
            [scale, -8.0 * scale]
        }
        #[inline(always)]
        unsafe fn widen<S: Simd>(s: S, block: *const u8, part: usize, scale: &[f32; 2]) -> S::F32 {
            unsafe { halves(s, block.add(2), part, scale) }
        }
    }

    impl Widen for Q4_1 {
        const KIND: WeightKind = WeightKind::Q4_1;
        #[inline(always)]
        unsafe fn scale<S: Simd>(s: S, block: *const u8) -> [f32; 2] {
            unsafe { s.load_f16_pair(block.cast()) }
        }
        #[inline(always)]
        unsafe fn widen<S: Simd>(s: S, block: *const u8, part: usize, scale: &[f32; 2]) -> S::F32 {
            unsafe { halves(s, block.add(4), part, scale) }
        }
    }

    /// The lower halves of 16 bytes are the first 16 elements, the upper ones the others.
    #[inline(always)]
    unsafe fn halves<S: Simd>(
        s: S,
        bytes: *const u8,
        part: usize,
        [scale, offset]: &[f32; 2],
    ) -> S::F32 {
        let first = part * S::LANES;
        let (upper, first) = (first >= BLOCK / 2, first % (BLOCK / 2));
        unsafe { s.load_u4_wide(bytes.add(first), upper, *scale, *offset) }
    }
}
