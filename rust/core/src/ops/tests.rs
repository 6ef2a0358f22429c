//! Products with weights against a naive oracle, for every kind, precision and instruction set.

use half::{bf16, f16};

use super::linear::multiply;
use super::*;
use crate::simd::Isa;

/// Small numbers, the same each time.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 24) as u32
    }

    fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }

    /// Around 1 in magnitude.
    fn float(&mut self) -> f32 {
        f32::from_bits(self.bits() & 0x807f_ffff | (124 + self.bits() % 5) << 23)
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

/// Bytes of rows of weights, at an odd address, and what they stand for.
struct Stored {
    bytes: Box<[u8]>,
    shape: [usize; 2],
    kind: WeightKind,
    values: Vec<f32>,
}

impl Stored {
    fn new(random: &mut Random, kind: WeightKind, rows: usize, columns: usize) -> Self {
        // One byte in front, so that nothing is aligned; nothing behind, for the sanitizer to see.
        let (mut bytes, mut values) = (vec![0], Vec::new());
        for _ in 0..rows {
            for first in (0..columns).step_by(32) {
                let n = (columns - first).min(32);
                block(random, kind, n, &mut bytes, &mut values);
            }
        }
        assert_eq!(bytes.len(), 1 + rows * kind.row_bytes(columns).unwrap());
        Self {
            bytes: bytes.into(),
            shape: [rows, columns],
            kind,
            values,
        }
    }

    fn part(&self) -> WeightRows<'_> {
        // SAFETY: the bytes are just these rows.
        unsafe { WeightRows::from_raw_parts(self.bytes[1..].as_ptr(), self.shape, self.kind) }
    }
}

/// A block of up to 32 elements, decoded in plain Rust.
fn block(
    random: &mut Random,
    kind: WeightKind,
    n: usize,
    bytes: &mut Vec<u8>,
    values: &mut Vec<f32>,
) {
    let scale = |random: &mut Random| f16::from_f32(random.float() / 16.0);
    match kind {
        WeightKind::F32 => {
            for _ in 0..n {
                values.push(random.float());
                bytes.extend(values[values.len() - 1].to_le_bytes());
            }
        }
        WeightKind::F16 => {
            for _ in 0..n {
                let x = f16::from_f32(random.float());
                values.push(x.to_f32());
                bytes.extend(x.to_le_bytes());
            }
        }
        WeightKind::Bf16 => {
            for _ in 0..n {
                let x = bf16::from_f32(random.float());
                values.push(x.to_f32());
                bytes.extend(x.to_le_bytes());
            }
        }
        WeightKind::Q8_0 => {
            let d = scale(random);
            bytes.extend(d.to_le_bytes());
            for _ in 0..n {
                let q = random.bits() as i8;
                bytes.extend(q.to_le_bytes());
                values.push(d.to_f32() * f32::from(q));
            }
        }
        WeightKind::Q4_0 | WeightKind::Q4_1 => {
            let (d, m) = (scale(random), scale(random));
            bytes.extend(d.to_le_bytes());
            if kind == WeightKind::Q4_1 {
                bytes.extend(m.to_le_bytes());
            }
            let pairs: Vec<u8> = (0..16).map(|_| random.bits() as u8).collect();
            let low = pairs.iter().map(|b| b & 15);
            for q in low.chain(pairs.iter().map(|b| b >> 4)) {
                let q = f32::from(q);
                values.push(match kind {
                    WeightKind::Q4_0 => d.to_f32() * (q - 8.0),
                    _ => d.to_f32() * q + m.to_f32(),
                });
            }
            bytes.extend(pairs);
        }
    }
}

/// Rows at an odd stride and address.
struct Strided {
    bytes: Vec<u8>,
    shape: [usize; 2],
    stride: usize,
}

impl Strided {
    const AT: usize = 3;

