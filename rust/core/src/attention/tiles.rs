//! Where an item's tiles come from: straight from a tiled cache, or packed into scratch from rows; and what to ask for
//! meanwhile, so that it is near when its turn comes.
//!
//! A thread works on one partition and prefetches the next one, where the tokens of a tile lie side by side; the last
//! partition of an item prefetches the first of the item that the thread has claimed next. It does so in the order of
//! memory, for all the KV heads that it has: in our own cache the K and V of a block's heads are neighbours, and the
//! longer the run, the better the hardware's own prefetching.

use std::marker::PhantomData;
use std::ops::Range;

use crate::simd::Simd;

use super::call::Call;
use super::format::{Format, Matrix};
use super::layout::{KvLayout, Side, TILE};
use super::pack::{PackTile, widen_value_tile};
use super::plan::{Item, PARTITION, local};
use super::scratch::{Buffer, padded};

/// Tiles in a partition.
pub(super) const TILES: usize = PARTITION / TILE;

/// How far ahead rows are asked for that are packed into tiles first, in tiles.
const PACK_AHEAD: usize = 2;

/// The tiles of one partition: K, then V, each in order of positions.
pub(super) struct Tiles {
    stream: [*const u8; 2 * TILES],
    /// What to prefetch while each is read.
    ahead: [*const u8; 2 * TILES],
    prefetched: bool,
    /// The tile of the partition that K begins with, and how many there are.
    pub(super) first: usize,
    pub(super) count: usize,
    /// Bytes from one step of V to the next.
    pub(super) value_row: usize,
    /// The scales of a quantized cache, by tile, as `stream`.
    scales: [*const f32; 2 * TILES],
}

impl Tiles {
    /// The `i`-th K tile.
    #[inline(always)]
    pub(super) fn key(&self, i: usize) -> *const u8 {
        self.stream[i]
    }

    /// The tile to prefetch while the `i`-th K tile is read.
    #[inline(always)]
    pub(super) fn ahead_of_key(&self, i: usize) -> *const u8 {
        self.ahead[i]
    }

    /// The `i`-th V tile.
    #[inline(always)]
    pub(super) fn value(&self, i: usize) -> *const u8 {
        self.stream[self.count + i]
    }

    /// The tile to prefetch while the `i`-th V tile is read.
    #[inline(always)]
    pub(super) fn ahead_of_value(&self, i: usize) -> *const u8 {
        self.ahead[self.count + i]
    }

    /// The scales of keys from a token of the partition on, up to the end of its tile. Quantized caches only.
    #[inline(always)]
    pub(super) fn key_scales(&self, token: usize) -> *const f32 {
        self.scales[token / TILE - self.first].wrapping_add(token % TILE)
    }

    /// The same of values.
    #[inline(always)]
    pub(super) fn value_scales(&self, token: usize) -> *const f32 {
        self.scales[self.count + token / TILE - self.first].wrapping_add(token % TILE)
    }

    /// What is ahead is on its way: from now on, what is asked for is near.
    pub(super) fn prefetched(&mut self) {
        self.ahead = self.stream;
        self.prefetched = true;
    }

    pub(super) fn is_prefetched(&self) -> bool {
        self.prefetched
    }
}

/// Scratch memory for the tiles of a partition.
#[derive(Default)]
pub(super) struct TileBuffers {
    keys: Buffer,
    values: Buffer,
    scales: Buffer,
}

/// The tiles of one item.
pub(super) struct Source<'a, F: Format> {
    call: &'a Call<'a>,
    item: &'a Item,
    blocks: &'a [u32],
    tile_bytes: usize,
    /// Whether the tokens of a tile lie side by side, tile after tile: always in a tiled cache, mostly in rows.
    contiguous: bool,
    format: PhantomData<F>,
}

impl<'a, F: Format> Source<'a, F> {
    pub(super) fn new(call: &'a Call<'a>, item: &'a Item) -> Self {
        let spec = call.layer.spec();
        let unit = &call.schedule.units[item.units[0]];
        let row = (spec.head_dim * spec.dtype.size()) as isize;
        let side_by_side = |side| call.layer.token_stride(side) == row;
        Self {
            call,
            item,
            // All units of an item have the same blocks in its partitions.
            blocks: call.plan.blocks(&call.plan.sequences[unit.sequence]),
            tile_bytes: TILE * spec.head_dim * spec.dtype.size(),
            contiguous: spec.layout == KvLayout::Tiled
                || spec.block_size.is_multiple_of(TILE)
                    && [Side::Key, Side::Value].into_iter().all(side_by_side),
            format: PhantomData,
        }
    }

    /// How many tiles of a partition any row sees.
    pub(super) fn count(&self, partition: usize) -> usize {
        self.range(partition).len()
    }

