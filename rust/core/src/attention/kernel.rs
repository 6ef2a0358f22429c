//! The micro-kernel: one tile of rows, one partition; scores, weights, values.
//!
//! 1. `scores`: per (row, token) one chain over head_dim, ascending, vectorized across tokens;
//! 2. `weights`: the row's maximum, `exp(score - maximum)`, and their sum in fixed lanes; over int8, their products with
//!    the values' scales, quantized;
//! 3. `values`: per (row, dimension) one chain over exactly the visible tokens, ascending, from +0.
//!
//! A matrix unit does the first and the last of them its own way (`matrix`).
//!
//! All are independent of the other rows, so a row's bits are too: `R` rows and so many vectors in flight only say how
//! many chains run at once. They are chosen so that all sums and operands stay in registers, and so many chains run that
//! the latency of a multiplication is hidden.

use std::marker::PhantomData;
use std::ops::Range;

use crate::simd::{Kernel, MATRIX_ROWS, MAX_LANES, Simd};

use super::Options;
use super::format::{Format, Matrix, Parts};
use super::layout::TILE;
use super::matrix;
use super::merge::Record;
use super::plan::{PARTITION, local, union};
use super::rows::{Row, RowTile};
use super::scores::scores;
use super::tiles::{TILES, Tiles};
use super::values::{tiles_at_once, values};
use super::weights::{maximum, quantize, weights};

/// Rows of the largest row tile.
pub(super) const MAX_ROWS: usize = matrix::ROWS;
/// Rows of the micro-kernels that exist, besides that of a matrix unit.
const KERNEL_ROWS: [usize; 7] = [1, 2, 3, 4, 6, 8, MANY_ROWS];

/// Up to so many rows, reading KV takes longer than multiplying it.
pub(super) const FEW_ROWS: usize = 4;

/// Rows of the largest micro-kernel that exists.
const MANY_ROWS: usize = 12;

/// Words from one row's scores to the next's: a tile more than there are, so that rows fall into different cache sets.
pub(super) const SCORES: usize = PARTITION + TILE;

/// Rows of the largest micro-kernel, or of a matrix unit's.
const fn most_rows<S: Simd, F: Format>() -> usize {
    // Two vectors in flight keep the multipliers busy; more rows need fewer loads. Parts take registers of their own.
    match (S::REGISTERS, Parts::<S, F>::COUNT) {
        _ if Matrix::<S, F>::USED => matrix::ROWS,
        (32.., _) => MANY_ROWS,
        (_, 1) => 6,
        _ => 4,
    }
}

/// Whether an item mostly has several tiles of so many rows: all but the first find the next partition prefetched, and a
/// loop of their own without that is worth its code.
pub(super) const fn repeats<S: Simd, F: Format>(rows: usize) -> bool {
    rows > FEW_ROWS && rows == most_rows::<S, F>()
}

/// How many of `left` rows the next tile of rows takes, and the rows of its micro-kernel.
pub(super) fn kernel_rows<S: Simd, F: Format>(left: usize) -> (usize, usize) {
    let n = left.div_ceil(left.div_ceil(most_rows::<S, F>()));
    if Matrix::<S, F>::USED {
        return (n, n.next_multiple_of(MATRIX_ROWS));
    }
    let fits = KERNEL_ROWS.into_iter().find(|&r| r >= n);
    (n, fits.unwrap_or(MANY_ROWS))
}

/// The micro-kernels that exist under an instruction set: rows times vectors of tokens in flight.
macro_rules! kernels {
    ($S:ty, $F:ty, $with:ident) => {
        if const { <$S>::REGISTERS >= 32 } {
            $with!(1 x 4, 2 x 4, 3 x 3, 4 x 2, 6 x 2, 8 x 2, 12 x 2)
        } else if const { Parts::<$S, $F>::COUNT == 1 } {
            $with!(1 x 4, 2 x 4, 3 x 3, 4 x 3, 6 x 2)
        } else {
            $with!(1 x 4, 2 x 3, 3 x 2, 4 x 2)
        }
    };
}

/// How many places packed tiles of K and V take in turn. One tile of few rows needs no more than it reads at a time, and
/// mostly finds them in the first-level cache. Others want them all; and a matrix unit, which waits long for what was
/// just written.
pub(super) fn places<S: Simd, F: Format>(row_tiles: &[RowTile], width: usize) -> [usize; 2] {
    match row_tiles {
        [one] if one.kernel_rows <= FEW_ROWS && const { !Matrix::<S, F>::USED } => {
            macro_rules! vectors {
                ($($rows:literal x $vectors:literal),*) => {
                    match one.kernel_rows {
                        $($rows => $vectors,)*
                        rows => unreachable!("no micro-kernel of {rows} rows"),
                    }
                };
            }
            let tokens: usize = S::LANES * kernels!(S, F, vectors);
            // Shorter vectors may begin and end inside a tile.
            let keys = tokens.div_ceil(TILE) + usize::from(S::LANES < TILE);
            [keys, tiles_at_once::<F>(one.kernel_rows, width)]
        }
        _ => [TILES; 2],
    }
}

