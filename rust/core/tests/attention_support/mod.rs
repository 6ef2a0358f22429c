//! What the attention tests share: sequences whose content is a function of their positions, caches whose every
//! unwritten byte is poison, and ways to put the one into the other.
#![allow(dead_code, missing_docs, unreachable_pub)] // each test crate uses a part

use half::bf16;
use leafkv_core::Isa;
use leafkv_core::attention::{
    KvArray, KvDtype, KvLayer, KvLayout, KvSpec, Options, Plan, PlanShape, Scales, Vectors,
    VectorsMut, attend, naive, write_kv,
};

/// Every bit set: a NaN in each dtype.
pub const POISON: u8 = 0xff;

pub const DTYPES: [KvDtype; 4] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Int8];
pub const LAYOUTS: [KvLayout; 2] = [KvLayout::Rows, KvLayout::Tiled];

/// A number in [-1, 1): a function of all coordinates. Its mantissa is full and its exponent varies, so that sums of
/// products are inexact in every dtype: another order of summation shows.
pub fn number(coordinates: [usize; 5]) -> f32 {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    for c in coordinates {
        x = (x ^ c as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 29;
    }
    let mantissa = (x >> 40) as f32 / (1 << 23) as f32 - 1.0;
    mantissa / (1 << (x >> 8 & 7)) as f32
}

/// A text: its first `shared` tokens are those of `prefix`, the others its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Text {
    pub id: usize,
    pub prefix: usize,
    pub shared: usize,
}

impl Text {
    pub fn own(id: usize) -> Self {
        Self {
            id,
            prefix: 0,
            shared: 0,
        }
    }

    fn source(&self, token: usize) -> usize {
        if token < self.shared {
            1_000_000 + self.prefix
        } else {
            self.id
        }
    }
}

/// New rows of a text: the last `rows` of its `kv_len` tokens.
#[derive(Debug, Clone)]
pub struct Sequence {
    pub text: Text,
    pub kv_len: usize,
    pub rows: usize,
    pub blocks: Vec<i32>,
}

#[derive(Debug, Clone, Copy)]
pub struct Heads {
    pub query: usize,
    pub kv: usize,
    pub dim: usize,
}

/// How rows lie in memory, or that they are tiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Tiled,
    /// `[block, head, token, dim]`
    HeadMajor,
    /// `[block, token, head, dim]`, as vLLM's and others' caches; K and V interleaved, misaligned by a few bytes.
    TokenMajor,
    /// Gaps between all rows; K `[head, block, token, dim]`, V `[block, token, head, dim]`.
    Strided,
    /// Gaps between the heads of all blocks; K `[head, block, ..]`, V `[block, head, ..]`.
    TiledStrided,
}

impl Order {
    pub fn layout(self) -> KvLayout {
        match self {
            Self::Tiled | Self::TiledStrided => KvLayout::Tiled,
            _ => KvLayout::Rows,
        }
    }
}

pub struct Cache {
    spec: KvSpec,
    bytes: Vec<u8>,
    scales: Vec<u8>,
    order: Order,
}

impl Cache {
    pub fn new(
        dtype: KvDtype,
        order: Order,
        num_blocks: usize,
        block_size: usize,
        heads: Heads,
    ) -> Self {
        let spec = KvSpec {
            dtype,
            layout: order.layout(),
            num_blocks,
            num_kv_heads: heads.kv,
            block_size,
            head_dim: heads.dim,
        };
        let size = num_blocks * heads.kv * block_size * (2 * heads.dim + 5) * dtype.size();
        Self {
            spec,
            bytes: vec![POISON; size + 64],
            scales: vec![POISON; 8 * num_blocks * heads.kv * block_size + 1],
            order,
        }
    }

    /// Another content for the bytes that are not written yet.
    pub fn poison(&mut self, byte: u8) {
        self.bytes.fill(byte);
        self.scales.fill(byte);
    }

    pub fn spec(&self) -> KvSpec {
        self.spec
    }

