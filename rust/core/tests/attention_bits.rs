//! The invariant: a row's bits depend on its query, the scale and its visible keys and values alone.
#![allow(missing_docs)]

mod attention_support;

use attention_support::*;
use leafkv_core::Isa;
use leafkv_core::attention::{KvDtype, Options};
use proptest::prelude::*;

/// A text in a cache of its own: tiled blocks of 16, in order.
struct Alone {
    cache: Cache,
    text: Text,
    heads: Heads,
}

impl Alone {
    fn new(dtype: KvDtype, heads: Heads, sequence: &Sequence) -> Self {
        let count = sequence.kv_len.div_ceil(16);
        let blocks = (0..count as i32).collect();
        let mut cache = Cache::new(dtype, Order::Tiled, count, 16, heads);
        cache.fill(&Sequence {
            blocks,
            ..sequence.clone()
        });
        Self {
            cache,
            text: sequence.text,
            heads,
        }
    }

    /// The row of one position, by itself, on one thread.
    fn row(&self, isa: Isa, kv_len: usize, options: &Options<'_>) -> Rows {
        let sequence = Sequence {
            text: self.text,
            kv_len,
            rows: 1,
            blocks: (0..kv_len.div_ceil(16) as i32).collect(),
        };
        run(isa, &[sequence], &self.cache, self.heads, 1, options)
    }
}

/// Some arrangement of rows in a batch, a cache and threads.
#[derive(Debug, Clone)]
struct Arrangement {
    isa: usize,
    dtype: KvDtype,
    heads: Heads,
    /// Prefix, shared tokens, further tokens, new rows.
    sequences: Vec<(usize, usize, usize, usize)>,
    order: Order,
    block_size: usize,
    threads: usize,
    poison: u8,
    window: Option<usize>,
    softcap: Option<f32>,
    alibi: bool,
    sinks: bool,
    seed: usize,
}

fn arrangements() -> impl Strategy<Value = Arrangement> {
    let heads = prop_oneof![
        Just((3, 1, 64)),
        Just((8, 2, 48)),
        Just((4, 4, 32)),
        Just((14, 2, 16)),
        Just((1, 1, 128)),
        Just((6, 3, 20)),
    ];
    let shared = prop_oneof![Just(0), Just(256), Just(300), Just(512), 1..600_usize];
    let own = prop_oneof![Just(1), Just(256), 1..300_usize];
    let rows = prop_oneof![4 => 1..4_usize, 2 => 1..24_usize, 1 => 1..70_usize];
    let cache = prop_oneof![
        (
            Just(Order::Tiled),
            prop_oneof![Just(16), Just(32), Just(48), Just(256)]
        ),
        (
            Just(Order::HeadMajor),
            prop_oneof![Just(1), Just(3), Just(16), Just(100)]
        ),
        (
            Just(Order::TokenMajor),
            prop_oneof![Just(5), Just(8), Just(16), Just(64)]
        ),
        (Just(Order::Strided), prop_oneof![Just(7), Just(16)]),
        (Just(Order::TiledStrided), prop_oneof![Just(16), Just(64)]),
    ];
    let options = (
        prop_oneof![3 => Just(None), 1 => (1..600_usize).prop_map(Some)],
        prop_oneof![2 => Just(None), 1 => Just(Some(1.5)), 1 => Just(Some(30.0))],
        any::<bool>(),
        any::<bool>(),
    );
    (
        (0..Isa::available().count(), 0..4_usize, heads),
        prop::collection::vec((0..2_usize, shared, own, rows), 1..6),
        cache,
        1..6_usize,
        prop_oneof![2 => Just(POISON), 1 => Just(0), 1 => Just(0x7b)],
        options,
        any::<u8>(),
    )
        .prop_map(
            |((isa, dtype, (query, kv, dim)), sequences, cache, threads, poison, options, seed)| {
                let (window, softcap, alibi, sinks) = options;
                Arrangement {
                    isa,
                    dtype: DTYPES[dtype],
                    heads: Heads { query, kv, dim },
                    sequences,
                    order: cache.0,
                    block_size: cache.1,
                    threads,
                    poison,
                    window,
                    softcap,
                    alibi,
                    sinks,
                    seed: seed.into(),
                }
            },
        )
}

