//! Where an item's tiles come from: straight from a tiled cache, or packed into scratch from rows; and what to ask for
//! meanwhile, so that it is near when its turn comes.
//!
//! A thread works on one partition and prefetches the next one, where the tokens of a tile lie side by side; the last
//! partition of an item prefetches the first of the item that the thread has claimed next. It does so in the order of
//! memory, for all the KV heads that it has: in our own cache the K and V of a block's heads are neighbours, and the
//! longer the run, the better the hardware's own prefetching.
//!
//! A tile that must be packed is packed when the kernel comes to it, and takes one of few places in turn, where that
//! keeps it in the first-level cache (see `kernel::places`).

use std::cell::Cell;
use std::ops::Range;

use crate::buffer::Buffer;
use crate::simd::Simd;

use super::call::Call;
use super::format::{Format, Matrix};
use super::layout::{KvDtype, KvLayout, Side, TILE};
use super::pack::{PackTile, widen_value_tile};
use super::plan::{Item, PARTITION, local};
use super::scratch::padded;

/// Tiles in a partition.
pub(super) const TILES: usize = PARTITION / TILE;

/// How far ahead rows are asked for that do not lie side by side, in tiles.
const PACK_AHEAD: usize = 2;

/// The tiles of one partition, of one KV head: K, then V, each in order of positions.
pub(super) struct Tiles<'a> {
    source: &'a Source<'a>,
    head: usize,
    /// Where the kernel reads each.
    stream: [*const u8; 2 * TILES],
    /// Where each begins in a contiguous cache, else null.
    origin: [*const u8; 2 * TILES],
    /// What to prefetch while each is read, or packed.
    ahead: [Cell<*const u8>; 2 * TILES],
    prefetched: bool,
    /// Those that are still to be packed, or copied: a bit each.
    missing: Cell<u32>,
    partition: usize,
    /// The tile of the partition that K begins with, and how many there are.
    pub(super) first: usize,
    pub(super) count: usize,
    /// Bytes from one step of V to the next.
    pub(super) value_row: usize,
    /// The scales of a quantized cache, by tile, as `stream`.
    scales: [*const f32; 2 * TILES],
}

const _: () = assert!(2 * TILES <= u32::BITS as usize);

