//! Filling the cache: slots, rounding, block copies.
#![allow(missing_docs)]

mod attention_support;

use attention_support::*;
use half::{bf16, f16};
use leafkv_core::attention::{Blocks as RawBlocks, KvDtype, Side, Vectors, copy_blocks, write_kv};
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
            write_kv(&cache.layer(), &keys, &values, &slots).unwrap();
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

#[test]
fn a_bad_slot_or_shape_is_refused_before_anything_is_written() {
    let cache = Cache::new(KvDtype::F32, Order::Tiled, 2, 16, HEADS);
    let data = vectors(1, 2);
    let two = Vectors::from_slice(&data, 2, 6);
    let other_heads = Vectors::from_slice(&data, 1, 6);
    for slots in [[0, 32], [0, -2], [i64::MAX, 0], [i64::MIN, 0]] {
        assert!(write_kv(&cache.layer(), &two, &two, &slots).is_err());
    }
    assert!(write_kv(&cache.layer(), &two, &two, &[0]).is_err());
    assert!(write_kv(&cache.layer(), &two, &other_heads, &[0, 1]).is_err());
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
