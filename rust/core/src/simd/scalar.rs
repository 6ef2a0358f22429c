//! The portable fallback: four lanes of plain Rust, which any compiler vectorizes where it can.

use half::f16;

use super::{Kernel, Simd};

#[derive(Clone, Copy)]
pub(super) struct Scalar;

const N: usize = 4;
type V = [f32; N];

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(always)]
fn low(pair: u32) -> f32 {
    f32::from_bits(pair << 16)
}

#[inline(always)]
fn high(pair: u32) -> f32 {
    f32::from_bits(pair & 0xffff_0000)
}

impl Simd for Scalar {
    type F32 = V;
    type Pairs = [u32; N];
    const LANES: usize = N;
    const ACCUMULATORS: usize = 8;

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
    unsafe fn store_bf16(self, p: *mut u16, a: V) {
        let bits = a.map(|x| {
            let u = x.to_bits();
            (u.wrapping_add(0x7fff + (u >> 16 & 1)) >> 16) as u16
        });
        // SAFETY: as above.
        unsafe { p.cast::<[u16; N]>().write_unaligned(bits) };
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> [u32; N] {
        // SAFETY: as above.
        unsafe { p.cast::<[u32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_pairs(self, p: *mut u32, a: [u32; N]) {
        // SAFETY: as above.
        unsafe { p.cast::<[u32; N]>().write_unaligned(a) };
    }
    #[inline(always)]
    unsafe fn join(self, first: *const u16, second: *const u16) -> [u32; N] {
        // SAFETY: as above.
        let [a, b] = [first, second].map(|p| unsafe { p.cast::<[u16; N]>().read_unaligned() });
        std::array::from_fn(|i| u32::from(a[i]) | u32::from(b[i]) << 16)
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    fn splat(self, a: f32) -> V {
        [a; N]
    }
    #[inline(always)]
    fn splat_pairs(self, a: u32) -> [u32; N] {
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
    fn max(self, a: V, b: V) -> V {
        zip(a, b, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // Without the instruction a fused multiply-add is a library call: two roundings instead, always.
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn round(self, a: V) -> V {
        // Adding and taking away 1.5 * 2^23 rounds to nearest even below 2^22, which is all that `exp` keeps.
        const MAGIC: f32 = 12_582_912.0;
        a.map(|x| (x + MAGIC) - MAGIC)
    }
    #[inline(always)]
    fn scale(self, a: V, n: V) -> V {
        let power = n.map(|n| f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23));
        self.mul(a, power)
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
    fn maximum(self, a: V) -> f32 {
        let m = |x: f32, y: f32| if x > y { x } else { y };
        m(m(a[0], a[2]), m(a[1], a[3]))
    }
    #[inline(always)]
    fn first(self, a: V) -> f32 {
        a[0]
    }
    #[inline(always)]
    fn dot(self, a: [u32; N], b: [u32; N], c: V) -> V {
        let c = self.fma(a.map(low), b.map(low), c);
        self.fma(a.map(high), b.map(high), c)
    }
    #[inline(always)]
    fn keep_half(self, a: [u32; N], high: bool) -> [u32; N] {
        a.map(|pair| pair & if high { 0xffff_0000 } else { 0xffff })
    }
}
