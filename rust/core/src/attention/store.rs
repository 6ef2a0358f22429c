//! Filling the cache: new keys and values into slots, whole blocks onto others.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::layout::{KvDtype, KvLayer, Side, Vectors};
use crate::simd::DefaultMode;
use crate::{Error, Result};

/// Stores keys and values of new tokens, rounded to the cache's dtype (to nearest even), at `slots`: token `i` goes to
/// offset `slots[i] % block_size` of block `slots[i] / block_size`; slot -1 is padding and skipped. Where a slot is
/// named twice, the last one wins. The caller's floating-point mode does not matter.
///
/// int8 quantizes each token and head by itself: the scale is its largest magnitude / 127, an element the nearest
/// integer to its value / scale. Where a row holds infinity or NaN, its scale is NaN: who sees the token sees NaN.
///
/// # Errors
/// Shapes do not match, or a slot is neither -1 nor in the cache. Nothing is then written.
pub fn write_kv(
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
    let size = spec.num_blocks as i64 * spec.block_size as i64;
    if let Some((i, slot)) = slots
        .iter()
        .enumerate()
        .find(|&(_, &slot)| slot < -1 || slot >= size)
    {
        return Err(Error::invalid(
            "slots",
            format!("entry {i} is {slot}, expected -1 or 0 to {}", size - 1),
        ));
    }
    let _mode = DefaultMode::enter();
    for (side, rows) in [(Side::Key, key), (Side::Value, value)] {
        // SAFETY: shapes and slots were checked; the layer is writable by the promise of `KvLayer::new`.
        unsafe {
            match spec.dtype {
                KvDtype::F32 => write(layer, side, rows, slots, |from, to: &mut [f32], _| {
                    to.copy_from_slice(from);
                }),
                KvDtype::F16 => write(layer, side, rows, slots, |from, to: &mut [f16], _| {
                    to.convert_from_f32_slice(from);
                }),
                KvDtype::Bf16 => write(layer, side, rows, slots, |from, to: &mut [bf16], _| {
                    to.convert_from_f32_slice(from);
                }),
                KvDtype::Int8 => write(
                    layer,
                    side,
                    rows,
                    slots,
                    |from, to, [block, head, token]| {
                        let scale = layer.scale(side, block, head, token);
                        scale.write_unaligned(quantize(from, to));
                    },
                ),
            }
        }
    }
    Ok(())
}

/// Converts each row, of a `[block, head, token]`, and puts its elements where the layout has them.
unsafe fn write<T: Copy + Default>(
    layer: &KvLayer<'_>,
    side: Side,
    rows: &Vectors<'_>,
    slots: &[i64],
    convert: impl Fn(&[f32], &mut [T], [usize; 3]),
) {
    let spec = layer.spec();
    let mut from = vec![0.0; spec.head_dim];
    let mut to = vec![T::default(); spec.head_dim];
    for (i, &slot) in slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else {
            continue;
        };
        let (block, token) = (slot / spec.block_size, slot % spec.block_size);
        let walk = layer.token_walk(side, token);
        for head in 0..spec.num_kv_heads {
            // SAFETY: the caller's promise.
            unsafe {
                rows.row(i, head)
                    .cast::<u8>()
                    .copy_to_nonoverlapping(from.as_mut_ptr().cast(), size_of_val(&from[..]));
                convert(&from, &mut to, [block, head, token]);
                walk.scatter(&to, layer.head(side, block, head));
            }
        }
    }
}

/// Integers and their scale: the largest magnitude / 127. Infinity and NaN make it NaN.
fn quantize(from: &[f32], to: &mut [i8]) -> f32 {
    let largest = from.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    // Neither is lost in `max`: 0 times either of them is NaN.
    let bad: f32 = from.iter().map(|x| x * 0.0).sum();
    let scale = largest / 127.0 + bad;
    // A scale that is too small to divide by stands for nothing but zeros.
    let inverse = if scale >= f32::MIN_POSITIVE {
        127.0 / largest
    } else {
        0.0
    };
    // Adding 1.5 * 2^23 rounds to nearest even, and leaves the integer in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    for (from, to) in from.iter().zip(to) {
        *to = (from * inverse + MAGIC).to_bits() as i8;
    }
    scale
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
