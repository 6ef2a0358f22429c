//! Queries, outputs, and new keys and values in half precision: the bits that the same numbers in float32 give, rounded
//! once, under every instruction set, at any strides and alignment, and nothing beside them.
#![allow(missing_docs)]

mod attention_support;

use attention_support::*;
use half::{bf16, f16};
use leafkv_core::Isa;
use leafkv_core::attention::{FloatDtype, KvDtype, Side, Vectors, VectorsMut, attend, write_kv};

const FLOATS: [FloatDtype; 3] = [FloatDtype::F32, FloatDtype::F16, FloatDtype::Bf16];

/// An element's bytes, rounded.
fn bytes(dtype: FloatDtype, x: f32) -> Vec<u8> {
    match dtype {
        FloatDtype::F32 => x.to_le_bytes().to_vec(),
        FloatDtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        FloatDtype::Bf16 => bf16::from_f32(x).to_le_bytes().to_vec(),
    }
}

fn rounded(dtype: FloatDtype, x: f32) -> f32 {
    match dtype {
        FloatDtype::F32 => x,
        FloatDtype::F16 => f16::from_f32(x).to_f32(),
        FloatDtype::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// `[tokens, heads, dim]` in bytes that begin at an odd address: rows of heads, then of tokens, with gaps of poison, heads in
/// reverse.
struct Strided {
    bytes: Vec<u8>,
    dtype: FloatDtype,
    shape: [usize; 3],
}

impl Strided {
    const GAP: usize = 3;

    fn new(dtype: FloatDtype, shape: [usize; 3]) -> Self {
        let rows = shape[0] * shape[1];
        let size = 1 + rows * (shape[2] * dtype.size() + Self::GAP);
        Self {
            bytes: vec![POISON; size],
            dtype,
            shape,
        }
    }

    fn of(dtype: FloatDtype, shape: [usize; 3], data: &[f32]) -> Self {
        let mut all = Self::new(dtype, shape);
        for (row, data) in data.chunks_exact(shape[2]).enumerate() {
            let at = all.at(row);
            let row = data.iter().flat_map(|&x| bytes(dtype, x));
            for (to, byte) in all.bytes[at..].iter_mut().zip(row) {
                *to = byte;
            }
        }
        all
    }

    /// Where a row begins; `row` counts heads, then tokens.
    fn at(&self, row: usize) -> usize {
        let [_, heads, dim] = self.shape;
        let (token, head) = (row / heads, row % heads);
        1 + (token * heads + heads - 1 - head) * (dim * self.dtype.size() + Self::GAP)
    }

    fn strides(&self) -> [isize; 2] {
        let [_, heads, dim] = self.shape;
        let row = (dim * self.dtype.size() + Self::GAP) as isize;
        [heads as isize * row, -row]
    }

    fn vectors(&self) -> Vectors<'_> {
        let base = self.bytes[self.at(0)..].as_ptr();
        // SAFETY: the strides stay inside the bytes.
        unsafe { Vectors::from_raw_parts(base, self.dtype, self.shape, self.strides()) }
    }

    fn vectors_mut(&mut self) -> VectorsMut<'_> {
        let (at, strides) = (self.at(0), self.strides());
        let base = self.bytes.as_mut_ptr().wrapping_add(at);
        // SAFETY: as above, and rows are apart.
        unsafe { VectorsMut::from_raw_parts(base, self.dtype, self.shape, strides) }
    }
}

/// One sequence that a single item finishes, two whose records are merged, rows in one tile and in several.
fn batch(heads: Heads, dtype: KvDtype, order: Order) -> (Vec<Sequence>, Cache) {
    let mut blocks = Blocks::new(80, 1);
    let mut cache = Cache::new(dtype, order, 80, 16, heads);
    let mut sequences = vec![];
    for (id, (kv_len, rows)) in [(7, 7), (600, 1), (300, 20)].into_iter().enumerate() {
        let sequence = Sequence {
            text: Text::own(id),
            kv_len,
            rows,
            blocks: blocks.take(usize::div_ceil(kv_len, 16)),
        };
        cache.fill(&sequence);
        sequences.push(sequence);
    }
    (sequences, cache)
}

