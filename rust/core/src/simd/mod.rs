//! Vector instructions behind one small trait, and the choice of instruction set at run time.
//!
//! A [`Simd`] value is a zero-size proof that this CPU has the instructions: only [`Isa::dispatch`] makes one, after
//! detection. A kernel is written once, generic over `S: Simd`, as an `#[inline(always)]` [`Kernel::run`];
//! [`Simd::vectorize`] runs it inside a function compiled with the instruction set's features, so that it becomes
//! straight vector code. Each file below holds the intrinsics of one instruction set and nothing else.
//!
//! Bits are a function of the instruction set: every method is one rounding as documented (or a fixed sequence of
//! them), nothing is contracted or reassociated, and sums across lanes follow one explicit tree. Who dispatches sets the
//! default floating-point mode first ([`DefaultMode`]).

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod exp;
mod mode;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::OnceLock;

pub(crate) use exp::{exp, exps, tanh};
pub(crate) use mode::DefaultMode;

use crate::{Error, Result};

/// Lanes that the widest instruction set has; every `Simd::LANES` divides it, and so does every padded row.
pub(crate) const MAX_LANES: usize = 16;

/// Rows of a matrix unit, and elements of a row of its sums.
pub(crate) const MATRIX_ROWS: usize = 16;

/// How many products a matrix unit adds up: `whole` times 32, and 16 more or not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Depth {
    pub(crate) whole: usize,
    pub(crate) half: bool,
}

/// Two tiles of keys, each `[depth / 2][16]` pairs; and as much memory to prefetch meanwhile, into the first-level cache
/// (`near`) and into the second-level cache (`ahead`; null for no prefetching at all).
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyTiles {
    pub(crate) tiles: [*const u8; 2],
    pub(crate) near: [*const u8; 2],
    pub(crate) ahead: [*const u8; 2],
}

/// Tiles of the values of 16 tokens, from some column on: 8 rows of pairs, `row` bytes apart; and for each as much
/// memory to prefetch meanwhile (or null), besides the tile that comes next, so that there is one more of these.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ValueTiles<'a> {
    pub(crate) tiles: &'a [*const u8],
    pub(crate) ahead: &'a [*const u8],
    pub(crate) row: usize,
    /// Columns, in vectors of 16: at most 4.
    pub(crate) columns: usize,
}