impl Tiles<'_> {
    /// The `i`-th K tile.
    #[inline(always)]
    pub(super) fn key(&self, i: usize) -> *const u8 {
        self.stream[i]
    }

    /// The tile to prefetch while the `i`-th K tile is read.
    #[inline(always)]
    pub(super) fn ahead_of_key(&self, i: usize) -> *const u8 {
        self.ahead[i].get()
    }

    /// The `i`-th V tile.
    #[inline(always)]
    pub(super) fn value(&self, i: usize) -> *const u8 {
        self.stream[self.count + i]
    }

    /// The tile to prefetch while the `i`-th V tile is read.
    #[inline(always)]
    pub(super) fn ahead_of_value(&self, i: usize) -> *const u8 {
        self.ahead[self.count + i].get()
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

    /// What is ahead is on its way: from now on, what is asked for is near. Tiles that are still to be packed ask when
    /// their turn comes.
    pub(super) fn prefetched(&mut self) {
        for (i, (ahead, own)) in self.ahead.iter().zip(self.stream).enumerate() {
            if self.missing.get() >> i & 1 == 0 {
                ahead.set(own);
            }
        }
        self.prefetched = true;
    }

    pub(super) fn is_prefetched(&self) -> bool {
        self.prefetched
    }

    /// Which tiles, counted from the first, touch some tokens of the partition.
    #[inline(always)]
    pub(super) fn touched(&self, tokens: &Range<usize>) -> Range<usize> {
        let Range { start, end } = touched(tokens);
        start - self.first..end - self.first
    }

    /// Makes K tiles ready to be read.
    #[inline(always)]
    pub(super) fn ready_keys<S: Simd, F: Format>(&self, s: S, tiles: Range<usize>) {
        self.ready::<S, F>(s, tiles);
    }

    /// The same for V tiles.
    #[inline(always)]
    pub(super) fn ready_values<S: Simd, F: Format>(&self, s: S, tiles: Range<usize>) {
        self.ready::<S, F>(s, self.count + tiles.start..self.count + tiles.end);
    }

    /// Makes a run of the stream ready.
    #[inline(always)]
    fn ready<S: Simd, F: Format>(&self, s: S, run: Range<usize>) {
        let bits = |n: usize| ((1_u64 << n) - 1) as u32;
        let missing = self.missing.get() & (bits(run.end) ^ bits(run.start));
        if missing != 0 {
            self.make::<S, F>(s, missing);
            self.missing.set(self.missing.get() ^ missing);
        }
    }

    /// Packs or copies some of the stream.
    #[inline(never)]
    fn make<S: Simd, F: Format>(&self, s: S, mut which: u32) {
        let spec = self.source.call.layer.spec();
        let dim = spec.head_dim;
        while which != 0 {
            let i = which.trailing_zeros() as usize;
            which &= which - 1;
            let (from, to) = (self.origin[i], self.stream[i].cast_mut());
            // SAFETY: `from` is a whole tile, the place has room for one that is padded, and nobody reads what was there.
            unsafe {
                if spec.layout == KvLayout::Rows {
                    self.pack::<S, F>(s, i, to);
                } else if i < self.count {
                    to.copy_from_nonoverlapping(from, self.source.tile_bytes);
                } else {
                    widen_value_tile::<F>(from, dim, padded(dim), to);
                }
                if i < self.count {
                    let [filled, all] = key_bytes::<S, F>(dim);
                    to.add(filled).write_bytes(0, all - filled);
                }
            }
        }
    }

    /// Packs the `i`-th of the stream, from rows; of its tokens, those that some row sees. Asks for what is ahead of it.
    /// Where nobody runs ahead, asks for the rows of the tile that comes some tiles later; else brings near the tile that
    /// is packed next.
    ///
    /// # Safety
    /// There is room for a tile at `to`.
    unsafe fn pack<S: Simd, F: Format>(&self, s: S, i: usize, to: *mut u8) {
        let source = self.source;
        let spec = source.call.layer.spec();
        let (side, tile) = if i < self.count {
            (Side::Key, i)
        } else {
            (Side::Value, i - self.count)
        };
        let (tile, from) = (self.partition * TILES + self.first + tile, self.origin[i]);
        let mut near = 0;
        if source.contiguous {
            let next = self.origin[(i + 1).min(2 * self.count - 1)];
            near = next.addr().wrapping_sub(from.addr()) as isize;
        } else {
            for row in source.rows(side, self.head, tile + PACK_AHEAD, from) {
                s.prefetch_run(row, spec.head_dim * spec.dtype.size());
            }
        }
        let ahead = self.ahead[i].replace(to);
        let rows = source.rows(side, self.head, tile, from);
        let width = padded(spec.head_dim);
        // SAFETY: the rows are whole; the rest is the caller's promise.
        s.vectorize(unsafe {
            PackTile::<F>::new(side, &rows, spec.head_dim, width, to, ahead, near)
        });
    }
}

/// Tiles that touch a range of tokens.
#[inline(always)]
pub(super) fn touched(tokens: &Range<usize>) -> Range<usize> {
    tokens.start / TILE..tokens.end.div_ceil(TILE)
}

/// Bytes of a tile whose tokens have so many elements.
pub(super) fn tile_bytes<F: Format>(elements: usize) -> usize {
    TILE * elements * F::DTYPE.size()
}

/// Bytes of a K tile: those of its dimensions, in whole lanes, and with the zeros that the kernel reads beyond.
fn key_bytes<S: Simd, F: Format>(head_dim: usize) -> [usize; 2] {
    [F::STEP, Matrix::<S, F>::DEPTH]
        .map(|multiple| tile_bytes::<F>(head_dim.next_multiple_of(multiple)))
}

