//! Where an item's tiles come from: straight from a tiled cache, or packed into scratch from rows; and what to ask for
//! meanwhile, so that it is near when its turn comes.
//!
//! A thread works on one partition and prefetches the next one, where the tokens of a tile lie side by side. It does so in
//! the order of memory: the K and V of a block are neighbours in our own cache, and the longer the run, the better the
//! hardware's own prefetching. The last partition of an item prefetches the first of the item that the thread has claimed
//! next.

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
    /// The scales of quantized keys and values, by position in the partition.
    pub(super) key_scales: *const f32,
    pub(super) value_scales: *const f32,
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
    head: usize,
    blocks: &'a [u32],
    tile_bytes: usize,
    /// Whether the tokens of a tile lie side by side, tile after tile: always in a tiled cache, mostly in rows.
    contiguous: bool,
    format: PhantomData<F>,
}

impl<'a, F: Format> Source<'a, F> {
    pub(super) fn new(call: &'a Call<'a>, item: &'a Item, head: usize) -> Self {
        let spec = call.layer.spec();
        let unit = &call.schedule.units[item.units[0]];
        let row = (spec.head_dim * spec.dtype.size()) as isize;
        let side_by_side = |side| call.layer.token_stride(side) == row;
        Self {
            call,
            item,
            head,
            // All units of an item have the same blocks in its partitions.
            blocks: call.plan.blocks(&call.plan.sequences[unit.sequence]),
            tile_bytes: TILE * spec.head_dim * spec.dtype.size(),
            contiguous: spec.layout == KvLayout::Tiled
                || spec.block_size.is_multiple_of(TILE)
                    && [Side::Key, Side::Value].into_iter().all(side_by_side),
            format: PhantomData,
        }
    }

    /// The tiles of a partition that any row sees, packed where need be. `upcoming` is the item that comes after this
    /// partition, if it is the last one.
    pub(super) fn tiles<S: Simd>(
        &self,
        s: S,
        partition: usize,
        upcoming: Option<&Self>,
        buffers: &mut TileBuffers,
    ) -> Tiles {
        let spec = self.call.layer.spec();
        let (dim, width) = (spec.head_dim, padded(spec.head_dim));
        let (rows, range) = (spec.layout == KvLayout::Rows, self.range(partition));
        // Where V's vectors hold one token, rows that are whole vectors are a tile as they are.
        let packed = rows && !(self.contiguous && F::STEP == 1 && dim == width);
        let widened = packed || dim != width;
        let mut tiles = Tiles {
            stream: [std::ptr::null(); 2 * TILES],
            ahead: [std::ptr::null(); 2 * TILES],
            prefetched: false,
            first: range.start - partition * TILES,
            count: range.len(),
            value_row: F::LANE * if widened { width } else { dim },
            key_scales: std::ptr::null(),
            value_scales: std::ptr::null(),
        };
        // Whole steps of K, whole vectors of V.
        let bytes = |row: usize| TILE * row * spec.dtype.size();
        let key_dim = dim.next_multiple_of(Matrix::<S, F>::DEPTH);
        let (key_bytes, value_bytes) = (bytes(key_dim), bytes(width));
        let floats = |tile: usize| TILES * tile / size_of::<f32>();
        // Where K has zeros more than it has dimensions.
        let filled = bytes(dim.next_multiple_of(F::STEP));
        let lengthened = rows || key_bytes != self.tile_bytes;
        let keys: Option<*mut u8> =
            lengthened.then(|| buffers.keys.floats(floats(key_bytes)).cast());
        let values: Option<*mut u8> =
            widened.then(|| buffers.values.floats(floats(value_bytes)).cast());
        let mut ahead = [std::ptr::null(); 2 * TILES];
        self.ahead(s, partition, upcoming, &mut ahead[..2 * tiles.count]);
        // Packing takes its time: it asks for as much as it makes.
        let mut ask = |i: usize, to: *mut u8| {
            let ahead = std::mem::replace(&mut ahead[i], std::ptr::null());
            if ahead.is_null() { to } else { ahead }
        };
        for (i, tile) in range.clone().enumerate() {
            tiles.stream[i] = match keys {
                None => self.direct(Side::Key, tile),
                Some(keys) => {
                    let to = keys.wrapping_add(i * key_bytes);
                    if rows {
                        self.pack(s, Side::Key, tile, to, ask(i, to));
                    } else {
                        self.copy_key(tile, to);
                    }
                    // SAFETY: the buffer has room for a partition's tiles.
                    unsafe { to.add(filled).write_bytes(0, key_bytes - filled) };
                    to
                }
            };
        }
        for (i, tile) in range.enumerate() {
            let i = tiles.count + i;
            tiles.stream[i] = match values {
                None => self.direct(Side::Value, tile),
                Some(values) => {
                    let to = values.wrapping_add((i - tiles.count) * value_bytes);
                    if packed {
                        self.pack(s, Side::Value, tile, to, ask(i, to));
                    } else {
                        self.widen(tile, to);
                    }
                    to
                }
            };
        }
        if F::QUANTIZED {
            let scales = buffers.scales.floats(2 * PARTITION);
            (tiles.key_scales, tiles.value_scales) = (scales, scales.wrapping_add(PARTITION));
            self.copy_scales(partition, scales);
        }
        tiles.prefetched();
        for (i, ahead) in ahead.into_iter().enumerate().filter(|(_, a)| !a.is_null()) {
            tiles.ahead[i] = ahead;
            tiles.prefetched = false;
        }
        tiles
    }