    /// Everything, gaps included.
    pub fn memory(&self) -> [&[u8]; 2] {
        [&self.bytes, &self.scales]
    }

    pub fn layer(&self) -> KvLayer<'_> {
        let s = &self.spec;
        let token = (s.head_dim * s.dtype.size()) as isize;
        let head = token * s.block_size as isize;
        let block = head * s.num_kv_heads as isize;
        let (all, heads) = (block * s.num_blocks as isize, s.num_kv_heads as isize);
        let (blocks, tokens) = (s.num_blocks as isize, s.block_size as isize);
        // Where K and V begin, and the strides of blocks, heads and tokens. Bases are aligned to the element at most.
        let gap = s.dtype.size() as isize;
        let [key, value] = match self.order {
            Order::Tiled | Order::HeadMajor => {
                [(0, [block, head, token]), (all, [block, head, token])]
            }
            Order::TokenMajor => {
                let strides = [2 * block, token, token * heads];
                [(gap, strides), (gap + block, strides)]
            }
            Order::Strided => {
                let (k, v) = (token + gap, token + 2 * gap);
                let all = k * tokens * blocks * heads;
                let of_key = [k * tokens, k * tokens * blocks, k];
                [
                    (gap, of_key),
                    (gap + all, [v * heads * tokens, v, v * heads]),
                ]
            }
            Order::TiledStrided => {
                let (k, v) = (head + 2 * gap, head + 3 * gap);
                let all = k * blocks * heads;
                [(gap, [k, k * blocks, 0]), (gap + all, [v * heads, v, 0])]
            }
        }
        .map(
            |(start, [block_stride, head_stride, token_stride])| KvArray {
                base: self.bytes.as_ptr().cast_mut().wrapping_offset(start),
                block_stride,
                head_stride,
                token_stride,
            },
        );
        // A block's scales of K, then those of V; aligned to nothing.
        let head = 4 * s.block_size as isize;
        let scales = Scales {
            base: self.scales.as_ptr().cast_mut().wrapping_add(1),
            block_stride: 2 * head * s.num_kv_heads as isize,
            head_stride: head,
        };
        let value_scales = Scales {
            base: scales.base.wrapping_offset(head * s.num_kv_heads as isize),
            ..scales
        };
        let scales = (s.dtype == KvDtype::Int8).then_some([scales, value_scales]);
        // SAFETY: the strides stay inside `bytes` and `scales`, which tests write from one thread only.
        unsafe { KvLayer::new(*s, key, value, scales).unwrap() }
    }

    /// Writes tokens `0..kv_len` of a sequence.
    pub fn fill(&mut self, sequence: &Sequence) {
        self.fill_with(sequence, |side, source, t, h, d| {
            number([side, source, t, h, d])
        });
    }

    /// The same with other numbers: functions of side (1: K, 2: V), source, token, head and dimension.
    pub fn fill_with(
        &mut self,
        sequence: &Sequence,
        number: impl Fn(usize, usize, usize, usize, usize) -> f32,
    ) {
        let s = self.spec;
        let slots: Vec<i64> = (0..sequence.kv_len)
            .map(|t| {
                i64::from(sequence.blocks[t / s.block_size]) * s.block_size as i64
                    + (t % s.block_size) as i64
            })
            .collect();
        let side = |side: usize| -> Vec<f32> {
            let mut data = Vec::with_capacity(slots.len() * s.num_kv_heads * s.head_dim);
            for t in 0..sequence.kv_len {
                for h in 0..s.num_kv_heads {
                    data.extend(
                        (0..s.head_dim).map(|d| number(side, sequence.text.source(t), t, h, d)),
                    );
                }
            }
            data
        };
        let (key, value) = (side(1), side(2));
        store(
            &self.layer(),
            &Vectors::from_slice(&key, s.num_kv_heads, s.head_dim),
            &Vectors::from_slice(&value, s.num_kv_heads, s.head_dim),
            &slots,
        )
        .unwrap();
    }
}

