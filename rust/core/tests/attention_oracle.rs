//! Attention against its definition: every instruction set of this CPU, every dtype, every layout, every option.
#![allow(missing_docs)]

mod attention_support;

use attention_support::*;
use leafkv_core::Isa;
use leafkv_core::attention::{KvDtype, KvLayout, Options};

/// Whether a tiled cache can hold it.
fn tiles(dtype: KvDtype, block_size: usize, dim: usize) -> bool {
    let step = match dtype {
        KvDtype::F32 | KvDtype::F16 => 1,
        KvDtype::Bf16 => 2,
        KvDtype::Int8 => 4,
    };
    block_size.is_multiple_of(16) && dim.is_multiple_of(step)
}

/// Sequences of `(KV tokens, new rows)` in each of `caches`, orders and block sizes, under every dtype.
fn check(
    caches: &[(Order, usize)],
    heads: Heads,
    lens: &[(usize, usize)],
    options: &[Options<'_>],
) {
    for dtype in DTYPES {
        let mut wants = vec![];
        for &(order, block_size) in caches {
            if order.layout() == KvLayout::Tiled && !tiles(dtype, block_size, heads.dim) {
                continue;
            }
            let count = lens.iter().map(|l| l.0.div_ceil(block_size)).sum::<usize>() + 3;
            let mut blocks = Blocks::new(count, heads.dim);
            let sequence = |(id, &(kv_len, rows)): (usize, &(usize, usize))| Sequence {
                text: Text::own(id),
                kv_len,
                rows,
                blocks: blocks.take(kv_len.div_ceil(block_size)),
            };
            let sequences: Vec<_> = lens.iter().enumerate().map(sequence).collect();
            let mut cache = Cache::new(dtype, order, count, block_size, heads);
            sequences.iter().for_each(|s| cache.fill(s));
            // The oracle is slow, and caches of the same numbers have the same result.
            if wants.is_empty() {
                let want = |options| oracle(&sequences, &cache, heads, options);
                wants = options.iter().map(want).collect();
            }
            for (isa, (options, want)) in
                Isa::available().flat_map(|isa| options.iter().zip(&wants).map(move |x| (isa, x)))
            {
                let what = format!(
                    "{isa} {dtype:?} {order:?}, blocks of {block_size}, {heads:?} {options:?}"
                );
                let out = run(isa, &sequences, &cache, heads, 2, options);
                assert_close(&out, want, tolerance(dtype), &what);
            }
        }
    }
}

#[test]
fn every_head_dimension() {
    for dim in [
        1, 2, 8, 17, 32, 46, 64, 72, 80, 96, 112, 128, 144, 192, 256, 512,
    ] {
        let heads = Heads {
            query: 4,
            kv: 2,
            dim,
        };
        let caches = [(Order::HeadMajor, 5), (Order::Tiled, 16)];
        let options = Options::new((dim as f32).sqrt().recip());
        check(&caches, heads, &[(37, 1), (300, 6)], &[options]);
    }
}

#[test]
fn every_group_of_query_heads() {
    for (query, kv) in [(1, 1), (12, 12), (32, 8), (28, 4), (9, 3), (8, 1), (32, 2)] {
        let heads = Heads { query, kv, dim: 16 };
        let caches = [(Order::Tiled, 32), (Order::TokenMajor, 32)];
        check(&caches, heads, &[(40, 1), (70, 9), (290, 1)], &[CAUSAL]);
    }
}

/// Orders and block sizes, and lengths around tiles, partitions and blocks.
#[test]
fn every_order_block_size_and_length_around_a_boundary() {
    let heads = Heads {
        query: 3,
        kv: 1,
        dim: 20,
    };
    let mut caches = vec![(Order::HeadMajor, 3)];
    for block_size in [1, 4, 8, 16, 32, 64, 128, 256] {
        let rows = [Order::HeadMajor, Order::TokenMajor, Order::Strided];
        let tiled = [Order::Tiled, Order::TiledStrided];
        caches.extend(rows.into_iter().chain(tiled).map(|o| (o, block_size)));
    }
    let lens: Vec<_> = [1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 511, 512, 513]
        .iter()
        .flat_map(|&kv| [(kv, 1), (kv, kv.min(18))])
        .collect();
    check(&caches, heads, &lens, &[CAUSAL]);
}

/// Heads side by side, apart, and in another order than blocks.
#[test]
fn every_order_of_heads() {
    let heads = Heads {
        query: 6,
        kv: 3,
        dim: 24,
    };
    let orders = [
        Order::HeadMajor,
        Order::TokenMajor,
        Order::Strided,
        Order::Tiled,
        Order::TiledStrided,
    ];
    check(
        &orders.map(|o| (o, 32)),
        heads,
        &[(1, 1), (300, 4), (64, 64)],
        &[CAUSAL],
    );
}

/// Masks, and the options one by one and together.
#[test]
fn every_option() {
    let heads = Heads {
        query: 10,
        kv: 2,
        dim: 24,
    };
    let lens = [(1, 1), (300, 40), (520, 3), (64, 64), (17, 0), (0, 0)];
    let (slopes, sinks) = (slopes(heads), sinks(heads));
    let windows = [1, 2, 17, 255, 256, 300, 5000].map(|window| Options {
        sliding_window: Some(window),
        ..CAUSAL
    });
    let open = Options {
        causal: false,
        ..CAUSAL
    };
    let softcap = |softcap| Options {
        softcap: Some(softcap),
        ..CAUSAL
    };
    let alibi = Options {
        alibi_slopes: Some(&slopes),
        ..CAUSAL
    };
    let sink = Options {
        sinks: Some(&sinks),
        ..CAUSAL
    };
    let all = Options {
        scale: -0.37,
        softcap: Some(3.0),
        alibi_slopes: Some(&slopes),
        sinks: Some(&sinks),
        ..CAUSAL
    };
    let mut options = vec![CAUSAL, open, softcap(1.5), softcap(50.0), alibi, sink, all];
    options.extend(windows);
    options.extend([
        Options {
            sliding_window: Some(100),
            ..all
        },
        Options {
            causal: false,
            ..all
        },
        Options {
            softcap: None,
            sliding_window: Some(300),
            ..all
        },
        Options {
            scale: 0.0,
            ..CAUSAL
        },
    ]);
    check(
        &[(Order::HeadMajor, 16), (Order::Tiled, 16)],
        heads,
        &lens,
        &options,
    );
}

/// Without causality there may be more rows than keys, and no keys at all.
#[test]
fn more_rows_than_keys() {
    let heads = Heads {
        query: 5,
        kv: 1,
        dim: 8,
    };
    let (slopes, sinks) = (slopes(heads), sinks(heads));
    let open = Options {
        causal: false,
        ..CAUSAL
    };
    let all = Options {
        softcap: Some(2.0),
        alibi_slopes: Some(&slopes),
        sinks: Some(&sinks),
        ..open
    };
    check(
        &[(Order::Tiled, 16)],
        heads,
        &[(0, 3), (5, 9), (20, 1)],
        &[open, all],
    );
}
