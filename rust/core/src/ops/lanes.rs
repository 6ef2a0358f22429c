//! Rows as vectors, of which the last may have some lanes only.

use crate::simd::{MAX_LANES, Simd};

/// What is done to each vector of a row.
pub(super) trait Lanes {
    /// To `lanes` elements from `i` on. Must be `#[inline(always)]`, as all that sees a vector.
    ///
    /// # Safety
    /// The row has them.
    unsafe fn lanes<S: Simd>(&self, s: S, i: usize, lanes: usize);
}

/// Where vectors of a row go.
pub(super) trait Sink: Copy {
    /// `lanes` elements from `i` on; the others are zero, unless something made them infinite.
    ///
    /// # Safety
    /// There is room for them.
    unsafe fn put<S: Simd>(self, s: S, i: usize, lanes: usize, a: S::F32);
}

impl Sink for *mut f32 {
    #[inline(always)]
    unsafe fn put<S: Simd>(self, s: S, i: usize, lanes: usize, a: S::F32) {
        // SAFETY: the caller's promise.
        unsafe { store(s, self.add(i), lanes, a) };
    }
}

/// Does `work` to all vectors of a row of `n` elements.
///
/// # Safety
/// What `work` uses has so many.
#[inline(always)]
pub(super) unsafe fn each<S: Simd>(s: S, n: usize, work: &impl Lanes) {
    let whole = n - n % S::LANES;
    // SAFETY: the caller's promise.
    unsafe {
        // Two calls: in the first one, the number of lanes is a constant.
        for i in (0..whole).step_by(S::LANES) {
            work.lanes(s, i, S::LANES);
        }
        if whole < n {
            work.lanes(s, whole, n - whole);
        }
    }
}

/// The first `lanes` lanes from memory, the others `rest`.
///
/// # Safety
/// There are so many floats, at any alignment.
#[inline(always)]
pub(super) unsafe fn load<S: Simd>(s: S, p: *const f32, lanes: usize, rest: f32) -> S::F32 {
    // SAFETY: the caller's promise; an array has MAX_LANES floats.
    unsafe {
        if lanes == S::LANES {
            return s.load(p);
        }
        let mut all = [rest; MAX_LANES];
        copy(p, all.as_mut_ptr(), lanes);
        s.load(all.as_ptr())
    }
}

/// The first `lanes` lanes to memory.
///
/// # Safety
/// There are so many floats, at any alignment.
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(s: S, p: *mut f32, lanes: usize, a: S::F32) {
    // SAFETY: as above.
    unsafe {
        if lanes == S::LANES {
            return s.store(p, a);
        }
        let mut all = [0.0; MAX_LANES];
        s.store(all.as_mut_ptr(), a);
        copy(all.as_ptr(), p, lanes);
    }
}

/// # Safety
/// There are `n` floats to read, and room for as many elsewhere.
#[inline(always)]
unsafe fn copy(from: *const f32, to: *mut f32, n: usize) {
    // SAFETY: the caller's promise. As bytes, which may lie at any alignment.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(from.cast(), 4 * n) };
}
