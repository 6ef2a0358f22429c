//! How each KV dtype feeds the one micro-kernel: a vector of cache memory, times a broadcast 32-bit word, is added to
//! a vector of sums.
//!
//! A *step* is what a lane of cache memory holds side by side: one position of a sum (f32, f16), two (bf16) or four
//! (int8). It takes one or two such operations, its *parts*. The broadcast words hold the query (for scores) or the
//! weights (for values) of a part: an f32, a pair of bf16, or a pair of 16-bit integers.
//!
//! **int8.** A row's query and its weights are quantized to 16 bits, against the row's largest magnitude, and multiplied
//! with the cache's 8 bits; sums are exact 32-bit integers, so their order is no question. What is lost beside the cache's
//! own rounding is 1.5e-5 of the largest query element or weight. The scales of K meet the sums of scores; those of V are
//! multiplied into the weights before they are quantized, since sums over tokens cannot be rescaled afterwards.

use std::marker::PhantomData;

use crate::simd::{MATRIX_ROWS, Simd};

use super::layout::KvDtype;
use super::plan::PARTITION;

/// Largest magnitude of a quantized weight: a partition of them times 127 fits 31 bits.
pub(super) const MAX_WEIGHT: f32 = 32767.0;
const _: () = assert!(PARTITION as i64 * 127 * 32767 <= i32::MAX as i64);

/// Parts of a step under an instruction set: 1 or 2.
pub(super) struct Parts<S, F>(PhantomData<(S, F)>);

impl<S: Simd, F: Format> Parts<S, F> {
    pub(super) const COUNT: usize = match F::DTYPE {
        KvDtype::F32 | KvDtype::F16 => 1,
        KvDtype::Bf16 => S::BF16_PARTS,
        KvDtype::Int8 => 2,
    };
}

/// Whether a format is multiplied by an instruction set's matrix unit.
pub(super) struct Matrix<S, F>(PhantomData<(S, F)>);

impl<S: Simd, F: Format> Matrix<S, F> {
    pub(super) const USED: bool = S::MATRIX && matches!(F::DTYPE, KvDtype::Bf16);
    /// Positions of a sum over `head_dim` that are added up together: K has a multiple of them, the rest zeros.
    pub(super) const DEPTH: usize = if Self::USED { MATRIX_ROWS } else { F::STEP };
}

/// A KV dtype, as the kernel sees it.
///
/// # Safety of its functions
/// Pointers are valid for what is loaded or stored, at any alignment.
#[allow(clippy::missing_safety_doc)] // said once, above
pub(super) trait Format: Copy + Send + Sync + 'static {
    const DTYPE: KvDtype;
    /// Positions of the sum in one step.
    const STEP: usize = Self::DTYPE.step();
    /// Bytes that one lane takes of one step.
    const LANE: usize = Self::DTYPE.size() * Self::STEP;
    /// Whether sums are integers, of quantized queries and weights.
    const QUANTIZED: bool = false;
    /// One factor of a multiplication.
    type Operand<S: Simd>: Copy;
    /// What a chain of them adds up in.
    type Sum<S: Simd>: Copy;

    /// Part `part` of `LANES` lanes of cache memory.
    unsafe fn load<S: Simd>(s: S, p: *const u8, part: usize) -> Self::Operand<S>;
    fn splat<S: Simd>(s: S, word: u32) -> Self::Operand<S>;
    fn zero<S: Simd>(s: S) -> Self::Sum<S>;
    fn fma<S: Simd>(
        s: S,
        a: Self::Operand<S>,
        b: Self::Operand<S>,
        sum: Self::Sum<S>,
    ) -> Self::Sum<S>;
    unsafe fn load_sum<S: Simd>(s: S, p: *const f32) -> Self::Sum<S>;
    unsafe fn store_sum<S: Simd>(s: S, p: *mut f32, sum: Self::Sum<S>);
    /// What is left of part `part` of a step where a row sees its first, or its last position, or both. `None` where
    /// that is nothing.
    fn seen<S: Simd>(
        s: S,
        a: Self::Operand<S>,
        part: usize,
        first: bool,
        last: bool,
    ) -> Option<Self::Operand<S>>;
    /// Stores weights (or a query's elements) as words of a row; `at` is the first one's token (or dimension).
    unsafe fn store_weights<S: Simd>(s: S, words: *mut u32, at: usize, weights: S::F32);
}

/// Sums that are floats.
macro_rules! floats {
    () => {
        type Sum<S: Simd> = S::F32;

        #[inline(always)]
        fn zero<S: Simd>(s: S) -> S::F32 {
            s.splat(0.0)
        }
        #[inline(always)]
        unsafe fn load_sum<S: Simd>(s: S, p: *const f32) -> S::F32 {
            // SAFETY: the caller's promise.
            unsafe { s.load(p) }
        }
        #[inline(always)]
        unsafe fn store_sum<S: Simd>(s: S, p: *mut f32, sum: S::F32) {
            // SAFETY: the caller's promise.
            unsafe { s.store(p, sum) };
        }
    };
}

