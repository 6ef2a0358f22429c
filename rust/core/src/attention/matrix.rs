//! Scores and values on a matrix unit: sixteen rows at a time, tile by tile of sixteen tokens. A row tile has up to twice
//! as many rows, for which K and V come from the second-level cache once.
//!
//! A product takes whole tiles, so the tokens that a row does not see get weight 0 — which helps where they are finite
//! only. Tiles with tokens that no row of the row tile sees are copied, and those cleared. Where a token that some rows see
//! and others do not is not finite, each row gets tiles of its own: slow, and for bad inputs alone.
//!
//! A zero weight can still turn the sign of a zero sum. It ends there: `Record::fold` adds onto +0.

use std::ops::Range;

use crate::simd::{Depth, KeyTiles, MATRIX_ROWS, Simd, ValueTiles};

use super::format::{Bf16, Format};
use super::kernel::{FEW_ROWS, Partition, SCORES};
use super::layout::TILE;
use super::merge::Record;
use super::plan::{PARTITION, intersection};
use super::tiles::{TILES, touched};

/// Rows of the largest row tile.
pub(super) const ROWS: usize = 2 * MATRIX_ROWS;
/// Vectors of columns whose sums the unit holds at once.
const COLUMNS: usize = 4;
/// Steps of a tile of V.
const STEPS: usize = TILE / Bf16::STEP;
/// Bytes of a step that sixteen lanes take.
const LINE: usize = MATRIX_ROWS * Bf16::LANE;

/// Words of a row's packed query: whole lines of sixteen.
pub(super) fn query_words(head_dim: usize) -> usize {
    head_dim.div_ceil(2 * MATRIX_ROWS) * MATRIX_ROWS
}

/// Floats of [`Partition::spare`]: a record for each row, and room for a partition of V.
pub(super) fn spare_floats(width: usize) -> usize {
    TILES * TILE * width / 2 + ROWS * Record::floats(width)
}

/// Scores of all tiles that touch `seen`, an even count of them; hidden ones come out as anything.
///
/// # Safety
/// `Partition` says what its pointers hold; the tiles cover `seen`.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd>(s: S, p: &Partition<'_>, seen: &Range<usize>) {
    let tiles = p.tiles;
    let depth = (p.steps * Bf16::STEP).next_multiple_of(MATRIX_ROWS);
    let depth = Depth {
        whole: depth / (2 * MATRIX_ROWS),
        half: !depth.is_multiple_of(2 * MATRIX_ROWS),
    };
    let all = touched(seen);
    // All at once, V too: the unit waits long for what was just written.
    tiles.ready_keys::<S, Bf16>(s, tiles.touched(seen));
    tiles.ready_values::<S, Bf16>(s, tiles.touched(seen));
    for x in all.clone().step_by(2) {
        // The last tile may come twice: there is room for that.
        let pair = [x, (x + 1).min(all.end - 1)].map(|x| x - tiles.first);
        let mut keys = KeyTiles {
            tiles: pair.map(|i| tiles.key(i)),
            near: pair.map(|i| tiles.key((i + 2).min(tiles.count - 1))),
            ahead: if prefetch(p) {
                pair.map(|i| tiles.ahead_of_key(i))
            } else {
                [std::ptr::null(); 2]
            },
        };
        let words = query_words(p.steps * Bf16::STEP);
        for group in (0..p.rows.len()).step_by(MATRIX_ROWS) {
            // SAFETY: the caller's promise.
            unsafe {
                let query = p.query.add(group * words);
                let to = p.scores.add(group * SCORES + x * TILE);
                s.matrix_scores(query, &keys, depth, to, SCORES * size_of::<f32>());
            }
            // The others find all that near.
            keys.ahead = [std::ptr::null(); 2];
        }
    }
}

/// Tiles that need not be asked for.
const NOTHING: &[*const u8; TILES] = &[std::ptr::null(); TILES];

/// Whether to prefetch: the next partition, or, for few rows, what is near.
fn prefetch(p: &Partition<'_>) -> bool {
    p.rows.len() <= FEW_ROWS || !p.tiles.is_prefetched()
}

/// Weighted sums of values, into the parts' outputs. [`scores`] has been there: the tiles are ready.
///
/// # Safety
/// `Partition` says what its pointers hold; the tiles cover `seen`, the union of what the rows see.
#[inline(always)]
pub(super) unsafe fn values<S: Simd, const R: usize>(
    s: S,
    p: &Partition<'_>,
    seen: &Range<usize>,
    sees: &[Range<usize>; R],
) {
    for (r, row) in sees.iter().enumerate().take(p.rows.len()) {
        // SAFETY: words inside the row.
        unsafe { clear_hidden(p, r, row, seen) };
    }
    // SAFETY: the caller's promise; the spare memory is as large as it should be.
    unsafe {
        let whole = Record::at(p.parts, p.width, 0);
        if multiply(s, p, seen, &intersection(sees, PARTITION), whole) {
            return;
        }
        let spare = Record::at(p.spare, p.width, 0);
        for (r, row) in sees.iter().enumerate().filter(|(_, row)| !row.is_empty()) {
            multiply(s, p, row, row, spare);
            let (own, to) = (spare.next(r).output(), whole.next(r).output());
            to.copy_from_nonoverlapping(own, p.width);
        }
    }
}

