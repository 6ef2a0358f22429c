//! The portable fallback: plain Rust, which any compiler vectorizes where it can. The crate's unit tests have it with as many
//! lanes and registers as the widest instruction set, too, so that what these shape runs on any CPU.

use half::f16;

use super::{Kernel, MAX_LANES, Simd};

/// N lanes, and how many registers are said to be there.
#[derive(Clone, Copy)]
pub(super) struct Scalar<const N: usize, const REGISTERS: usize>;

#[inline(always)]
fn zip<const N: usize>(a: [f32; N], b: [f32; N], f: impl Fn(f32, f32) -> f32) -> [f32; N] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// All lanes in one: lane i and lane i + n/2 first.
#[inline(always)]
fn halve<const N: usize>(mut a: [f32; N], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for i in 0..half {
            a[i] = f(a[i], a[i + half]);
        }
        half /= 2;
    }
    a[0]
}

/// The two signed halves of a word.
#[inline(always)]
fn halves(word: u32) -> [i32; 2] {
    [i32::from(word as i16), (word as i32) >> 16]
}

/// Rounds to bf16, to nearest even, in the high half; the low one is zero.
#[inline(always)]
fn round_bf16(x: f32) -> u32 {
    let u = x.to_bits();
    u.wrapping_add(0x7fff + (u >> 16 & 1)) & 0xffff_0000
}

impl<const N: usize, const REGISTERS: usize> Simd for Scalar<N, REGISTERS> {
    type F32 = [f32; N];
    type I32 = [u32; N];
    type Bf16 = [f32; N];
    const LANES: usize = N;
    const REGISTERS: usize = REGISTERS;
    const BF16_PARTS: usize = 2;
    type Vectors = Self;

