//! `KvManager` against the model of `manager_model`, on operations decoded from bytes.
//!
//! `fuzz/` runs the same on bytes that a coverage-guided fuzzer finds; what it found is in `tests/regressions/` and is
//! replayed here, together with random bytes and mutations of both.

mod model;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use model::bytes;
use model::world::Seen;

/// SplitMix64: the same bytes everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }

    /// A few small changes: bytes changed, put in, left out, repeated.
    fn mutate(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for _ in 0..1 + self.below(6) {
            let at = self.below(bytes.len() + 1);
            let end = at + self.below(12).min(bytes.len() - at);
            match self.below(4) {
                0 if at < bytes.len() => bytes[at] = self.next() as u8,
                1 => bytes.insert(at, self.next() as u8),
                2 => drop(bytes.drain(at..end)),
                _ => {
                    let piece = bytes[at..end].to_vec();
                    let to = self.below(bytes.len() + 1);
                    bytes.splice(to..to, piece);
                }
            }
        }
        bytes
    }
}

fn regressions() -> Vec<(PathBuf, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/regressions/bytes");
    let files: BTreeSet<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files
        .into_iter()
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect()
}

/// Runs bytes; where that fails, says which bytes they were.
fn run(what: &str, bytes: &[u8], seen: &mut Seen) {
    let met = std::panic::catch_unwind(|| bytes::run(bytes));
    let Ok(met) = met else {
        panic!("{what} failed: {bytes:?}\n{:?}", bytes::decode(bytes))
    };
    for (what, times) in met {
        *seen.entry(what).or_default() += times;
    }
}

#[test]
fn what_once_failed_stays_right() {
    let regressions = regressions();
    assert!(!regressions.is_empty());
    for (path, bytes) in regressions {
        run(&path.display().to_string(), &bytes, &mut Seen::new());
    }
}

#[test]
fn any_bytes_are_right() {
    let cases = std::env::var("LEAFKV_FUZZ_CASES");
    let cases: usize = cases.map_or(8_000, |cases| {
        cases.parse().expect("LEAFKV_FUZZ_CASES is a number")
    });
    let mut random = Random(1);
    let mut corpus: Vec<Vec<u8>> = regressions().into_iter().map(|(_, bytes)| bytes).collect();
    let mut seen = Seen::new();
    for case in 0..cases {
        let len = random.below(900);
        let bytes = match random.below(2) {
            0 => random.bytes(len),
            _ => {
                let index = random.below(corpus.len());
                random.mutate(&corpus[index])
            }
        };
        let before = seen.len();
        run(&format!("case {case}"), &bytes, &mut seen);
        // What leads to something new is worth more mutations.
        if seen.len() > before {
            corpus.push(bytes);
        }
    }
    assert!(
        cases < 1_000 || seen.len() > 40,
        "too little happened: {seen:?}"
    );
}
