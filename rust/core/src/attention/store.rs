//! Filling the cache: new keys and values into slots, whole blocks onto others.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::float::FloatDtype;
use super::layout::{KvDtype, KvLayer, Side, Vectors, Walk};
use super::scratch::padded;
use crate::simd::{DefaultMode, Dispatch, Isa, Kernel, Simd};
use crate::{Error, Result};

/// Stores keys and values of new tokens, rounded to the cache's dtype (to nearest even), at `slots`: token `i` goes to
/// offset `slots[i] % block_size` of block `slots[i] / block_size`; slot -1 is padding and skipped. Where a slot is
/// named twice, the last one wins. Neither the instruction set nor the caller's floating-point mode matters.
///
/// Keys and values are of one [`FloatDtype`]: halves are stored as if they had been widened before, those of the cache's
/// own dtype bit by bit, NaN included.
///
/// int8 quantizes each token and head by itself: the scale is its largest magnitude / 127, an element the nearest
/// integer to its value / scale. Where a row holds infinity or NaN, its scale is NaN: who sees the token sees NaN.
///
/// # Errors
/// Shapes or element types do not match, a slot is neither -1 nor in the cache, or this CPU lacks `isa`. Nothing is then
/// written.
pub fn write_kv(
    isa: Isa,
    layer: &KvLayer<'_>,
    key: &Vectors<'_>,
    value: &Vectors<'_>,
    slots: &[i64],
) -> Result<()> {
    let spec = layer.spec();
    let shape = [slots.len(), spec.num_kv_heads, spec.head_dim];
    for (argument, came) in [("key", key.shape()), ("value", value.shape())] {
        if came != shape {
            return Err(Error::invalid(
                argument,
                format!("got shape {came:?}, expected {shape:?}"),
            ));
        }
    }
    if value.dtype() != key.dtype() {
        let [came, expected] = [value, key].map(|rows| rows.dtype().name());
        return Err(Error::invalid(
            "value",
            format!("got {came}, expected the dtype of key, {expected}"),
        ));
    }
    check_slots(layer, slots)?;
    isa.expect_available()?;
    let _mode = DefaultMode::enter();
    isa.dispatch(Store {
        layer,
        rows: [(Side::Key, key), (Side::Value, value)],
        slots,
    });
    Ok(())
}

/// A checked call of [`write_kv`].
struct Store<'a> {
    layer: &'a KvLayer<'a>,
    rows: [(Side, &'a Vectors<'a>); 2],
    slots: &'a [i64],
}

impl Dispatch for Store<'_> {
    type Output = ();
    fn run<S: Simd>(self, s: S) {
        s.vectorize(self);
    }
}

impl Kernel for Store<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (spec, dtype) = (self.layer.spec(), self.rows[0].1.dtype());
        let mut room = match dtype {
            FloatDtype::F32 => Vec::new(),
            FloatDtype::F16 | FloatDtype::Bf16 => vec![0.0; padded(spec.head_dim)],
        };
        let as_they_are = matches!(
            (dtype, spec.dtype),
            (FloatDtype::F16, KvDtype::F16) | (FloatDtype::Bf16, KvDtype::Bf16)
        );
        for (i, &slot) in self.slots.iter().enumerate() {
            let Some(slot) = Slot::new(self.layer, slot) else {
                continue;
            };
            for head in 0..spec.num_kv_heads {
                for (side, rows) in self.rows {
                    // SAFETY: `write_kv` checked shapes and slots; the layer is writable by the promise of `KvLayer::new`.
                    // There is room for a row of halves.
                    unsafe {
                        let row = rows.row(i, head);
                        if as_they_are {
                            slot.copy::<u16>(side, head, row.cast());
                        } else {
                            let row = dtype.widen(s, row, spec.head_dim, room.as_mut_ptr());
                            slot.write(side, head, row);
                        }
                    }
                }
            }
        }
    }
}

/// # Errors
/// A slot is neither -1 nor in the cache.
pub(crate) fn check_slots(layer: &KvLayer<'_>, slots: &[i64]) -> Result<()> {
    let spec = layer.spec();
    let size = spec.num_blocks as i64 * spec.block_size as i64;
    match slots.iter().position(|&slot| slot < -1 || slot >= size) {
        None => Ok(()),
        Some(i) => Err(Error::invalid(
            "slots",
            format!(
                "entry {i} is {}, expected -1 or 0 to {}",
                slots[i],
                size - 1
            ),
        )),
    }
}

