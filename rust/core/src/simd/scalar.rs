//! The portable fallback: four lanes of plain Rust, which any compiler vectorizes where it can.

use half::f16;

use super::{Kernel, MAX_LANES, Simd};

#[derive(Clone, Copy)]
pub(super) struct Scalar;

const N: usize = 4;
type V = [f32; N];

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// The two signed halves of a word.
#[inline(always)]
fn halves(word: u32) -> [i32; 2] {
    [i32::from(word as i16), (word as i32) >> 16]
}

impl Simd for Scalar {
    type F32 = V;
    type I32 = [u32; N];
    type Bf16 = V;
    const LANES: usize = N;
    const REGISTERS: usize = 16;
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
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: the caller vouches for LANES floats.
        unsafe { p.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: V) {
        // SAFETY: as above.
        unsafe { p.cast::<V>().write_unaligned(a) };
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        // SAFETY: as above.
        let bits = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        bits.map(|b| f16::from_bits(b).to_f32_const())
    }
    #[inline(always)]
    unsafe fn load_bf16_wide(self, p: *const u16) -> V {
        // SAFETY: as above.
        let bits = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        bits.map(|b| f32::from_bits(u32::from(b) << 16))
    }
    #[inline(always)]
    unsafe fn load_i8_wide(self, p: *const u8) -> V {
        // SAFETY: as above.
        let bytes = unsafe { p.cast::<[i8; N]>().read_unaligned() };
        bytes.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_u4_wide(self, p: *const u8, upper: bool, scale: f32, offset: f32) -> V {
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
    fn splat(self, a: f32) -> V {
        [a; N]
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        zip(a, b, |x, y| x + y)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        zip(a, b, |x, y| x - y)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        zip(a, b, |x, y| x * y)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        zip(a, b, |x, y| x / y)
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        zip(a, b, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // Without the instruction a fused multiply-add is a library call: two roundings instead, always.
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn exponents(self, a: V) -> V {
        a.map(|x| f32::from_bits(x.to_bits() << 23))
    }
    #[inline(always)]
    fn select_below(self, a: V, limit: f32, b: V, c: V) -> V {
        std::array::from_fn(|i| if a[i] < limit { b[i] } else { c[i] })
    }
    #[inline(always)]
    fn select_lanes(self, lo: usize, hi: usize, a: V, b: V) -> V {
        std::array::from_fn(|i| if lo <= i && i < hi { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn zip(self, a: V, b: V) -> (V, V) {
        ([a[0], b[0], a[1], b[1]], [a[2], b[2], a[3], b[3]])
    }
    #[inline(always)]
    fn sum(self, a: V) -> f32 {
        (a[0] + a[2]) + (a[1] + a[3])
    }
    #[inline(always)]
    fn sums(self, a: &[V; MAX_LANES]) -> V {
        std::array::from_fn(|i| self.sum(a[i]))
    }
    #[inline(always)]
    fn maximum(self, a: V) -> f32 {
        let m = |x: f32, y: f32| if x > y { x } else { y };
        m(m(a[0], a[2]), m(a[1], a[3]))
    }
    #[inline(always)]
    fn first(self, a: V) -> f32 {
        a[0]
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8, part: usize) -> V {
        // SAFETY: as above.
        let pairs = unsafe { p.cast::<[[u16; 2]; N]>().read_unaligned() };
        pairs.map(|pair| f32::from_bits(u32::from(pair[part]) << 16))
    }
    #[inline(always)]
    fn splat_bf16(self, word: u32) -> V {
        self.splat(f32::from_bits(word))
    }
    #[inline(always)]
    fn dot_bf16(self, a: V, b: V, c: V) -> V {
        self.fma(a, b, c)
    }
    #[inline(always)]
    fn keep_bf16(self, a: V, _: bool) -> V {
        a
    }
    #[inline(always)]
    unsafe fn store_bf16(self, words: *mut u32, at: usize, a: V) {
        let bits = a.map(|x| {
            let u = x.to_bits();
            u.wrapping_add(0x7fff + (u >> 16 & 1)) & 0xffff_0000
        });
        // SAFETY: as above.
        unsafe { words.add(at).cast::<[u32; N]>().write_unaligned(bits) };
    }

    #[inline(always)]
    fn round_bf16(self, a: V) -> V {
        a.map(|x| {
            let u = x.to_bits();
            let rounded = u.wrapping_add(0x7fff + (u >> 16 & 1)) & 0xffff_0000;
            if x.is_nan() {
                x
            } else {
                f32::from_bits(rounded)
            }
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
    fn to_f32(self, a: [u32; N]) -> V {
        a.map(|x| (x as i32) as f32)
    }
    #[inline(always)]
    unsafe fn store_i16(self, words: *mut u32, at: usize, a: V) {
        let [n0, n1, n2, n3] = a.map(|x| u32::from(x.round_ties_even() as i16 as u16));
        // SAFETY: as above.
        unsafe {
            words
                .add(at / 2)
                .cast::<[u32; 2]>()
                .write_unaligned([n0 | n2 << 16, n1 | n3 << 16]);
        }
    }
}