    /// The tiles of a partition and head that any row sees, packed where need be, while those of `ahead` are asked for.
    pub(super) fn tiles<S: Simd>(
        &self,
        s: S,
        partition: usize,
        head: usize,
        ahead: &[*const u8],
        buffers: &mut TileBuffers,
    ) -> Tiles {
        let spec = self.call.layer.spec();
        let (dim, width) = (spec.head_dim, padded(spec.head_dim));
        let (rows, range) = (spec.layout == KvLayout::Rows, self.range(partition));
        // Where V's vectors hold one token, rows that are whole vectors are a tile as they are.
        let packed = rows && !(self.contiguous && F::STEP == 1 && dim == width);
        let widened = packed || dim != width;
        let count = range.len();
        let mut tiles = Tiles {
            stream: [std::ptr::null(); 2 * TILES],
            ahead: [std::ptr::null(); 2 * TILES],
            prefetched: false,
            first: range.start - partition * TILES,
            count,
            value_row: F::LANE * if widened { width } else { dim },
            scales: [std::ptr::null(); 2 * TILES],
        };
        if spec.block_size.is_multiple_of(TILE) {
            self.locate(partition, head, &mut tiles);
        } else if F::QUANTIZED {
            let scales = buffers.scales.floats(2 * PARTITION);
            self.copy_scales(partition, head, scales);
            for (i, to) in tiles.scales[..2 * count].iter_mut().enumerate() {
                *to = scales.wrapping_add(i * TILE);
            }
        }
        // Whole steps of K, whole vectors of V.
        let bytes = |row: usize| TILE * row * spec.dtype.size();
        let key_dim = dim.next_multiple_of(Matrix::<S, F>::DEPTH);
        let (key_bytes, value_bytes) = (bytes(key_dim), bytes(width));
        let floats = |tile: usize| TILES * tile / size_of::<f32>();
        // Where K has zeros more than it has dimensions.
        let filled = bytes(dim.next_multiple_of(F::STEP));
        // Packing takes its time: it asks for as much as it makes.
        let mut asked = 0;
        if rows || key_bytes != self.tile_bytes {
            let keys: *mut u8 = buffers.keys.floats(floats(key_bytes)).cast();
            for (i, tile) in range.clone().enumerate() {
                let to = keys.wrapping_add(i * key_bytes);
                let from = std::mem::replace(&mut tiles.stream[i], to);
                if rows {
                    let ask = ahead.get(asked).copied().unwrap_or(to);
                    let next = tiles.stream[i + 1];
                    self.pack(s, Side::Key, head, tile, from, next, to, ask);
                    asked += 1;
                } else {
                    // SAFETY: the buffer has room for a partition's tiles.
                    unsafe { to.copy_from_nonoverlapping(from, self.tile_bytes) };
                }
                // SAFETY: as above.
                unsafe { to.add(filled).write_bytes(0, key_bytes - filled) };
            }
        }
        if widened {
            let values: *mut u8 = buffers.values.floats(floats(value_bytes)).cast();
            for (i, tile) in range.enumerate() {
                let to = values.wrapping_add(i * value_bytes);
                let from = std::mem::replace(&mut tiles.stream[count + i], to);
                if packed {
                    let ask = ahead.get(asked).copied().unwrap_or(to);
                    let next = tiles.stream[(count + i + 1).min(2 * count - 1)];
                    self.pack(s, Side::Value, head, tile, from, next, to, ask);
                    asked += 1;
                } else {
                    // SAFETY: `from` is a whole tile, and the buffer has room for a partition's wider ones.
                    unsafe { widen_value_tile::<F>(from, dim, width, to) };
                }
            }
        }
        tiles.prefetched();
        // What was asked for while tiles were packed is left out.
        let slots = tiles.ahead[..2 * count].iter_mut();
        for (slot, &ahead) in slots.zip(ahead).skip(asked) {
            *slot = ahead;
            tiles.prefetched = false;
        }
        tiles
    }

    /// Where the scales of a partition's tiles are, and in a contiguous cache the tiles. Blocks are whole tiles.
    fn locate(&self, partition: usize, head: usize, tiles: &mut Tiles) {
        let layer = &self.call.layer;
        let mut i = 0;
        self.runs(partition, |block, run| {
            for (side, to) in [(Side::Key, i), (Side::Value, tiles.count + i)] {
                // SAFETY: the plan checked the table's entries, `attend` the heads; the tiles are inside the block, as
                // their scales are, which a quantized layer has.
                unsafe {
                    let base = layer.head(side, block, head);
                    for (tile, to) in run.clone().zip(to..) {
                        if self.contiguous {
                            tiles.stream[to] = base.add(tile * self.tile_bytes);
                        }
                        if F::QUANTIZED {
                            tiles.scales[to] = layer.scale(side, block, head, tile * TILE);
                        }
                    }
                }
            }
            i += run.len();
        });
    }