/// Elements that are converted at a time: whole steps of every dtype.
const PIECE: usize = 64;

/// A slot of the cache, to be written.
pub(crate) struct Slot<'a> {
    layer: &'a KvLayer<'a>,
    block: usize,
    token: usize,
    /// Of keys and of values.
    walks: [Walk; 2],
}

impl<'a> Slot<'a> {
    /// `None` where the slot is padding.
    pub(crate) fn new(layer: &'a KvLayer<'a>, slot: i64) -> Option<Self> {
        let (slot, block_size) = (usize::try_from(slot).ok()?, layer.spec().block_size);
        let token = slot % block_size;
        Some(Self {
            layer,
            block: slot / block_size,
            token,
            walks: [Side::Key, Side::Value].map(|side| layer.token_walk(side, token)),
        })
    }

    /// Asks for all memory that is to be written: a tiled layout has a key's elements on as many cache lines, which would
    /// else be waited for one after another.
    #[inline(always)]
    pub(crate) fn prefetch<S: Simd>(&self, s: S) {
        let spec = self.layer.spec();
        for (side, walk) in [Side::Key, Side::Value].into_iter().zip(&self.walks) {
            for head in 0..spec.num_kv_heads {
                // SAFETY: the slot is in the layer.
                let head = unsafe { self.layer.head(side, self.block, head) };
                walk.prefetch(s, spec.head_dim, head);
            }
        }
    }

    /// Stores one head's key or value as [`write_kv`] says, in the default floating-point mode. The row may lie at any
    /// alignment. Inlined with all it calls, to be compiled for the caller's instruction set.
    ///
    /// # Safety
    /// The slot and the head are in the layer, which is writable, and nobody else uses them; the row has `head_dim`
    /// elements.
    #[inline(always)]
    pub(crate) unsafe fn write(&self, side: Side, head: usize, row: *const f32) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.layer.spec().dtype {
                KvDtype::F32 => self.copy(side, head, row),
                KvDtype::F16 => self.convert(side, head, row, |from, to: &mut [f16]| {
                    to.convert_from_f32_slice(from);
                }),
                KvDtype::Bf16 => self.convert(side, head, row, |from, to: &mut [bf16]| {
                    to.convert_from_f32_slice(from);
                }),
                KvDtype::Int8 => {
                    let [scale, inverse] = scale(row, self.layer.spec().head_dim);
                    self.convert(side, head, row, |from, to| quantize(from, inverse, to));
                    let to = self.layer.scale(side, self.block, head, self.token);
                    to.write_unaligned(scale);
                }
            }
        }
    }

    /// Stores a row whose elements are the cache's own.
    #[inline(always)]
    unsafe fn copy<T: Copy + Default>(&self, side: Side, head: usize, row: *const T) {
        // SAFETY: the caller's promise.
        unsafe {
            self.convert(side, head, row, |from, to: &mut [T]| {
                to.copy_from_slice(from);
            });
        }
    }

    /// Converts a row piece by piece, and puts its elements where the layout has them.
    #[inline(always)]
    unsafe fn convert<U: Copy + Default, T: Copy + Default>(
        &self,
        side: Side,
        head: usize,
        row: *const U,
        convert: impl Fn(&[U], &mut [T]),
    ) {
        let (walk, dims) = (&self.walks[side as usize], self.layer.spec().head_dim);
        let (mut from, mut to) = ([U::default(); PIECE], [T::default(); PIECE]);
        for first in (0..dims).step_by(PIECE) {
            let n = PIECE.min(dims - first);
            let (from, to) = (&mut from[..n], &mut to[..n]);
            // SAFETY: the caller's promise.
            unsafe {
                row.add(first)
                    .cast::<u8>()
                    .copy_to_nonoverlapping(from.as_mut_ptr().cast(), size_of_val(from));
                convert(from, to);
                walk.scatter(first, to, self.layer.head(side, self.block, head));
            }
        }
    }
}