    fn new(values: &[f32], columns: usize, gap: usize) -> Self {
        let (rows, stride) = (values.len() / columns, 4 * columns + gap);
        let mut bytes = vec![0xff; Self::AT + rows * stride];
        for (row, values) in values.chunks(columns).enumerate() {
            for (i, value) in values.iter().enumerate() {
                bytes[Self::AT + row * stride + 4 * i..][..4].copy_from_slice(&value.to_ne_bytes());
            }
        }
        Self {
            bytes,
            shape: [rows, columns],
            stride,
        }
    }

    fn rows(&self) -> Rows<'_> {
        let base = self.bytes[Self::AT..].as_ptr();
        // SAFETY: made to be so.
        unsafe { Rows::from_raw_parts(base, self.shape, self.stride as isize) }
    }

    fn rows_mut(&mut self) -> RowsMut<'_> {
        let base = self.bytes[Self::AT..].as_mut_ptr();
        // SAFETY: made to be so.
        unsafe { RowsMut::from_raw_parts(base, self.shape, self.stride as isize) }
    }

    /// The elements; what lies between the rows must be as it was.
    fn values(&self) -> Vec<f32> {
        let mut values = Vec::new();
        assert!(self.bytes[..Self::AT].iter().all(|b| *b == 0xff));
        for row in self.bytes[Self::AT..].chunks(self.stride) {
            let (row, gap) = row.split_at(4 * self.shape[1]);
            assert!(gap.iter().all(|b| *b == 0xff), "written between rows");
            values.extend(
                row.chunks(4)
                    .map(|b| f32::from_ne_bytes(b.try_into().unwrap())),
            );
        }
        values
    }
}

/// A sum in f64, and how far a sum in float32 may be from it.
fn expected(x: &[f32], w: &[f32], rest: [f32; 2]) -> (f64, f64) {
    let product = |(x, w): (&f32, &f32)| f64::from(*x) * f64::from(*w);
    let terms = || x.iter().zip(w).map(product).chain(rest.map(f64::from));
    (terms().sum(), terms().map(f64::abs).sum::<f64>() * 1e-6)
}

/// Every way of multiplying that this CPU has: instruction set, precision, and whether bfloat16 is multiplied as such.
fn ways() -> Vec<(Isa, Precision, bool)> {
    let mut ways = Vec::new();
    for isa in Isa::available() {
        ways.push((isa, Precision::Float32, false));
        ways.push((isa, Precision::Bfloat16, false));
        if matches!(isa, Isa::Avx512Bf16 | Isa::Amx) {
            ways.push((isa, Precision::Bfloat16, true));
        }
    }
    ways
}

fn kinds(precision: Precision) -> &'static [WeightKind] {
    match precision {
        Precision::Float32 => &WeightKind::ALL,
        Precision::Bfloat16 => &[WeightKind::Bf16],
    }
}

/// Few columns and many, whole blocks and not, as a kind allows; from 1,301 on they are read part by part, from 2,080 on in
/// the smallest pieces, and the most part by part even by one row.
fn columns(kind: WeightKind) -> &'static [usize] {
    match kind.is_quantized() {
        true => &[32, 64, 576, 1312, 2080, 5152],
        false => &[1, 5, 31, 32, 33, 47, 96, 577, 1301, 2081, 5153],
    }
}

