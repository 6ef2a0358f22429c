//! Floating-point modes that callers may be in: they change no bits of attention or of the cache, and are theirs again.
#![allow(missing_docs)]
#![cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]

mod attention_support;
mod modes;

use attention_support::*;
use leafkv_core::Isa;
use leafkv_core::attention::{KvDtype, Options, Plan, Side, Vectors, VectorsMut, attend, write_kv};
use modes::{MODES, mode, under};

fn bits(rows: &Rows) -> Vec<u32> {
    let numbers = rows.out.iter().chain(&rows.lse);
    numbers.map(|x| x.to_bits()).collect()
}

/// A sequence of three partitions; its last rows are new.
struct Case {
    heads: Heads,
    sequence: Sequence,
    cache: Cache,
    query: Vec<f32>,
}

impl Case {
    /// Queries and cache of numbers times these factors, the last 256 values of zero.
    fn new(dtype: KvDtype, query: f32, key: f32, value: f32) -> Self {
        let heads = Heads {
            query: 8,
            kv: 4,
            // Not whole vectors; and work for more than one thread, see `INLINE_WORK`.
            dim: 56,
        };
        let sequence = Sequence {
            text: Text::own(0),
            kv_len: 700,
            rows: 2,
            blocks: (0..44).collect(),
        };
        let mut cache = Cache::new(dtype, Order::Tiled, 44, 16, heads);
        cache.fill_with(&sequence, |side, source, t, h, d| {
            let factor = match side {
                1 => key,
                _ if t < 444 => value,
                _ => 0.0,
            };
            number([side, source, t, h, d]) * factor
        });
        let mut queries = queries(std::slice::from_ref(&sequence), heads);
        queries.iter_mut().for_each(|q| *q *= query);
        Self {
            heads,
            sequence,
            cache,
            query: queries,
        }
    }

    fn plan(&self, threads: usize) -> Plan {
        let sequences = std::slice::from_ref(&self.sequence);
        plan(sequences, &self.cache.spec(), self.heads, threads)
    }

    fn run(&self, isa: Isa, plan: &Plan, options: &Options<'_>, mode: u64) -> Rows {
        let Heads { query, dim, .. } = self.heads;
        let mut out = vec![f32::NAN; self.query.len()];
        let mut lse = vec![f32::NAN; self.query.len() / dim];
        let rows = Vectors::from_slice(&self.query, query, dim);
        let mut to = VectorsMut::from_slice(&mut out, query, dim);
        let layer = self.cache.layer();
        under(mode, || {
            attend(plan, isa, &rows, &layer, &mut to, Some(&mut lse), options)
        })
        .unwrap();
        Rows { out, lse }
    }

    /// The same bits under every mode, on one thread and on two.
    fn check(&self, isa: Isa, options: &Options<'_>) -> Rows {
        let own = mode();
        let want = self.run(isa, &self.plan(1), options, own);
        for threads in [1, 2] {
            let plan = self.plan(threads);
            // Who takes which item is chance.
            for (mode, _) in MODES.into_iter().flat_map(|m| (0..4).map(move |i| (m, i))) {
                let got = self.run(isa, &plan, options, mode);
                let dtype = self.cache.spec().dtype;
                assert!(
                    bits(&got) == bits(&want),
                    "{isa} {dtype:?}, {threads} threads, mode {mode:x}"
                );
            }
        }
        want
    }
}

/// Small values far below the largest score: the results are denormals.
#[test]
fn modes_do_not_change_small_results() {
    let slopes = [0.31; 8];
    let options = Options {
        alibi_slopes: Some(&slopes),
        ..CAUSAL
    };
    for dtype in DTYPES {
        let case = Case::new(dtype, 1.0, 1.0, 3e-6);
        for isa in Isa::available() {
            let out = case.check(isa, &options).out;
            let small = out.iter().filter(|x| x.is_subnormal()).count();
            assert!(small > out.len() / 8, "{isa} {dtype:?}: {small} {out:?}");
        }
    }
}

/// Queries of denormals that the scale makes matter.
#[test]
fn modes_do_not_change_what_small_queries_see() {
    for dtype in DTYPES {
        let case = Case::new(dtype, 1e-40, 1.0, 1.0);
        let options = Options::new(1e38);
        for isa in Isa::available() {
            case.check(isa, &options);
        }
    }
}

/// What goes into the cache is rounded to nearest even.
#[test]
fn modes_do_not_change_what_is_written() {
    let (heads, dim) = (2, 24);
    let factors = [1.0, 1e-6, 1e-36, 1e-38, 1e-40];
    let side = |side: usize| -> Vec<f32> {
        let row = |(t, factor): (usize, &f32)| {
            let element = |i: usize| number([side, 0, t, i / dim, i % dim]) * factor * 1.001_93;
            (0..heads * dim).map(element).collect::<Vec<_>>()
        };
        factors.iter().enumerate().flat_map(row).collect()
    };
    let (keys, values) = (side(1), side(2));
    let shape = Heads {
        query: heads,
        kv: heads,
        dim,
    };
    for dtype in DTYPES {
        let written = |isa, mode| -> Vec<u32> {
            let cache = Cache::new(dtype, Order::Tiled, 1, 16, shape);
            let layer = cache.layer();
            let (keys, values) = (
                Vectors::from_slice(&keys, heads, dim),
                Vectors::from_slice(&values, heads, dim),
            );
            under(mode, || {
                write_kv(isa, &layer, &keys, &values, &[0, 1, 2, 3, 4])
            })
            .unwrap();
            let mut bits = vec![];
            for (token, head) in (0..factors.len()).flat_map(|t| (0..heads).map(move |h| (t, h))) {
                for (side, d) in (0..2 * dim).map(|i| ([Side::Key, Side::Value][i / dim], i % dim))
                {
                    bits.push(layer.element(side, 0, head, token, d).to_bits());
                }
            }
            bits
        };
        let want = written(Isa::Scalar, mode());
        for isa in Isa::available() {
            for mode in MODES {
                assert!(written(isa, mode) == want, "{isa} {dtype:?}, mode {mode:x}");
            }
        }
    }
}
