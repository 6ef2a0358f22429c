//! Making tiles of what is not tiled: rows are transposed (K) or paired (V) into the tile that the kernel reads, and
//! rows of V are padded to whole vectors. The values do not change, so neither do any bits of the result.
#![allow(clippy::needless_range_loop)] // indices name vectors and rows at once

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
    /// As much memory to prefetch meanwhile.
    ahead: *const u8,
    /// How many bytes after each row a row begins that is packed next, to be brought near meanwhile.
    near: isize,
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
        ahead: *const u8,
        near: isize,
    ) -> Self {
        Self {
            side,
            rows,
            head_dim,
            width,
            tile,
            ahead,
            near,
            format: PhantomData,
        }
    }

    /// K: `[steps][16]` lanes of `F::LANE` bytes.
    #[inline(always)]
    unsafe fn keys<S: Simd>(&self, s: S) {
        let (size, steps) = (F::DTYPE.size(), self.head_dim / F::STEP);
        let offset = |step: usize, i: usize| (step * TILE + i) * F::LANE;
        let lane = |step: usize, i: usize| self.tile.wrapping_add(offset(step, i));
        // Words of 32 bits are transposed: one step, or two.
        let per_word = size_of::<f32>() / F::LANE;
        let mut step = 0;
        // SAFETY: steps stay inside the rows, and `lane` inside the tile.
        unsafe {
            while step + S::LANES * per_word <= steps {
                for first in (0..TILE).step_by(S::LANES) {
                    let words = self.transpose(s, step, first);
                    for j in 0..S::LANES {
                        let at = step + j * per_word;
                        let to = lane(at, first);
                        s.prefetch(self.ahead.wrapping_add(offset(at, first)));
                        if per_word == 1 {
                            s.store(to.cast(), words[j]);
                        } else {
                            s.store_halves(to.cast(), lane(at + 1, first).cast(), words[j]);
                        }
                    }
                }
                step += S::LANES * per_word;
            }
            for (i, row) in self.rows.iter().enumerate() {
                for step in step..steps {
                    copy(row.add(step * F::LANE), lane(step, i), F::LANE);
                }
                let rest = (self.head_dim - steps * F::STEP) * size;
                if rest > 0 {
                    // Dimensions that do not exist: zero, as in the query.
                    let last = lane(steps, i);
                    last.write_bytes(0, F::LANE);
                    copy(row.add(steps * F::LANE), last, rest);
                }
            }
        }
    }

    /// `LANES` words of `LANES` rows from `first` on: vector `j` has word `j` after `step` of all of them.
    #[inline(always)]
    unsafe fn transpose<S: Simd>(&self, s: S, step: usize, first: usize) -> [S::F32; MAX_LANES] {
        let mut v = [s.splat(0.0); MAX_LANES];
        for i in 0..S::LANES {
            let from = self.rows[first + i].wrapping_add(step * F::LANE);
            // SAFETY: the words are inside the rows.
            v[i] = unsafe { s.load(from.cast()) };
            s.prefetch_near(from.wrapping_offset(self.near));
        }
        // Each round of zips of the two halves turns the index (row, word) by one bit.
        for _ in 0..S::LANES.ilog2() {
            let halves = v;
            for i in 0..S::LANES / 2 {
                (v[2 * i], v[2 * i + 1]) = s.zip(halves[i], halves[i + S::LANES / 2]);
            }
        }
        v
    }

    /// V: `[16 / STEP][width][STEP]`.
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, s: S) {
        let size = F::DTYPE.size();
        for step in 0..TILE / F::STEP {
            let rows = &self.rows[step * F::STEP..][..F::STEP];
            // SAFETY: elements stay inside the rows and the tile.
            unsafe {
                let to = self.tile.add(step * self.width * F::LANE);
                let mut d = 0;
                while F::STEP > 1 && d + S::LANES <= self.head_dim {
                    let at = |i: usize| rows[i].add(d * size);
                    let to = to.add(d * F::LANE);
                    let ahead = (step * self.head_dim + d) * F::LANE;
                    s.prefetch(self.ahead.wrapping_add(ahead));
                    for i in 0..F::STEP {
                        s.prefetch_near(at(i).wrapping_offset(self.near));
                    }
                    match F::STEP {
                        2 => s.interleave_2([0, 1].map(|i| at(i).cast()), to.cast()),
                        _ => s.interleave_4([0, 1, 2, 3].map(at), to),
                    }
                    d += S::LANES;
                }
                if F::STEP == 1 {
                    to.copy_from_nonoverlapping(rows[0], self.head_dim * size);
                    for line in (0..self.head_dim * size).step_by(64) {
                        let ahead = step * self.head_dim * size + line;
                        s.prefetch(self.ahead.wrapping_add(ahead));
                    }
                    continue;
                }
                for d in d..self.head_dim {
                    for (i, row) in rows.iter().enumerate() {
                        copy(row.add(d * size), to.add(d * F::LANE + i * size), size);
                    }
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

/// Copies a few bytes.
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, size: usize) {
    // SAFETY: the caller's promise.
    unsafe { to.copy_from_nonoverlapping(from, size) };
}
