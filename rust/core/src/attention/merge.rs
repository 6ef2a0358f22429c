//! Folding partitions: the `(maximum, sum, output)` of one row over some keys, and the one rule that joins two.
//!
//! The rule is not associative, so everything here folds *one partition at a time, left to right, onto a state that
//! covers the positions before it*; a row then has the same bits however its partitions were spread over items and
//! threads.

use crate::simd::{MAX_LANES, Simd, exp};

/// One row's `(m, l, o)` in scratch memory: `width` floats of output (not yet divided by the sum), then the maximum of
/// the scores and the sum of their exponentials. A maximum of minus infinity says that no key was visible; where all visible
/// scores are minus infinity, it is the lowest number, and the sum 0.
#[derive(Clone, Copy)]
pub(super) struct Record {
    output: *mut f32,
    width: usize,
}

/// # Safety of every method
/// The record points at [`Record::floats`] floats that nobody else touches meanwhile.
#[allow(clippy::missing_safety_doc)] // said once, above
impl Record {
    /// Floats that a record takes; keeps records on cache lines of their own.
    pub(super) const fn floats(width: usize) -> usize {
        width + MAX_LANES
    }

    /// Record `index` of an array of them. `width` is a multiple of `MAX_LANES`.
    #[inline(always)]
    pub(super) unsafe fn at(base: *mut f32, width: usize, index: usize) -> Self {
        Self {
            // SAFETY: the caller's promise.
            output: unsafe { base.add(index * Self::floats(width)) },
            width,
        }
    }

    /// The `i`-th record after this one.
    #[inline(always)]
    pub(super) unsafe fn next(self, i: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::at(self.output, self.width, i) }
    }

    #[inline(always)]
    pub(super) fn output(self) -> *mut f32 {
        self.output
    }

    #[inline(always)]
    unsafe fn statistics(self) -> (f32, f32) {
        // SAFETY: the caller's promise.
        unsafe {
            (
                *self.output.add(self.width),
                *self.output.add(self.width + 1),
            )
        }
    }

    #[inline(always)]
    pub(super) unsafe fn set_statistics(self, m: f32, l: f32) {
        // SAFETY: the caller's promise.
        unsafe {
            *self.output.add(self.width) = m;
            *self.output.add(self.width + 1) = l;
        }
    }

    /// The state before the first key.
    #[inline(always)]
    pub(super) unsafe fn clear(self) {
        // SAFETY: the caller's promise.
        unsafe {
            self.output.write_bytes(0, self.width);
            self.set_statistics(f32::NEG_INFINITY, 0.0);
        }
    }

    #[inline(always)]
    pub(super) unsafe fn copy_from(self, other: Self) {
        // SAFETY: the caller's promise, for both.
        unsafe {
            self.output
                .copy_from_nonoverlapping(other.output, Self::floats(self.width));
        }
    }

    /// Folds the next partition onto this state.
    #[inline(always)]
    pub(super) unsafe fn fold<S: Simd>(self, s: S, part: Self) {
        // SAFETY: the caller's promise, for both.
        unsafe { Self::fold_rows(s, self, part, 1) };
    }

    /// Folds the next partition onto the states of so many rows, at most `MAX_LANES`, from these records on.
    #[inline(always)]
    pub(super) unsafe fn fold_rows<S: Simd>(s: S, states: Self, parts: Self, rows: usize) {
        // Factors and sums of all rows at once: `exp` takes longer than the rest.
        let mut m = [0.0; MAX_LANES];
        let mut sums = [[0.0; MAX_LANES]; 2];
        let mut factors = [[f32::NEG_INFINITY; MAX_LANES]; 2];
        // SAFETY: the caller's promise, for all of them.
        unsafe {
            for r in 0..rows {
                let ((m0, l0), (m1, l1)) =
                    (states.next(r).statistics(), parts.next(r).statistics());
                m[r] = if m0 > m1 { m0 } else { m1 };
                (sums[0][r], sums[1][r]) = (l0, l1);
                (factors[0][r], factors[1][r]) = (m0 - m[r], m1 - m[r]);
            }
            let [l0, l1] = &mut sums;
            let [f0, f1] = &mut factors;
            for r in (0..rows).step_by(S::LANES) {
                let a = exp(s, s.load(f0.as_ptr().add(r)));
                let b = exp(s, s.load(f1.as_ptr().add(r)));
                let old = s.mul(s.load(l0.as_ptr().add(r)), a);
                s.store(
                    l0.as_mut_ptr().add(r),
                    s.fma(s.load(l1.as_ptr().add(r)), b, old),
                );
                s.store(f0.as_mut_ptr().add(r), a);
                s.store(f1.as_mut_ptr().add(r), b);
            }
            // Adding 0 leaves no -0, whose sign need not be the row's own (see `matrix`).
            let zero = s.splat(0.0);
            for r in 0..rows {
                let (state, part) = (states.next(r), parts.next(r));
                if part.statistics().0 == f32::NEG_INFINITY {
                    continue;
                }
                state.set_statistics(m[r], l0[r]);
                let (a, b) = (s.splat(f0[r]), s.splat(f1[r]));
                for d in (0..state.width).step_by(S::LANES) {
                    let kept = s.fma(s.load(state.output.add(d)), a, zero);
                    s.store(
                        state.output.add(d),
                        s.fma(s.load(part.output.add(d)), b, kept),
                    );
                }
            }
        }
    }

    /// Writes the row's result, `head_dim` floats: output over sum, or zeros where no key was visible. `out` may be the
    /// record's own output. `sink` is the score of one more key, whose value is zero; minus infinity for none. `lse`, if not
    /// null, takes the logarithm of the sum.
    #[inline(always)]
    pub(super) unsafe fn finish<S: Simd>(
        self,
        s: S,
        sink: f32,
        out: *mut f32,
        lse: *mut f32,
        head_dim: usize,
    ) {
        // SAFETY: the caller's promise; `out` has `head_dim` floats, and the record at least as many.
        unsafe {
            let (mut m, mut l) = self.statistics();
            let mut inverse = if m == f32::NEG_INFINITY { 0.0 } else { 1.0 / l };
            if sink > f32::NEG_INFINITY {
                let all = if m > sink { m } else { sink };
                // Without keys, m is minus infinity, and its factor 0.
                let kept = s.first(exp(s, s.splat(m - all)));
                let own = s.first(exp(s, s.splat(sink - all)));
                (m, l) = (all, s.first(s.fma(s.splat(l), s.splat(kept), s.splat(own))));
                inverse = kept / l;
            }
            let whole = head_dim / S::LANES * S::LANES;
            for d in (0..whole).step_by(S::LANES) {
                let row = s.mul(s.load(self.output.add(d)), s.splat(inverse));
                s.store(out.add(d), row);
            }
            for d in whole..head_dim {
                out.add(d).write_unaligned(*self.output.add(d) * inverse);
            }
            if !lse.is_null() {
                *lse = if l == 0.0 {
                    f32::NEG_INFINITY
                } else {
                    (f64::from(m) + f64::from(l).ln()) as f32
                };
            }
        }
    }
}
