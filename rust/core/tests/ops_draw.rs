//! Sampling, against its definition in double precision: every instruction set, sizes that are parts of vectors, ties,
//! logits that cannot come.
#![allow(missing_docs)]

use leafkv_core::Isa;
use leafkv_core::ops::{Draw, Rows, draw};

const PLAIN: Draw = Draw {
    seed: 3,
    position: 0,
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
};

/// Numbers in [0, 1), the same in every run.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[(self.next() * of.len() as f64) as usize]
    }

    fn logits(&mut self, n: usize) -> Vec<f32> {
        let (scale, step) = (self.pick(&[0.01, 1.0, 4.0, 30.0]), self.pick(&[0.0, 0.5]));
        let gaps = self.pick(&[0.0, 0.0, 0.6]);
        let mut logits: Vec<f32> = (0..n)
            .map(|_| {
                let normal = (self.next() + self.next() + self.next() - 1.5) * scale;
                let x = if step > 0.0 {
                    (normal / step).round() * step
                } else {
                    normal
                };
                if self.next() < gaps {
                    f32::NEG_INFINITY
                } else {
                    x as f32
                }
            })
            .collect();
        if logits.iter().all(|&x| x == f32::NEG_INFINITY) {
            logits[0] = 0.0;
        }
        logits
    }

    fn draw(&mut self) -> Draw {
        Draw {
            seed: (self.next() * 1e18) as u64,
            position: (self.next() * 1e4) as u64,
            temperature: self.pick(&[1e-5, 0.1, 0.7, 1.0, 3.0, 1e30]),
            top_k: self.pick(&[0, 0, 1, 2, 7, 50, 1_000_000]),
            top_p: self.pick(&[1.0, 1.0, 1e-9, 0.3, 0.9, 0.999]),
            min_p: self.pick(&[0.0, 0.0, 0.02, 0.5, 1.0]),
        }
    }
}

fn one(isa: Isa, logits: &[f32], how: Draw) -> i64 {
    let mut out = [-7];
    draw(
        isa,
        &Rows::from_slice(logits, logits.len()),
        &[how],
        &mut out,
        Some(1),
    )
    .unwrap();
    out[0]
}

/// Of each token, the weight with which it may be drawn.
fn by_definition(logits: &[f32], how: &Draw) -> Vec<f64> {
    let descending = |x: &[f64]| {
        let mut sorted = x.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        sorted
    };
    let x: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
    let best = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut weights: Vec<f64> = x
        .iter()
        .map(|x| ((x - best) / how.temperature).exp())
        .collect();
    if how.top_k > 0 && how.top_k < x.len() {
        let least = descending(&x)[how.top_k - 1];
        weights
            .iter_mut()
            .zip(&x)
            .filter(|(_, x)| **x < least)
            .for_each(|(w, _)| *w = 0.0);
    }
    weights
        .iter_mut()
        .filter(|w| **w < how.min_p)
        .for_each(|w| *w = 0.0);
    if how.top_p < 1.0 {
        let total: f64 = weights.iter().sum();
        let mut mass = 0.0;
        let reached = descending(&weights).into_iter().find(|w| {
            mass += w;
            mass >= how.top_p * total * (1.0 - 1e-12)
        });
        let least = reached.unwrap();
        weights
            .iter_mut()
            .filter(|w| **w < least)
            .for_each(|w| *w = 0.0);
    }
    weights
}

#[test]
fn tokens_are_drawn_by_definition() {
    for isa in Isa::available() {
        let mut noise = Noise(5);
        for n in [1, 2, 3, 15, 17, 63, 64, 65, 300, 4097] {
            for _ in 0..60 {
                let (logits, how) = (noise.logits(n), noise.draw());
                let weights = by_definition(&logits, &how);
                let token = one(isa, &logits, how) as usize;
                // The generator is numpy's, and tested with it: here only what its number leads to is known, from the
                // number that the same seed and position give where all weights are 1.
                let uniform = uniform(isa, &how);
                let before: f64 = weights[..token].iter().sum();
                let (total, slack) = (weights.iter().sum::<f64>(), 1e-5);
                let (low, high) = (before / total, (before + weights[token]) / total);
                assert!(
                    weights[token] > 0.0,
                    "{isa}: {how:?}: token {token} of {n} was dropped"
                );
                assert!(
                    low - slack <= uniform.1 && uniform.0 <= high + slack,
                    "{isa}: {how:?}: token {token} of {n} is at {low}..{high}, drawn with {uniform:?}"
                );
            }
        }
    }
}

