//! AVX-512 (F, BW, DQ, VL): sixteen lanes, thirty-two registers; with `BF16`, dot products of bf16 pairs, and of 16-bit
//! integers (VNNI), which every CPU that has the one has, too; with `AMX`, its matrix unit.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::transmute;

use super::{Depth, Kernel, KeyTiles, MAX_LANES, Simd, ValueTiles, amx};

/// Proof that this CPU has AVX-512 F, BW, DQ and VL, and BF16 with VNNI, and AMX where the parameters say so.
#[derive(Clone, Copy)]
pub(super) struct Avx512<const BF16: bool, const AMX: bool>(());

impl<const BF16: bool, const AMX: bool> Avx512<BF16, AMX> {
    #[inline]
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && (!BF16
                || is_x86_feature_detected!("avx512bf16")
                    && is_x86_feature_detected!("avx512vnni"))
            && (!AMX || amx::is_available()))
        .then_some(Self(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn shim<K: Kernel, S: Simd>(s: S, kernel: K) -> K::Output {
    kernel.run(s)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")]
fn shim_bf16<K: Kernel, S: Simd>(s: S, kernel: K) -> K::Output {
    kernel.run(s)
}

/// `_mm512_dpwssd_epi32`, which the compiler would take apart again, for its latency's sake.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")]
fn dot_words(a: __m512i, b: __m512i, mut c: __m512i) -> __m512i {
    // SAFETY: the instruction is one of the function's features, and changes nothing else.
    unsafe {
        asm!("vpdpwssd {c}, {a}, {b}", a = in(zmm_reg) a, b = in(zmm_reg) b, c = inout(zmm_reg) c,
            options(pure, nomem, nostack, preserves_flags));
    }
    c
}

/// `_mm512_srli_epi32::<4>`, which the compiler would move to the other side of a widening, to be done a second time.
#[inline]
#[target_feature(enable = "avx512f")]
fn upper_halves(bytes: __m512i) -> __m512i {
    let upper;
    // SAFETY: as above.
    unsafe {
        asm!("vpsrld {upper}, {bytes}, 4", upper = out(zmm_reg) upper, bytes = in(zmm_reg) bytes,
            options(pure, nomem, nostack, preserves_flags));
    }
    upper
}

/// Rounds to bf16, to nearest even, in the high halves; the low ones are zero.
#[inline]
#[target_feature(enable = "avx512f")]
fn round_bf16(a: __m512) -> __m512i {
    let u = _mm512_castps_si512(a);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(u), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000_u32 as i32))
}

/// Lanes `lo..hi` of sixteen.
#[inline(always)]
fn lanes(lo: usize, hi: usize) -> __mmask16 {
    ((1_u32 << hi) - (1_u32 << lo.min(hi))) as u16
}

// SAFETY of every `unsafe` below: `self` proves that the CPU has the instructions; pointers are the caller's promise.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<const BF16: bool, const AMX: bool> Simd for Avx512<BF16, AMX> {
    type F32 = __m512;
    type I32 = __m512i;
    type Bf16 = __m512i;
    const LANES: usize = 16;
    const REGISTERS: usize = 32;
    const BF16_PARTS: usize = if BF16 { 1 } else { 2 };
    const MATRIX: bool = AMX;
    type Vectors = Avx512<BF16, false>;

    #[inline(always)]
    fn vectors(self) -> Self::Vectors {
        Avx512(())
    }

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        if BF16 {
            unsafe { shim_bf16(self, kernel) }
        } else {
            unsafe { shim(self, kernel) }
        }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: __m512) {
        unsafe { _mm512_storeu_ps(p, a) };
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_wide(self, p: *const u16) -> __m512 {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, a: __m512) {
        unsafe {
            let narrow = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(a);
            _mm256_storeu_si256(p.cast(), narrow);
        }
    }
    #[inline(always)]
    unsafe fn load_i8_wide(self, p: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u4_wide(self, p: *const u8, upper: bool, scale: f32, offset: f32) -> __m512 {
        unsafe {
            // All sixteen results, then a look-up, which heeds four bits of each index.
            let q = _mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0,
                15.0,
            );
            let table = _mm512_fmadd_ps(q, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let index = if upper { upper_halves(bytes) } else { bytes };
            _mm512_permutexvar_ps(index, table)
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
    fn splat(self, a: f32) -> __m512 {
        unsafe { _mm512_set1_ps(a) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn exponents(self, a: __m512) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(a))) }
    }
    #[inline(always)]
    fn select_below(self, a: __m512, limit: f32, b: __m512, c: __m512) -> __m512 {
        unsafe {
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, _mm512_set1_ps(limit));
            _mm512_mask_mov_ps(c, below, b)
        }
    }
    #[inline(always)]
    fn select_lanes(self, lo: usize, hi: usize, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mask_mov_ps(b, lanes(lo, hi), a) }
    }
    #[inline(always)]
    fn zip(self, a: __m512, b: __m512) -> (__m512, __m512) {
        unsafe {
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            (
                _mm512_permutex2var_ps(a, low, b),
                _mm512_permutex2var_ps(a, high, b),
            )
        }
    }
    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        unsafe {
            let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
    }
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // of several arrays at once
    fn sums(self, a: &[__m512; MAX_LANES]) -> __m512 {
        // Each step adds the halves of two vectors' sums into one; in this order, lanes end in that of the vectors.
        let (mut eights, mut fours, mut twos) = ([a[0]; 8], [a[0]; 4], [a[0]; 2]);
        unsafe {
            for i in 0..8 {
                let first = 8 * (i % 2) + i / 2;
                let (p, q) = (a[first], a[first + 4]);
                eights[i] = _mm512_add_ps(
                    _mm512_shuffle_f32x4::<0b01_00_01_00>(p, q),
                    _mm512_shuffle_f32x4::<0b11_10_11_10>(p, q),
                );
            }
            for i in 0..4 {
                let (p, q) = (eights[2 * i], eights[2 * i + 1]);
                fours[i] = _mm512_add_ps(
                    _mm512_shuffle_f32x4::<0b10_00_10_00>(p, q),
                    _mm512_shuffle_f32x4::<0b11_01_11_01>(p, q),
                );
            }
            for i in 0..2 {
                let p = _mm512_castps_pd(fours[2 * i]);
                let q = _mm512_castps_pd(fours[2 * i + 1]);
                twos[i] = _mm512_add_ps(
                    _mm512_castpd_ps(_mm512_unpacklo_pd(p, q)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)),
                );
            }
            let [p, q] = twos;
            _mm512_add_ps(
                _mm512_shuffle_ps::<0b10_00_10_00>(p, q),
                _mm512_shuffle_ps::<0b11_01_11_01>(p, q),
            )
        }
    }
    #[inline(always)]
    fn maximum(self, a: __m512) -> f32 {
        unsafe {
            let a = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        }
    }
    #[inline(always)]
    fn first(self, a: __m512) -> f32 {
        unsafe { _mm512_cvtss_f32(a) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8, part: usize) -> __m512i {
        unsafe {
            let pairs = _mm512_loadu_si512(p.cast());
            match part {
                _ if BF16 => pairs,
                0 => _mm512_slli_epi32::<16>(pairs),
                _ => _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32)),
            }
        }
    }
    #[inline(always)]
    fn splat_bf16(self, word: u32) -> __m512i {
        self.splat_i32(word)
    }
    #[inline(always)]
    fn dot_bf16(self, a: __m512i, b: __m512i, c: __m512) -> __m512 {
        unsafe {
            if BF16 {
                _mm512_dpbf16_ps(
                    c,
                    transmute::<__m512i, __m512bh>(a),
                    transmute::<__m512i, __m512bh>(b),
                )
            } else {
                _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), c)
            }
        }
    }
    #[inline(always)]
    fn keep_bf16(self, a: __m512i, last: bool) -> __m512i {
        let mask = if last { 0xffff_0000_u32 as i32 } else { 0xffff };
        unsafe { _mm512_and_si512(a, _mm512_set1_epi32(mask)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, words: *mut u32, at: usize, a: __m512) {
        unsafe {
            if BF16 {
                let narrow = transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(a));
                _mm256_storeu_si256(words.add(at / 2).cast(), narrow);
            } else {
                _mm512_storeu_si512(words.add(at).cast(), round_bf16(a));
            }
        }
    }

    #[inline(always)]
    fn round_bf16(self, a: __m512) -> __m512 {
        unsafe {
            let rounded = _mm512_castsi512_ps(round_bf16(a));
            _mm512_mask_mov_ps(rounded, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a), a)
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8, part: usize) -> __m512i {
        unsafe {
            let bytes = _mm512_loadu_si512(p.cast());
            match part {
                0 => _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(bytes)),
                _ => _mm512_srai_epi16::<8>(bytes),
            }
        }
    }
    #[inline(always)]
    fn splat_i32(self, word: u32) -> __m512i {
        unsafe { _mm512_set1_epi32(word as i32) }
    }
    #[inline(always)]
    fn dot_i16(self, a: __m512i, b: __m512i, c: __m512i) -> __m512i {
        unsafe {
            if BF16 {
                dot_words(a, b, c)
            } else {
                _mm512_add_epi32(c, _mm512_madd_epi16(a, b))
            }
        }
    }
    #[inline(always)]
    unsafe fn load_i32(self, p: *const f32) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_i32(self, p: *mut f32, a: __m512i) {
        unsafe { _mm512_storeu_si512(p.cast(), a) };
    }
    #[inline(always)]
    fn to_f32(self, a: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn store_i16(self, words: *mut u32, at: usize, a: __m512) {
        unsafe {
            // The order inside each group of four first, as words: 0 2 1 3.
            let n = _mm512_shuffle_epi32::<0b11_01_10_00>(_mm512_cvtps_epi32(a));
            _mm256_storeu_si256(words.add(at / 2).cast(), _mm512_cvtepi32_epi16(n));
        }
    }

    #[inline(always)]
    unsafe fn store_halves(self, low: *mut u16, high: *mut u16, a: __m512) {
        unsafe {
            let words = _mm512_castps_si512(a);
            _mm256_storeu_si256(low.cast(), _mm512_cvtepi32_epi16(words));
            let words = _mm512_srli_epi32::<16>(words);
            _mm256_storeu_si256(high.cast(), _mm512_cvtepi32_epi16(words));
        }
    }
    #[inline(always)]
    unsafe fn interleave_2(self, rows: [*const u16; 2], to: *mut u16) {
        unsafe {
            let a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(rows[0].cast()));
            let b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(rows[1].cast()));
            let pairs = _mm512_or_si512(a, _mm512_slli_epi32::<16>(b));
            _mm512_storeu_si512(to.cast(), pairs);
        }
    }
    #[inline(always)]
    unsafe fn interleave_4(self, rows: [*const u8; 4], to: *mut u8) {
        unsafe {
            let a = _mm512_cvtepu8_epi32(_mm_loadu_si128(rows[0].cast()));
            let b = _mm512_cvtepu8_epi32(_mm_loadu_si128(rows[1].cast()));
            let c = _mm512_cvtepu8_epi32(_mm_loadu_si128(rows[2].cast()));
            let d = _mm512_cvtepu8_epi32(_mm_loadu_si128(rows[3].cast()));
            let ab = _mm512_or_si512(a, _mm512_slli_epi32::<8>(b));
            let cd = _mm512_or_si512(_mm512_slli_epi32::<16>(c), _mm512_slli_epi32::<24>(d));
            _mm512_storeu_si512(to.cast(), _mm512_or_si512(ab, cd));
        }
    }

    #[inline(always)]
    fn matrix_begin(self) {
        if AMX {
            unsafe { amx::begin() };
        }
    }
    #[inline(always)]
    fn matrix_end(self) {
        if AMX {
            unsafe { amx::end() };
        }
    }
    #[inline(always)]
    unsafe fn matrix_scores(
        self,
        query: *const u32,
        keys: &KeyTiles,
        depth: Depth,
        scores: *mut f32,
        stride: usize,
    ) {
        assert!(AMX);
        unsafe { amx::scores(query, keys, depth, scores, stride) };
    }
    #[inline(always)]
    unsafe fn matrix_values(
        self,
        weights: *const u32,
        stride: usize,
        values: &ValueTiles<'_>,
        out: *mut f32,
        out_stride: usize,
    ) {
        assert!(AMX);
        unsafe { amx::values(weights, stride, values, out, out_stride) };
    }
}
