//! Where an item's tiles come from: straight from a tiled cache, or packed into scratch from rows.

use std::marker::PhantomData;
use std::ops::Range;

use crate::simd::Simd;

use super::call::Call;
use super::format::Format;
use super::layout::{KvLayout, Side, TILE};
use super::pack::{PackTile, widen_value_tile};
use super::plan::{Item, PARTITION, local};
use super::scratch::{Buffer, padded};

/// Tiles in a partition.
pub(super) const TILES: usize = PARTITION / TILE;

/// How far ahead of its use KV is asked for, in bytes: enough to hide memory's latency at full bandwidth.
const PREFETCH_BYTES: usize = 16 * 1024;
const MAX_AHEAD: usize = TILES;
/// The same for the rows of tiles that are packed first, in tiles.
const PACK_AHEAD: usize = 2;

/// The tiles of one partition in the order of their use (K, V, then the next partition's first K tiles), so that
/// what to prefetch is simply a later entry.
pub(super) struct Tiles {
    stream: [*const u8; 2 * TILES + MAX_AHEAD],
    len: usize,
    /// The tile of the partition that the stream begins with, and how many there are.
    pub(super) first: usize,
    pub(super) count: usize,
    ahead: usize,
    /// Bytes from one step of V to the next.
    pub(super) value_row: usize,
}

impl Tiles {
    /// The `i`-th K tile, and the one to prefetch meanwhile.
    #[inline(always)]
    pub(super) fn key(&self, i: usize) -> (*const u8, *const u8) {
        (
            self.stream[i],
            self.stream[(i + self.ahead).min(self.len - 1)],
        )
    }

    /// The `i`-th V tile, and the one to prefetch meanwhile.
    #[inline(always)]
    pub(super) fn value(&self, i: usize) -> (*const u8, *const u8) {
        self.key(self.count + i)
    }
}

/// The tiles of one item.
pub(super) struct Source<'a, F: Format> {
    call: &'a Call<'a>,
    head: usize,
    blocks: &'a [u32],
    /// What any row of the item sees, and where the item ends.
    sees: Range<usize>,
    end: usize,
    /// Scratch for K and V of a partition, if they are packed there.
    keys: Option<*mut u8>,
    values: Option<*mut u8>,
    ahead: usize,
    tile_bytes: usize,
    format: PhantomData<F>,
}

impl<'a, F: Format> Source<'a, F> {
    /// `sees` is the union of what the item's rows see; `keys` and `values` are scratch, used if need be.
    pub(super) fn new(
        call: &'a Call<'a>,
        item: &Item,
        head: usize,
        sees: Range<usize>,
        keys: &mut Buffer,
        values: &mut Buffer,
    ) -> Self {
        let spec = call.layer.spec();
        let (dim, width) = (spec.head_dim, padded(spec.head_dim));
        let tile_bytes = TILE * dim * spec.dtype.size();
        let rows = spec.layout == KvLayout::Rows;
        // Whole steps of K, whole vectors of V.
        let partition = |row: usize| PARTITION * row * spec.dtype.size() / size_of::<f32>();
        let keys = rows.then(|| keys.floats(partition(dim.next_multiple_of(F::STEP))).cast());
        let values = (rows || dim != width).then(|| values.floats(partition(width)).cast());
        let unit = &call.schedule.units[item.units[0]];
        Self {
            call,
            head,
            // All units of an item have the same blocks in its partitions.
            blocks: call.plan.blocks(&call.plan.sequences[unit.sequence]),
            // Beyond the item they may not, and it does not look there.
            sees: sees.start..sees.end.min(item.partitions.end * PARTITION),
            end: item.partitions.end,
            keys,
            values,
            // What is packed is already near; the packing itself runs through memory in order.
            ahead: if rows {
                0
            } else {
                (PREFETCH_BYTES / tile_bytes).clamp(1, MAX_AHEAD)
            },
            tile_bytes,
            format: PhantomData,
        }
    }

