//! Where kernels of this kind break: large block ids and offsets, extreme scores, head mapping, bad input.
#![allow(missing_docs)]

mod attention_support;

use attention_support::*;
use leafkv_core::attention::{
    KvArray, KvDtype, KvLayer, KvLayout, KvSpec, Options, Plan, PlanShape, Side, Vectors,
    VectorsMut, attend, write_kv,
};
use leafkv_core::{Error, Isa};

fn one(
    kv_len: usize,
    rows: usize,
    blocks: impl Iterator<Item = i32>,
    block_size: usize,
) -> Sequence {
    Sequence {
        text: Text::own(0),
        kv_len,
        rows,
        blocks: blocks.take(kv_len.div_ceil(block_size)).collect(),
    }
}

#[test]
fn block_ids_above_16_bits() {
    let heads = Heads {
        query: 2,
        kv: 1,
        dim: 8,
    };
    for (order, block_size, kv_len) in [(Order::HeadMajor, 1, 7), (Order::Tiled, 16, 100)] {
        let outs = [0, 65_534].map(|first| {
            let sequence = one(kv_len, 2, first.., block_size);
            let mut cache = Cache::new(KvDtype::F32, order, 70_000, block_size, heads);
            cache.fill(&sequence);
            run(
                Isa::current().unwrap(),
                &[sequence],
                &cache,
                heads,
                1,
                &CAUSAL,
            )
        });
        assert_eq!(outs[0], outs[1]);
    }
}

/// A cache whose blocks are 1 GiB apart; only the pages of a few tokens are ever touched.
#[test]
fn offsets_above_32_bits() {
    let heads = Heads {
        query: 1,
        kv: 1,
        dim: 16,
    };
    let mut memory = vec![0_u8; (5 << 30) + 4096];
    let spec = KvSpec {
        dtype: KvDtype::F32,
        layout: KvLayout::Tiled,
        num_blocks: 6,
        num_kv_heads: 1,
        block_size: 16,
        head_dim: 16,
    };
    let key = KvArray {
        base: memory.as_mut_ptr(),
        block_stride: 1 << 30,
        head_stride: 0,
        token_stride: 0,
    };
    let value = KvArray {
        base: key.base.wrapping_add(1024),
        ..key
    };
    // SAFETY: five blocks and 2 KiB fit the memory.
    let layer = unsafe { KvLayer::new(spec, key, value, None) }.unwrap();
    let sequence = one(80, 1, [5, 0, 4, 3, 1].into_iter(), 16);
    let mut near = Cache::new(KvDtype::F32, Order::Tiled, 6, 16, heads);
    near.fill(&sequence);
    for &block in &sequence.blocks {
        for token in 0..16 {
            let row = |side| -> Vec<f32> {
                (0..16)
                    .map(|d| near.layer().element(side, block as usize, 0, token, d))
                    .collect()
            };
            let (k, v) = (row(Side::Key), row(Side::Value));
            let slot = i64::from(block) * 16 + token as i64;
            write_kv(
                &layer,
                &Vectors::from_slice(&k, 1, 16),
                &Vectors::from_slice(&v, 1, 16),
                &[slot],
            )
            .unwrap();
        }
    }
    let sequences = [sequence];
    let query = queries(&sequences, heads);
    let mut out = vec![f32::NAN; query.len()];
    attend(
        &plan(&sequences, &spec, heads, 1),
        Isa::current().unwrap(),
        &Vectors::from_slice(&query, 1, 16),
        &layer,
        &mut VectorsMut::from_slice(&mut out, 1, 16),
        None,
        &CAUSAL,
    )
    .unwrap();
    let isa = Isa::current().unwrap();
    assert_eq!(out, run(isa, &sequences, &near, heads, 1, &CAUSAL).out);
}