macro_rules! single {
    ($name:ident, $dtype:expr, $load:ident, $pointer:ty) => {
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Format for $name {
            const DTYPE: KvDtype = $dtype;
            type Operand<S: Simd> = S::F32;
            floats!();

            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, p: *const u8, _: usize) -> S::F32 {
                // SAFETY: the caller's promise.
                unsafe { s.$load(p.cast::<$pointer>()) }
            }
            #[inline(always)]
            fn splat<S: Simd>(s: S, word: u32) -> S::F32 {
                s.splat(f32::from_bits(word))
            }
            #[inline(always)]
            fn fma<S: Simd>(s: S, a: S::F32, b: S::F32, sum: S::F32) -> S::F32 {
                s.fma(a, b, sum)
            }
            #[inline(always)]
            fn seen<S: Simd>(_: S, a: S::F32, _: usize, first: bool, _: bool) -> Option<S::F32> {
                if first { Some(a) } else { None }
            }
            #[inline(always)]
            unsafe fn store_weights<S: Simd>(s: S, words: *mut u32, at: usize, weights: S::F32) {
                // SAFETY: the caller's promise.
                unsafe { s.store(words.cast::<f32>().add(at), weights) };
            }
        }
    };
}

single!(F32, KvDtype::F32, load, f32);
single!(F16, KvDtype::F16, load_f16, u16);

#[derive(Clone, Copy)]
pub(super) struct Bf16;

impl Format for Bf16 {
    const DTYPE: KvDtype = KvDtype::Bf16;
    type Operand<S: Simd> = S::Bf16;
    floats!();

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, part: usize) -> S::Bf16 {
        // SAFETY: the caller's promise.
        unsafe { s.load_bf16(p, part) }
    }
    #[inline(always)]
    fn splat<S: Simd>(s: S, word: u32) -> S::Bf16 {
        s.splat_bf16(word)
    }
    #[inline(always)]
    fn fma<S: Simd>(s: S, a: S::Bf16, b: S::Bf16, sum: S::F32) -> S::F32 {
        s.dot_bf16(a, b, sum)
    }
    #[inline(always)]
    fn seen<S: Simd>(s: S, a: S::Bf16, part: usize, first: bool, last: bool) -> Option<S::Bf16> {
        match (S::BF16_PARTS, first, last) {
            (2, ..) if [first, last][part] => Some(a),
            (2, ..) => None,
            (_, true, true) => Some(a),
            (_, false, false) => None,
            _ => Some(s.keep_bf16(a, last)),
        }
    }
    #[inline(always)]
    unsafe fn store_weights<S: Simd>(s: S, words: *mut u32, at: usize, weights: S::F32) {
        // SAFETY: the caller's promise.
        unsafe { s.store_bf16(words, at, weights) };
    }
}

#[derive(Clone, Copy)]
pub(super) struct Int8;

impl Format for Int8 {
    const DTYPE: KvDtype = KvDtype::Int8;
    const QUANTIZED: bool = true;
    type Operand<S: Simd> = S::I32;
    type Sum<S: Simd> = S::I32;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, part: usize) -> S::I32 {
        // SAFETY: the caller's promise.
        unsafe { s.load_i8(p, part) }
    }
    #[inline(always)]
    fn splat<S: Simd>(s: S, word: u32) -> S::I32 {
        s.splat_i32(word)
    }
    #[inline(always)]
    fn zero<S: Simd>(s: S) -> S::I32 {
        s.splat_i32(0)
    }
    #[inline(always)]
    fn fma<S: Simd>(s: S, a: S::I32, b: S::I32, sum: S::I32) -> S::I32 {
        s.dot_i16(a, b, sum)
    }
    #[inline(always)]
    unsafe fn load_sum<S: Simd>(s: S, p: *const f32) -> S::I32 {
        // SAFETY: the caller's promise.
        unsafe { s.load_i32(p) }
    }
    #[inline(always)]
    unsafe fn store_sum<S: Simd>(s: S, p: *mut f32, sum: S::I32) {
        // SAFETY: the caller's promise.
        unsafe { s.store_i32(p, sum) };
    }
    #[inline(always)]
    fn seen<S: Simd>(_: S, a: S::I32, _: usize, _: bool, _: bool) -> Option<S::I32> {
        // Hidden weights are 0, and 0 times an integer is.
        Some(a)
    }
    #[inline(always)]
    unsafe fn store_weights<S: Simd>(s: S, words: *mut u32, at: usize, weights: S::F32) {
        // SAFETY: the caller's promise.
        unsafe { s.store_i16(words, at, weights) };
    }
}

/// How to quantize numbers of which `largest` is the largest magnitude to integers up to `most`: what to multiply them by,
/// and what one unit then stands for. `bad` is NaN if there is NaN or infinity among them, else 0: the unit is then
/// NaN, too.
#[inline(always)]
pub(super) fn quantum(largest: f32, most: f32, bad: f32) -> (f32, f32) {
    // Far below what a query or a weight can stand for, and yet its inverse is finite.
    let largest = largest.max(f32::MIN_POSITIVE * 1e6);
    (most / largest, largest / most + bad)
}

/// Largest magnitude of a quantized query of `head_dim` elements: so many of them times 127 fit 31 bits.
pub(super) fn max_query(head_dim: usize) -> f32 {
    // Rounded down, and exact as a float.
    (i32::MAX as usize / 127 / head_dim).min(32767) as f32
}