/// Scratch memory for the tiles of a partition.
#[derive(Default)]
pub(super) struct TileBuffers {
    keys: Buffer,
    values: Buffer,
    scales: Buffer,
}

/// The tiles of one item.
pub(super) struct Source<'a> {
    call: &'a Call<'a>,
    item: &'a Item,
    blocks: &'a [u32],
    tile_bytes: usize,
    /// Whether the tokens of a tile lie side by side, tile after tile: always in a tiled cache, mostly in rows.
    contiguous: bool,
    quantized: bool,
}

impl<'a> Source<'a> {
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
            quantized: spec.dtype == KvDtype::Int8,
        }
    }

    /// How many tiles of a partition any row sees.
    pub(super) fn count(&self, partition: usize) -> usize {
        self.range(partition).len()
    }

    /// The tiles of a partition and head that any row sees. While they are read or packed, those of `ahead` are asked
    /// for. Packed ones of K and V take so many `places` in turn.
    pub(super) fn tiles<'t, S: Simd, F: Format>(
        &'t self,
        partition: usize,
        head: usize,
        ahead: &[*const u8],
        places: [usize; 2],
        buffers: &'t mut TileBuffers,
    ) -> Tiles<'t> {
        let spec = self.call.layer.spec();
        let (dim, width) = (spec.head_dim, padded(spec.head_dim));
        let (rows, range) = (spec.layout == KvLayout::Rows, self.range(partition));
        // Where V's vectors hold one token, rows that are whole vectors are a tile as they are.
        let values_made = dim != width || rows && !(self.contiguous && F::STEP == 1);
        let count = range.len();
        let mut tiles = Tiles {
            source: self,
            head,
            stream: [std::ptr::null(); 2 * TILES],
            origin: [std::ptr::null(); 2 * TILES],
            ahead: [const { Cell::new(std::ptr::null()) }; 2 * TILES],
            prefetched: true,
            missing: Cell::new(0),
            partition,
            first: range.start - partition * TILES,
            count,
            value_row: F::LANE * if values_made { width } else { dim },
            scales: [std::ptr::null(); 2 * TILES],
        };
        if spec.block_size.is_multiple_of(TILE) {
            self.locate(partition, head, &mut tiles);
        } else if self.quantized {
            let scales = buffers.scales.floats(2 * PARTITION);
            self.copy_scales(partition, head, scales);
            for (i, to) in tiles.scales[..2 * count].iter_mut().enumerate() {
                *to = scales.wrapping_add(i * TILE);
            }
        }
        tiles.stream = tiles.origin;
        let [_, key] = key_bytes::<S, F>(dim);
        let value = tile_bytes::<F>(width);
        let sides = [
            (0, rows || key != self.tile_bytes, key, &mut buffers.keys),
            (count, values_made, value, &mut buffers.values),
        ];
        let mut missing = 0;
        for ((start, made, bytes, buffer), places) in sides.into_iter().zip(places) {
            if made {
                let to: *mut u8 = buffer.floats(places * bytes / size_of::<f32>()).cast();
                for i in 0..count {
                    tiles.stream[start + i] = to.wrapping_add(i % places * bytes);
                    missing |= 1_u32 << (start + i);
                }
            }
        }
        for (i, own) in tiles.stream[..2 * count].iter().enumerate() {
            let ahead = ahead.get(i).copied();
            tiles.ahead[i] = Cell::new(ahead.unwrap_or(*own));
            // Packing asks by itself.
            let packed = rows && missing >> i & 1 == 1;
            tiles.prefetched &= packed || ahead.is_none();
        }
        tiles.missing = Cell::new(missing);
        tiles
    }

    /// Where the scales of a partition's tiles are, and in a contiguous cache the tiles. Blocks are whole tiles.
    fn locate(&self, partition: usize, head: usize, tiles: &mut Tiles<'_>) {
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
                            tiles.origin[to] = base.add(tile * self.tile_bytes);
                        }
                        if self.quantized {
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
                        if self.quantized {
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
        let Range { start, end } = touched(&local(&self.item.sees, partition));
        partition * TILES + start..partition * TILES + end
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
