//! The one exponential: of scores to weights and the factors of the merge in attention, and in silu; and the hyperbolic
//! tangent that soft-capped scores go through.
#![allow(clippy::needless_range_loop)] // indices name vectors of several arrays at once

use super::Simd;

/// A little below -127 ln 2, where `exponents` makes 0 of n. All that is less is taken for this.
const LEAST: f32 = -88.03;
/// 1.5 * 2^23, and a float's bias. Added to a small number, it leaves no room for a fraction: the lowest bits of the sum
/// are the nearest integer n, ready to be the exponent of 2^n.
const ROUNDER: f32 = 12_582_912.0 + 127.0;
/// Minimax in relative error (1.0e-7 as rounded) of 2^f on |f| <= 1/2, highest power first; the constant term is exactly
/// 1, so that `exp(0)` is.
#[allow(clippy::approx_constant)] // near ln 2, not ln 2
const COEFFICIENTS: [f32; 6] = [
    0.001_326_472_7,
    0.009_671_513,
    0.055_507_306,
    0.240_222_44,
    0.693_147,
    1.0,
];

/// e^x for x <= 0; exactly 1 at 0, 0 below -87.7 (also for -inf), NaN for NaN.
///
/// From -87.3 down its results are below the normal numbers, and right within the smallest of those. Above, the relative
/// error is below `3e-7 + 1.5e-8 |x|`, which is `3e-7 + 7.5e-8 |x|` where `fma` rounds twice: 2^(x log2 e),
/// with log2 e as one float. The second term is nothing in a sum of such weights, whose largest is 1: e^x falls faster
/// than |x| grows.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F32) -> S::F32 {
    exps(s, [x])[0]
}

/// The same of several vectors, step by step: so many chains of dependent instructions hide their latency.
#[inline(always)]
pub(crate) fn exps<S: Simd, const N: usize>(s: S, x: [S::F32; N]) -> [S::F32; N] {
    // Loops, not `map`: a function of the standard library need not be inlined where the instructions are.
    let (mut power, mut f, mut e) = (x, x, x);
    let mut p = [s.splat(COEFFICIENTS[0]); N];
    let log2e = s.splat(std::f32::consts::LOG2_E);
    for i in 0..N {
        // In this order, NaN stays NaN.
        let x = s.max(s.splat(LEAST), x[i]);
        let rounded = s.fma(x, log2e, s.splat(ROUNDER));
        power[i] = s.exponents(rounded);
        f[i] = s.fma(x, log2e, s.sub(s.splat(ROUNDER), rounded));
    }
    for c in &COEFFICIENTS[1..] {
        for i in 0..N {
            p[i] = s.fma(p[i], f[i], s.splat(*c));
        }
    }
    for i in 0..N {
        e[i] = s.mul(p[i], power[i]);
    }
    e
}

/// Up to this magnitude tanh is a polynomial: beyond it, nothing cancels in `1 - e^-2x`.
const TANH_SMALL: f32 = 0.625;
/// `(tanh(y) / y - 1) / y^2` in y^2, near-minimax (2e-8 of tanh), highest power first.
const TANH_COEFFICIENTS: [f32; 5] = [
    -0.006_104_947,
    0.021_003_641,
    -0.053_852_5,
    0.133_327_83,
    -0.333_333_28,
];

/// tanh x, within about 3 ulp; NaN for NaN.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let zero = s.splat(0.0);
    let negated = s.sub(zero, x);
    let magnitude = s.select_below(x, 0.0, negated, x);

    let square = s.mul(x, x);
    let mut p = s.splat(TANH_COEFFICIENTS[0]);
    for c in &TANH_COEFFICIENTS[1..] {
        p = s.fma(p, square, s.splat(*c));
    }
    let small = s.fma(s.mul(x, square), p, x);

    let e = exp(s, s.mul(magnitude, s.splat(-2.0)));
    let one = s.splat(1.0);
    let large = s.div(s.sub(one, e), s.add(one, e));
    let large = s.select_below(x, 0.0, s.sub(zero, large), large);
    s.select_below(magnitude, TANH_SMALL, small, large)
}

