//! Attention against its definition: every instruction set of this CPU, every dtype, both layouts.
#![allow(missing_docs)]

mod attention_support;

use attention_support::*;
use leafkv_core::Isa;
use leafkv_core::attention::{KvDtype, Options};

/// Sequences of `(KV tokens, new rows)` in each of `caches`, orders and block sizes.
fn check(
    dtype: KvDtype,
    caches: &[(Order, usize)],
    heads: Heads,
    lens: &[(usize, usize)],
    options: &Options<'_>,
) {
    let mut want = None;
    for &(order, block_size) in caches {
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
        let want = want.get_or_insert_with(|| oracle(&sequences, &cache, heads, options));
        for isa in Isa::available() {
            let what =
                format!("{isa} {dtype:?} {order:?}, blocks of {block_size}, {heads:?} {options:?}");
            let out = run(isa, &sequences, &cache, heads, 2, options);
            assert_close(&out, want, tolerance(dtype, heads.dim), &what);
        }
    }
}

#[test]
fn every_head_dimension() {
    for dim in [1, 2, 8, 17, 32, 46, 64, 72, 80, 96, 112, 128, 144, 256] {
        let heads = Heads {
            query: 4,
            kv: 2,
            dim,
        };
        for dtype in DTYPES {
            let caches = [(Order::HeadMajor, 5), (Order::Tiled, 16)];
            let odd_pairs = dim % [1, 1, 2, 4][dtype as usize] != 0;
            let caches = if odd_pairs { &caches[..1] } else { &caches };
            check(dtype, caches, heads, &[(37, 1), (300, 6)], &CAUSAL);
        }
    }
}

#[test]
fn every_group_of_query_heads() {
    for (query, kv) in [(1, 1), (12, 12), (32, 8), (28, 4), (9, 3), (8, 1), (32, 2)] {
        let heads = Heads { query, kv, dim: 16 };
        for dtype in DTYPES {
            let caches = [(Order::Tiled, 32), (Order::TokenMajor, 32)];
            check(
                dtype,
                &caches,
                heads,
                &[(40, 1), (70, 9), (290, 1)],
                &CAUSAL,
            );
        }
    }
}

#[test]
fn every_block_size_and_length_around_a_boundary() {
    let heads = Heads {
        query: 3,
        kv: 1,
        dim: 20,
    };
    let mut caches = vec![];
    for block_size in [1, 3, 8, 16, 32, 64, 256] {
        caches.extend([
            (Order::HeadMajor, block_size),
            (Order::TokenMajor, block_size),
        ]);
        if block_size % 16 == 0 {
            caches.push((Order::Tiled, block_size));
        }
    }
    let lens: Vec<_> = [1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 511, 512, 513]
        .iter()
        .flat_map(|&kv| [(kv, 1), (kv, kv.min(18))])
        .collect();
    for dtype in DTYPES {
        check(dtype, &caches, heads, &lens, &CAUSAL);
    }
}

#[test]
fn every_mask() {
    let heads = Heads {
        query: 6,
        kv: 2,
        dim: 24,
    };
    let lens = [(1, 1), (300, 40), (520, 3), (64, 64), (17, 0), (0, 0)];
    let windows = [
        None,
        Some(1),
        Some(2),
        Some(17),
        Some(255),
        Some(256),
        Some(300),
        Some(5000),
    ];
    let masks = windows.map(|sliding_window| Options {
        sliding_window,
        ..CAUSAL
    });
    for options in masks.into_iter().chain([Options {
        causal: false,
        ..CAUSAL
    }]) {
        for dtype in DTYPES {
            check(
                dtype,
                &[(Order::HeadMajor, 16), (Order::Tiled, 16)],
                heads,
                &lens,
                &options,
            );
        }
    }
}

#[test]
fn rows_without_keys_are_zero() {
    let heads = Heads {
        query: 2,
        kv: 1,
        dim: 8,
    };
    let open = Options {
        causal: false,
        ..CAUSAL
    };
    check(
        KvDtype::F32,
        &[(Order::Tiled, 16)],
        heads,
        &[(0, 3), (5, 9), (20, 1)],
        &open,
    );
}