/// Scores of 1e5 either way, weights that vanish: results stay finite, right, and a mean of the values.
#[test]
fn extreme_scores() {
    let heads = Heads {
        query: 4,
        kv: 2,
        dim: 16,
    };
    let sequences = [one(600, 3, 0.., 16)];
    let options = Options {
        scale: 4096.0,
        ..CAUSAL
    };
    for dtype in DTYPES {
        for sign in [1.0, -1.0] {
            // Keys are multiples of the last row's query in the KV head's first query head.
            let key = |t: usize, h, d| sign * (1 + t % 7) as f32 * number([3, 0, 599, h * 2, d]);
            let mut cache = Cache::new(dtype, Order::Tiled, 38, 16, heads);
            cache.fill_with(&sequences[0], |side, source, t, h, d| match side {
                1 => key(t, h, d),
                _ => number([side, source, t, h, d]),
            });
            let mut ones = Cache::new(dtype, Order::Tiled, 38, 16, heads);
            ones.fill_with(
                &sequences[0],
                |side, _, t, h, d| if side == 1 { key(t, h, d) } else { 1.0 },
            );

            let query = &queries(&sequences, heads)[2 * 64..][..16];
            let score: f32 = query
                .iter()
                .enumerate()
                .map(|(d, q)| q * key(6, 0, d) * 4096.0)
                .sum();
            assert!(score.abs() > 1e5, "{score}");

            let want = oracle(&sequences, &cache, heads, &options);
            for isa in Isa::available() {
                let out = run(isa, &sequences, &cache, heads, 1, &options);
                assert!(out.iter().all(|x| x.is_finite()), "{isa} {dtype:?}");
                // Scores of that query are far apart or equal, so its result is exact enough to compare.
                let (got, want) = (&out[2 * 64..][..16], &want[2 * 64..][..16]);
                assert_close(got, want, tolerance(dtype, 16), &format!("{isa} {dtype:?}"));
                let sums = run(isa, &sequences, &ones, heads, 1, &options);
                assert_close(
                    &sums,
                    &vec![1.0; sums.len()],
                    tolerance(dtype, 16),
                    "sums of weights",
                );
            }
        }
    }
}

#[test]
fn query_heads_read_their_own_kv_head() {
    for (query, kv) in [
        (12, 12),
        (32, 32),
        (32, 8),
        (28, 4),
        (9, 3),
        (8, 1),
        (32, 2),
    ] {
        let heads = Heads { query, kv, dim: 8 };
        let sequence = one(40, 2, 0.., 16);
        let mut cache = Cache::new(KvDtype::F32, Order::Tiled, 3, 16, heads);
        cache.fill_with(&sequence, |_, _, _, h, _| h as f32);
        let out = run(
            Isa::current().unwrap(),
            &[sequence],
            &cache,
            heads,
            1,
            &CAUSAL,
        );
        for (i, x) in out.out.iter().enumerate() {
            let head = i / 8 % query;
            let want = (head / (query / kv)) as f32;
            assert!(
                (x - want).abs() <= 4e-6 * want,
                "{query}/{kv}: head {head} is {x}"
            );
        }
    }
}

fn shape() -> PlanShape {
    PlanShape {
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 8,
        block_size: 16,
        num_blocks: 10,
    }
}

fn refused<T>(result: Result<T, Error>, argument: &str) {
    match result {
        Err(Error::InvalidArgument {
            argument: named, ..
        }) => assert_eq!(named, argument),
        Err(other) => panic!("{argument}: {other}"),
        Ok(_) => panic!("{argument} was accepted"),
    }
}

#[test]
fn malformed_plans_are_refused_by_argument() {
    let table = |ids: [i32; 3]| move |_: usize, i: usize| ids[i];
    let new = |shape, ids, starts: &[i32], lens: &[i32]| {
        Plan::new(shape, 3, table(ids), starts, lens, Some(1))
    };
    assert!(new(shape(), [0, 9, 5], &[0, 2], &[48]).is_ok());
    // Entries beyond a sequence's blocks are nobody's business.
    assert!(new(shape(), [0, -1, 99], &[0, 2], &[16]).is_ok());

    refused(new(shape(), [0, 10, 5], &[0, 2], &[48]), "block_tables");
    refused(new(shape(), [0, -1, 5], &[0, 2], &[17]), "block_tables");
    refused(new(shape(), [0, 1, 2], &[0, 2], &[49]), "block_tables");
    refused(new(shape(), [0, 1, 2], &[1, 2], &[48]), "query_starts");
    refused(
        new(shape(), [0, 1, 2], &[0, 3, 2], &[48, 48]),
        "query_starts",
    );
    refused(new(shape(), [0, 1, 2], &[0, 2], &[48, 48]), "query_starts");
    refused(new(shape(), [0, 1, 2], &[0, 2], &[-1]), "kv_lens");
    refused(
        new(
            PlanShape {
                num_heads: 5,
                ..shape()
            },
            [0, 1, 2],
            &[0, 2],
            &[48],
        ),
        "num_heads",
    );
    refused(
        new(
            PlanShape {
                head_dim: 0,
                ..shape()
            },
            [0, 1, 2],
            &[0, 2],
            &[48],
        ),
        "head_dim",
    );
    refused(
        Plan::new(shape(), 3, table([0; 3]), &[0, 1], &[5], Some(0)),
        "num_threads",
    );
}

