//! Making tiles of what is not tiled: rows are transposed (K) or paired (V) into the tile that the kernel reads, and
//! rows of V are padded to whole vectors. The values do not change, so neither do any bits of the result.

use std::marker::PhantomData;

use crate::simd::{Kernel, MAX_LANES, Simd};

use super::format::Format;
use super::layout::{Side, TILE};

/// Rows to a tile. Where a tile has fewer than 16 tokens, the rows beyond repeat one: nobody sees them.
pub(super) struct PackTile<'a, F> {
    side: Side,
    rows: &'a [*const u8; TILE],
    head_dim: usize,
    /// Elements of a row of the V tile.
    width: usize,
    tile: *mut u8,
    format: PhantomData<F>,
}

impl<'a, F: Format> PackTile<'a, F> {
    /// # Safety
    /// Each row has `head_dim` elements. `tile` has room for 16 rows, of K rounded up to whole steps, of V to `width`.
    pub(super) unsafe fn new(
        side: Side,
        rows: &'a [*const u8; TILE],
        head_dim: usize,
        width: usize,
        tile: *mut u8,
    ) -> Self {
        Self {
            side,
            rows,
            head_dim,
            width,
            tile,
            format: PhantomData,
        }
    }

    /// K: `[steps][16]` lanes of `F::LANE` bytes.
    #[inline(always)]
    unsafe fn keys<S: Simd>(&self, s: S) {
        let whole = self.head_dim / F::STEP;
        let lane = |step: usize, i: usize| self.tile.wrapping_add((step * TILE + i) * F::LANE);
        let mut step = 0;
        // SAFETY: steps stay inside the rows, and `lane` inside the tile.
        unsafe {
            while F::LANE == size_of::<f32>() && step + S::LANES <= whole {
                for first in (0..TILE).step_by(S::LANES) {
                    self.transpose(s, step, first, |j| lane(step + j, first).cast());
                }
                step += S::LANES;
            }
            for (i, row) in self.rows.iter().enumerate() {
                for step in step..whole {
                    copy_lane(row.add(step * F::LANE), lane(step, i), F::LANE);
                }
                if !self.head_dim.is_multiple_of(F::STEP) {
                    // The odd dimension's partner does not exist: zero, as in the query.
                    let last = lane(whole, i);
                    copy_lane(row.add(whole * F::LANE), last, F::LANE / 2);
                    last.add(F::LANE / 2).write_bytes(0, F::LANE / 2);
                }
            }
        }
    }

    /// `LANES` words of `LANES` rows from `first` on: word `step + j` of all of them goes to `to(j)`.
    #[inline(always)]
    unsafe fn transpose<S: Simd>(
        &self,
        s: S,
        step: usize,
        first: usize,
        to: impl Fn(usize) -> *mut f32,
    ) {
        let mut v = [s.splat(0.0); MAX_LANES];
        for (v, row) in v.iter_mut().zip(&self.rows[first..first + S::LANES]) {
            // SAFETY: the words are inside the rows.
            *v = unsafe { s.load(row.add(step * F::LANE).cast()) };
        }
        // Each round of zips of the two halves turns the index (row, word) by one bit.
        for _ in 0..S::LANES.ilog2() {
            let halves = v;
            for i in 0..S::LANES / 2 {
                (v[2 * i], v[2 * i + 1]) = s.zip(halves[i], halves[i + S::LANES / 2]);
            }
        }
        for (j, &v) in v[..S::LANES].iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { s.store(to(j), v) };
        }
    }

    /// V: `[16 / STEP][width][STEP]`.
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, s: S) {
        let size = F::LANE / F::STEP;
        for step in 0..TILE / F::STEP {
            // SAFETY: elements stay inside the rows and the tile.
            unsafe {
                let to = self.tile.add(step * self.width * F::LANE);
                if F::STEP == 1 {
                    to.copy_from_nonoverlapping(self.rows[step], self.head_dim * size);
                    continue;
                }
                let (a, b) = (self.rows[2 * step], self.rows[2 * step + 1]);
                let mut d = 0;
                while d + S::LANES <= self.head_dim {
                    let pairs = s.join(a.add(d * size).cast(), b.add(d * size).cast());
                    s.store_pairs(to.add(d * F::LANE).cast(), pairs);
                    d += S::LANES;
                }
                for d in d..self.head_dim {
                    copy_lane(a.add(d * size), to.add(d * F::LANE), size);
                    copy_lane(b.add(d * size), to.add(d * F::LANE + size), size);
                }
            }
        }
    }
}

impl<F: Format> Kernel for PackTile<'_, F> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the promise of `new`.
        unsafe {
            match self.side {
                Side::Key => self.keys(s),
                Side::Value => self.values(s),
            }
        }
    }
}

/// A V tile whose rows are `head_dim` wide to one whose rows are `width` wide.
///
/// # Safety
/// `from` is a V tile; `tile` has room for `TILE * width`, `width >= head_dim`.
pub(super) unsafe fn widen_value_tile<F: Format>(
    from: *const u8,
    head_dim: usize,
    width: usize,
    tile: *mut u8,
) {
    for step in 0..TILE / F::STEP {
        // SAFETY: inside both tiles.
        unsafe {
            tile.add(step * width * F::LANE)
                .copy_from_nonoverlapping(from.add(step * head_dim * F::LANE), head_dim * F::LANE);
        }
    }
}

/// Copies 2 or 4 bytes at any alignment.
#[inline(always)]
unsafe fn copy_lane(from: *const u8, to: *mut u8, size: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match size {
            4 => to
                .cast::<u32>()
                .write_unaligned(from.cast::<u32>().read_unaligned()),
            _ => to
                .cast::<u16>()
                .write_unaligned(from.cast::<u16>().read_unaligned()),
        }
    }
}