/// [`write_kv`] under the instruction set in use.
pub fn store(
    layer: &KvLayer<'_>,
    key: &Vectors<'_>,
    value: &Vectors<'_>,
    slots: &[i64],
) -> leafkv_core::Result<()> {
    write_kv(Isa::current()?, layer, key, value, slots)
}

/// Hands out blocks in a scrambled order.
pub struct Blocks {
    free: Vec<i32>,
}

impl Blocks {
    pub fn new(count: usize, seed: usize) -> Self {
        let mut free: Vec<i32> = (0..count as i32).collect();
        free.sort_by_key(|&id| (number([7, seed, id as usize, 0, 0]) * 128.0) as i32 ^ id & 3);
        Self { free }
    }

    pub fn take(&mut self, n: usize) -> Vec<i32> {
        self.free.split_off(self.free.len() - n)
    }
}

/// The queries of all rows: functions of text, position and query head, that bf16 holds exactly.
pub fn queries(sequences: &[Sequence], heads: Heads) -> Vec<f32> {
    let mut data = Vec::new();
    for s in sequences {
        // Without causality there may be more rows than keys.
        for t in (0..s.rows).map(|i| (s.kv_len + i).wrapping_sub(s.rows)) {
            for h in 0..heads.query {
                data.extend((0..heads.dim).map(|d| {
                    let q = 8.0 * number([3, s.text.source(t), t, h, d]);
                    f32::from_bits(q.to_bits() & 0xffff_0000)
                }));
            }
        }
    }
    data
}

pub fn plan(sequences: &[Sequence], spec: &KvSpec, heads: Heads, threads: usize) -> Plan {
    let mut starts = vec![0];
    for s in sequences {
        starts.push(starts[starts.len() - 1] + s.rows as i32);
    }
    let lens: Vec<i32> = sequences.iter().map(|s| s.kv_len as i32).collect();
    let widest = sequences.iter().map(|s| s.blocks.len()).max().unwrap_or(0);
    let shape = PlanShape {
        num_heads: heads.query,
        num_kv_heads: heads.kv,
        head_dim: heads.dim,
        block_size: spec.block_size,
        num_blocks: spec.num_blocks,
    };
    let id = |s: usize, i: usize| sequences[s].blocks.get(i).copied().unwrap_or(-1);
    Plan::new(shape, widest, id, &starts, &lens, Some(threads)).unwrap()
}

pub const CAUSAL: Options<'static> = Options::new(0.125);

/// A slope of each query head; one of them is none, and one negative.
pub fn slopes(heads: Heads) -> Vec<f32> {
    let slope = |h: usize| [0.5, 0.0, 0.03, -0.001][h % 4] / (1 + h / 4) as f32;
    (0..heads.query).map(slope).collect()
}

/// A sink of each query head: among the scores, far below and above them, none.
pub fn sinks(heads: Heads) -> Vec<f32> {
    let sink = |h: usize| [1.5, f32::NEG_INFINITY, 4.25, -200.0, 12.0][h % 5];
    (0..heads.query).map(sink).collect()
}

/// Results of all rows, and their log-sum-exps.
#[derive(Debug, Clone, PartialEq)]
pub struct Rows {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
}

impl Rows {
    /// The bits of some rows (tokens, all heads).
    pub fn bits(&self, rows: std::ops::Range<usize>, heads: Heads) -> Vec<u32> {
        let (n, width) = (heads.query, heads.query * heads.dim);
        let out = &self.out[rows.start * width..rows.end * width];
        let lse = &self.lse[rows.start * n..rows.end * n];
        out.iter().chain(lse).map(|x| x.to_bits()).collect()
    }
}

/// Runs attention; the output starts as poison, so that a row left out is seen.
pub fn run(
    isa: Isa,
    sequences: &[Sequence],
    cache: &Cache,
    heads: Heads,
    threads: usize,
    options: &Options<'_>,
) -> Rows {
    let plan = plan(sequences, &cache.spec(), heads, threads);
    let query = queries(sequences, heads);
    let mut out = vec![f32::NAN; query.len()];
    let mut lse = vec![f32::NAN; query.len() / heads.dim];
    attend(
        &plan,
        isa,
        &Vectors::from_slice(&query, heads.query, heads.dim),
        &cache.layer(),
        &mut VectorsMut::from_slice(&mut out, heads.query, heads.dim),
        Some(&mut lse),
        options,
    )
    .unwrap();
    Rows { out, lse }
}