#[test]
fn malformed_calls_are_refused_and_leave_the_output_alone() {
    let heads = Heads {
        query: 4,
        kv: 2,
        dim: 8,
    };
    let sequence = one(20, 2, 0.., 16);
    let mut cache = Cache::new(KvDtype::F32, Order::Tiled, 10, 16, heads);
    cache.fill(&sequence);
    let good = plan(std::slice::from_ref(&sequence), &cache.spec(), heads, 1);
    let query = queries(&[sequence], heads);
    let call = |plan: &Plan, query: &[f32], heads: usize, out_rows: usize, options: &Options| {
        let mut out = vec![7.0; out_rows * 32];
        let result = attend(
            plan,
            Isa::current().unwrap(),
            &Vectors::from_slice(query, heads, 8),
            &cache.layer(),
            &mut VectorsMut::from_slice(&mut out, 4, 8),
            None,
            options,
        );
        if result.is_err() {
            assert!(out.iter().all(|&x| x == 7.0));
        }
        result
    };
    call(&good, &query, 4, 2, &CAUSAL).unwrap();
    refused(call(&good, &query, 2, 2, &CAUSAL), "query");
    refused(call(&good, &query[..32], 4, 2, &CAUSAL), "query");
    refused(call(&good, &query, 4, 3, &CAUSAL), "out");
    refused(
        call(
            &good,
            &query,
            4,
            2,
            &Options {
                scale: f32::NAN,
                ..CAUSAL
            },
        ),
        "scale",
    );
    refused(
        call(
            &good,
            &query,
            4,
            2,
            &Options {
                sliding_window: Some(0),
                ..CAUSAL
            },
        ),
        "sliding_window",
    );
    let open_window = Options {
        causal: false,
        sliding_window: Some(3),
        ..CAUSAL
    };
    refused(call(&good, &query, 4, 2, &open_window), "sliding_window");
    let other = Plan::new(
        PlanShape {
            num_blocks: 11,
            ..shape()
        },
        2,
        |_, i| i as i32,
        &[0, 2],
        &[20],
        Some(1),
    );
    refused(call(&other.unwrap(), &query, 4, 2, &CAUSAL), "key_cache");

    // With `causal`, the first of three rows over two keys would see nothing; without, all see both.
    let long = Plan::new(shape(), 2, |_, i| i as i32, &[0, 3], &[2], Some(1)).unwrap();
    refused(call(&long, &[1.0; 96], 4, 3, &CAUSAL), "kv_lens");
    call(
        &long,
        &[1.0; 96],
        4,
        3,
        &Options {
            causal: false,
            ..CAUSAL
        },
    )
    .unwrap();
}

#[test]
fn the_tiled_layout_refuses_what_it_cannot_hold() {
    let heads = Heads {
        query: 1,
        kv: 1,
        dim: 7,
    };
    let spec = |dtype, block_size| KvSpec {
        block_size,
        ..Cache::new(dtype, Order::Tiled, 1, 16, heads).spec()
    };
    let array = KvArray {
        base: std::ptr::null_mut(),
        block_stride: 0,
        head_stride: 0,
        token_stride: 0,
    };
    // SAFETY: nobody uses the layers.
    unsafe {
        assert!(KvLayer::new(spec(KvDtype::F16, 16), array, array, None).is_ok());
        refused(
            KvLayer::new(spec(KvDtype::F16, 8), array, array, None),
            "key_cache",
        );
        refused(
            KvLayer::new(spec(KvDtype::Bf16, 16), array, array, None),
            "key_cache",
        );
    }
}