    /// The tiles that come after a partition, as many as there is room for; asks for their scales.
    fn ahead<S: Simd>(
        &self,
        s: S,
        partition: usize,
        upcoming: Option<&Self>,
        ahead: &mut [*const u8],
    ) {
        if !self.contiguous {
            return;
        }
        let next = if partition + 1 < self.item.partitions.end {
            Some((self, partition + 1))
        } else {
            upcoming.map(|next| (next, next.item.partitions.start))
        };
        if let Some((source, partition)) = next {
            let mut ahead = ahead.iter_mut();
            source.in_memory_order(partition, |tile| {
                if let Some(ahead) = ahead.next() {
                    *ahead = tile;
                }
            });
            source.prefetch_scales(s, partition);
        }
    }

    /// Asks for the tiles of a partition that nobody ran ahead of.
    pub(super) fn prefetch<S: Simd>(&self, s: S, partition: usize) {
        if !self.contiguous {
            return;
        }
        self.in_memory_order(partition, |tile| {
            for line in (0..self.tile_bytes).step_by(64) {
                s.prefetch(tile.wrapping_add(line));
            }
        });
        self.prefetch_scales(s, partition);
    }

    /// The tiles of a partition that any row sees, block by block, K before V. Contiguous ones only.
    fn in_memory_order(&self, partition: usize, mut visit: impl FnMut(*const u8)) {
        let tiles_a_block = self.call.layer.spec().block_size / TILE;
        let range = self.range(partition);
        let mut tile = range.start;
        while tile < range.end {
            let end = ((tile / tiles_a_block + 1) * tiles_a_block).min(range.end);
            for side in [Side::Key, Side::Value] {
                (tile..end).for_each(|tile| visit(self.direct(side, tile)));
            }
            tile = end;
        }
    }

    /// Absolute tiles of a partition that any row sees.
    fn range(&self, partition: usize) -> Range<usize> {
        let sees = local(&self.item.sees, partition);
        let base = partition * TILES;
        base + sees.start / TILE..base + sees.end.div_ceil(TILE)
    }

    /// A contiguous tile where it lies in the cache.
    fn direct(&self, side: Side, tile: usize) -> *const u8 {
        let block_size = self.call.layer.spec().block_size;
        let (block, token) = (tile * TILE / block_size, tile * TILE % block_size);
        // SAFETY: the plan checked the table's entries, `attend` the heads; the tile is inside the block.
        unsafe {
            let block = self
                .call
                .layer
                .head(side, self.blocks[block] as usize, self.head);
            block.add(token / TILE * self.tile_bytes)
        }
    }