/// One instruction set. Methods are intrinsics; those that take a pointer demand no alignment.
///
/// # Safety of the pointer methods
/// They need `LANES` lanes of what they load or store valid at the pointer, at any alignment.
#[allow(clippy::missing_safety_doc)] // said once, above
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// `LANES` floats.
    type F32: Copy;
    /// `LANES` words of 32 bits: integers, or pairs of 16-bit integers.
    type I32: Copy;
    /// What one multiplication takes of `LANES` pairs of bf16: both, or one widened.
    type Bf16: Copy;
    /// Lanes of a vector; divides [`MAX_LANES`].
    const LANES: usize;
    /// Vectors that the register file holds.
    const REGISTERS: usize;
    /// Multiplications that a pair of bf16 takes.
    const BF16_PARTS: usize;
    /// Whether there is a matrix unit, for bf16.
    const MATRIX: bool = false;
    /// The same without it.
    type Vectors: Simd;

    fn vectors(self) -> Self::Vectors;

    /// Runs `kernel` in a function compiled for this instruction set.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output;

    unsafe fn load(self, p: *const f32) -> Self::F32;
    unsafe fn store(self, p: *mut f32, a: Self::F32);
    /// Widens f16, exactly.
    unsafe fn load_f16(self, p: *const u16) -> Self::F32;
    /// Widens bf16, exactly.
    unsafe fn load_bf16_wide(self, p: *const u16) -> Self::F32;
    /// Rounds to f16, to nearest even; NaN stays NaN.
    unsafe fn store_f16(self, p: *mut u16, a: Self::F32);
    /// Rounds to bf16, to nearest even; NaN stays NaN if it is a quiet one, as arithmetic makes them.
    #[inline(always)]
    unsafe fn store_bf16_narrow(self, p: *mut u16, a: Self::F32) {
        let mut low = [0; MAX_LANES];
        // SAFETY: the caller's promise.
        unsafe { self.store_halves(low.as_mut_ptr(), p, self.round_bf16(a)) };
    }
    /// Widens 8-bit integers.
    unsafe fn load_i8_wide(self, p: *const u8) -> Self::F32;
    /// `q * scale + offset`, where q is the lower half, or the upper, of `LANES` bytes. Rounds once if no product needs
    /// rounding: 20 significant bits of the scale are few enough.
    unsafe fn load_u4_wide(self, p: *const u8, upper: bool, scale: f32, offset: f32) -> Self::F32;
    /// Two f16, widened exactly. Two more are valid behind them.
    unsafe fn load_f16_pair(self, p: *const u16) -> [f32; 2];
    /// Asks for the cache line at `p` into the second-level cache. Any address is allowed.
    fn prefetch(self, p: *const u8);
    /// The same, into the first-level cache.
    fn prefetch_near(self, p: *const u8);
    /// The same, to be written to.
    #[inline(always)]
    fn prefetch_write(self, p: *const u8) {
        self.prefetch_near(p);
    }
    /// Asks for `bytes` from `p` on into the second-level cache.
    #[inline(always)]
    fn prefetch_run(self, p: *const u8, bytes: usize) {
        for line in (0..bytes).step_by(64) {
            self.prefetch(p.wrapping_add(line));
        }
    }

    fn splat(self, a: f32) -> Self::F32;
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The larger of two; NaN where `b` is, and unspecified where only `a` is.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, fused where the hardware can.
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// Moves the lowest bits of floats to where their exponents are.
    fn exponents(self, a: Self::F32) -> Self::F32;
    /// `b` in the lanes where `a < limit`, else `c`. A NaN in `a` is not below.
    fn select_below(self, a: Self::F32, limit: f32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `a` in lanes `lo..hi`, else `b`.
    fn select_lanes(self, lo: usize, hi: usize, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Interleaves lanes: `a0 b0 a1 b1 ...`, in two vectors. Whatever the bits, they are only moved.
    fn zip(self, a: Self::F32, b: Self::F32) -> (Self::F32, Self::F32);
    /// Sum of the lanes, by halves: lane i and lane i + n/2 first.
    fn sum(self, a: Self::F32) -> f32;
    /// [`Simd::sum`] of each of the first `LANES` vectors, in their order.
    fn sums(self, a: &[Self::F32; MAX_LANES]) -> Self::F32;
    /// Largest lane.
    fn maximum(self, a: Self::F32) -> f32;
    /// Lane 0.
    fn first(self, a: Self::F32) -> f32;

    /// Part `part` of `LANES` pairs of bf16.
    unsafe fn load_bf16(self, p: *const u8, part: usize) -> Self::Bf16;
    /// A word as [`Simd::store_bf16`] makes them.
    fn splat_bf16(self, word: u32) -> Self::Bf16;
    /// `c + a * b`, or where there is one part `c + a.0 * b.0 + a.1 * b.1`, as the instruction set does it.
    fn dot_bf16(self, a: Self::Bf16, b: Self::Bf16, c: Self::F32) -> Self::F32;
    /// Clears one element of each pair and keeps the first, or the last. Only where there is one part.
    fn keep_bf16(self, a: Self::Bf16, last: bool) -> Self::Bf16;
    /// Rounds to bf16, to nearest even, and stores them as the words of pairs; `at`, a multiple of `LANES`, is the
    /// first one's index. NaN need not survive.
    unsafe fn store_bf16(self, words: *mut u32, at: usize, a: Self::F32);

    /// Rounds to bf16, to nearest even; NaN stays NaN.
    fn round_bf16(self, a: Self::F32) -> Self::F32;

    /// Of `LANES` groups of four 8-bit integers, elements `part` and `part + 2` as pairs of 16 bits.
    unsafe fn load_i8(self, p: *const u8, part: usize) -> Self::I32;
    fn splat_i32(self, word: u32) -> Self::I32;
    /// `c + a.0 * b.0 + a.1 * b.1` of pairs of 16-bit integers.
    fn dot_i16(self, a: Self::I32, b: Self::I32, c: Self::I32) -> Self::I32;
    unsafe fn load_i32(self, p: *const f32) -> Self::I32;
    unsafe fn store_i32(self, p: *mut f32, a: Self::I32);
    /// To the nearest float.
    fn to_f32(self, a: Self::I32) -> Self::F32;
    /// Rounds to 16-bit integers, to nearest even, and stores them as the two words of groups of four, the first and
    /// third, then the others; `at`, a multiple of `LANES`, is the first one's index.
    unsafe fn store_i16(self, words: *mut u32, at: usize, a: Self::F32);

    /// Makes the matrix unit ready on this thread.
    fn matrix_begin(self) {}
    /// Says that this thread needs it no more.
    fn matrix_end(self) {}
    /// `scores[r][t] = sum over d of query[r][d] * key[d][t]` for 16 rows, `stride` bytes apart, and the tokens of two
    /// tiles. The query is `[whole, half][16][16]` pairs.
    ///
    /// Only between `matrix_begin` and `matrix_end`; all is valid for what is read or written.
    unsafe fn matrix_scores(
        self,
        query: *const u32,
        keys: &KeyTiles,
        depth: Depth,
        scores: *mut f32,
        stride: usize,
    ) {
        let _ = (query, keys, depth, scores, stride);
        unreachable!("no matrix unit");
    }
    /// `out[r][c] = sum over t of weights[r][t] * value[t][c]` for 16 rows and the columns of the tiles.
    /// Rows of weights are `stride` bytes apart, those of the output `out_stride`; there is a tile at least.
    ///
    /// Only between `matrix_begin` and `matrix_end`; all is valid for what is read or written.
    unsafe fn matrix_values(
        self,
        weights: *const u32,
        stride: usize,
        values: &ValueTiles<'_>,
        out: *mut f32,
        out_stride: usize,
    ) {
        let _ = (weights, stride, values, out, out_stride);
        unreachable!("no matrix unit");
    }

    /// Stores the low 16 bits of each lane at `low`, the high ones at `high`.
    #[inline(always)]
    unsafe fn store_halves(self, low: *mut u16, high: *mut u16, a: Self::F32) {
        let mut words = [0_u32; MAX_LANES];
        // SAFETY: the caller's promise.
        unsafe {
            self.store(words.as_mut_ptr().cast(), a);
            for (i, word) in words[..Self::LANES].iter().enumerate() {
                low.add(i).write_unaligned(*word as u16);
                high.add(i).write_unaligned((*word >> 16) as u16);
            }
        }
    }
    /// Interleaves `LANES` elements of each of two rows of 16 bits.
    #[inline(always)]
    unsafe fn interleave_2(self, rows: [*const u16; 2], to: *mut u16) {
        for i in 0..Self::LANES {
            for (j, row) in rows.iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe {
                    to.add(2 * i + j)
                        .write_unaligned(row.add(i).read_unaligned());
                }
            }
        }
    }
    /// Interleaves `LANES` elements of each of four rows of bytes.
    #[inline(always)]
    unsafe fn interleave_4(self, rows: [*const u8; 4], to: *mut u8) {
        for i in 0..Self::LANES {
            for (j, row) in rows.iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe { *to.add(4 * i + j) = *row.add(i) };
            }
        }
    }
}

