//! Norms, activations, rotations and the best logits: against plain loops, whatever the memory, the batch, the threads.
#![allow(missing_docs)]
#![allow(clippy::needless_range_loop)] // indices name rows of several arrays at once

mod attention_support;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod modes;

use std::ops::Range;

use attention_support::{Cache, DTYPES, Heads, Order, POISON, number, store};
use leafkv_core::attention::{KvDtype, Side, Vectors};
use leafkv_core::ops::{
    HeadNorms, LinearOptions, Projected, Rows, RowsMut, Weight, WeightKind, WeightRows, argmax,
    embed, linear, rms_norm, rope_write_kv, silu_mul, top_k,
};
use leafkv_core::{Error, Isa};

/// Parts of vectors, whole ones, and both.
const SIZES: [usize; 7] = [1, 3, 15, 16, 17, 576, 1000];

const EPS: f32 = 1e-5;

/// Floats at odd addresses, with gaps between the rows.
struct Matrix {
    bytes: Vec<u8>,
    rows: usize,
    columns: usize,
}

impl Matrix {
    const START: usize = 65;
    const GAP: usize = 69;

    fn poison([rows, columns]: [usize; 2]) -> Self {
        let bytes = vec![POISON; Self::START + rows * (4 * columns + Self::GAP)];
        Self {
            bytes,
            rows,
            columns,
        }
    }

    fn new(shape: [usize; 2], element: impl Fn(usize, usize) -> f32) -> Self {
        let mut matrix = Self::poison(shape);
        for row in 0..shape[0] {
            for column in 0..shape[1] {
                let at = matrix.at(row) + 4 * column;
                matrix.bytes[at..at + 4].copy_from_slice(&element(row, column).to_ne_bytes());
            }
        }
        matrix
    }

    fn at(&self, row: usize) -> usize {
        Self::START + row * self.stride()
    }

    fn stride(&self) -> usize {
        4 * self.columns + Self::GAP
    }

    fn part(&self, rows: Range<usize>) -> Rows<'_> {
        let shape = [rows.len(), self.columns];
        let base = self.bytes[self.at(rows.start)..].as_ptr();
        // SAFETY: these rows are in `bytes`.
        unsafe { Rows::from_raw_parts(base, shape, self.stride() as isize) }
    }

    fn rows(&self) -> Rows<'_> {
        self.part(0..self.rows)
    }

    fn rows_mut(&mut self) -> RowsMut<'_> {
        self.in_place().1
    }

    /// The rows, to be read and overwritten.
    fn in_place(&mut self) -> (Rows<'_>, RowsMut<'_>) {
        let (shape, stride) = ([self.rows, self.columns], self.stride() as isize);
        let base = self.bytes[Self::START..].as_mut_ptr();
        // SAFETY: as above. Who has both gives them to an operation that may overwrite what it reads.
        unsafe {
            (
                Rows::from_raw_parts(base, shape, stride),
                RowsMut::from_raw_parts(base, shape, stride),
            )
        }
    }

    fn row(&self, row: usize) -> Vec<f32> {
        let bytes = &self.bytes[self.at(row)..][..4 * self.columns];
        let floats = bytes
            .chunks(4)
            .map(|b| f32::from_ne_bytes(b.try_into().unwrap()));
        floats.collect()
    }

    /// The bits of each row, once nothing around them was written.
    fn bits(&self) -> Vec<Vec<u32>> {
        let mut end = 0;
        for row in 0..=self.rows {
            let gap = &self.bytes[end..self.at(row).min(self.bytes.len())];
            assert!(gap.iter().all(|&byte| byte == POISON), "before row {row}");
            end = self.at(row) + 4 * self.columns;
        }
        (0..self.rows).map(|row| bits(&self.row(row))).collect()
    }
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| x.to_bits()).collect()
}

fn noise(seed: usize, factor: f32) -> impl Fn(usize, usize) -> f32 {
    move |row, column| factor * number([seed, row, column, 0, 0])
}