    /// Packs a tile of a rows cache; of its tokens, those that some row sees. Asks for what is `ahead`; where nobody ran
    /// ahead, also for the rows of the tile that comes some tiles later.
    fn pack<S: Simd>(&self, s: S, side: Side, tile: usize, to: *mut u8, ahead: *const u8) {
        let spec = self.call.layer.spec();
        if !self.contiguous {
            for row in self.rows(side, tile + PACK_AHEAD) {
                for line in (0..spec.head_dim * spec.dtype.size()).step_by(64) {
                    s.prefetch(row.wrapping_add(line));
                }
            }
        }
        let rows = self.rows(side, tile);
        // SAFETY: the rows are whole, and the buffers have room for a partition's tiles.
        s.vectorize(unsafe {
            PackTile::<F>::new(side, &rows, spec.head_dim, padded(spec.head_dim), to, ahead)
        });
    }

    /// The rows of a tile of a rows cache. Beyond the last token that is seen, they repeat its row.
    fn rows(&self, side: Side, tile: usize) -> [*const u8; TILE] {
        let last = self.item.sees.end - 1;
        if self.contiguous {
            let (first, row) = (self.direct(side, tile), self.tile_bytes / TILE);
            let seen = last.saturating_sub(tile * TILE);
            return std::array::from_fn(|i| first.wrapping_add(i.min(seen) * row));
        }
        let block_size = self.call.layer.spec().block_size;
        std::array::from_fn(|i| {
            let token = (tile * TILE + i).min(last);
            let block = self.blocks[token / block_size] as usize;
            // SAFETY: as in `direct`.
            unsafe {
                self.call
                    .layer
                    .row(side, block, self.head, token % block_size)
                    .cast_const()
            }
        })
    }

    /// Copies a K tile of a tiled cache.
    fn copy_key(&self, tile: usize, to: *mut u8) {
        // SAFETY: `to` has room for a tile.
        unsafe { to.copy_from_nonoverlapping(self.direct(Side::Key, tile), self.tile_bytes) };
    }

    /// Copies a V tile of a tiled cache to whole vectors.
    fn widen(&self, tile: usize, to: *mut u8) {
        let head_dim = self.call.layer.spec().head_dim;
        let from = self.direct(Side::Value, tile);
        // SAFETY: `from` is a whole tile, and the buffer has room for a partition's wider ones.
        unsafe { widen_value_tile::<F>(from, head_dim, padded(head_dim), to) };
    }

    /// Copies the scales of a partition, those of K to the first half of `to`, those of V to the second.
    fn copy_scales(&self, partition: usize, to: *mut f32) {
        self.scale_runs(partition, |side, from, token, n| {
            let half = if side == Side::Key { 0 } else { PARTITION };
            // SAFETY: the scales are a block's own; the tokens are in the partition, for which each half has room.
            unsafe {
                from.cast::<u8>().copy_to_nonoverlapping(
                    to.add(half + token - partition * PARTITION).cast(),
                    n * size_of::<f32>(),
                );
            }
        });
    }

    fn prefetch_scales<S: Simd>(&self, s: S, partition: usize) {
        if F::QUANTIZED {
            self.scale_runs(partition, |_, from, _, n| {
                for i in (0..n).step_by(16) {
                    s.prefetch(from.wrapping_add(i).cast());
                }
            });
        }
    }

    /// Runs of a partition's scales that lie side by side, of whole tiles up to the last token that any row sees: the
    /// side, where the first one is, whose token it is, how many there are.
    fn scale_runs(&self, partition: usize, mut visit: impl FnMut(Side, *const f32, usize, usize)) {
        let tiles = self.range(partition);
        let tokens = tiles.start * TILE..(tiles.end * TILE).min(self.item.sees.end);
        let block_size = self.call.layer.spec().block_size;
        let mut token = tokens.start;
        while token < tokens.end {
            let n = (block_size - token % block_size).min(tokens.end - token);
            let block = self.blocks[token / block_size] as usize;
            for side in [Side::Key, Side::Value] {
                // SAFETY: as in `direct`; a quantized layer has scales.
                let from = unsafe {
                    self.call
                        .layer
                        .scale(side, block, self.head, token % block_size)
                };
                visit(side, from, token, n);
            }
            token += n;
        }
    }
}
