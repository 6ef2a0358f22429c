//! How each KV dtype feeds the one micro-kernel: a vector of cache memory, times a broadcast 32-bit word, is added to
//! a vector of floats.
//!
//! A *step* is one such operation: one position of the sum (f32, f16) or two (bf16). The broadcast word holds the
//! query (for scores) or the weights (for values) of that step: an f32, or a pair of bf16.

use half::bf16;

use crate::simd::Simd;

use super::layout::KvDtype;

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
    /// A vector of one step.
    type Operand<S: Simd>: Copy;

    /// `LANES` lanes of cache memory.
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> Self::Operand<S>;
    fn splat<S: Simd>(s: S, word: u32) -> Self::Operand<S>;
    fn fma<S: Simd>(s: S, a: Self::Operand<S>, b: Self::Operand<S>, acc: S::F32) -> S::F32;
    /// Clears the position of a step that is hidden: all but the first, or all but the last.
    fn keep_half<S: Simd>(s: S, a: Self::Operand<S>, last: bool) -> Self::Operand<S>;
    /// The word of one step of a query; `get(i)` is its element, 0 beyond the end.
    fn word(get: impl Fn(usize) -> f32, step: usize) -> u32;
    /// Stores weights as words, from position `at` of the row of words.
    unsafe fn store_weights<S: Simd>(s: S, row: *mut u32, at: usize, weights: S::F32);
}

macro_rules! single {
    ($name:ident, $dtype:expr, $load:ident, $pointer:ty) => {
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Format for $name {
            const DTYPE: KvDtype = $dtype;
            type Operand<S: Simd> = S::F32;

            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F32 {
                // SAFETY: the caller's promise.
                unsafe { s.$load(p.cast::<$pointer>()) }
            }
            #[inline(always)]
            fn splat<S: Simd>(s: S, word: u32) -> S::F32 {
                s.splat(f32::from_bits(word))
            }
            #[inline(always)]
            fn fma<S: Simd>(s: S, a: S::F32, b: S::F32, acc: S::F32) -> S::F32 {
                s.fma(a, b, acc)
            }
            #[inline(always)]
            fn keep_half<S: Simd>(_: S, a: S::F32, _: bool) -> S::F32 {
                a
            }
            #[inline(always)]
            fn word(get: impl Fn(usize) -> f32, step: usize) -> u32 {
                get(step).to_bits()
            }
            #[inline(always)]
            unsafe fn store_weights<S: Simd>(s: S, row: *mut u32, at: usize, weights: S::F32) {
                // SAFETY: the caller's promise.
                unsafe { s.store(row.cast::<f32>().add(at), weights) };
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
    type Operand<S: Simd> = S::Pairs;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::Pairs {
        // SAFETY: the caller's promise.
        unsafe { s.load_pairs(p.cast()) }
    }
    #[inline(always)]
    fn splat<S: Simd>(s: S, word: u32) -> S::Pairs {
        s.splat_pairs(word)
    }
    #[inline(always)]
    fn fma<S: Simd>(s: S, a: S::Pairs, b: S::Pairs, acc: S::F32) -> S::F32 {
        s.dot(a, b, acc)
    }
    #[inline(always)]
    fn keep_half<S: Simd>(s: S, a: S::Pairs, last: bool) -> S::Pairs {
        s.keep_half(a, last)
    }
    #[inline(always)]
    fn word(get: impl Fn(usize) -> f32, step: usize) -> u32 {
        let half = |i| u32::from(bf16::from_f32(get(i)).to_bits());
        half(2 * step) | half(2 * step + 1) << 16
    }
    #[inline(always)]
    unsafe fn store_weights<S: Simd>(s: S, row: *mut u32, at: usize, weights: S::F32) {
        // SAFETY: the caller's promise.
        unsafe { s.store_bf16(row.cast::<u16>().add(at), weights) };
    }
}