fn norm(isa: Isa, x: &Rows<'_>, weight: &Rows<'_>, threads: usize) -> Matrix {
    let mut out = Matrix::poison(x.shape());
    rms_norm(isa, x, weight, EPS, &mut out.rows_mut(), Some(threads)).unwrap();
    out
}

fn silu(isa: Isa, gate_up: &Rows<'_>, threads: usize) -> Matrix {
    let [rows, columns] = gate_up.shape();
    let mut out = Matrix::poison([rows, columns / 2]);
    silu_mul(isa, gate_up, &mut out.rows_mut(), Some(threads)).unwrap();
    out
}

fn first(isa: Isa, logits: &Rows<'_>, threads: usize) -> Vec<i64> {
    let mut out = vec![-7; logits.shape()[0]];
    argmax(isa, logits, &mut out, Some(threads)).unwrap();
    out
}

fn best(isa: Isa, logits: &Rows<'_>, k: usize, threads: usize) -> (Vec<f32>, Vec<i64>) {
    let entries = k * logits.shape()[0];
    let (mut values, mut ids) = (vec![0.0; entries], vec![-7; entries]);
    top_k(isa, logits, k, &mut values, &mut ids, Some(threads)).unwrap();
    (values, ids)
}

/// A row alone, in a batch, on any number of threads: always the same bits.
fn check_batches(x: &Matrix, operation: impl Fn(&Rows<'_>, usize) -> Vec<Vec<u32>>) {
    let all = operation(&x.rows(), 1);
    assert_eq!(all.len(), x.rows);
    for threads in [1, 2, 3, 4, 2, 3, 4, 2, 3, 4] {
        assert!(operation(&x.rows(), threads) == all, "{threads} threads");
    }
    for rows in [0..1, 1..2, 5..9, x.rows - 1..x.rows] {
        assert!(
            operation(&x.part(rows.clone()), 2) == all[rows.clone()],
            "{rows:?}"
        );
    }
}

#[test]
fn rms_norm_is_that_of_a_plain_loop() {
    for (isa, n) in Isa::available().flat_map(|isa| SIZES.map(|n| (isa, n))) {
        let x = Matrix::new([5, n], noise(1, 3.0));
        let weight = Matrix::new([1, n], noise(2, 2.0));
        let mut out = norm(isa, &x.rows(), &weight.rows(), 1);
        for row in 0..5 {
            let x = x.row(row);
            let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            let root = (squares / n as f64 + f64::from(EPS)).sqrt();
            for ((x, w), got) in x.iter().zip(weight.row(0)).zip(out.row(row)) {
                let want = f64::from(*x) / root * f64::from(w);
                let error = (f64::from(got) - want).abs();
                assert!(error <= 5e-7 * want.abs(), "{isa} {n}: {got} for {want}");
            }
        }
        let want = out.bits();
        out = Matrix::new([5, n], noise(1, 3.0));
        let (from, mut to) = out.in_place();
        rms_norm(isa, &from, &weight.rows(), EPS, &mut to, Some(1)).unwrap();
        assert!(out.bits() == want, "{isa} {n}: in place");
    }
}

#[test]
fn rms_norm_of_what_is_not_finite() {
    for isa in Isa::available() {
        let normed = |x: [f32; 3]| {
            let x = Matrix::new([1, 3], |_, column| x[column]);
            let ones = Matrix::new([1, 3], |_, _| 1.0);
            norm(isa, &x.rows(), &ones.rows(), 1).row(0)
        };
        assert!(
            normed([1.0, f32::NAN, 0.0]).iter().all(|x| x.is_nan()),
            "{isa}"
        );
        let infinite = normed([1.0, f32::INFINITY, -2.0]);
        assert!(infinite[1].is_nan(), "{isa}");
        assert_eq!([infinite[0], infinite[2]], [0.0, 0.0], "{isa}");
        assert_eq!(
            normed([1e30, 0.0, -1e30]),
            [0.0; 3],
            "{isa}: the square is infinite"
        );
        assert_eq!(normed([0.0; 3]), [0.0; 3], "{isa}");
    }
}

#[test]
fn silu_mul_is_that_of_a_plain_loop() {
    for (isa, n) in Isa::available().flat_map(|isa| SIZES.map(|n| (isa, n))) {
        for factor in [1.0, 30.0, 300.0] {
            let gate_up = Matrix::new([5, 2 * n], noise(3, factor));
            let out = silu(isa, &gate_up.rows(), 1);
            out.bits();
            for row in 0..5 {
                let (gate_up, out) = (gate_up.row(row), out.row(row));
                for i in 0..n {
                    let [gate, up] = [gate_up[i], gate_up[n + i]].map(f64::from);
                    let want = gate / (1.0 + (-gate).exp()) * up;
                    let error = (f64::from(out[i]) - want).abs();
                    // The last term: of results around the smallest normal number, all may be gone.
                    let allowed = (1e-6 + 1e-7 * gate.abs()) * want.abs() + 2e-36 * up.abs();
                    assert!(error <= allowed, "{isa} {gate} {up}: {} for {want}", out[i]);
                }
            }
        }
    }
}

#[test]
fn silu_mul_of_what_is_not_finite() {
    let (infinity, nan) = (f32::INFINITY, f32::NAN);
    let gates = [-infinity, infinity, nan, -nan, -0.0, 0.0, -3e38, 3e38];
    for isa in Isa::available() {
        // The special ones in whole vectors, and at the end.
        let gate_up = Matrix::new([1, 2 * 40], |_, i| if i < 40 { gates[i % 8] } else { 2.0 });
        let out = silu(isa, &gate_up.rows(), 1).row(0);
        for (i, x) in out.into_iter().enumerate() {
            let want = [-0.0, infinity, nan, nan, -0.0, 0.0, -0.0, infinity][i % 8];
            let equal = x.to_bits() == f32::to_bits(want) || x.is_nan() && want.is_nan();
            assert!(equal, "{isa} {}: {x} for {want}", gates[i % 8]);
        }
        let row = |gate: f32, up: f32| {
            let x = Matrix::new([1, 2], |_, i| [gate, up][i]);
            silu(isa, &x.rows(), 1).row(0)[0]
        };
        assert!(row(1.0, nan).is_nan() && row(-infinity, infinity).is_nan());
    }
}

/// Logits with many equals; some rows are special.
fn logits(shape: [usize; 2]) -> Matrix {
    let noise = noise(4, 8.0);
    Matrix::new(shape, |row, column| match (row % 8, column) {
        (1, 0) => f32::NAN,
        (2, c) if c + 1 == shape[1] => f32::INFINITY,
        (3, _) => f32::NEG_INFINITY,
        (4, c) if c % 3 > 0 => f32::NEG_INFINITY,
        (5, c) => [0.0, -0.0][c % 2],
        (6, c) if c + 1 == shape[1] => -f32::NAN,
        _ => noise(row, column).round(),
    })
}

/// Indices, the best first; nothing where there is no distribution.
fn in_order(row: &[f32]) -> Vec<i64> {
    let odd = |x: &f32| x.is_nan() || *x == f32::INFINITY;
    if row.iter().any(odd) || row.iter().all(|x| *x == f32::NEG_INFINITY) {
        return vec![];
    }
    let mut order: Vec<i64> = (0..row.len() as i64).collect();
    order.sort_by(|&a, &b| row[b as usize].partial_cmp(&row[a as usize]).unwrap());
    order
}

#[test]
fn the_best_logits_are_those_of_a_stable_sort() {
    let sizes = [63, 64, 65, 640, 5000];
    for (isa, n) in
        Isa::available().flat_map(|isa| SIZES.into_iter().chain(sizes).map(move |n| (isa, n)))
    {
        let x = logits([9, n]);
        let ids = first(isa, &x.rows(), 1);
        for row in 0..9 {
            let want = in_order(&x.row(row)).first().copied();
            assert_eq!(ids[row], want.unwrap_or(-1), "{isa} {n}, row {row}");
        }
        for k in [1, 2, 9, 10, 11, 50, n / 2, n - 1, n] {
            if !(1..=n).contains(&k) {
                continue;
            }
            let (values, ids) = best(isa, &x.rows(), k, 1);
            for row in 0..9 {
                let (values, ids) = (&values[row * k..][..k], &ids[row * k..][..k]);
                let (x, order) = (x.row(row), in_order(&x.row(row)));
                if order.is_empty() {
                    assert!(ids.iter().all(|&id| id == -1), "{isa} {n}, row {row}");
                    assert!(values.iter().all(|x| x.is_nan()), "{isa} {n}, row {row}");
                    continue;
                }
                assert_eq!(ids, &order[..k], "{isa}: {k} of {n}, row {row}");
                let want: Vec<f32> = ids.iter().map(|&id| x[id as usize]).collect();
                assert_eq!(bits(values), bits(&want), "{isa}: {k} of {n}, row {row}");
            }
        }
    }
}

#[test]
fn nothing_is_the_best_of_nothing() {
    for isa in Isa::available() {
        assert_eq!(first(isa, &Matrix::poison([3, 0]).rows(), 1), [-1; 3]);
        assert_eq!(first(isa, &Matrix::poison([0, 3]).rows(), 1), []);
    }
}

#[test]
fn a_row_alone_has_the_bits_that_it_has_in_a_batch() {
    // Enough for several threads.
    let x = Matrix::new([64, 570], noise(5, 2.0));
    let weight = Matrix::new([1, 570], noise(6, 2.0));
    let some = logits([64, 570]);
    for isa in Isa::available() {
        check_batches(&x, |x, threads| {
            norm(isa, x, &weight.rows(), threads).bits()
        });
        check_batches(&x, |x, threads| silu(isa, x, threads).bits());
        check_batches(&some, |x, threads| {
            let ids = first(isa, x, threads);
            ids.iter().map(|&id| vec![id as u32]).collect()
        });
        check_batches(&some, |x, threads| {
            let (values, ids) = best(isa, x, 7, threads);
            let rows = values.chunks(7).zip(ids.chunks(7));
            let row = |(values, ids): (&[f32], &[i64])| {
                [bits(values), ids.iter().map(|&id| id as u32).collect()].concat()
            };
            rows.map(row).collect()
        });
    }
}

/// A layer's projections of some tokens.
struct Tokens {
    heads: Heads,
    qkv: Matrix,
    cos: Matrix,
    sin: Matrix,
    norms: Option<[Matrix; 2]>,
    slots: Vec<i64>,
}

impl Tokens {
    fn new(heads: Heads, tokens: usize, normed: bool) -> Self {
        let (dim, half) = (heads.dim, heads.dim / 2);
        let angle = |token, i| 40.0 * number([7, token, i, 0, 0]);
        let weight = |seed| Matrix::new([1, dim], noise(seed, 2.0));
        Self {
            heads,
            qkv: Matrix::new([tokens, (heads.query + 2 * heads.kv) * dim], noise(8, 4.0)),
            cos: Matrix::new([tokens, half], |token, i| angle(token, i).cos()),
            sin: Matrix::new([tokens, half], |token, i| angle(token, i).sin()),
            norms: normed.then(|| [weight(9), weight(10)]),
            slots: (0..tokens as i64).map(|token| 3 + token).collect(),
        }
    }

    fn cache(&self, dtype: KvDtype, order: Order) -> Cache {
        Cache::new(dtype, order, 8, 16, self.heads)
    }

    fn projected(&self, tokens: Range<usize>) -> Projected<'_> {
        Projected {
            qkv: self.qkv.part(tokens.clone()),
            cos: self.cos.part(tokens.clone()),
            sin: self.sin.part(tokens),
            norms: self.norms.as_ref().map(|[query, key]| HeadNorms {
                query: query.rows(),
                key: key.rows(),
                eps: EPS,
            }),
        }
    }

    /// Some tokens' queries; keys and values are in the cache.
    fn run(&self, isa: Isa, cache: &mut Cache, tokens: Range<usize>, threads: usize) -> Matrix {
        let mut out = Matrix::poison([tokens.len(), self.heads.query * self.heads.dim]);
        let (projected, slots) = (self.projected(tokens.clone()), &self.slots[tokens]);
        let to = &mut out.rows_mut();
        rope_write_kv(isa, &projected, &cache.layer(), slots, to, Some(threads)).unwrap();
        out
    }

    /// A head, from some element of a token's row on, normalised and turned.
    fn turned(&self, isa: Isa, token: usize, from: usize, weight: usize) -> Vec<f32> {
        let half = self.heads.dim / 2;
        let mut x = self.qkv.row(token)[from..][..2 * half].to_vec();
        if let Some(norms) = &self.norms {
            let head = Matrix::new([1, 2 * half], |_, i| x[i]);
            x = norm(isa, &head.rows(), &norms[weight].rows(), 1).row(0);
        }
        let (cos, sin) = (self.cos.row(token), self.sin.row(token));
        let first = (0..half).map(|i| x[i] * cos[i] - x[half + i] * sin[i]);
        let second = (0..half).map(|i| x[half + i] * cos[i] + x[i] * sin[i]);
        first.chain(second).collect()
    }

    /// Queries, and the cache after them.
    fn naive(&self, isa: Isa, dtype: KvDtype, order: Order) -> (Vec<Vec<u32>>, Cache) {
        let Heads { query, kv, dim } = self.heads;
        let (mut queries, mut keys, mut values) = (vec![], vec![], vec![]);
        for token in 0..self.slots.len() {
            let turned = |head: usize, weight| self.turned(isa, token, head * dim, weight);
            queries.push((0..query).flat_map(|head| bits(&turned(head, 0))).collect());
            keys.extend((query..query + kv).flat_map(|head| turned(head, 1)));
            values.extend_from_slice(&self.qkv.row(token)[(query + kv) * dim..]);
        }
        let [keys, values] = [&keys, &values].map(|rows| Vectors::from_slice(rows, kv, dim));
        let cache = self.cache(dtype, order);
        store(&cache.layer(), &keys, &values, &self.slots).unwrap();
        // Elements are where they belong, of long heads, too.
        let token = self.slots.len() - 1;
        let slot = self.slots[token] as usize;
        for (side, rows) in [(Side::Key, keys), (Side::Value, values)] {
            for (head, i) in (0..kv).flat_map(|head| (0..dim).map(move |i| (head, i))) {
                let got = cache.layer().element(side, slot / 16, head, slot % 16, i);
                let error = (got - rows.element(token, head, i)).abs();
                assert!(error < 0.05, "{dtype:?} {order:?}: element {i}");
            }
        }
        (queries, cache)
    }
}