/// Bounds of the random number.
fn uniform(isa: Isa, how: &Draw) -> (f64, f64) {
    let n = 1 << 17;
    let how = Draw {
        seed: how.seed,
        position: how.position,
        ..PLAIN
    };
    let at = one(isa, &vec![0.0; n], how) as f64;
    (at / n as f64, (at + 1.0) / n as f64)
}

#[test]
fn frequencies_are_the_probabilities() {
    let logits: Vec<f32> = [0.05_f32, 0.4, 0.1, 0.25, 0.2]
        .iter()
        .map(|p| p.ln())
        .collect();
    for isa in Isa::available() {
        let mut counts = [0_u32; 5];
        let n = 20_000;
        for position in 0..n {
            counts[one(isa, &logits, Draw { position, ..PLAIN }) as usize] += 1;
        }
        for (count, p) in counts.into_iter().zip([0.05_f64, 0.4, 0.1, 0.25, 0.2]) {
            let (mean, deviation) = (n as f64 * p, (n as f64 * p * (1.0 - p)).sqrt());
            assert!(
                (f64::from(count) - mean).abs() < 5.0 * deviation,
                "{isa}: {counts:?}"
            );
        }
    }
}

#[test]
fn a_row_gives_the_same_alone_and_in_a_batch_of_any_threads() {
    let (rows, n) = (40, 1_000);
    for isa in Isa::available() {
        let mut noise = Noise(8);
        let logits: Vec<f32> = (0..rows).flat_map(|_| noise.logits(n)).collect();
        let draws: Vec<Draw> = (0..rows).map(|_| noise.draw()).collect();
        let alone: Vec<i64> = (0..rows)
            .map(|row| one(isa, &logits[row * n..][..n], draws[row]))
            .collect();
        for threads in [1, 2, 3, 5] {
            let mut out = vec![-7; rows];
            draw(
                isa,
                &Rows::from_slice(&logits, n),
                &draws,
                &mut out,
                Some(threads),
            )
            .unwrap();
            assert_eq!(out, alone, "{isa}: {threads} threads");
        }
    }
}

#[test]
fn nothing_is_drawn_from_what_is_no_distribution() {
    const INF: f32 = f32::INFINITY;
    for isa in Isa::available() {
        for row in [[f32::NAN, 1.0], [1.0, INF], [-INF, -INF]] {
            assert_eq!(one(isa, &row, PLAIN), -1, "{isa}: {row:?}");
        }
        let mut out = [];
        draw(isa, &Rows::from_slice(&[], 3), &[], &mut out, None).unwrap();
        for temperature in [f64::MIN_POSITIVE, 1e-5, 1.0, 1e30, f64::MAX] {
            let how = Draw {
                temperature,
                ..PLAIN
            };
            assert_eq!(
                one(isa, &[-INF, -INF, 2.0, -INF], how),
                2,
                "{isa}: {temperature}"
            );
        }
    }
}

#[test]
fn bad_numbers_are_named() {
    let isa = Isa::current().unwrap();
    let rows = Rows::from_slice(&[0.0; 6], 3);
    let mut out = [7; 2];
    let problem = |draws: &[Draw], out: &mut [i64]| {
        draw(isa, &rows, draws, out, None).unwrap_err().to_string()
    };
    let bad = [
        (
            Draw {
                temperature: 0.0,
                ..PLAIN
            },
            "temperature: got 0 for row 1, expected a finite number > 0",
        ),
        (
            Draw {
                temperature: f64::NAN,
                ..PLAIN
            },
            "temperature: got NaN for row 1",
        ),
        (
            Draw {
                temperature: f64::INFINITY,
                ..PLAIN
            },
            "temperature: got inf for row 1",
        ),
        (
            Draw {
                top_p: 0.0,
                ..PLAIN
            },
            "top_p: got 0 for row 1, expected a number in (0, 1]",
        ),
        (
            Draw {
                top_p: 1.1,
                ..PLAIN
            },
            "top_p: got 1.1",
        ),
        (
            Draw {
                top_p: f64::NAN,
                ..PLAIN
            },
            "top_p: got NaN",
        ),
        (
            Draw {
                min_p: -0.1,
                ..PLAIN
            },
            "min_p: got -0.1 for row 1, expected a number in [0, 1]",
        ),
        (
            Draw {
                min_p: f64::NAN,
                ..PLAIN
            },
            "min_p: got NaN",
        ),
    ];
    for (how, expected) in bad {
        let said = problem(&[PLAIN, how], &mut out);
        assert!(said.starts_with(expected), "{said}");
    }
    assert!(
        problem(&[PLAIN], &mut out).starts_with("draws: got 1, expected one for each of 2 rows")
    );
    assert!(problem(&[PLAIN; 2], &mut [0; 3]).starts_with("out: got 3 entries, expected 2"));
    assert_eq!(out, [7; 2]);
}