/// The sequences of an arrangement; those of one prefix share its whole blocks.
fn place(a: &Arrangement) -> (Vec<Sequence>, usize) {
    let longest = |prefix| {
        let same = a.sequences.iter().filter(|s| s.0 == prefix);
        same.map(|s| s.1).max().unwrap_or(0) / a.block_size
    };
    let count = a
        .sequences
        .iter()
        .map(|s| (s.1 + s.2).div_ceil(a.block_size))
        .sum::<usize>()
        + longest(0)
        + longest(1);
    let mut blocks = Blocks::new(count, a.seed);
    let prefixes = [0, 1].map(|prefix| blocks.take(longest(prefix)));
    let sequences = a
        .sequences
        .iter()
        .enumerate()
        .map(|(id, &(prefix, shared, own, rows))| {
            let kv_len = shared + own;
            let mut table = prefixes[prefix][..shared / a.block_size].to_vec();
            table.extend(blocks.take(kv_len.div_ceil(a.block_size) - table.len()));
            Sequence {
                text: Text { id, prefix, shared },
                kv_len,
                rows: rows.min(kv_len),
                blocks: table,
            }
        });
    (sequences.collect(), count)
}

proptest! {
    // Fewer than usual; PROPTEST_CASES scales them.
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases * 3 / 8, max_shrink_iters: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_row_alone_equals_the_same_row_in_any_arrangement(a in arrangements()) {
        let isa = Isa::available().nth(a.isa).unwrap();
        let (slopes, sinks) = (slopes(a.heads), sinks(a.heads));
        let options = Options {
            sliding_window: a.window,
            softcap: a.softcap,
            alibi_slopes: a.alibi.then_some(&slopes),
            sinks: a.sinks.then_some(&sinks),
            ..CAUSAL
        };
        let (sequences, count) = place(&a);
        let mut cache = Cache::new(a.dtype, a.order, count, a.block_size, a.heads);
        cache.poison(a.poison);
        sequences.iter().for_each(|s| cache.fill(s));
        let out = run(isa, &sequences, &cache, a.heads, a.threads, &options);

        let mut row = 0;
        for s in &sequences {
            let alone = Alone::new(a.dtype, a.heads, s);
            for kv_len in s.kv_len - s.rows + 1..=s.kv_len {
                let want = alone.row(isa, kv_len, &options);
                prop_assert!(!want.out.iter().chain(&want.lse).any(|x| x.is_nan()));
                let (got, want) = (out.bits(row..row + 1, a.heads), want.bits(0..1, a.heads));
                prop_assert_eq!(got, want, "{:?} {:?}, {} keys", isa, s.text, kv_len);
                row += 1;
            }
        }
    }
}

/// Enough work for every thread to take part, and a prefix that all share, which the first barely outlives.
#[test]
fn threads_and_layouts_change_nothing() {
    let heads = Heads {
        query: 12,
        kv: 4,
        dim: 64,
    };
    let sequences: Vec<_> = (0..12)
        .map(|id| {
            let kv_len = 770 + 90 * id;
            Sequence {
                text: Text {
                    id,
                    prefix: 0,
                    shared: 768,
                },
                kv_len,
                rows: if id % 5 == 4 { 200 } else { 1 + id % 2 },
                blocks: (0..48)
                    .chain(48 + 100 * id as i32..)
                    .take(kv_len.div_ceil(16))
                    .collect(),
            }
        })
        .collect();
    let (slopes, sinks) = (slopes(heads), sinks(heads));
    let all = Options {
        softcap: Some(5.0),
        alibi_slopes: Some(&slopes),
        sinks: Some(&sinks),
        ..CAUSAL
    };
    for dtype in DTYPES {
        let caches = [Order::Tiled, Order::HeadMajor].map(|order| {
            let mut cache = Cache::new(dtype, order, 1300, 16, heads);
            sequences.iter().for_each(|s| cache.fill(s));
            cache
        });
        for (isa, options) in Isa::available().flat_map(|isa| [(isa, &CAUSAL), (isa, &all)]) {
            let want = run(isa, &sequences, &caches[0], heads, 1, options);
            let rows = 0..want.lse.len() / heads.query;
            for (layout, threads) in [(0, 2), (0, 3), (0, 8), (1, 1), (1, 3)] {
                let out = run(isa, &sequences, &caches[layout], heads, threads, options);
                let same = out.bits(rows.clone(), heads) == want.bits(rows.clone(), heads);
                assert!(
                    same,
                    "{isa} {dtype:?}, {threads} threads, {:?}",
                    LAYOUTS[1 - layout]
                );
            }
        }
    }
}