const ORDERS: [Order; 4] = [
    Order::Tiled,
    Order::TokenMajor,
    Order::Strided,
    Order::TiledStrided,
];

#[test]
fn rope_write_kv_turns_as_a_plain_loop_and_stores_as_write_kv() {
    let cases = DTYPES
        .into_iter()
        .flat_map(|dtype| ORDERS.map(|order| (dtype, order)));
    for (dtype, order) in cases {
        for (query, kv, dim) in [(1, 1, 4), (3, 1, 72), (4, 2, 64), (2, 2, 136)] {
            for normed in [false, true] {
                let heads = Heads { query, kv, dim };
                let mut tokens = Tokens::new(heads, 20, normed);
                tokens.slots[3] = -1;
                tokens.slots[17] = tokens.slots[2];
                for isa in Isa::available() {
                    let mut cache = tokens.cache(dtype, order);
                    let queries = tokens.run(isa, &mut cache, 0..20, 1);
                    let (want, stored) = tokens.naive(isa, dtype, order);
                    let what = format!("{isa} {dtype:?} {order:?} {heads:?} {normed}");
                    assert!(queries.bits() == want, "queries: {what}");
                    assert!(cache.memory() == stored.memory(), "cache: {what}");
                }
            }
        }
    }
}

#[test]
fn rope_write_kv_is_the_same_in_any_batch_and_the_last_token_in_a_slot_stays() {
    let heads = Heads {
        query: 9,
        kv: 3,
        dim: 64,
    };
    let mut tokens = Tokens::new(heads, 64, true);
    for twice in [false, true] {
        if twice {
            let slots = tokens.slots.iter_mut().enumerate();
            slots.for_each(|(i, slot)| *slot = [3, 21, 90, -1][i % 4]);
        }
        for (isa, dtype) in Isa::available().flat_map(|isa| DTYPES.map(|dtype| (isa, dtype))) {
            let new = || tokens.cache(dtype, Order::Tiled);
            let mut stored = new();
            let all = tokens.run(isa, &mut stored, 0..64, 1).bits();
            for threads in [2, 3, 4, 2, 3, 4, 2, 3, 4] {
                let mut cache = new();
                let queries = tokens.run(isa, &mut cache, 0..64, threads).bits();
                assert!(queries == all, "{isa} {dtype:?}, {threads} threads");
                assert!(
                    cache.memory() == stored.memory(),
                    "{isa} {dtype:?}, {threads} threads"
                );
            }
            let mut cache = new();
            for token in 0..64 {
                let queries = tokens.run(isa, &mut cache, token..token + 1, 4).bits();
                assert!(queries[0] == all[token], "{isa} {dtype:?}, {token} alone");
            }
            assert!(
                cache.memory() == stored.memory(),
                "{isa} {dtype:?}, one by one"
            );
        }
    }
}