/// The scale of a row, its largest magnitude / 127, and what to multiply its elements by. Infinity and NaN make it NaN.
///
/// # Safety
/// The row has `n` elements.
#[inline(always)]
unsafe fn scale(row: *const f32, n: usize) -> [f32; 2] {
    // Magnitudes are in the order of their bits, and these are the largest.
    // SAFETY: the caller's promise.
    let magnitude = |i| unsafe { row.add(i).read_unaligned().abs().to_bits() };
    let largest = f32::from_bits((0..n).map(magnitude).max().unwrap_or(0));
    if !largest.is_finite() {
        return [f32::NAN, 0.0];
    }
    let scale = largest / 127.0;
    // One that is too small to divide by stands for nothing but zeros.
    if scale >= f32::MIN_POSITIVE {
        [scale, 127.0 / largest]
    } else {
        [scale, 0.0]
    }
}

/// The nearest integers, to even, of a row's elements.
#[inline(always)]
fn quantize(from: &[f32], inverse: f32, to: &mut [i8]) {
    // Adding 1.5 * 2^23 rounds to nearest even, and leaves the integer in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    for (from, to) in from.iter().zip(to) {
        *to = (from * inverse + MAGIC).to_bits() as i8;
    }
}

/// An array of blocks, each of them contiguous bytes.
#[derive(Debug, Clone, Copy)]
pub struct Blocks {
    base: *mut u8,
    count: usize,
    stride: isize,
    bytes: usize,
}

impl Blocks {
    /// `count` blocks of `bytes` each, `stride` bytes apart.
    ///
    /// # Safety
    /// All of them are valid for reads and writes by [`copy_blocks`], and do not overlap.
    pub unsafe fn from_raw_parts(base: *mut u8, count: usize, stride: isize, bytes: usize) -> Self {
        Self {
            base,
            count,
            stride,
            bytes,
        }
    }

    fn block(&self, i: usize) -> *mut u8 {
        self.base.wrapping_offset(i as isize * self.stride)
    }
}

/// Copies whole blocks by `(source, destination)` pairs, as if all sources were read before any destination is
/// written: `[(a, b), (b, a)]` swaps.
///
/// # Errors
/// A block is not in the cache, or a destination is named twice. Nothing is then written.
pub fn copy_blocks(blocks: &Blocks, pairs: &[(i32, i32)]) -> Result<()> {
    let mut copies = Vec::with_capacity(pairs.len());
    for (i, &(source, destination)) in pairs.iter().enumerate() {
        for id in [source, destination] {
            if !usize::try_from(id).is_ok_and(|id| id < blocks.count) {
                return Err(Error::invalid(
                    "pairs",
                    format!(
                        "row {i} names block {id}, expected 0 to {}",
                        blocks.count as i64 - 1
                    ),
                ));
            }
        }
        copies.push((source as usize, destination as usize));
    }
    let mut by_destination = copies.clone();
    by_destination.sort_unstable_by_key(|&(_, destination)| destination);
    if let Some(twice) = by_destination.windows(2).find(|w| w[0].1 == w[1].1) {
        return Err(Error::invalid(
            "pairs",
            format!("block {} is the destination of two copies", twice[0].1),
        ));
    }

    // Where a source is overwritten by another copy, it is saved first; without such pairs nothing is.
    let overwritten = |block: usize| {
        by_destination
            .binary_search_by_key(&block, |&(_, d)| d)
            .is_ok()
    };
    let saved: Vec<Option<Vec<u8>>> = copies
        .iter()
        .map(|&(source, destination)| {
            (source != destination && overwritten(source)).then(|| {
                let mut copy = vec![0; blocks.bytes];
                // SAFETY: the block is in range; `copy` is as large.
                unsafe {
                    copy.as_mut_ptr()
                        .copy_from_nonoverlapping(blocks.block(source), blocks.bytes);
                };
                copy
            })
        })
        .collect();
    for (&(source, destination), saved) in copies.iter().zip(&saved) {
        if source == destination {
            continue;
        }
        let from = saved
            .as_ref()
            .map_or(blocks.block(source).cast_const(), |copy| copy.as_ptr());
        // SAFETY: both blocks are in range, distinct, and blocks do not overlap.
        unsafe {
            blocks
                .block(destination)
                .copy_from_nonoverlapping(from, blocks.bytes);
        };
    }
    Ok(())
}
