//! AVX2 with FMA and F16C: eight lanes, sixteen registers. The elements of bf16 pairs are widened and multiplied
//! one after another.

use std::arch::x86_64::*;

use super::{Kernel, MAX_LANES, Simd};

/// Proof that this CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    #[inline]
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn shim<K: Kernel>(s: Avx2, kernel: K) -> K::Output {
    kernel.run(s)
}

/// Rounds to bf16, to nearest even, in the high halves; the low ones are anything.
#[inline(always)]
fn round_bf16(a: __m256) -> __m256i {
    // SAFETY: called from methods of `Avx2` alone, which proves the instructions.
    unsafe {
        let u = _mm256_castps_si256(a);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(u), _mm256_set1_epi32(1));
        _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)))
    }
}

/// The high halves of words, the low ones cleared.
#[inline(always)]
fn high(words: __m256i) -> __m256i {
    // SAFETY: as above.
    unsafe { _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32)) }
}

// SAFETY of every `unsafe` below: `self` proves that the CPU has the instructions; pointers are the caller's promise.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx2 {
    type F32 = __m256;
    type I32 = __m256i;
    type Bf16 = __m256;
    const LANES: usize = 8;
    const REGISTERS: usize = 16;
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
    unsafe fn load(self, p: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: __m256) {
        unsafe { _mm256_storeu_ps(p, a) };
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_wide(self, p: *const u16) -> __m256 {
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, a: __m256) {
        unsafe {
            let narrow = _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(a);
            _mm_storeu_si128(p.cast(), narrow);
        }
    }
    #[inline(always)]
    unsafe fn load_i8_wide(self, p: *const u8) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u4_wide(self, p: *const u8, upper: bool, scale: f32, offset: f32) -> __m256 {
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let q = match upper {
                true => _mm256_srli_epi32::<4>(bytes),
                false => _mm256_and_si256(bytes, _mm256_set1_epi32(15)),
            };
            _mm256_fmadd_ps(
                _mm256_cvtepi32_ps(q),
                _mm256_set1_ps(scale),
                _mm256_set1_ps(offset),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_f16_pair(self, p: *const u16) -> [f32; 2] {
        unsafe {
            let wide = _mm_cvtph_ps(_mm_loadl_epi64(p.cast()));
            [_mm_cvtss_f32(wide), _mm_cvtss_f32(_mm_movehdup_ps(wide))]
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
    }
    #[inline(always)]
    fn prefetch_near(self, p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) };
    }

    #[inline(always)]
    fn prefetch_write(self, p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(p.cast()) };
    }

    #[inline(always)]
    fn splat(self, a: f32) -> __m256 {
        unsafe { _mm256_set1_ps(a) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn exponents(self, a: __m256) -> __m256 {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(a))) }
    }
    #[inline(always)]
    fn select_below(self, a: __m256, limit: f32, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_blendv_ps(c, b, _mm256_cmp_ps::<_CMP_LT_OQ>(a, _mm256_set1_ps(limit))) }
    }
    #[inline(always)]
    fn select_lanes(self, lo: usize, hi: usize, a: __m256, b: __m256) -> __m256 {
        unsafe {
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let before = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo as i32), lane);
            let until = _mm256_cmpgt_epi32(_mm256_set1_epi32(hi as i32), lane);
            _mm256_blendv_ps(
                b,
                a,
                _mm256_castsi256_ps(_mm256_andnot_si256(before, until)),
            )
        }
    }
    #[inline(always)]
    fn zip(self, a: __m256, b: __m256) -> (__m256, __m256) {
        unsafe {
            let (low, high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            (
                _mm256_permute2f128_ps::<0x20>(low, high),
                _mm256_permute2f128_ps::<0x31>(low, high),
            )
        }
    }
    #[inline(always)]
    fn sum(self, a: __m256) -> f32 {
        unsafe {
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
    }
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // of several arrays at once
    fn sums(self, a: &[__m256; MAX_LANES]) -> __m256 {
        // Each step adds the halves of two vectors' sums into one; in this order, lanes end in that of the vectors.
        let (mut fours, mut twos) = ([a[0]; 4], [a[0]; 2]);
        unsafe {
            for i in 0..4 {
                let (p, q) = (a[i], a[i + 4]);
                fours[i] = _mm256_add_ps(
                    _mm256_permute2f128_ps::<0x20>(p, q),
                    _mm256_permute2f128_ps::<0x31>(p, q),
                );
            }
            for i in 0..2 {
                let p = _mm256_castps_pd(fours[2 * i]);
                let q = _mm256_castps_pd(fours[2 * i + 1]);
                twos[i] = _mm256_add_ps(
                    _mm256_castpd_ps(_mm256_unpacklo_pd(p, q)),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(p, q)),
                );
            }
            let [p, q] = twos;
            _mm256_add_ps(
                _mm256_shuffle_ps::<0b10_00_10_00>(p, q),
                _mm256_shuffle_ps::<0b11_01_11_01>(p, q),
            )
        }
    }
    #[inline(always)]
    fn maximum(self, a: __m256) -> f32 {
        unsafe {
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        }
    }
    #[inline(always)]
    fn first(self, a: __m256) -> f32 {
        unsafe { _mm256_cvtss_f32(a) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8, part: usize) -> __m256 {
        unsafe {
            let pairs = _mm256_loadu_si256(p.cast());
            _mm256_castsi256_ps(match part {
                0 => _mm256_slli_epi32::<16>(pairs),
                _ => high(pairs),
            })
        }
    }
    #[inline(always)]
    fn splat_bf16(self, word: u32) -> __m256 {
        self.splat(f32::from_bits(word))
    }
    #[inline(always)]
    fn dot_bf16(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        self.fma(a, b, c)
    }
    #[inline(always)]
    fn keep_bf16(self, a: __m256, _: bool) -> __m256 {
        a
    }
    #[inline(always)]
    unsafe fn store_bf16(self, words: *mut u32, at: usize, a: __m256) {
        unsafe { _mm256_storeu_si256(words.add(at).cast(), high(round_bf16(a))) };
    }

    #[inline(always)]
    fn round_bf16(self, a: __m256) -> __m256 {
        unsafe {
            let rounded = _mm256_castsi256_ps(high(round_bf16(a)));
            _mm256_blendv_ps(rounded, a, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8, part: usize) -> __m256i {
        unsafe {
            let bytes = _mm256_loadu_si256(p.cast());
            match part {
                0 => _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes)),
                _ => _mm256_srai_epi16::<8>(bytes),
            }
        }
    }
    #[inline(always)]
    fn splat_i32(self, word: u32) -> __m256i {
        unsafe { _mm256_set1_epi32(word as i32) }
    }
    #[inline(always)]
    fn dot_i16(self, a: __m256i, b: __m256i, c: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(c, _mm256_madd_epi16(a, b)) }
    }
    #[inline(always)]
    unsafe fn load_i32(self, p: *const f32) -> __m256i {
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_i32(self, p: *mut f32, a: __m256i) {
        unsafe { _mm256_storeu_si256(p.cast(), a) };
    }
    #[inline(always)]
    fn to_f32(self, a: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn store_i16(self, words: *mut u32, at: usize, a: __m256) {
        unsafe {
            let n = _mm256_cvtps_epi32(a);
            let order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
            let (low, high) = (_mm256_castsi256_si128(n), _mm256_extracti128_si256::<1>(n));
            let packed = _mm_shuffle_epi8(_mm_packs_epi32(low, high), order);
            _mm_storeu_si128(words.add(at / 2).cast(), packed);
        }
    }

    #[inline(always)]
    unsafe fn store_halves(self, low: *mut u16, high: *mut u16, a: __m256) {
        unsafe {
            let words = _mm256_castps_si256(a);
            let half = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
            let (a, b) = (
                _mm256_castsi256_si128(half),
                _mm256_extracti128_si256::<1>(half),
            );
            _mm_storeu_si128(low.cast(), _mm_packus_epi32(a, b));
            let half = _mm256_srli_epi32::<16>(words);
            let (a, b) = (
                _mm256_castsi256_si128(half),
                _mm256_extracti128_si256::<1>(half),
            );
            _mm_storeu_si128(high.cast(), _mm_packus_epi32(a, b));
        }
    }
    #[inline(always)]
    unsafe fn interleave_2(self, rows: [*const u16; 2], to: *mut u16) {
        unsafe {
            let a = _mm_loadu_si128(rows[0].cast());
            let b = _mm_loadu_si128(rows[1].cast());
            _mm_storeu_si128(to.cast(), _mm_unpacklo_epi16(a, b));
            _mm_storeu_si128(to.add(8).cast(), _mm_unpackhi_epi16(a, b));
        }
    }
    #[inline(always)]
    unsafe fn interleave_4(self, rows: [*const u8; 4], to: *mut u8) {
        unsafe {
            let a = _mm_loadl_epi64(rows[0].cast());
            let b = _mm_loadl_epi64(rows[1].cast());
            let c = _mm_loadl_epi64(rows[2].cast());
            let d = _mm_loadl_epi64(rows[3].cast());
            let (ab, cd) = (_mm_unpacklo_epi8(a, b), _mm_unpacklo_epi8(c, d));
            _mm_storeu_si128(to.cast(), _mm_unpacklo_epi16(ab, cd));
            _mm_storeu_si128(to.add(16).cast(), _mm_unpackhi_epi16(ab, cd));
        }
    }
}