#[track_caller]
fn refused(result: Result<(), Error>, argument: &'static str, problem: &str) {
    assert_eq!(result.unwrap_err(), Error::invalid(argument, problem));
}

#[test]
fn shapes_that_do_not_match_are_refused_before_anything_is_written() {
    let isa = Isa::current().unwrap();
    let x = Matrix::new([2, 6], noise(1, 1.0));
    let (long, short) = (Matrix::poison([1, 7]), Matrix::poison([1, 6]));
    let (x, long, short) = (x.rows(), long.rows(), short.rows());
    let mut out = Matrix::poison([2, 5]);
    let to = &mut out.rows_mut();
    let norm = |weight, to: &mut _| rms_norm(isa, &x, weight, EPS, to, None);
    refused(norm(&long, to), "weight", "got 7 elements, expected 6");
    refused(norm(&x, to), "weight", "got shape [2, 6], expected [1, 6]");
    refused(norm(&short, to), "out", "got shape [2, 5], expected [2, 6]");
    let threads = rms_norm(
        isa,
        &x,
        &short,
        EPS,
        &mut Matrix::poison([2, 6]).rows_mut(),
        Some(0),
    );
    refused(threads, "num_threads", "got 0, expected 1 to 1024");

    let silu = |gate_up, to: &mut _| silu_mul(isa, gate_up, to, None);
    refused(
        silu(&long, to),
        "gate_up",
        "got 7 columns, expected as many of gate as of up",
    );
    refused(silu(&x, to), "out", "got shape [2, 5], expected [2, 3]");

    let (mut values, mut ids) = ([0.5; 4], [7; 4]);
    refused(
        argmax(isa, &x, &mut ids, None),
        "out",
        "got 4 entries, expected 2",
    );
    let columns = "expected 1 to 6, the columns of logits";
    let mut top = |k, values: &mut [f32]| top_k(isa, &x, k, values, &mut ids, None);
    refused(top(0, &mut values), "k", &format!("got 0, {columns}"));
    refused(top(7, &mut values), "k", &format!("got 7, {columns}"));
    refused(
        top(2, &mut values[1..]),
        "values",
        "got 3 entries, expected 4",
    );
    refused(top(3, &mut [0.0; 6]), "ids", "got 4 entries, expected 6");
    assert_eq!((values, ids), ([0.5; 4], [7; 4]));
    assert!(out.bytes.iter().all(|&byte| byte == POISON));

    let heads = Heads {
        query: 3,
        kv: 2,
        dim: 8,
    };
    let tokens = Tokens::new(heads, 2, true);
    let cache = tokens.cache(KvDtype::F32, Order::Tiled);
    let odd = Cache::new(KvDtype::F32, Order::Tiled, 1, 16, Heads { dim: 7, ..heads });
    let mut out = Matrix::poison([2, 24]);
    let good = tokens.projected(0..2);
    let norms = good.norms.unwrap();
    let mut rope = |projected: Projected<'_>, cache: &Cache, slots: &[i64]| {
        let to = &mut out.rows_mut();
        rope_write_kv(isa, &projected, &cache.layer(), slots, to, None)
    };
    let slots = [0, 5];
    let short = tokens.projected(0..1);
    let expected = |came: &str, expected: &str| format!("got shape {came}, expected {expected}");
    let (cos, sin) = (short.cos, short.sin);
    for (projected, argument, problem) in [
        (
            Projected {
                qkv: good.cos,
                ..good
            },
            "qkv",
            expected("[2, 4]", "[2, 56]"),
        ),
        (
            Projected { cos, ..good },
            "cos",
            expected("[1, 4]", "[2, 4]"),
        ),
        (
            Projected { sin, ..good },
            "sin",
            expected("[1, 4]", "[2, 4]"),
        ),
        (short, "out", expected("[2, 24]", "[1, 24]")),
    ] {
        refused(rope(projected, &cache, &slots), argument, &problem);
    }
    let normed = |query, key| Projected {
        norms: Some(HeadNorms {
            query,
            key,
            ..norms
        }),
        ..good
    };
    for (projected, argument) in [
        (normed(x, norms.key), "q_norm"),
        (normed(norms.query, x), "k_norm"),
    ] {
        refused(
            rope(projected, &cache, &slots),
            argument,
            &expected("[2, 6]", "[1, 8]"),
        );
    }
    refused(
        rope(good, &odd, &slots),
        "key_cache",
        "got head_dim 7, expected pairs of elements",
    );
    refused(
        rope(good, &cache, &[0]),
        "slots",
        "got 1 entries, expected one a token, 2",
    );
    for slot in [-2, 128] {
        let problem = format!("entry 1 is {slot}, expected -1 or 0 to 127");
        refused(rope(good, &cache, &[0, slot]), "slots", &problem);
    }
    assert!(out.bytes.iter().all(|&byte| byte == POISON));
    assert!(cache.memory().concat().iter().all(|&byte| byte == POISON));
    if let Some(isa) = [Isa::Neon, Isa::Amx]
        .into_iter()
        .find(|isa| !isa.is_available())
    {
        let result = argmax(isa, &x, &mut [0; 2], None);
        refused(result, "isa", &format!("this CPU has no {isa}"));
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const SMALL: [usize; 2] = [50, 576];

/// Weights whose elements, or scales, are denormal.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn small_weights(kind: WeightKind) -> Vec<u8> {
    let element = noise(15, 1e-38);
    let mut bytes = Vec::new();
    for i in 0..SMALL[0] * SMALL[1] {
        match kind {
            WeightKind::F32 => bytes.extend(element(i, 0).to_ne_bytes()),
            WeightKind::F16 => bytes.extend(((i * 7 % 1000) as u16).to_ne_bytes()),
            _ => {
                if i % 32 == 0 {
                    bytes.extend((1 + (i / 32 % 9) as u16).to_ne_bytes());
                }
                bytes.push((i * 5 % 256) as u8);
            }
        }
    }
    bytes
}