/// A tile of rows and a partition.
pub(super) struct Partition<'a> {
    pub(super) options: &'a Options<'a>,
    /// The partition's number.
    pub(super) index: usize,
    /// The rows: as many as the kernel has, or fewer.
    pub(super) rows: &'a [Row],
    /// `[steps][parts][R]` words; of a matrix unit, for each 16 rows `[steps / 16][16][16]`, rounded up.
    pub(super) query: *const u32,
    pub(super) steps: usize,
    /// All that the rows see of the partition.
    pub(super) tiles: &'a Tiles<'a>,
    /// `[R][SCORES]` words for scores, then weights.
    pub(super) scores: *mut f32,
    /// `[R]` records for this partition's results.
    pub(super) parts: *mut f32,
    /// Of a matrix unit: [`matrix::spare_floats`].
    pub(super) spare: *mut f32,
    /// The first of the rows' states to fold them onto, if that is to be done here.
    pub(super) states: Option<Record>,
    pub(super) width: usize,
}

impl Partition<'_> {
    /// Runs the micro-kernel of so many rows, times token vectors in flight.
    ///
    /// # Safety
    /// The pointers are valid for what the fields say.
    pub(super) unsafe fn run<S: Simd, F: Format>(self, s: S, kernel_rows: usize) {
        macro_rules! pick {
            ($($rows:literal x $vectors:literal),*) => {
                match kernel_rows {
                    $($rows => s.vectorize(Tile::<F, $rows, $vectors>(self, PhantomData)),)*
                    _ => unreachable!("no micro-kernel of {kernel_rows} rows"),
                }
            };
        }
        if const { Matrix::<S, F>::USED } {
            s.vectorize(Tile::<F, { matrix::ROWS }, 2>(self, PhantomData));
        } else {
            kernels!(S, F, pick);
        }
    }
}

/// The micro-kernel for `R` rows and `V` vectors of tokens.
struct Tile<'a, F, const R: usize, const V: usize>(Partition<'a>, PhantomData<F>);

impl<F: Format, const R: usize, const V: usize> Kernel for Tile<'_, F, R, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self(p, _) = self;
        let sees: [Range<usize>; R] = std::array::from_fn(|r| {
            let row = p.rows.get(r);
            row.map_or(0..0, |row| local(&row.sees, p.index))
        });
        let seen = union(sees.iter());
        // SAFETY: `Partition` says what its pointers hold; `tiles` covers `seen`.
        unsafe {
            let record = |r| Record::at(p.parts, p.width, r);
            if seen.is_empty() {
                for r in 0..R {
                    record(r).set_statistics(f32::NEG_INFINITY, 0.0);
                }
                return;
            }
            if const { Matrix::<S, F>::USED } {
                matrix::scores(s, &p, &seen);
            } else {
                scores::<S, F, R, V>(s, &p, &seen);
            }
            // All maxima first, and all quanta before their use: none then waits for another row's.
            let mut maxima = [f32::NEG_INFINITY; R];
            let (mut per_one, mut quanta) = ([1.0; R], [1.0; R]);
            for (r, row) in p.rows.iter().take(R).enumerate() {
                let scores = p.scores.add(r * SCORES);
                if !sees[r].is_empty() {
                    maxima[r] = maximum::<S, F>(s, &p, row, scores, &sees[r]);
                }
            }
            for r in 0..p.rows.len().min(R) {
                let mut l = 0.0;
                if !sees[r].is_empty() {
                    let scores = p.scores.add(r * SCORES);
                    (l, per_one[r], quanta[r]) =
                        weights::<S, F>(s, p.tiles, scores, &sees[r], maxima[r]);
                }
                record(r).set_statistics(maxima[r], l);
            }
            if F::QUANTIZED {
                for r in 0..p.rows.len().min(R) {
                    if !sees[r].is_empty() {
                        quantize::<S, F>(s, p.scores.add(r * SCORES), &sees[r], per_one[r]);
                    }
                }
            }
            if const { Matrix::<S, F>::USED } {
                matrix::values(s, &p, &seen, &sees);
            } else {
                values::<S, F, R>(s, &p, &seen, &sees, &quanta);
            }
            if let Some(states) = p.states {
                for first in (0..p.rows.len()).step_by(MAX_LANES) {
                    let rows = (p.rows.len() - first).min(MAX_LANES);
                    Record::fold_rows(s, states.next(first), record(first), rows);
                }
            }
        }
    }
}