#[test]
fn halves_are_widened_before_everything_and_rounded_after_it() {
    for (dim, kv_dtype) in [1, 20, 64, 72]
        .into_iter()
        .flat_map(|d| DTYPES.map(|t| (d, t)))
    {
        let heads = Heads {
            query: 4,
            kv: 2,
            dim,
        };
        // Any order of a cache, in turn.
        let order = match dim {
            20 => Order::Tiled,
            72 => Order::TokenMajor,
            _ => Order::HeadMajor,
        };
        let (sequences, cache) = batch(heads, kv_dtype, order);
        let queries: Vec<f32> = queries(&sequences, heads)
            .iter()
            // Not exact in 16 bits.
            .map(|x| x * 1.001_93)
            .collect();
        let shape = [queries.len() / (4 * dim), 4, dim];
        let plan = plan(&sequences, &cache.spec(), heads, 2);
        for (isa, of_query) in Isa::available().flat_map(|i| FLOATS.map(|t| (i, t))) {
            let run = |query: &Vectors<'_>, mut out: VectorsMut<'_>| {
                let mut lse = vec![f32::NAN; shape[0] * shape[1]];
                let layer = cache.layer();
                attend(&plan, isa, query, &layer, &mut out, Some(&mut lse), &CAUSAL).unwrap();
                lse
            };
            let wide: Vec<f32> = queries.iter().map(|&x| rounded(of_query, x)).collect();
            let mut want = vec![f32::NAN; wide.len()];
            let want_lse = run(
                &Vectors::from_slice(&wide, 4, dim),
                VectorsMut::from_slice(&mut want, 4, dim),
            );
            assert!(want.iter().all(|x| x.is_finite()));
            let query = Strided::of(of_query, shape, &queries);
            for of_out in FLOATS {
                let what = format!("{isa} {dim} {kv_dtype:?} {of_query:?} to {of_out:?}");
                let mut out = Strided::new(of_out, shape);
                assert_eq!(run(&query.vectors(), out.vectors_mut()), want_lse, "{what}");
                assert!(
                    out.bytes == Strided::of(of_out, shape, &want).bytes,
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn halves_are_stored_as_if_they_had_been_widened_before() {
    let slots = [70, -1, 3, 95, 33, 3, 34, 16];
    for (dim, kv_dtype) in [4, 76, 148]
        .into_iter()
        .flat_map(|d| DTYPES.map(|t| (d, t)))
    {
        let heads = Heads {
            query: 1,
            kv: 3,
            dim,
        };
        let shape = [slots.len(), 3, dim];
        let data = |side: usize| -> Vec<f32> {
            // Subnormals of each dtype, and its infinity.
            let factor = |t: usize| [1.0, 1.0, 1e-5, 1e-7, 1e-39, 1.0, 1e6, 1e-20][t % 8];
            (0..shape.iter().product())
                .map(|i| number([side, i, 0, 0, 0]) * 1.001_93 * factor(i / (3 * dim)))
                .collect()
        };
        for (order, dtype) in [Order::Tiled, Order::TokenMajor]
            .into_iter()
            .flat_map(|o| FLOATS.map(|t| (o, t)))
        {
            let [keys, values] = [1, 2].map(data);
            let want = Cache::new(kv_dtype, order, 3, 32, heads);
            let wide =
                |data: &[f32]| -> Vec<f32> { data.iter().map(|&x| rounded(dtype, x)).collect() };
            let (k, v) = (wide(&keys), wide(&values));
            let [k, v] = [&k, &v].map(|x| Vectors::from_slice(x, 3, dim));
            store(&want.layer(), &k, &v, &slots).unwrap();
            let [keys, values] = [keys, values].map(|x| Strided::of(dtype, shape, &x));
            for isa in Isa::available() {
                let cache = Cache::new(kv_dtype, order, 3, 32, heads);
                let (k, v) = (keys.vectors(), values.vectors());
                write_kv(isa, &cache.layer(), &k, &v, &slots).unwrap();
                assert!(
                    cache.memory() == want.memory(),
                    "{isa} {dim} {kv_dtype:?} {order:?} {dtype:?}"
                );
            }
        }
    }
}

/// Whatever the bits: a signalling NaN is no other one afterwards.
#[test]
fn halves_of_the_caches_own_dtype_are_copied() {
    fn check<T: leafkv_core::attention::Float>(dtype: KvDtype, bits: impl Fn(u16) -> T) {
        let heads = Heads {
            query: 1,
            kv: 1,
            dim: 1 << 16,
        };
        let all: Vec<T> = (0..=u16::MAX).map(bits).collect();
        let rows = Vectors::from_slice(&all, 1, 1 << 16);
        for isa in Isa::available() {
            let cache = Cache::new(dtype, Order::HeadMajor, 1, 1, heads);
            write_kv(isa, &cache.layer(), &rows, &rows, &[0]).unwrap();
            for (i, bytes) in cache.memory()[0][..1 << 18].chunks_exact(2).enumerate() {
                assert_eq!(u16::from_le_bytes([bytes[0], bytes[1]]), i as u16, "{isa}");
            }
        }
    }
    check(KvDtype::F16, f16::from_bits);
    check(KvDtype::Bf16, bf16::from_bits);
}

#[test]
fn keys_and_values_of_different_dtypes_are_refused_before_anything_is_written() {
    let heads = Heads {
        query: 1,
        kv: 1,
        dim: 4,
    };
    let cache = Cache::new(KvDtype::F16, Order::Tiled, 1, 16, heads);
    let (floats, halves) = ([1.0_f32; 4], [f16::ONE; 4]);
    let (floats, halves) = (
        Vectors::from_slice(&floats, 1, 4),
        Vectors::from_slice(&halves, 1, 4),
    );
    let problem = store(&cache.layer(), &floats, &halves, &[0])
        .unwrap_err()
        .to_string();
    assert_eq!(
        problem,
        "value: got float16, expected the dtype of key, float32"
    );
    assert!(store(&cache.layer(), &halves, &floats, &[0]).is_err());
    assert!(cache.layer().element(Side::Key, 0, 0, 0, 0).is_nan());
}