/// Weights of the tiles that a row does not see at all: zero.
unsafe fn clear_hidden(p: &Partition<'_>, r: usize, row: &Range<usize>, seen: &Range<usize>) {
    let all = touched(seen);
    let own = if row.is_empty() {
        all.start..all.start
    } else {
        touched(row)
    };
    // SAFETY: the caller's promise.
    let clear = |tiles: Range<usize>| unsafe {
        let words = p.scores.cast::<u32>().add(r * SCORES + tiles.start * STEPS);
        words.write_bytes(0, tiles.len() * STEPS);
    };
    clear(all.start..own.start);
    clear(own.end..all.end);
}

/// Weighted sums over the tiles that touch `seen`, for all rows, to records from `to` on. `common` is what all rows see.
/// False if a value that some see, and others do not, is not finite: the sums are then wrong.
#[inline(always)]
unsafe fn multiply<S: Simd>(
    s: S,
    p: &Partition<'_>,
    seen: &Range<usize>,
    common: &Range<usize>,
    to: Record,
) -> bool {
    let row = p.tiles.value_row;
    let Range { start: first, end } = touched(seen);
    let n = end - first;
    let mut tiles = [std::ptr::null::<u8>(); TILES];
    // SAFETY: the caller's promise.
    unsafe {
        let mut mended = p.spare.add(ROWS * Record::floats(p.width)).cast::<u8>();
        for (i, to) in tiles[..n].iter_mut().enumerate() {
            let tokens = (first + i) * TILE..(first + i + 1) * TILE;
            *to = p.tiles.value(first + i - p.tiles.first);
            if common.start > tokens.start || tokens.end > common.end {
                mend(*to, row, &tokens, seen, mended);
                if common != seen && !is_finite(s, mended, row) {
                    return false;
                }
                *to = mended;
                mended = mended.add(STEPS * row);
            }
        }
        let vectors = p.width / MATRIX_ROWS;
        let chunks = vectors.div_ceil(COLUMNS);
        let (mut c, mut asked) = (0, 0);
        for i in 0..chunks {
            let width = (vectors - c).div_ceil(chunks - i);
            let mut ahead = [std::ptr::null::<u8>(); TILES];
            if prefetch(p) {
                // In the order of memory, so much for each tile.
                for to in &mut ahead[..n] {
                    let (tile, offset) = (asked / (STEPS * row), asked % (STEPS * row));
                    *to = p.tiles.ahead_of_value(tile).wrapping_add(offset);
                    asked += STEPS * LINE * width;
                }
            }
            let mut columns = [tiles[n - 1].wrapping_add(c * LINE); TILES + 1];
            for (to, tile) in columns[..n].iter_mut().zip(&tiles) {
                *to = tile.wrapping_add(c * LINE);
            }
            let mut values = ValueTiles {
                tiles: &columns[..=n],
                ahead: &ahead[..n],
                row,
                columns: width,
            };
            for group in (0..p.rows.len()).step_by(MATRIX_ROWS) {
                let weights = p.scores.cast::<u32>().add(group * SCORES + first * STEPS);
                let out = to.next(group).output().add(c * MATRIX_ROWS);
                let strides = [SCORES, Record::floats(p.width)].map(|n| n * size_of::<f32>());
                s.matrix_values(weights, strides[0], &values, out, strides[1]);
                // The others find all that near.
                values.ahead = &NOTHING[..n];
            }
            c += width;
        }
    }
    true
}

/// Copies a tile and clears the tokens outside `seen`.
unsafe fn mend(
    tile: *const u8,
    row: usize,
    tokens: &Range<usize>,
    seen: &Range<usize>,
    to: *mut u8,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for step in 0..STEPS {
            let (from, to) = (tile.add(step * row), to.add(step * row));
            let token = tokens.start + step * Bf16::STEP;
            match [seen.contains(&token), seen.contains(&(token + 1))] {
                [false, false] => to.write_bytes(0, row),
                [head, tail] => {
                    to.copy_from_nonoverlapping(from, row);
                    if !(head && tail) {
                        let hidden = to.cast::<u16>().add(usize::from(head));
                        for d in 0..row / Bf16::LANE {
                            hidden.add(2 * d).write(0);
                        }
                    }
                }
            }
        }
    }
}

/// Whether a tile has neither NaN nor infinity.
#[inline(always)]
unsafe fn is_finite<S: Simd>(s: S, tile: *const u8, row: usize) -> bool {
    let mut bad = s.splat(0.0);
    for at in (0..STEPS * row).step_by(LINE) {
        // SAFETY: the caller's promise.
        unsafe { bad = s.dot_bf16(s.load_bf16(tile.add(at), 0), s.splat_bf16(0), bad) };
    }
    !s.sum(bad).is_nan()
}
