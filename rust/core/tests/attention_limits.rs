//! Where kernels of this kind break: large block ids and offsets, extreme scores, head mapping, bad input.
#![allow(missing_docs)]

mod attention_support;

use attention_support::*;
use leafkv_core::attention::{
    KvArray, KvDtype, KvLayer, KvLayout, KvSpec, Options, Plan, PlanShape, Scales, Side, Vectors,
    VectorsMut, attend,
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
            store(
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
    let (slopes, sinks) = (
        [0.5, 1e4, -0.5, 0.0],
        [-1e5, f32::NEG_INFINITY, -2e5, -3e38],
    );
    let plain = Options {
        scale: 4096.0,
        ..CAUSAL
    };
    let all = Options {
        softcap: Some(3e5),
        alibi_slopes: Some(&slopes),
        sinks: Some(&sinks),
        ..plain
    };
    let sink = Options {
        sinks: Some(&[1e5, 3e38, 1e30, 9e9]),
        ..plain
    };
    for (dtype, sign) in DTYPES.into_iter().flat_map(|d| [(d, 1.0), (d, -1.0)]) {
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
            |side, _, t, h, d| {
                if side == 1 { key(t, h, d) } else { 1.0 }
            },
        );

        let query = &queries(&sequences, heads)[2 * 64..][..16];
        let products = query.iter().enumerate().map(|(d, q)| q * key(6, 0, d));
        let score = products.sum::<f32>() * plain.scale;
        assert!(score.abs() > 1e5, "{score}");

        let want = oracle(&sequences, &cache, heads, &plain);
        for isa in Isa::available() {
            let what = format!("{isa} {dtype:?} {sign}");
            let got = run(isa, &sequences, &cache, heads, 1, &plain);
            for i in 2 * 64..2 * 64 + 16 {
                // Scores of that query are far apart or equal, so its result is exact enough to compare.
                let error = (f64::from(got.out[i]) - want.out[i]).abs();
                assert!(error <= tolerance(dtype).0, "{what}: {error:e}");
            }
            for options in [&plain, &all, &sink] {
                let got = run(isa, &sequences, &cache, heads, 1, options);
                let finite = got.out.iter().chain(&got.lse).all(|x| x.is_finite());
                assert!(finite, "{what} {options:?}");
                let sums = run(isa, &sequences, &ones, heads, 1, options).out;
                let most = 1.0 + tolerance(dtype).0 as f32;
                assert!(sums.iter().all(|x| (0.0..=most).contains(x)), "{what}");
                let least = if options == &plain { 2.0 - most } else { 0.0 };
                assert!(sums.iter().all(|x| *x >= least), "{what} {sums:?}");
            }
        }
    }
}

/// Positions of keys that have no weight: the first partition, others, the last one (which is not full), several, parts of
/// them, all but one key, none but one, one. Five partitions in all.
const WEIGHTLESS: [std::ops::Range<usize>; 11] = [
    0..256,
    256..512,
    1024..1054,
    0..512,
    512..1054,
    256..1024,
    3..1040,
    0..1053,
    1..1054,
    0..1,
    700..701,
];