/// Code to run under an instruction set. `run` must be `#[inline(always)]` with all it calls: no closure and no function
/// of the standard library (`map`, `from_fn`, iterators) may see a vector, for they may stay functions of their own, which
/// lack the instructions.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// Code that picks its own [`Simd::vectorize`] regions; `run` itself is compiled without special features.
pub(crate) trait Dispatch {
    type Output;
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// An instruction set. Results are reproducible bit for bit under one of them, not across them; products in bfloat16 on
/// CPUs of one maker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Portable Rust; multiplications and additions round separately.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same with dot products of BF16 and (VNNI) of integers.
    Avx512Bf16,
    /// The same with AMX tiles for bf16.
    Amx,
    /// AArch64.
    Neon,
    /// As [`Isa::Scalar`], in the shape of AVX-512.
    #[cfg(test)]
    Wide,
}

/// Names of [`Isa`]s, best first.
const ISAS: &[(Isa, &str)] = &[
    (Isa::Amx, "amx"),
    (Isa::Avx512Bf16, "avx512-bf16"),
    (Isa::Avx512, "avx512"),
    (Isa::Avx2, "avx2"),
    (Isa::Neon, "neon"),
    (Isa::Scalar, "scalar"),
    #[cfg(test)]
    (Isa::Wide, "wide"),
];

