//! Making tiles of what is not tiled: rows are transposed (K) or paired (V) into the tile that the kernel reads, and
//! rows of V are padded to whole vectors. The values do not change, so neither do any bits of the result.

use super::format::Format;
use super::layout::TILE;

/// K rows to a K tile, `[steps][16]` lanes of `F::LANE` bytes. Lanes without a row keep what they had.
///
/// # Safety
/// Each row has `head_dim` elements; `tile` has room for its steps.
pub(super) unsafe fn key_tile<F: Format>(rows: &[*const u8], head_dim: usize, tile: *mut u8) {
    let whole = head_dim / F::STEP;
    for (i, &row) in rows.iter().enumerate() {
        // SAFETY: `i < TILE`, and steps stay inside the row and the tile.
        unsafe {
            for step in 0..whole {
                copy_lane(
                    row.add(step * F::LANE),
                    tile.add((step * TILE + i) * F::LANE),
                    F::LANE,
                );
            }
            if !head_dim.is_multiple_of(F::STEP) {
                // The odd dimension's partner does not exist: zero, as in the query.
                let last = tile.add((whole * TILE + i) * F::LANE);
                copy_lane(row.add(whole * F::LANE), last, F::LANE / 2);
                last.add(F::LANE / 2).write_bytes(0, F::LANE / 2);
            }
        }
    }
}

/// V rows to a V tile, `[16 / STEP][width][STEP]`. Slots without a row keep what they had.
///
/// # Safety
/// Each row has `head_dim` elements; `tile` has room for `TILE * width`, `width >= head_dim`.
pub(super) unsafe fn value_tile<F: Format>(
    rows: &[*const u8],
    head_dim: usize,
    width: usize,
    tile: *mut u8,
) {
    let size = F::LANE / F::STEP;
    for (i, &row) in rows.iter().enumerate() {
        // SAFETY: `i < TILE`, and elements stay inside the row and the tile.
        unsafe {
            let to = tile.add((i / F::STEP * width * F::STEP + i % F::STEP) * size);
            if F::STEP == 1 {
                to.copy_from_nonoverlapping(row, head_dim * size);
            } else {
                for d in 0..head_dim {
                    copy_lane(row.add(d * size), to.add(d * F::LANE), size);
                }
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
