//! Filling the cache: slots, rounding, block copies.
#![allow(missing_docs)]

mod attention_support;

use attention_support::*;
use half::{bf16, f16};
use leafkv_core::attention::{
    Blocks as RawBlocks, KvArray, KvDtype, KvLayer, KvLayout, KvSpec, Scales, Side, Vectors,
    copy_blocks,
};
use proptest::prelude::*;

const HEADS: Heads = Heads {
    query: 1,
    kv: 2,
    dim: 6,
};

fn vectors(seed: usize, tokens: usize) -> Vec<f32> {
    // Not exact in 16 bits: rounding shows.
    (0..tokens * 12)
        .map(|i| number([seed, i, 0, 0, 0]) * 1.001_93)
        .collect()
}

#[test]
fn tokens_come_back_rounded_to_nearest_even_and_nothing_else_changes() {
    for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
        for order in [Order::HeadMajor, Order::TokenMajor, Order::Tiled] {
            let cache = Cache::new(dtype, order, 3, 32, HEADS);
            let slots = [70, -1, 3, 95, 33, 3, 34];
            let (k, v) = (vectors(1, 7), vectors(2, 7));
            let (keys, values) = (Vectors::from_slice(&k, 2, 6), Vectors::from_slice(&v, 2, 6));
            store(&cache.layer(), &keys, &values, &slots).unwrap();
            let round = |x: f32| match dtype {
                KvDtype::F32 => x,
                KvDtype::F16 => f16::from_f32(x).to_f32(),
                KvDtype::Bf16 => bf16::from_f32(x).to_f32(),
                KvDtype::Int8 => unreachable!(),
            };
            for (side, data) in [(Side::Key, &k), (Side::Value, &v)] {
                for slot in 0..96 {
                    // The last one of a slot that is named twice.
                    let token = slots.iter().rposition(|&s| s == slot as i64);
                    for (head, dim) in (0..12).map(|i| (i / 6, i % 6)) {
                        let came = cache.layer().element(side, slot / 32, head, slot % 32, dim);
                        match token {
                            Some(t) => assert_eq!(came, round(data[t * 12 + head * 6 + dim])),
                            None => assert!(
                                came.is_nan(),
                                "{dtype:?} {order:?} slot {slot} was written"
                            ),
                        }
                    }
                }
            }
        }
    }
}

/// Of one row: the scale, and the integers.
fn quantized(row: &[f32]) -> (f32, Vec<i8>) {
    let largest = row.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    let integer = |x: &f32| (f64::from(*x) * 127.0 / f64::from(largest)).round_ties_even() as i8;
    (largest / 127.0, row.iter().map(integer).collect())
}

/// Where byte `byte` of an element lies in a contiguous (block, head), by the tables of the layouts.
fn offset(
    dtype: KvDtype,
    layout: KvLayout,
    side: Side,
    token: usize,
    d: usize,
    dim: usize,
) -> usize {
    let step = match dtype {
        KvDtype::F32 | KvDtype::F16 => 1,
        KvDtype::Bf16 => 2,
        KvDtype::Int8 => 4,
    };
    let (tile, t) = (token / 16, token % 16);
    let element = match (layout, side) {
        (KvLayout::Rows, _) => token * dim + d,
        (_, Side::Key) => tile * 16 * dim + (d / step * 16 + t) * step + d % step,
        (_, Side::Value) => tile * 16 * dim + (t / step * dim + d) * step + t % step,
    };
    element * dtype.size()
}