#[cfg(test)]
mod tests {
    use super::super::{Dispatch, Isa, Kernel, MAX_LANES};
    use super::*;

    struct Exp<'a>(&'a mut [f32]);
    struct Tanh<'a>(&'a mut [f32]);

    impl Kernel for Exp<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for chunk in self.0.chunks_exact_mut(MAX_LANES) {
                for lanes in chunk.chunks_exact_mut(S::LANES) {
                    // SAFETY: a chunk has LANES elements.
                    unsafe { s.store(lanes.as_mut_ptr(), exp(s, s.load(lanes.as_ptr()))) };
                }
            }
        }
    }

    impl Kernel for Tanh<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for chunk in self.0.chunks_exact_mut(MAX_LANES) {
                for lanes in chunk.chunks_exact_mut(S::LANES) {
                    // SAFETY: a chunk has LANES elements.
                    unsafe { s.store(lanes.as_mut_ptr(), tanh(s, s.load(lanes.as_ptr()))) };
                }
            }
        }
    }

    impl Dispatch for Tanh<'_> {
        type Output = ();
        fn run<S: Simd>(self, s: S) {
            s.vectorize(self);
        }
    }

    #[test]
    fn tanh_is_accurate_odd_and_passes_nan() {
        for isa in Isa::available() {
            let x: Vec<f32> = (0..16 * 1024)
                .map(|i| (f64::from(i) * 0.0016 - 13.0).powi(3) as f32 / 100.0)
                .collect();
            let mut y = x.clone();
            isa.dispatch(Tanh(&mut y));
            for (&x, &y) in x.iter().zip(&y) {
                let want = f64::from(x).tanh();
                let error = (f64::from(y) - want).abs();
                assert!(
                    error <= 4e-7 * want.abs(),
                    "{isa} tanh({x}) = {y}, {error:e} off"
                );
            }
            let mut edge = [0.0; MAX_LANES];
            edge[..4].copy_from_slice(&[f32::NAN, 1e30, f32::NEG_INFINITY, 1e-30]);
            isa.dispatch(Tanh(&mut edge));
            assert!(edge[0].is_nan(), "{isa}");
            assert_eq!(edge[1..5], [1.0, -1.0, 1e-30, 0.0], "{isa}");
        }
    }

    impl Dispatch for Exp<'_> {
        type Output = ();
        fn run<S: Simd>(self, s: S) {
            s.vectorize(self);
        }
    }

    #[test]
    fn exp_is_accurate_zero_far_below_and_passes_nan() {
        for isa in Isa::available() {
            let x: Vec<f32> = (0..64 * 1024).map(|i| -0.0015 * i as f32).collect();
            let mut y = x.clone();
            isa.dispatch(Exp(&mut y));
            let slope = if isa.rounds_twice() { 7.5e-8 } else { 1.5e-8 };
            for (&x, &y) in x.iter().zip(&y) {
                let want = f64::from(x).exp();
                if x < -87.7 {
                    assert_eq!(y, 0.0, "{isa} exp({x})");
                } else if want < f64::from(f32::MIN_POSITIVE) {
                    assert!(
                        (0.0..=f32::MIN_POSITIVE).contains(&y),
                        "{isa} exp({x}) = {y}"
                    );
                } else {
                    let error = (f64::from(y) / want - 1.0).abs();
                    let allowed = 3e-7 + slope * f64::from(x.abs());
                    assert!(error < allowed, "{isa} exp({x}) = {y}, {error:e} off");
                }
            }
            let mut edge = [-1.0; MAX_LANES];
            edge[0] = 0.0;
            edge[1] = f32::NEG_INFINITY;
            edge[2] = f32::NAN;
            edge[3] = -f32::NAN;
            edge[4] = -3e38;
            isa.dispatch(Exp(&mut edge));
            assert_eq!(edge[0], 1.0, "{isa}");
            assert_eq!(edge[1], 0.0, "{isa}");
            assert!(edge[2].is_nan() && edge[3].is_nan(), "{isa}");
            assert_eq!(edge[4], 0.0, "{isa}");
        }
    }
}