/// Products of one row and of many with such weights, and the weights as floats.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn multiplied(
    isa: Isa,
    kind: WeightKind,
    bytes: &[u8],
    x: &Matrix,
    threads: usize,
) -> [Vec<Vec<u32>>; 2] {
    // SAFETY: the bytes are such rows.
    let part = unsafe { WeightRows::from_raw_parts(bytes.as_ptr(), SMALL, kind) };
    let weight = Weight::new(vec![part]).unwrap();
    let options = LinearOptions {
        num_threads: Some(threads),
        ..LinearOptions::default()
    };
    let product = |x: Rows<'_>| {
        let mut out = Matrix::poison([x.shape()[0], SMALL[0]]);
        linear(isa, &x, &weight, &mut out.rows_mut(), &options).unwrap();
        out.bits()
    };
    let mut products = product(x.part(0..1));
    products.extend(product(x.rows()));
    let mut out = Matrix::poison(SMALL);
    let ids: Vec<u32> = (0..SMALL[0] as u32).collect();
    embed(isa, &weight, &ids, &mut out.rows_mut(), Some(threads)).unwrap();
    [products, out.bits()]
}

/// Denormals, coming in and going out, and numbers that are rounded.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn modes_of_the_caller_change_nothing() {
    use modes::{MODES, mode, under};

    let small = |seed, factor| Matrix::new([40, 570], noise(seed, factor));
    let (tiny, x) = (small(11, 1e-38), small(12, 3.0));
    let weight = Matrix::new([1, 570], noise(13, 1e-38));
    let heads = Heads {
        query: 9,
        kv: 3,
        dim: 64,
    };
    let mut tokens = Tokens::new(heads, 40, false);
    tokens.qkv = Matrix::new([40, 15 * 64], noise(14, 1e-38));
    // Denormal products, of denormal weights or scales.
    let products = [
        (WeightKind::F32, 3.0),
        (WeightKind::F16, 1e-33),
        (WeightKind::Q8_0, 1e-35),
    ]
    .map(|(kind, factor)| {
        let x = Matrix::new([40, SMALL[1]], noise(16, factor));
        (kind, small_weights(kind), x)
    });
    for isa in Isa::available() {
        let run = |mode, threads| {
            under(mode, || {
                let mut cache = tokens.cache(KvDtype::F16, Order::Tiled);
                let rows = [
                    norm(isa, &x.rows(), &weight.rows(), threads).bits(),
                    norm(isa, &tiny.rows(), &weight.rows(), threads).bits(),
                    silu(isa, &tiny.rows(), threads).bits(),
                    tokens.run(isa, &mut cache, 0..40, threads).bits(),
                ];
                let products = products
                    .each_ref()
                    .map(|(kind, bytes, x)| multiplied(isa, *kind, bytes, x, threads));
                let ids = [
                    first(isa, &tiny.rows(), threads),
                    best(isa, &tiny.rows(), 9, threads).1,
                ];
                (rows, products, ids, cache.memory().concat())
            })
        };
        let want = run(mode(), 1);
        let denormal = |bits: &u32| f32::from_bits(*bits).is_subnormal();
        for [products, _] in &want.1 {
            assert!(products.iter().flatten().any(denormal), "{isa}");
        }
        for (mode, threads) in MODES.into_iter().flat_map(|mode| [(mode, 1), (mode, 2)]) {
            assert!(
                run(mode, threads) == want,
                "{isa}, mode {mode:x}, {threads} threads"
            );
        }
    }
}