/// Every element is where the tables of the layouts say, as whole numbers that all dtypes hold.
#[test]
fn elements_lie_where_the_layout_says() {
    let (block_size, heads, dim, blocks) = (32, 2, 8, 3);
    let number = |side: usize, slot: usize, h: usize, d: usize| {
        let x = (side * 31 + slot * 7 + h * 13 + d * 3) % 100;
        // The largest of each row makes the scale 1.
        if d == 0 { 127.0 } else { x as f32 }
    };
    for (dtype, layout) in DTYPES.into_iter().flat_map(|d| LAYOUTS.map(|l| (d, l))) {
        let head = block_size * dim * dtype.size();
        let size = blocks * heads * head;
        let (mut bytes, mut floats) = (
            vec![0_u8; 2 * size],
            vec![0_f32; 2 * blocks * heads * block_size],
        );
        let array = |start: usize, base: *mut u8| KvArray {
            base: base.wrapping_add(start),
            block_stride: (heads * head) as isize,
            head_stride: head as isize,
            token_stride: (dim * dtype.size()) as isize,
        };
        let scales = |start: usize, base: *mut f32| Scales {
            base: base.wrapping_add(start).cast(),
            block_stride: (heads * block_size * 4) as isize,
            head_stride: (block_size * 4) as isize,
        };
        let base = bytes.as_mut_ptr();
        let scales = (dtype == KvDtype::Int8)
            .then(|| [0, blocks * heads * block_size].map(|at| scales(at, floats.as_mut_ptr())));
        let spec = KvSpec {
            dtype,
            layout,
            num_blocks: blocks,
            num_kv_heads: heads,
            block_size,
            head_dim: dim,
        };
        // SAFETY: the strides stay inside both.
        let layer =
            unsafe { KvLayer::new(spec, array(0, base), array(size, base), scales) }.unwrap();
        let slots: Vec<i64> = (0..(blocks * block_size) as i64).rev().collect();
        let rows = |side| -> Vec<f32> {
            let slots = slots.iter().map(|&s| s as usize);
            slots
                .flat_map(|s| (0..heads * dim).map(move |i| number(side, s, i / dim, i % dim)))
                .collect()
        };
        let (k, v) = (rows(0), rows(1));
        let [keys, values] = [&k, &v].map(|x| Vectors::from_slice(x, heads, dim));
        store(&layer, &keys, &values, &slots).unwrap();
        for (i, side) in [Side::Key, Side::Value].into_iter().enumerate() {
            for slot in 0..blocks * block_size {
                for (h, d) in (0..heads * dim).map(|x| (x / dim, x % dim)) {
                    let at = i * size
                        + (slot / block_size * heads + h) * head
                        + offset(dtype, layout, side, slot % block_size, d, dim);
                    let b = |n: usize| bytes[at + n];
                    let came = match dtype {
                        KvDtype::F32 => f32::from_le_bytes([b(0), b(1), b(2), b(3)]),
                        KvDtype::F16 => f16::from_le_bytes([b(0), b(1)]).to_f32(),
                        KvDtype::Bf16 => bf16::from_le_bytes([b(0), b(1)]).to_f32(),
                        KvDtype::Int8 => f32::from(b(0) as i8),
                    };
                    let want = number(i, slot, h, d);
                    assert_eq!(came, want, "{dtype:?} {layout:?} {side:?} {slot} {h} {d}");
                }
            }
        }
        let one = if dtype == KvDtype::Int8 { 1.0 } else { 0.0 };
        assert!(floats.iter().all(|x| *x == one));
    }
}

#[test]
fn int8_rows_are_rounded_to_nearest_even_by_their_largest_element() {
    const DIM: usize = 8;
    let heads = Heads {
        query: 1,
        kv: 1,
        dim: DIM,
    };
    let row = |x: &[f32]| -> Vec<f32> { x.iter().copied().chain([0.0; DIM]).take(DIM).collect() };
    let mut rows = vec![
        // Ties, both ways and signs.
        row(&[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 125.5]),
        row(&[0.0; DIM]),
        row(&[-3e38, 3e38, 1e38, 1.0]),
        row(&[-0.0, 1e-30, -2e-30, 3e-36]),
    ];
    rows.extend((0..40).map(|i| (0..DIM).map(|d| number([9, i, d, 0, 0]) * 3.0).collect()));
    for order in [
        Order::HeadMajor,
        Order::TokenMajor,
        Order::Strided,
        Order::Tiled,
        Order::TiledStrided,
    ] {
        let cache = Cache::new(KvDtype::Int8, order, 3, 32, heads);
        let slots: Vec<i64> = (0..rows.len() as i64).map(|i| 95 - 2 * i).collect();
        let data = rows.concat();
        let vectors = Vectors::from_slice(&data, 1, DIM);
        store(&cache.layer(), &vectors, &vectors, &slots).unwrap();
        for (side, slot) in [Side::Key, Side::Value]
            .into_iter()
            .flat_map(|s| (0..96).map(move |i| (s, i)))
        {
            let came = |d| cache.layer().element(side, slot / 32, 0, slot % 32, d);
            let Some(i) = slots.iter().position(|&s| s == slot as i64) else {
                assert!(
                    (0..DIM).all(|d| came(d).is_nan()),
                    "{order:?} slot {slot} was written"
                );
                continue;
            };
            let (scale, integers) = quantized(&rows[i]);
            for d in 0..DIM {
                let want = if scale == 0.0 {
                    0.0
                } else {
                    f32::from(integers[d]) * scale
                };
                assert_eq!(came(d), want, "{order:?} {side:?} row {i} {d}");
                let error = (f64::from(came(d)) - f64::from(rows[i][d])).abs();
                assert!(
                    error <= f64::from(scale) * 0.500_02,
                    "row {i} {d}: {error:e} of {scale:e}"
                );
            }
        }
    }
}