    /// The tiles of a partition that any row sees, packed where need be.
    pub(super) fn tiles<S: Simd>(&self, s: S, partition: usize) -> Tiles {
        let spec = self.call.layer.spec();
        let (range, width) = (self.range(partition), padded(spec.head_dim));
        let mut tiles = Tiles {
            stream: [std::ptr::null(); 2 * TILES + MAX_AHEAD],
            len: 0,
            first: range.start - partition * TILES,
            count: range.len(),
            ahead: self.ahead,
            value_row: F::LANE
                * if self.values.is_some() {
                    width
                } else {
                    spec.head_dim
                },
        };
        let mut push = |p: *const u8| {
            tiles.stream[tiles.len] = p;
            tiles.len += 1;
        };
        let key_bytes = TILE * spec.head_dim.div_ceil(F::STEP) * F::LANE;
        for (i, tile) in range.clone().enumerate() {
            push(match self.keys {
                None => self.direct(Side::Key, tile),
                Some(keys) => self.pack(s, Side::Key, tile, keys.wrapping_add(i * key_bytes)),
            });
        }
        for (i, tile) in range.enumerate() {
            let to = |values: *mut u8| values.wrapping_add(i * TILE * width * spec.dtype.size());
            push(match self.values {
                None => self.direct(Side::Value, tile),
                Some(values) if self.keys.is_some() => self.pack(s, Side::Value, tile, to(values)),
                Some(values) => self.widen(tile, to(values)),
            });
        }
        if self.ahead > 0 && partition + 1 < self.end {
            for tile in self.range(partition + 1).take(self.ahead) {
                push(self.direct(Side::Key, tile));
            }
        }
        tiles
    }

    /// Asks for the first tiles of an item, which nobody ran ahead of.
    pub(super) fn prefetch_first<S: Simd>(&self, s: S, tiles: &Tiles) {
        for p in &tiles.stream[..self.ahead.min(tiles.len)] {
            for line in (0..self.tile_bytes).step_by(64) {
                s.prefetch(p.wrapping_add(line));
            }
        }
    }

    /// Absolute tiles of a partition that any row sees.
    fn range(&self, partition: usize) -> Range<usize> {
        let sees = local(&self.sees, partition);
        let base = partition * TILES;
        base + sees.start / TILE..base + sees.end.div_ceil(TILE)
    }

    /// A tile where it lies in a tiled cache.
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

    /// Packs a tile of a rows cache; of its tokens, those that some row sees. Meanwhile asks for the rows of the tile
    /// that comes some tiles later.
    fn pack<S: Simd>(&self, s: S, side: Side, tile: usize, to: *mut u8) -> *const u8 {
        let spec = self.call.layer.spec();
        for row in self.rows(side, tile + PACK_AHEAD) {
            for line in (0..spec.head_dim * spec.dtype.size()).step_by(64) {
                s.prefetch(row.wrapping_add(line));
            }
        }
        let rows = self.rows(side, tile);
        // SAFETY: the rows are whole, and `new` made room for a partition's tiles.
        s.vectorize(unsafe {
            PackTile::<F>::new(side, &rows, spec.head_dim, padded(spec.head_dim), to)
        });
        to
    }

    /// The rows of a tile of a rows cache. Beyond the last token that is seen, they repeat its row.
    fn rows(&self, side: Side, tile: usize) -> [*const u8; TILE] {
        let block_size = self.call.layer.spec().block_size;
        std::array::from_fn(|i| {
            let token = (tile * TILE + i).min(self.sees.end - 1);
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

    /// Copies a V tile of a tiled cache to whole vectors.
    fn widen(&self, tile: usize, to: *mut u8) -> *const u8 {
        let head_dim = self.call.layer.spec().head_dim;
        let from = self.direct(Side::Value, tile);
        // SAFETY: `from` is a whole tile, and `new` made room for a partition's wider ones.
        unsafe { widen_value_tile::<F>(from, head_dim, padded(head_dim), to) };
        to
    }
}