#[test]
fn products_equal_the_oracle() {
    let mut random = Random(7);
    for (isa, precision, dot) in ways() {
        for kind in kinds(precision) {
            for &columns in columns(*kind) {
                for rows in [1, 2, 3, 4, 5, 9] {
                    // Two parts, whose outputs are no multiple of anything.
                    let first = Stored::new(&mut random, *kind, 35, columns);
                    let second = Stored::new(&mut random, *kind, 6, columns);
                    let weight = Weight::new(vec![first.part(), second.part()]).unwrap();
                    let values = [&first.values[..], &second.values].concat();
                    let (x, bias) = (random.floats(rows * columns), random.floats(41));
                    let before = random.floats(rows * 41);
                    let (x, bias) = (Strided::new(&x, columns, 5), Strided::new(&bias, 41, 0));
                    for (with_bias, add) in [(false, false), (true, false), (true, true)] {
                        let mut out = Strided::new(&before, 41, 12);
                        let options = LinearOptions {
                            bias: with_bias.then(|| bias.rows()),
                            add,
                            precision,
                            num_threads: Some(2),
                            ..LinearOptions::default()
                        };
                        multiply(isa, &x.rows(), &weight, &mut out.rows_mut(), &options, dot)
                            .unwrap();
                        let mut x = x.values();
                        if precision == Precision::Bfloat16 {
                            x.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
                        }
                        let (bias, out) = (bias.values(), out.values());
                        for (i, got) in out.iter().enumerate() {
                            let (t, n) = (i / 41, i % 41);
                            let rest = [(with_bias, bias[n]), (add, before[i])];
                            let rest = rest.map(|(there, value)| if there { value } else { 0.0 });
                            let (x, w) = (
                                &x[t * columns..][..columns],
                                &values[n * columns..][..columns],
                            );
                            let (want, allowed) = expected(x, w, rest);
                            let error = (f64::from(*got) - want).abs();
                            assert!(
                                error <= allowed,
                                "{isa} {precision:?} {dot} {kind:?} [{rows}, {columns}] output {t}, {n}: {got}, not {want}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_on_any_threads_from_weights_anywhere() {
    let mut random = Random(11);
    for (isa, precision, dot) in ways() {
        // Few columns, so many that they are read part by part, and rows a page apart.
        let cases = kinds(precision)
            .iter()
            .flat_map(|kind| match kind.is_quantized() {
                true => [(kind, 96), (kind, 1024), (kind, 2080), (kind, 5152)],
                false => [(kind, 77), (kind, 1024), (kind, 2081), (kind, 5153)],
            });
        for (kind, columns) in cases {
            let stored = Stored::new(&mut random, *kind, 70, columns);
            // The same rows in three parts, and on a cache line.
            let cuts = [0, 1, 37, 70];
            let bytes = kind.row_bytes(columns).unwrap();
            let mut aligned = vec![0_u8; 64 + 70 * bytes];
            let at = aligned.as_ptr().align_offset(64);
            aligned[at..at + 70 * bytes].copy_from_slice(&stored.bytes[1..]);
            let parts = cuts.windows(2).map(|cut| {
                let base = aligned[at + cut[0] * bytes..].as_ptr();
                // SAFETY: the bytes are these rows.
                unsafe { WeightRows::from_raw_parts(base, [cut[1] - cut[0], columns], *kind) }
            });
            let weights = [
                Weight::new(vec![stored.part()]).unwrap(),
                Weight::new(parts.collect()).unwrap(),
            ];

            let most = 130;
            let x = random.floats(most * columns);
            let product = |x: &[f32], weight, threads| {
                let mut out = vec![0.0; x.len() / columns * 70];
                let options = LinearOptions {
                    precision,
                    num_threads: Some(threads),
                    ..LinearOptions::default()
                };
                let mut rows = RowsMut::from_slice(&mut out, 70);
                let x = Rows::from_slice(x, columns);
                multiply(isa, &x, weight, &mut rows, &options, dot).unwrap();
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let alone: Vec<u32> = x
                .chunks(columns)
                .flat_map(|row| product(row, &weights[0], 1))
                .collect();
            for rows in [1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33, 97, most] {
                let first = random.below(most - rows + 1);
                let x = &x[first * columns..][..rows * columns];
                for (threads, weight) in [(1, &weights[1]), (2, &weights[0]), (3, &weights[1])] {
                    assert_eq!(
                        product(x, weight, threads),
                        alone[first * 70..][..rows * 70],
                        "{isa} {precision:?} {dot} {kind:?}: {rows} rows on {threads} threads"
                    );
                }
            }
        }
    }
}

#[test]
fn normed_and_gated_rows_are_multiplied_as_those_of_the_operations_are() {
    let mut random = Random(12);
    for (isa, precision, dot) in ways() {
        for columns in [1, 31, 32, 40, 77, 576] {
            for rows in [1, 5] {
                let kind = WeightKind::Bf16;
                let stored = Stored::new(&mut random, kind, 9, columns);
                let weight = Weight::new(vec![stored.part()]).unwrap();
                let product = |x: &Strided, input| {
                    let mut out = vec![0.0; rows * 9];
                    let options = LinearOptions {
                        input,
                        precision,
                        ..LinearOptions::default()
                    };
                    let mut to = RowsMut::from_slice(&mut out, 9);
                    multiply(isa, &x.rows(), &weight, &mut to, &options, dot).unwrap();
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let case = format!("{isa} {precision:?} {dot} [{rows}, {columns}]");
                let (norm, eps) = (random.floats(columns), 1e-5);
                let norm = Rows::from_slice(&norm, columns);
                let (x, mut out) = (random.floats(rows * columns), vec![0.0; rows * columns]);
                let x = Strided::new(&x, columns, 5);
                let mut to = RowsMut::from_slice(&mut out, columns);
                rms_norm(isa, &x.rows(), &norm, eps, &mut to, None).unwrap();
                let input = Input::Normed { weight: norm, eps };
                let apart = product(&Strided::new(&out, columns, 0), Input::Plain);
                assert_eq!(product(&x, input), apart, "normed, {case}");

                let x = random.floats(2 * rows * columns);
                let x = Strided::new(&x, 2 * columns, 7);
                let mut to = RowsMut::from_slice(&mut out, columns);
                silu_mul(isa, &x.rows(), &mut to, None).unwrap();
                let apart = product(&Strided::new(&out, columns, 0), Input::Plain);
                assert_eq!(product(&x, Input::Gated), apart, "gated, {case}");
            }
        }
    }
}

#[test]
fn quantized_weights_have_the_bits_of_what_they_stand_for() {
    let mut random = Random(13);
    for isa in Isa::available() {
        for kind in WeightKind::ALL {
            let stored = Stored::new(&mut random, kind, 40, 96);
            let bytes: Box<[u8]> = stored.values.iter().flat_map(|x| x.to_le_bytes()).collect();
            // SAFETY: the bytes are just these rows.
            let plain =
                unsafe { WeightRows::from_raw_parts(bytes.as_ptr(), [40, 96], WeightKind::F32) };
            for rows in [1, 5] {
                let x = random.floats(rows * 96);
                let product = |part| {
                    let weight = Weight::new(vec![part]).unwrap();
                    let mut out = vec![0.0; rows * 40];
                    let options = LinearOptions::default();
                    let (x, mut rows) =
                        (Rows::from_slice(&x, 96), RowsMut::from_slice(&mut out, 40));
                    linear(isa, &x, &weight, &mut rows, &options).unwrap();
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                assert_eq!(product(stored.part()), product(plain), "{isa} {kind:?}");
            }
        }
    }
}

#[test]
fn nothing_of_one_row_reaches_another() {
    let mut random = Random(17);
    for (isa, precision, dot) in ways() {
        for kind in kinds(precision) {
            let columns = columns(*kind)[3];
            let stored = Stored::new(&mut random, *kind, 33, columns);
            let weight = Weight::new(vec![stored.part()]).unwrap();
            let mut x = random.floats(7 * columns);
            x[3 * columns] = f32::NAN;
            x[4 * columns + columns / 2] = f32::INFINITY;
            let mut out = vec![0.0; 7 * 33];
            let options = LinearOptions {
                precision,
                ..LinearOptions::default()
            };
            let mut rows = RowsMut::from_slice(&mut out, 33);
            multiply(
                isa,
                &Rows::from_slice(&x, columns),
                &weight,
                &mut rows,
                &options,
                dot,
            )
            .unwrap();
            for (t, row) in out.chunks(33).enumerate() {
                match t {
                    3 => assert!(row.iter().all(|y| y.is_nan()), "{isa} {kind:?}"),
                    // A weight may be zero.
                    4 => assert!(row.iter().all(|y| !y.is_finite()), "{isa} {kind:?}"),
                    _ => assert!(row.iter().all(|y| y.is_finite()), "{isa} {kind:?}"),
                }
            }
        }
    }
}

#[test]
fn rows_of_weights_are_embedded_as_what_they_stand_for() {
    let mut random = Random(19);
    for isa in Isa::available() {
        for kind in WeightKind::ALL {
            for &columns in columns(kind) {
                let first = Stored::new(&mut random, kind, 5, columns);
                let second = Stored::new(&mut random, WeightKind::F32, 4, columns);
                let weight = Weight::new(vec![first.part(), second.part()]).unwrap();
                let values = [&first.values[..], &second.values].concat();
                let ids: Vec<u32> = (0..11).map(|_| random.below(9) as u32).collect();
                let mut out = Strided::new(&vec![0.0; ids.len() * columns], columns, 4);
                embed(isa, &weight, &ids, &mut out.rows_mut(), Some(2)).unwrap();
                for (row, id) in out.values().chunks(columns).zip(&ids) {
                    let want = &values[*id as usize * columns..][..columns];
                    assert_eq!(row, want, "{isa} {kind:?} of {columns} columns");
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let data = [0_u8; 4 * 32 * 3];
    let part = |rows, columns, kind| {
        // SAFETY: no kind has more bytes.
        unsafe { WeightRows::from_raw_parts(data.as_ptr(), [rows, columns], kind) }
    };
    let message = |result: Result<(), crate::Error>| result.unwrap_err().to_string();
    for (parts, problem) in [
        (vec![], "parts: got 0 parts of 0 columns"),
        (
            vec![part(1, 0, WeightKind::F32)],
            "parts: got 1 parts of 0 columns",
        ),
        (
            vec![part(1, 32, WeightKind::F32), part(1, 31, WeightKind::F32)],
            "parts: got 31 columns beside 32, expected as many",
        ),
        (
            vec![part(1, 31, WeightKind::Q4_0)],
            "got 31 columns of q4_0, expected a multiple of 32",
        ),
    ] {
        let result = Weight::new(parts).map(drop);
        assert!(message(result.clone()).contains(problem), "{result:?}");
    }

    let isa = Isa::available().next().unwrap();
    let weight = Weight::new(vec![part(3, 32, WeightKind::F32)]).unwrap();
    let (x, bias) = ([1.0; 64], [0.0; 3]);
    let mut out = [7.0; 6];
    let mut product = |columns, outputs, options: &LinearOptions<'_>| {
        let mut out = RowsMut::from_slice(&mut out, outputs);
        message(linear(
            isa,
            &Rows::from_slice(&x, columns),
            &weight,
            &mut out,
            options,
        ))
    };
    let plain = LinearOptions::default();
    assert_eq!(
        product(16, 3, &plain),
        "x: got shape [4, 16], expected [4, 32]"
    );
    assert_eq!(
        product(32, 2, &plain),
        "out: got shape [3, 2], expected [2, 3]"
    );
    let options = LinearOptions {
        bias: Some(Rows::from_slice(&bias[..2], 2)),
        ..plain
    };
    assert_eq!(product(32, 3, &options), "bias: got 2 elements, expected 3");
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let input = Input::Normed {
            weight: Rows::from_slice(&x[..32], 32),
            eps,
        };
        let problem = product(32, 3, &LinearOptions { input, ..plain });
        assert!(
            problem.contains("finite number greater than 0"),
            "{problem}"
        );
    }
    let options = LinearOptions {
        precision: Precision::Bfloat16,
        ..plain
    };
    assert_eq!(
        product(32, 3, &options),
        "precision: bfloat16 needs weights of bfloat16, got float32"
    );
    let options = LinearOptions {
        num_threads: Some(0),
        ..plain
    };
    assert!(product(32, 3, &options).contains("num_threads: got 0"));
    assert_eq!(out, [7.0; 6]);
    let mut out = [7.0; 64];
    let result = embed(
        isa,
        &weight,
        &[2, 3],
        &mut RowsMut::from_slice(&mut out, 32),
        None,
    );
    assert_eq!(
        message(result),
        "token_ids: item 1 is 3, expected less than 3"
    );
    assert_eq!(out, [7.0; 64]);
}