/// What the definition gives for the query that the dtype works with: for bf16 and int8, a rounded one.
pub fn oracle(
    sequences: &[Sequence],
    cache: &Cache,
    heads: Heads,
    options: &Options<'_>,
) -> naive::Attention {
    let spec = cache.spec();
    let mut query = queries(sequences, heads);
    query.iter_mut().for_each(|q| *q *= options.scale);
    for row in query.chunks_exact_mut(heads.dim) {
        match spec.dtype {
            KvDtype::F32 | KvDtype::F16 => {}
            KvDtype::Bf16 => row
                .iter_mut()
                .for_each(|q| *q = bf16::from_f32(*q).to_f32()),
            KvDtype::Int8 => {
                let most = (i32::MAX as usize / 127 / heads.dim).min(32767) as f32;
                let largest = row.iter().fold(1e-30, |m: f32, q| m.max(q.abs()));
                let (units, unit) = (most / largest, largest / most);
                row.iter_mut()
                    .for_each(|q| *q = (*q * units).round_ties_even() * unit);
            }
        }
    }
    naive::attend(
        &plan(sequences, &spec, heads, 1),
        &Vectors::from_slice(&query, heads.query, heads.dim),
        &cache.layer(),
        &Options {
            scale: 1.0,
            ..*options
        },
    )
    .unwrap()
}

/// The largest errors: of results, whose values are below 1, and of log-sum-exps, in units of their magnitude.
///
/// Scores of a few units are right to about 2e-7, and so then are weights, sums and logarithms: twice of what is seen.
/// A weight in bf16 is off by up to 2^-9 of itself, and the mean of values by as much. A quantized weight is off by up
/// to `1 / 65534` of its partition's largest (times the scales): where one weight stands out among 256, their errors,
/// which go either way, are `sqrt(256 / 12)` units of a third of the largest value; about the same comes of many equal
/// weights, which all may be off the same way. Three times that.
pub fn tolerance(dtype: KvDtype) -> (f64, f64) {
    let weights = match dtype {
        KvDtype::F32 | KvDtype::F16 => 0.0,
        KvDtype::Bf16 => 1.0 / 512.0,
        KvDtype::Int8 => 3.0 * 1.5e-5,
    };
    (6e-7 + weights, 5e-7)
}

/// The largest error in units of what is allowed.
fn worst(got: &[f32], want: &[f64], allowed: impl Fn(f64) -> f64) -> (usize, f64) {
    assert_eq!(got.len(), want.len());
    let errors = got.iter().zip(want).map(|(&x, &y)| {
        let error = (f64::from(x) - y).abs() / allowed(y);
        // Infinities are equal, and so is NaN where it is expected; elsewhere it is as wrong as can be.
        if f64::from(x) == y || x.is_nan() && y.is_nan() {
            0.0
        } else if error.is_nan() {
            f64::INFINITY
        } else {
            error
        }
    });
    errors
        .enumerate()
        .max_by(|x, y| x.1.total_cmp(&y.1))
        .unwrap_or((0, 0.0))
}

pub fn assert_close(got: &Rows, want: &naive::Attention, tolerance: (f64, f64), what: &str) {
    let (i, error) = worst(&got.out, &want.out, |_| tolerance.0);
    assert!(
        error <= 1.0,
        "{what}: element {i} is {}, expected {}: {error:.2} of what is allowed",
        got.out[i],
        want.out[i]
    );
    let (i, error) = worst(&got.lse, &want.lse, |y| tolerance.1 * y.abs().max(1.0));
    assert!(
        error <= 1.0,
        "{what}: lse {i} is {}, expected {}: {error:.2} of what is allowed",
        got.lse[i],
        want.lse[i]
    );
}