/// Keys of infinity, whose scores are minus infinity: whole partitions of them have no weight, wherever they are. Where a row
/// sees nothing else, it is NaN, as softmax is; and so it is with a score of infinity or NaN.
#[test]
fn keys_of_infinity() {
    let heads = Heads {
        query: 4,
        kv: 2,
        dim: 32,
    };
    // They share two partitions of blocks, so that the others are folded onto those by other items.
    let sequences = [(27, 2, 32..), (28, 1, 66..)].map(|(id, rows, own)| Sequence {
        text: Text {
            id,
            prefix: 0,
            shared: 512,
        },
        kv_len: 1054,
        rows,
        blocks: (0..32).chain(own).take(66).collect(),
    });
    // A column in which all queries of a KV head's group have one sign.
    let queries = queries(&sequences, heads);
    let columns = [0, 1].map(|h| {
        let column = |d| {
            let rows = queries.chunks(4 * 32);
            let signs = rows.flat_map(|r| [r[64 * h + d] > 0.0, r[64 * h + 32 + d] > 0.0]);
            signs.collect::<Vec<_>>()
        };
        let alike = |d: &usize| column(*d).windows(2).all(|w| w[0] == w[1]);
        let d = (0..32).find(alike).expect("a column of one sign");
        (d, if column(d)[0] { 1.0 } else { -1.0 })
    });

    // Flat ones: far away keys stay in reach of a float's precision.
    let slopes = [0.01, 0.0, 0.002, -0.001];
    let sinks = sinks(heads);
    let sink = Options {
        sinks: Some(&sinks),
        ..CAUSAL
    };
    let options = [
        CAUSAL,
        sink,
        Options {
            alibi_slopes: Some(&slopes),
            sliding_window: Some(290),
            ..CAUSAL
        },
        Options {
            softcap: Some(2.0),
            ..CAUSAL
        },
    ];
    // What the elements are, and one more bad element: its side, position and value.
    let inf = f32::INFINITY;
    let mut cases: Vec<_> = WEIGHTLESS.map(|span| (span, -inf, None)).into();
    cases.push((0..1054, -inf, None));
    cases.push((256..512, inf, None));
    cases.push((700..701, inf, None));
    for span in [0..256, 768..1054] {
        let at = span.start + 17;
        cases.extend(
            [(1, f32::NAN), (1, inf), (2, f32::NAN), (2, inf)]
                .map(|(side, x)| (span.clone(), -inf, Some((side, at, x)))),
        );
    }
    for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
        for (span, element, bad) in &cases {
            let mut cache = Cache::new(dtype, Order::Tiled, 100, 16, heads);
            for sequence in &sequences {
                cache.fill_with(sequence, |side, source, t, h, d| {
                    let (column, sign) = columns[h];
                    match bad {
                        Some((bad, at, x)) if (side, t, d) == (*bad, *at, column) => x * sign,
                        _ if side == 1 && d == column && span.contains(&t) => element * sign,
                        _ => number([side, source, t, h, d]),
                    }
                });
            }
            for options in &options {
                let want = oracle(&sequences, &cache, heads, options);
                for (isa, threads) in Isa::available().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                    let got = run(isa, &sequences, &cache, heads, threads, options);
                    let what = format!(
                        "{isa} {dtype:?}, {threads} threads, {element} in {span:?}, {bad:?}, {options:?}"
                    );
                    assert_close(&got, &want, tolerance(dtype), &what);
                }
            }
        }
        // In so many words, of rows that see nothing but minus infinity.
        let mut cache = Cache::new(dtype, Order::Tiled, 100, 16, heads);
        for sequence in &sequences {
            cache.fill_with(sequence, |side, _, _, h, d| match columns[h] {
                (column, sign) if side == 1 && d == column => -inf * sign,
                _ => 1.0,
            });
        }
        for isa in Isa::available() {
            let plain = run(isa, &sequences, &cache, heads, 1, &CAUSAL);
            assert!(plain.out.iter().all(|x| x.is_nan()), "{isa} {dtype:?}");
            assert!(plain.lse.iter().all(|x| *x == -inf), "{isa} {dtype:?}");
        }
    }
}

/// Keys whose scores are too far below for a float to say.
#[test]
fn keys_of_huge_numbers() {
    let heads = Heads {
        query: 2,
        kv: 2,
        dim: 32,
    };
    let sequences = [one(1054, 1, 0.., 16)];
    let query = queries(&sequences, heads);
    for (dtype, span) in DTYPES
        .into_iter()
        .flat_map(|d| WEIGHTLESS.map(move |span| (d, span)))
    {
        let huge = if dtype == KvDtype::F16 { 6e4 } else { 3e38 };
        let mut cache = Cache::new(dtype, Order::Tiled, 66, 16, heads);
        cache.fill_with(&sequences[0], |side, source, t, h, d| {
            if side == 1 && span.contains(&t) {
                -huge * query[h * 32 + d].signum()
            } else {
                number([side, source, t, h, d])
            }
        });
        let want = oracle(&sequences, &cache, heads, &CAUSAL);
        for (isa, threads) in Isa::available().flat_map(|isa| [(isa, 1), (isa, 3)]) {
            let got = run(isa, &sequences, &cache, heads, threads, &CAUSAL);
            let what = format!("{isa} {dtype:?}, {threads} threads, {span:?}");
            assert_close(&got, &want, tolerance(dtype), &what);
        }
    }
}

