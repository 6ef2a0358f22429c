//! NEON: four lanes, thirty-two registers. bf16 pairs are widened and multiplied one after another.

use std::arch::aarch64::*;
use std::arch::asm;

use half::f16;

use super::{Kernel, MAX_LANES, Simd};

/// Proof that this CPU has NEON.
#[derive(Clone, Copy)]
pub(super) struct Neon(());

impl Neon {
    #[inline]
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

#[target_feature(enable = "neon")]
fn shim<K: Kernel>(s: Neon, kernel: K) -> K::Output {
    kernel.run(s)
}

// SAFETY of every `unsafe` below: `self` proves that the CPU has the instructions; pointers are the caller's promise.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Neon {
    type F32 = float32x4_t;
    type I32 = int32x4_t;
    type Bf16 = float32x4_t;
    const LANES: usize = 4;
    const REGISTERS: usize = 32;
    const BF16_PARTS: usize = 2;
    type Vectors = Self;

    #[inline(always)]
    fn vectors(self) -> Self {
        self
    }

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        unsafe { shim(self, kernel) }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> float32x4_t {
        unsafe { vld1q_f32(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: float32x4_t) {
        unsafe { vst1q_f32(p, a) };
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> float32x4_t {
        // The f16 intrinsics are not stable: shift the fields in place, fix the exponent by a multiplication that is
        // exact (subnormals included), and give infinities and NaNs their exponent back.
        unsafe {
            let bits = vmovl_u16(vld1_u16(p));
            let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
            let magnitude = vshlq_n_u32::<13>(vandq_u32(bits, vdupq_n_u32(0x7fff)));
            let scale = vdupq_n_f32(f32::from_bits((127 + 112) << 23));
            let value = vreinterpretq_u32_f32(vmulq_f32(vreinterpretq_f32_u32(magnitude), scale));
            let special = vcgeq_u32(magnitude, vdupq_n_u32(0x7c00 << 13));
            let special = vandq_u32(special, vorrq_u32(magnitude, vdupq_n_u32(0x7f80_0000)));
            vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(value, special), sign))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_wide(self, p: *const u16) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, a: float32x4_t) {
        // The f16 intrinsics are not stable.
        let narrow: uint16x4_t;
        unsafe {
            asm!("fcvtn {n:v}.4h, {a:v}.4s", n = lateout(vreg) narrow, a = in(vreg) a, options(pure, nomem, nostack, preserves_flags));
            vst1_u16(p, narrow);
        }
    }
    #[inline(always)]
    unsafe fn load_i8_wide(self, p: *const u8) -> float32x4_t {
        unsafe {
            let bytes = vreinterpret_s8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
        }
    }
    #[inline(always)]
    unsafe fn load_u4_wide(
        self,
        p: *const u8,
        upper: bool,
        scale: f32,
        offset: f32,
    ) -> float32x4_t {
        unsafe {
            let bytes = vreinterpret_u8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
            let q = match upper {
                true => vshr_n_u8::<4>(bytes),
                false => vand_u8(bytes, vdup_n_u8(15)),
            };
            let q = vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(q))));
            vfmaq_f32(vdupq_n_f32(offset), q, vdupq_n_f32(scale))
        }
    }
    #[inline(always)]
    unsafe fn load_f16_pair(self, p: *const u16) -> [f32; 2] {
        let bits = unsafe { p.cast::<[u16; 2]>().read_unaligned() };
        bits.map(|b| f16::from_bits(b).to_f32_const())
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // The prefetch intrinsic is not stable.
        unsafe {
            asm!("prfm pldl2keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags));
        };
    }
    #[inline(always)]
    fn prefetch_near(self, p: *const u8) {
        // As above.
        unsafe {
            asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags));
        };
    }

    #[inline(always)]
    fn splat(self, a: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(a) }
    }
    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    fn max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmaxq_f32(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    fn exponents(self, a: float32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(a))) }
    }
    #[inline(always)]
    fn select_below(
        self,
        a: float32x4_t,
        limit: f32,
        b: float32x4_t,
        c: float32x4_t,
    ) -> float32x4_t {
        unsafe { vbslq_f32(vcltq_f32(a, vdupq_n_f32(limit)), b, c) }
    }
    #[inline(always)]
    fn select_lanes(self, lo: usize, hi: usize, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe {
            let lane = vld1q_u32([0, 1, 2, 3].as_ptr());
            let from = vcgeq_u32(lane, vdupq_n_u32(lo as u32));
            let until = vcltq_u32(lane, vdupq_n_u32(hi as u32));
            vbslq_f32(vandq_u32(from, until), a, b)
        }
    }
    #[inline(always)]
    fn zip(self, a: float32x4_t, b: float32x4_t) -> (float32x4_t, float32x4_t) {
        unsafe { (vzip1q_f32(a, b), vzip2q_f32(a, b)) }
    }
    #[inline(always)]
    fn sum(self, a: float32x4_t) -> f32 {
        unsafe {
            let a = vadd_f32(vget_low_f32(a), vget_high_f32(a));
            vget_lane_f32::<0>(a) + vget_lane_f32::<1>(a)
        }
    }
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // of several arrays at once
    fn sums(self, a: &[float32x4_t; MAX_LANES]) -> float32x4_t {
        let (mut halves, mut twos) = ([a[0]; 4], [a[0]; 2]);
        unsafe {
            for i in 0..4 {
                halves[i] = vaddq_f32(a[i], vextq_f32::<2>(a[i], a[i]));
            }
            for i in 0..2 {
                let low = vget_low_f32(halves[2 * i]);
                twos[i] = vcombine_f32(low, vget_low_f32(halves[2 * i + 1]));
            }
            vpaddq_f32(twos[0], twos[1])
        }
    }
    #[inline(always)]
    fn maximum(self, a: float32x4_t) -> f32 {
        unsafe { vmaxvq_f32(a) }
    }
    #[inline(always)]
    fn first(self, a: float32x4_t) -> f32 {
        unsafe { vgetq_lane_f32::<0>(a) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8, part: usize) -> float32x4_t {
        unsafe {
            let pairs = vreinterpretq_u32_u8(vld1q_u8(p));
            vreinterpretq_f32_u32(match part {
                0 => vshlq_n_u32::<16>(pairs),
                _ => vandq_u32(pairs, vdupq_n_u32(0xffff_0000)),
            })
        }
    }
    #[inline(always)]
    fn splat_bf16(self, word: u32) -> float32x4_t {
        self.splat(f32::from_bits(word))
    }
    #[inline(always)]
    fn dot_bf16(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        self.fma(a, b, c)
    }
    #[inline(always)]
    fn keep_bf16(self, a: float32x4_t, _: bool) -> float32x4_t {
        a
    }
    #[inline(always)]
    unsafe fn store_bf16(self, words: *mut u32, at: usize, a: float32x4_t) {
        unsafe {
            let u = vreinterpretq_u32_f32(a);
            let odd = vandq_u32(vshrq_n_u32::<16>(u), vdupq_n_u32(1));
            let rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            vst1q_u32(words.add(at), vandq_u32(rounded, vdupq_n_u32(0xffff_0000)));
        }
    }

    #[inline(always)]
    fn round_bf16(self, a: float32x4_t) -> float32x4_t {
        unsafe {
            let u = vreinterpretq_u32_f32(a);
            let odd = vandq_u32(vshrq_n_u32::<16>(u), vdupq_n_u32(1));
            let rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let high = vreinterpretq_f32_u32(vandq_u32(rounded, vdupq_n_u32(0xffff_0000)));
            vbslq_f32(vceqq_f32(a, a), high, a)
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8, part: usize) -> int32x4_t {
        unsafe {
            let bytes = vreinterpretq_s16_u8(vld1q_u8(p));
            vreinterpretq_s32_s16(match part {
                0 => vshrq_n_s16::<8>(vshlq_n_s16::<8>(bytes)),
                _ => vshrq_n_s16::<8>(bytes),
            })
        }
    }
    #[inline(always)]
    fn splat_i32(self, word: u32) -> int32x4_t {
        unsafe { vdupq_n_s32(word as i32) }
    }
    #[inline(always)]
    fn dot_i16(self, a: int32x4_t, b: int32x4_t, c: int32x4_t) -> int32x4_t {
        unsafe {
            let (a, b) = (vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b));
            let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
            vaddq_s32(c, vpaddq_s32(low, vmull_high_s16(a, b)))
        }
    }
    #[inline(always)]
    unsafe fn load_i32(self, p: *const f32) -> int32x4_t {
        unsafe { vreinterpretq_s32_f32(vld1q_f32(p)) }
    }
    #[inline(always)]
    unsafe fn store_i32(self, p: *mut f32, a: int32x4_t) {
        unsafe { vst1q_f32(p, vreinterpretq_f32_s32(a)) };
    }
    #[inline(always)]
    fn to_f32(self, a: int32x4_t) -> float32x4_t {
        unsafe { vcvtq_f32_s32(a) }
    }
    #[inline(always)]
    unsafe fn store_i16(self, words: *mut u32, at: usize, a: float32x4_t) {
        unsafe {
            let n = vmovn_s32(vcvtnq_s32_f32(a));
            let first = vreinterpret_u32_s16(vuzp1_s16(n, n));
            let second = vreinterpret_u32_s16(vuzp2_s16(n, n));
            let words = words.add(at / 2);
            words.write_unaligned(vget_lane_u32::<0>(first));
            words.add(1).write_unaligned(vget_lane_u32::<0>(second));
        }
    }
}