/// Tiles of rows are packed when the kernel comes to them, in as few places as it reads at a time: none is taken too soon,
/// wherever in a tile the vectors of tokens begin.
#[test]
fn rows_equal_tiles_wherever_a_window_begins() {
    for group in 1..=4 {
        let heads = Heads {
            query: group,
            kv: 1,
            dim: 16,
        };
        let sequence = [Sequence {
            text: Text::own(0),
            kv_len: 250,
            rows: 1,
            blocks: (0..16).collect(),
        }];
        for dtype in DTYPES {
            let caches = [Order::Tiled, Order::HeadMajor].map(|order| {
                let mut cache = Cache::new(dtype, order, 16, 16, heads);
                cache.fill(&sequence[0]);
                cache
            });
            for (isa, window) in
                Isa::available().flat_map(|isa| (100..116).map(move |window| (isa, window)))
            {
                let options = Options {
                    sliding_window: Some(window),
                    ..CAUSAL
                };
                let [tiled, rows] = caches
                    .each_ref()
                    .map(|cache| run(isa, &sequence, cache, heads, 1, &options).bits(0..1, heads));
                assert_eq!(rows, tiled, "{isa} {dtype:?}, {group} rows, {window}");
            }
        }
    }
}

/// A visible NaN or infinity reaches the rows that see it, and no other.
#[test]
fn a_visible_nan_shows_in_its_rows_alone() {
    let heads = Heads {
        query: 2,
        kv: 1,
        dim: 16,
    };
    let sequences: Vec<_> = (0..2)
        .map(|id| Sequence {
            text: Text::own(id),
            kv_len: 40,
            rows: 10,
            blocks: (3 * id as i32..).take(3).collect(),
        })
        .collect();
    let cases = DTYPES.map(|dtype| [(dtype, f32::NAN), (dtype, f32::INFINITY)]);
    for ((dtype, bad), side) in cases.concat().into_iter().flat_map(|c| [(c, 1), (c, 2)]) {
        let mut cache = Cache::new(dtype, Order::Tiled, 6, 16, heads);
        cache.fill(&sequences[0]);
        cache.fill(&sequences[1]);
        let plain: Vec<_> = Isa::available()
            .map(|isa| run(isa, &sequences, &cache, heads, 1, &CAUSAL))
            .collect();
        // One element of one token.
        cache.fill_with(&sequences[0], |s, source, t, h, d| {
            if (s, t, d) == (side, 35, 3) {
                bad
            } else {
                number([s, source, t, h, d])
            }
        });
        for (isa, plain) in Isa::available().zip(plain) {
            let out = run(isa, &sequences, &cache, heads, 1, &CAUSAL);
            for row in 0..20 {
                // Row 5 of the first sequence is position 35.
                if !(5..10).contains(&row) {
                    let (got, want) = (
                        out.bits(row..row + 1, heads),
                        plain.bits(row..row + 1, heads),
                    );
                    assert_eq!(got, want, "{isa} {dtype:?} row {row}");
                    continue;
                }
                // A bad value shows in its dimension, and of a quantized token in all. A bad key shows in all; an infinite
                // one may also be a score that leaves no weight.
                let alone = side == 2 && dtype != KvDtype::Int8;
                let certain = side == 2 || bad.is_nan() || dtype == KvDtype::Int8;
                for (i, x) in out.out[row * 32..][..32].iter().enumerate() {
                    let what = format!("{isa} {dtype:?} side {side}, {bad}, row {row}: {x}");
                    if alone && i % 16 != 3 {
                        assert_eq!(*x, plain.out[row * 32 + i], "{what}");
                    } else if certain {
                        assert!(!x.is_finite(), "{what}");
                    }
                }
            }
        }
    }
}