/// The largest integers that sums of quantized products can be: many equal factors, all at the limit.
#[test]
fn integer_sums_do_not_overflow() {
    for dim in [512, 516, 520, 1024, 4096] {
        let heads = Heads {
            query: 1,
            kv: 1,
            dim,
        };
        let mut cache = Cache::new(KvDtype::Int8, Order::Tiled, 16, 16, heads);
        let sequences = [one(256, 1, 0.., 16)];
        cache.fill_with(&sequences[0], |_, _, _, _, _| 1.0);
        let plan = plan(&sequences, &cache.spec(), heads, 1);
        for (isa, sign) in Isa::available().flat_map(|isa| [(isa, 1.0), (isa, -1.0)]) {
            let (mut out, mut lse) = (vec![0.0; dim], [0.0]);
            attend(
                &plan,
                isa,
                &Vectors::from_slice(&vec![sign; dim], 1, dim),
                &cache.layer(),
                &mut VectorsMut::from_slice(&mut out, 1, dim),
                Some(&mut lse),
                &Options::new(1.0),
            )
            .unwrap();
            let want = sign * dim as f32 + 256_f32.ln();
            assert!(
                (lse[0] - want).abs() <= 1e-6 * want.abs(),
                "{isa} {dim}: {lse:?}"
            );
            assert!(out.iter().all(|x| (x - 1.0).abs() <= 1e-6), "{isa} {dim}");
        }
    }
}

/// Nothing to see: zero, and the logarithm of no sum; with sinks, of theirs.
#[test]
fn rows_without_keys() {
    let heads = Heads {
        query: 3,
        kv: 1,
        dim: 8,
    };
    let sequences = [one(0, 2, 0.., 16), one(9, 12, 0.., 16)];
    let sinks = [0.5, f32::NEG_INFINITY, -300.0];
    for (dtype, isa) in DTYPES
        .into_iter()
        .flat_map(|d| Isa::available().map(move |i| (d, i)))
    {
        let mut cache = Cache::new(dtype, Order::Tiled, 1, 16, heads);
        cache.fill(&sequences[1]);
        let open = Options {
            causal: false,
            ..CAUSAL
        };
        let with_sinks = Options {
            sinks: Some(&sinks),
            ..open
        };
        let none = [f32::NEG_INFINITY; 3];
        for (options, lse) in [(open, none), (with_sinks, sinks)] {
            let got = run(isa, &sequences, &cache, heads, 1, &options);
            assert!(
                got.out[..2 * 24].iter().all(|x| x.to_bits() == 0),
                "{isa} {dtype:?}"
            );
            assert_eq!(got.lse[..6], [lse, lse].concat(), "{isa} {dtype:?}");
            assert!(
                got.lse[6..].iter().all(|x| x.is_finite()),
                "{isa} {dtype:?}"
            );
        }
    }
}