/// What a scale cannot say: the row of an infinity or NaN is NaN, and one of subnormal numbers is off by less than one
/// that is not.
#[test]
fn int8_rows_without_a_scale() {
    let heads = Heads {
        query: 1,
        kv: 1,
        dim: 4,
    };
    let cache = Cache::new(KvDtype::Int8, Order::Tiled, 1, 16, heads);
    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    let tiny = [
        1e-45, 1e-40, 1e-38, 1.2e-38, 1e-37, 1e-36, 1.49e-36, 1.5e-36,
    ];
    let data: Vec<f32> = bad
        .iter()
        .chain(&tiny)
        .flat_map(|x| [0.25, *x, -x, 0.0])
        .collect();
    let mut data = data;
    data.chunks_exact_mut(4)
        .skip(bad.len())
        .for_each(|row| row[0] = 0.0);
    let slots: Vec<i64> = (0..(bad.len() + tiny.len()) as i64).collect();
    let vectors = Vectors::from_slice(&data, 1, 4);
    store(&cache.layer(), &vectors, &vectors, &slots).unwrap();
    for (side, (t, row)) in [Side::Key, Side::Value]
        .into_iter()
        .flat_map(|s| data.chunks_exact(4).enumerate().map(move |x| (s, x)))
    {
        for (d, x) in row.iter().enumerate() {
            let came = cache.layer().element(side, 0, 0, t, d);
            if t < bad.len() {
                assert!(came.is_nan(), "{side:?} {t} {d}: {came}");
            } else {
                assert!(
                    (came - x).abs() <= 1.5e-36,
                    "{side:?} {t} {d}: {came:e}, expected {x:e}"
                );
            }
        }
    }
}

#[test]
fn a_bad_slot_or_shape_is_refused_before_anything_is_written() {
    let cache = Cache::new(KvDtype::F32, Order::Tiled, 2, 16, HEADS);
    let data = vectors(1, 2);
    let two = Vectors::from_slice(&data, 2, 6);
    let other_heads = Vectors::from_slice(&data, 1, 6);
    for slots in [[0, 32], [0, -2], [i64::MAX, 0], [i64::MIN, 0]] {
        assert!(store(&cache.layer(), &two, &two, &slots).is_err());
    }
    assert!(store(&cache.layer(), &two, &two, &[0]).is_err());
    assert!(store(&cache.layer(), &two, &other_heads, &[0, 1]).is_err());
    assert!(cache.layer().element(Side::Key, 0, 0, 0, 0).is_nan());
}

const COUNT: usize = 6;

/// Blocks of 5 bytes, 7 bytes apart.
fn copied(pairs: &[(i32, i32)]) -> (bool, Vec<u8>) {
    let mut bytes: Vec<u8> = (0..COUNT as u8 * 7).collect();
    // SAFETY: the blocks are inside `bytes`.
    let blocks = unsafe { RawBlocks::from_raw_parts(bytes.as_mut_ptr(), COUNT, 7, 5) };
    (copy_blocks(&blocks, pairs).is_ok(), bytes)
}

#[test]
fn copies_that_are_not_one_are_refused_whole() {
    let untouched: Vec<u8> = (0..42).collect();
    for pairs in [
        &[(0, 1), (2, 1)][..],
        &[(0, 1), (0, 6)],
        &[(0, 1), (-1, 2)],
        &[(1, 1), (2, 1)],
    ] {
        assert_eq!(copied(pairs), (false, untouched.clone()), "{pairs:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Chains, cycles, swaps, copies onto oneself: as if all sources were read first.
    #[test]
    fn block_copies_are_simultaneous(
        sources in prop::collection::vec(0..COUNT, COUNT),
        destinations in Just((0..COUNT).collect::<Vec<_>>()).prop_shuffle(),
        n in 0..=COUNT,
    ) {
        let pairs: Vec<_> = sources.iter().zip(&destinations).take(n).map(|(&s, &d)| (s as i32, d as i32)).collect();
        let (accepted, bytes) = copied(&pairs);
        prop_assert!(accepted);
        for (i, byte) in bytes.iter().enumerate() {
            let (block, offset) = (i / 7, i % 7);
            let source = pairs.iter().find(|p| p.1 as usize == block && offset < 5).map_or(block, |p| p.0 as usize);
            prop_assert_eq!(usize::from(*byte), source * 7 + offset);
        }
    }
}