    /// Lists the tiles of a partition that any row sees, of some heads, in the order of memory: block by block, head by
    /// head, K before V. Only where they are contiguous; asks for their scales at once.
    pub(super) fn list<S: Simd>(
        &self,
        s: S,
        partition: usize,
        heads: Range<usize>,
        list: &mut Vec<*const u8>,
    ) {
        if !self.contiguous {
            return;
        }
        let layer = &self.call.layer;
        self.runs(partition, |block, run| {
            for (head, side) in heads
                .clone()
                .flat_map(|h| [(h, Side::Key), (h, Side::Value)])
            {
                // SAFETY: as in `locate`.
                unsafe {
                    let base = layer.head(side, block, head);
                    for tile in run.clone() {
                        list.push(base.add(tile * self.tile_bytes));
                        if F::QUANTIZED {
                            s.prefetch(layer.scale(side, block, head, tile * TILE).cast());
                        }
                    }
                }
            }
        });
    }

    /// Asks for listed tiles, wholly.
    pub(super) fn prefetch<S: Simd>(&self, s: S, list: &[*const u8]) {
        for tile in list {
            s.prefetch_run(*tile, self.tile_bytes);
        }
    }

    /// The blocks of a partition that hold tiles which any row sees, and those tiles, counted from the block's first.
    /// Only where blocks are whole tiles.
    fn runs(&self, partition: usize, mut visit: impl FnMut(usize, Range<usize>)) {
        let tiles_a_block = self.call.layer.spec().block_size / TILE;
        let range = self.range(partition);
        let (mut block, mut first) = (range.start / tiles_a_block, range.start % tiles_a_block);
        let mut left = range.len();
        while left > 0 {
            let n = left.min(tiles_a_block - first);
            visit(self.blocks[block] as usize, first..first + n);
            (block, first, left) = (block + 1, 0, left - n);
        }
    }

    /// Absolute tiles of a partition that any row sees.
    fn range(&self, partition: usize) -> Range<usize> {
        let sees = local(&self.item.sees, partition);
        let base = partition * TILES;
        base + sees.start / TILE..base + sees.end.div_ceil(TILE)
    }

    /// Packs a tile of a rows cache; of its tokens, those that some row sees. Asks for what is `ahead`; where nobody ran
    /// ahead, also for the rows of the tile that comes some tiles later. `from` is where a contiguous one begins, `next` where the one does that is
    /// packed after it.
    #[allow(clippy::too_many_arguments)] // one caller
    fn pack<S: Simd>(
        &self,
        s: S,
        side: Side,
        head: usize,
        tile: usize,
        from: *const u8,
        next: *const u8,
        to: *mut u8,
        ahead: *const u8,
    ) {
        let spec = self.call.layer.spec();
        if !self.contiguous {
            for row in self.rows(side, head, tile + PACK_AHEAD, from) {
                s.prefetch_run(row, spec.head_dim * spec.dtype.size());
            }
        }
        let rows = self.rows(side, head, tile, from);
        let near = if self.contiguous {
            next.addr().wrapping_sub(from.addr()) as isize
        } else {
            0
        };
        // SAFETY: the rows are whole, and the buffers have room for a partition's tiles.
        s.vectorize(unsafe {
            PackTile::<F>::new(
                side,
                &rows,
                spec.head_dim,
                padded(spec.head_dim),
                to,
                ahead,
                near,
            )
        });
    }

    /// The rows of a tile of a rows cache. Beyond the last token that is seen, they repeat its row.
    fn rows(&self, side: Side, head: usize, tile: usize, from: *const u8) -> [*const u8; TILE] {
        let last = self.item.sees.end - 1;
        if self.contiguous {
            let (row, seen) = (self.tile_bytes / TILE, last.saturating_sub(tile * TILE));
            return std::array::from_fn(|i| from.wrapping_add(i.min(seen) * row));
        }
        let block_size = self.call.layer.spec().block_size;
        std::array::from_fn(|i| {
            let token = (tile * TILE + i).min(last);
            let block = self.blocks[token / block_size] as usize;
            // SAFETY: as in `locate`.
            unsafe {
                self.call
                    .layer
                    .row(side, block, head, token % block_size)
                    .cast_const()
            }
        })
    }

    /// Copies the scales of a partition's tiles, those of K, then those of V; up to the last token that any row sees.
    fn copy_scales(&self, partition: usize, head: usize, to: *mut f32) {
        let (layer, tiles) = (&self.call.layer, self.range(partition));
        let block_size = layer.spec().block_size;
        let first = tiles.start * TILE;
        let (mut token, end) = (first, (tiles.end * TILE).min(self.item.sees.end));
        while token < end {
            let (block, offset) = (token / block_size, token % block_size);
            let n = (block_size - offset).min(end - token);
            let sides = [
                (Side::Key, to),
                (Side::Value, to.wrapping_add(tiles.len() * TILE)),
            ];
            for (side, to) in sides {
                // SAFETY: as in `locate`; those of a block are contiguous, at any alignment, and the buffer has room for
                // those of a partition.
                unsafe {
                    let scales = layer.scale(side, self.blocks[block] as usize, head, offset);
                    let to = to.add(token - first).cast::<u8>();
                    to.copy_from_nonoverlapping(scales.cast(), n * size_of::<f32>());
                }
            }
            token += n;
        }
    }
}