/// A NaN or infinity in a query shows in its row and head, and no other.
#[test]
fn a_bad_query_shows_in_its_row_alone() {
    let heads = Heads {
        query: 4,
        kv: 2,
        dim: 24,
    };
    let sequences = [one(30, 5, 0.., 16)];
    for (dtype, isa) in DTYPES
        .into_iter()
        .flat_map(|d| Isa::available().map(move |i| (d, i)))
    {
        let mut cache = Cache::new(dtype, Order::Tiled, 2, 16, heads);
        cache.fill(&sequences[0]);
        let plan = plan(&sequences, &cache.spec(), heads, 1);
        let plain = run(isa, &sequences, &cache, heads, 1, &CAUSAL).out;
        for bad in [f32::NAN, f32::INFINITY] {
            let mut query = queries(&sequences, heads);
            query[(2 * 4 + 1) * 24 + 7] = bad;
            let mut out = vec![0.0; query.len()];
            attend(
                &plan,
                isa,
                &Vectors::from_slice(&query, 4, 24),
                &cache.layer(),
                &mut VectorsMut::from_slice(&mut out, 4, 24),
                None,
                &CAUSAL,
            )
            .unwrap();
            for (i, (got, want)) in out.chunks(24).zip(plain.chunks(24)).enumerate() {
                if i == 2 * 4 + 1 {
                    assert!(got.iter().all(|x| x.is_nan()), "{isa} {dtype:?} {bad}");
                } else {
                    assert_eq!(got, want, "{isa} {dtype:?} {bad}");
                }
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
    for softcap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let options = Options {
            softcap: Some(softcap),
            ..CAUSAL
        };
        refused(call(&good, &query, 4, 2, &options), "softcap");
    }
    for values in [
        &[0.5; 3][..],
        &[0.5; 5],
        &[],
        &[0.5, f32::NAN, 0.5, 0.5],
        &[0.5, 0.5, 0.5, f32::INFINITY],
    ] {
        let slopes = Options {
            alibi_slopes: Some(values),
            ..CAUSAL
        };
        let sinks = Options {
            sinks: Some(values),
            ..CAUSAL
        };
        refused(call(&good, &query, 4, 2, &slopes), "alibi_slopes");
        refused(call(&good, &query, 4, 2, &sinks), "sinks");
        refused(good.is_brief(&sinks), "sinks");
    }
    let minus_infinity = Options {
        alibi_slopes: Some(&[f32::NEG_INFINITY; 4]),
        ..CAUSAL
    };
    refused(call(&good, &query, 4, 2, &minus_infinity), "alibi_slopes");
    for n in [0, 7, 9] {
        let mut out = vec![7.0; 64];
        let mut lse = vec![7.0; n];
        let result = attend(
            &good,
            Isa::current().unwrap(),
            &Vectors::from_slice(&query, 4, 8),
            &cache.layer(),
            &mut VectorsMut::from_slice(&mut out, 4, 8),
            Some(&mut lse),
            &CAUSAL,
        );
        refused(result, "lse");
        assert!(out.iter().chain(&lse).all(|&x| x == 7.0));
    }
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
fn layers_that_cannot_be_are_refused() {
    let spec = |dtype, layout, block_size, head_dim| KvSpec {
        dtype,
        layout,
        num_blocks: 1,
        num_kv_heads: 1,
        block_size,
        head_dim,
    };
    let array = KvArray {
        base: std::ptr::null_mut(),
        block_stride: 0,
        head_stride: 0,
        token_stride: 0,
    };
    let scales = Scales {
        base: std::ptr::null_mut(),
        block_stride: 0,
        head_stride: 0,
    };
    // SAFETY: nobody uses the layers.
    let new = |spec: KvSpec, scales| unsafe { KvLayer::new(spec, array, array, scales) };
    use KvDtype::*;
    use KvLayout::*;
    let both = Some([scales; 2]);
    for (dtype, block_size, dim, scales) in [
        (F32, 16, 7, None),
        (F16, 48, 7, None),
        (Bf16, 16, 6, None),
        (Int8, 16, 4, both),
    ] {
        assert!(new(spec(dtype, Tiled, block_size, dim), scales).is_ok());
        assert!(new(spec(dtype, Rows, 5, 7), scales).is_ok());
        for bad in [
            spec(dtype, Tiled, 8, dim),
            spec(dtype, Tiled, 24, dim),
            spec(dtype, Tiled, 16, 0),
            spec(dtype, Rows, 0, dim),
        ] {
            refused(new(bad, scales), "key_cache");
        }
        // Scales where there are none, and none where they are needed.
        let other = if scales.is_none() { both } else { None };
        refused(new(spec(dtype, Tiled, 16, dim), other), "k_scale");
    }
    for (dtype, dim, scales) in [(Bf16, 7, None), (Int8, 6, both), (Int8, 7, both)] {
        refused(new(spec(dtype, Tiled, 16, dim), scales), "key_cache");
    }
}
