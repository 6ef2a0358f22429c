//! Filling the cache: new keys and values into slots, whole blocks onto others.

use half::{bf16, f16};

use super::layout::{KvDtype, KvLayer, Side, Vectors};
use crate::{Error, Result};

/// Stores keys and values of new tokens, rounded to the cache's dtype (to nearest even), at `slots`: token `i` goes to
/// offset `slots[i] % block_size` of block `slots[i] / block_size`; slot -1 is padding and skipped. Where a slot is
/// named twice, the last one wins.
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
    for (side, rows) in [(Side::Key, key), (Side::Value, value)] {
        // SAFETY: shapes and slots were checked; the layer is writable by the promise of `KvLayer::new`.
        unsafe {
            match spec.dtype {
                KvDtype::F32 => write(layer, side, rows, slots, |x| x),
                KvDtype::F16 => write(layer, side, rows, slots, |x| f16::from_f32(x).to_bits()),
                KvDtype::Bf16 => write(layer, side, rows, slots, |x| bf16::from_f32(x).to_bits()),
                KvDtype::Int8 => write_quantized(layer, side, rows, slots),
            }
        }
    }
    Ok(())
}

unsafe fn write<T>(
    layer: &KvLayer<'_>,
    side: Side,
    rows: &Vectors<'_>,
    slots: &[i64],
    round: impl Fn(f32) -> T,
) {
    let spec = layer.spec();
    for (i, &slot) in slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else {
            continue;
        };
        let (block, token) = (slot / spec.block_size, slot % spec.block_size);
        let walk = layer.token_walk(side, token);
        for head in 0..spec.num_kv_heads {
            // SAFETY: the caller's promise.
            unsafe {
                let (from, to) = (rows.row(i, head), layer.head(side, block, head));
                for d in 0..spec.head_dim {
                    let element = round(from.add(d).read_unaligned());
                    to.offset(walk.at(d)).cast::<T>().write_unaligned(element);
                }
            }
        }
    }
}

unsafe fn write_quantized(layer: &KvLayer<'_>, side: Side, rows: &Vectors<'_>, slots: &[i64]) {
    let spec = layer.spec();
    for (i, &slot) in slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else {
            continue;
        };
        let (block, token) = (slot / spec.block_size, slot % spec.block_size);
        let walk = layer.token_walk(side, token);
        for head in 0..spec.num_kv_heads {
            // SAFETY: the caller's promise.
            unsafe {
                let (from, to) = (rows.row(i, head), layer.head(side, block, head));
                let get = |d: usize| from.add(d).read_unaligned();
                let largest = (0..spec.head_dim).fold(0.0, |m: f32, d| m.max(get(d).abs()));
                // Neither is lost in `max`: 0 times either of them is NaN.
                let bad: f32 = (0..spec.head_dim).map(|d| get(d) * 0.0).sum();
                let scale = largest / 127.0 + bad;
                layer.scale(side, block, head, token).write_unaligned(scale);
                // A scale that is too small to divide by stands for nothing but zeros.
                let inverse = if scale >= f32::MIN_POSITIVE {
                    127.0 / largest
                } else {
                    0.0
                };
                for d in 0..spec.head_dim {
                    let element = (get(d) * inverse).round_ties_even() as i8;
                    to.offset(walk.at(d)).cast::<i8>().write(element);
                }
            }
        }
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