/// The environment variable that forces an instruction set.
const ISA_VARIABLE: &str = "LEAFKV_ISA";

impl Isa {
    /// The instruction set in use: the best that this CPU has, or what `LEAFKV_ISA` named when first asked.
    ///
    /// # Errors
    /// `LEAFKV_ISA` names none, or one that this CPU lacks.
    pub fn current() -> Result<Self> {
        static CURRENT: OnceLock<Result<Isa>> = OnceLock::new();
        CURRENT
            .get_or_init(|| match std::env::var(ISA_VARIABLE) {
                Ok(name) if !name.is_empty() => Self::parse(&name),
                Err(std::env::VarError::NotUnicode(name)) => Self::parse(&name.to_string_lossy()),
                _ => Ok(Self::available().next().unwrap_or(Self::Scalar)),
            })
            .clone()
    }

    /// Every instruction set that this CPU has, best first.
    pub fn available() -> impl Iterator<Item = Self> {
        ISAS.iter()
            .map(|(isa, _)| *isa)
            .filter(|isa| isa.is_available())
    }

    /// Whether this CPU (and build) can run it.
    pub fn is_available(self) -> bool {
        struct Probe;
        impl Dispatch for Probe {
            type Output = ();
            fn run<S: Simd>(self, _: S) {}
        }
        self.dispatch(Probe).is_some()
    }

    /// # Errors
    /// This CPU lacks it.
    pub(crate) fn expect_available(self) -> Result<()> {
        if self.is_available() {
            return Ok(());
        }
        Err(Error::invalid("isa", format!("this CPU has no {self}")))
    }

    /// Runs `f` with the token of this instruction set; `None` where the CPU lacks it.
    pub(crate) fn dispatch<D: Dispatch>(self, f: D) -> Option<D::Output> {
        match self {
            Self::Scalar => Some(f.run(scalar::Scalar::<4, 16>)),
            #[cfg(test)]
            Self::Wide => Some(f.run(scalar::Scalar::<16, 32>)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::Avx2::detect().map(|s| f.run(s)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::Avx512::<false, false>::detect().map(|s| f.run(s)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => avx512::Avx512::<true, false>::detect().map(|s| f.run(s)),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => avx512::Avx512::<true, true>::detect().map(|s| f.run(s)),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => neon::Neon::detect().map(|s| f.run(s)),
            #[allow(unreachable_patterns)] // those of other architectures
            _ => None,
        }
    }

    /// Whether a multiplication and an addition are not fused.
    #[cfg(test)]
    fn rounds_twice(self) -> bool {
        matches!(self, Self::Scalar | Self::Wide)
    }

    fn parse(name: &str) -> Result<Self> {
        let Some(&(isa, _)) = ISAS.iter().find(|(_, n)| *n == name) else {
            let known: Vec<_> = ISAS.iter().map(|(_, n)| *n).collect();
            let known = known.join(", ");
            return Err(Error::invalid(
                ISA_VARIABLE,
                format!("{name:?} is not an instruction set; known are {known}"),
            ));
        };
        if isa.is_available() {
            Ok(isa)
        } else {
            let has: Vec<_> = Self::available().map(|i| i.to_string()).collect();
            Err(Error::invalid(
                ISA_VARIABLE,
                format!("this CPU has no {name}; it has {}", has.join(", ")),
            ))
        }
    }
}

/// Whether products of bf16 pairs are faster than those of floats: they are on AMD's CPUs. The vector units of Intel's take
/// four times as long for one as for an FMA; its matrix unit would be faster still, but only attention has a way to it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn fast_bf16(isa: Isa) -> bool {
    static AMD: OnceLock<bool> = OnceLock::new();
    let is_amd = || {
        let id = std::arch::x86_64::__cpuid(0);
        [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
    };
    isa == Isa::Avx512Bf16 && *AMD.get_or_init(is_amd)
}

/// As above: no other has any.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn fast_bf16(_: Isa) -> bool {
    false
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = ISAS.iter().find(|(isa, _)| isa == self);
        f.write_str(name.map_or("?", |(_, name)| name))
    }
}