    #[inline(always)]
    fn vectors(self) -> Self {
        self
    }

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> [f32; N] {
        // SAFETY: the caller vouches for LANES floats.
        unsafe { p.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: [f32; N]) {
        // SAFETY: as above.
        unsafe { p.cast::<[f32; N]>().write_unaligned(a) };
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> [f32; N] {
        // SAFETY: as above.
        let bits = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        bits.map(|b| f16::from_bits(b).to_f32_const())
    }
    #[inline(always)]
    unsafe fn load_bf16_wide(self, p: *const u16) -> [f32; N] {
        // SAFETY: as above.
        let bits = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        bits.map(|b| f32::from_bits(u32::from(b) << 16))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, a: [f32; N]) {
        let bits = a.map(|x| f16::from_f32_const(x).to_bits());
        // SAFETY: as above.
        unsafe { p.cast::<[u16; N]>().write_unaligned(bits) };
    }
    #[inline(always)]
    unsafe fn load_i8_wide(self, p: *const u8) -> [f32; N] {
        // SAFETY: as above.
        let bytes = unsafe { p.cast::<[i8; N]>().read_unaligned() };
        bytes.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_u4_wide(self, p: *const u8, upper: bool, scale: f32, offset: f32) -> [f32; N] {
        // SAFETY: as above.
        let bytes = unsafe { p.cast::<[u8; N]>().read_unaligned() };
        bytes.map(|b| f32::from(if upper { b >> 4 } else { b & 15 }) * scale + offset)
    }
    #[inline(always)]
    unsafe fn load_f16_pair(self, p: *const u16) -> [f32; 2] {
        // SAFETY: as above.
        let bits = unsafe { p.cast::<[u16; 2]>().read_unaligned() };
        bits.map(|b| f16::from_bits(b).to_f32_const())
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
    #[inline(always)]
    fn prefetch_near(self, _: *const u8) {}

    #[inline(always)]
    fn splat(self, a: f32) -> [f32; N] {
        [a; N]
    }
    #[inline(always)]
    fn add(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |x, y| x + y)
    }
    #[inline(always)]
    fn sub(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |x, y| x - y)
    }
    #[inline(always)]
    fn mul(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |x, y| x * y)
    }
    #[inline(always)]
    fn div(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |x, y| x / y)
    }
    #[inline(always)]
    fn max(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    fn fma(self, a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        // Without the instruction a fused multiply-add is a library call: two roundings instead, always.
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn exponents(self, a: [f32; N]) -> [f32; N] {
        a.map(|x| f32::from_bits(x.to_bits() << 23))
    }
    #[inline(always)]
    fn select_below(self, a: [f32; N], limit: f32, b: [f32; N], c: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if a[i] < limit { b[i] } else { c[i] })
    }
    #[inline(always)]
    fn select_lanes(self, lo: usize, hi: usize, a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if lo <= i && i < hi { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn zip(self, a: [f32; N], b: [f32; N]) -> ([f32; N], [f32; N]) {
        let from = |first: usize| {
            std::array::from_fn(|i| {
                if i % 2 == 0 {
                    a[first + i / 2]
                } else {
                    b[first + i / 2]
                }
            })
        };
        (from(0), from(N / 2))
    }
    #[inline(always)]
    fn sum(self, a: [f32; N]) -> f32 {
        halve(a, |x, y| x + y)
    }
    #[inline(always)]
    fn sums(self, a: &[[f32; N]; MAX_LANES]) -> [f32; N] {
        std::array::from_fn(|i| self.sum(a[i]))
    }
    #[inline(always)]
    fn maximum(self, a: [f32; N]) -> f32 {
        halve(a, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    fn first(self, a: [f32; N]) -> f32 {
        a[0]
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8, part: usize) -> [f32; N] {
        // SAFETY: as above.
        let pairs = unsafe { p.cast::<[[u16; 2]; N]>().read_unaligned() };
        pairs.map(|pair| f32::from_bits(u32::from(pair[part]) << 16))
    }
    #[inline(always)]
    fn splat_bf16(self, word: u32) -> [f32; N] {
        self.splat(f32::from_bits(word))
    }
    #[inline(always)]
    fn dot_bf16(self, a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        self.fma(a, b, c)
    }
    #[inline(always)]
    fn keep_bf16(self, a: [f32; N], _: bool) -> [f32; N] {
        a
    }
    #[inline(always)]
    unsafe fn store_bf16(self, words: *mut u32, at: usize, a: [f32; N]) {
        let bits = a.map(round_bf16);
        // SAFETY: as above.
        unsafe { words.add(at).cast::<[u32; N]>().write_unaligned(bits) };
    }

    #[inline(always)]
    fn round_bf16(self, a: [f32; N]) -> [f32; N] {
        a.map(|x| match x.is_nan() {
            true => x,
            false => f32::from_bits(round_bf16(x)),
        })
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8, part: usize) -> [u32; N] {
        // SAFETY: as above.
        let groups = unsafe { p.cast::<[[i8; 4]; N]>().read_unaligned() };
        groups.map(|g| {
            let [first, second] = [g[part], g[part + 2]].map(|x| u32::from(i16::from(x) as u16));
            first | second << 16
        })
    }
    #[inline(always)]
    fn splat_i32(self, word: u32) -> [u32; N] {
        [word; N]
    }
    #[inline(always)]
    fn dot_i16(self, a: [u32; N], b: [u32; N], c: [u32; N]) -> [u32; N] {
        std::array::from_fn(|i| {
            let ([a0, a1], [b0, b1]) = (halves(a[i]), halves(b[i]));
            c[i].wrapping_add((a0 * b0).wrapping_add(a1 * b1) as u32)
        })
    }
    #[inline(always)]
    unsafe fn load_i32(self, p: *const f32) -> [u32; N] {
        // SAFETY: as above.
        unsafe { p.cast::<[u32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_i32(self, p: *mut f32, a: [u32; N]) {
        // SAFETY: as above.
        unsafe { p.cast::<[u32; N]>().write_unaligned(a) };
    }
    #[inline(always)]
    fn to_f32(self, a: [u32; N]) -> [f32; N] {
        a.map(|x| (x as i32) as f32)
    }
    #[inline(always)]
    unsafe fn store_i16(self, words: *mut u32, at: usize, a: [f32; N]) {
        let n = a.map(|x| u32::from(x.round_ties_even() as i16 as u16));
        for group in (0..N).step_by(4) {
            let two = [
                n[group] | n[group + 2] << 16,
                n[group + 1] | n[group + 3] << 16,
            ];
            // SAFETY: as above.
            unsafe {
                let to = words.add((at + group) / 2).cast::<[u32; 2]>();
                to.write_unaligned(two);
            }
        }
    }
}
