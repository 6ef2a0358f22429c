//! The KV manager's hot paths, without Python. What is measured and why: `benches/README.md`.
//!
//! Every benchmark here has a twin of the same name in `bench_kv_manager.py`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion};
use leafkv_core::{Admission, BlockId, Config, KvManager, Rows, Scope, SequenceId, TokenId};

const BLOCK: usize = 16;
/// Levels of the shared-prefix tree: how many children a node has, and how many tokens a child adds.
const LEVELS: [(usize, usize); 3] = [(100, 512), (10, 256), (10, 128)];
const LEAVES: usize = 10_000;
/// Blocks of the tree, then of the prompts that are put beside it.
const TREE_BLOCKS: usize = (100 * 512 + 1_000 * 256 + 10_000 * 128) / BLOCK;
const PROMPT: usize = 4_096;
const EXTRA_PROMPTS: usize = 200;
const POOL: usize = TREE_BLOCKS + (EXTRA_PROMPTS + 8) * PROMPT / BLOCK;

/// An id that no sequence of the setups has.
const ID: SequenceId = 1 << 40;

/// splitmix64: tokens that are the same in every run, and in no two prompts.
struct Tokens(u64);

impl Tokens {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn take(&mut self, n: usize) -> Vec<TokenId> {
        (0..n).map(|_| (self.next() % 128_000) as TokenId).collect()
    }
}

fn manager(num_blocks: usize) -> KvManager {
    KvManager::new(Config::new(num_blocks, BLOCK)).expect("valid sizes")
}

fn begin(manager: &mut KvManager, id: SequenceId, tokens: Vec<TokenId>) -> usize {
    match manager.begin(id, tokens, Scope::default()) {
        Ok(Admission::Ready { cached_tokens }) => cached_tokens,
        other => panic!("{other:?}"),
    }
}

/// A prompt's whole life.
fn serve(manager: &mut KvManager, tokens: Vec<TokenId>) {
    let n = tokens.len();
    let cached = begin(manager, ID, tokens);
    manager.grow(ID, n - cached).expect("room");
    manager.commit(ID, n, &[]).expect("reserved");
    manager.release(ID).expect("live");
}

/// The 10,000 prompts of 896 tokens, depth first.
fn leaves(tokens: &mut Tokens) -> Vec<Vec<TokenId>> {
    let mut prompts = vec![Vec::new()];
    for (children, length) in LEVELS {
        let grown = prompts.iter().flat_map(|prompt| {
            let child = |_| [prompt.clone(), tokens.take(length)].concat();
            (0..children).map(child).collect::<Vec<_>>()
        });
        prompts = grown.collect();
    }
    prompts
}

/// The tree that everything is measured beside.
fn tree(prompts: &[Vec<TokenId>]) -> KvManager {
    let mut manager = manager(POOL);
    for prompt in prompts {
        serve(&mut manager, prompt.clone());
    }
    manager
}

/// Puts a prompt into the tree as a path of `edges` edges of equal length: others part from it in between.
fn insert_path(manager: &mut KvManager, tokens: &mut Tokens, edges: usize) -> Vec<TokenId> {
    let prompt = tokens.take(PROMPT);
    serve(manager, prompt.clone());
    for edge in 1..edges {
        let shared = &prompt[..edge * PROMPT / edges];
        serve(manager, [shared, &tokens.take(BLOCK)].concat());
    }
    prompt
}

fn matching(c: &mut Criterion) {
    let mut tokens = Tokens(1);
    let prompts = leaves(&mut tokens);
    let mut manager = tree(&prompts);
    for edges in [1, 16] {
        let prompt = insert_path(&mut manager, &mut tokens, edges);
        c.bench_function(&format!("match/{edges}"), |b| {
            b.iter(|| manager.match_prefix(black_box(&prompt), Scope::default()));
        });
        // One token is always left to compute.
        let longer = [prompt, vec![0]].concat();
        assert_eq!(manager.lookup(&longer, Scope::default()), Ok(PROMPT));
        c.bench_function(&format!("begin_release/{edges}"), |b| {
            b.iter_batched(
                || longer.clone(),
                |prompt| {
                    begin(&mut manager, ID, prompt);
                    manager.release(ID).expect("live");
                },
                BatchSize::SmallInput,
            );
        });
    }
    let mut order = Tokens(2);
    c.bench_function("match/random_leaf", |b| {
        b.iter_batched_ref(
            || prompts[order.next() as usize % LEAVES].clone(),
            |prompt| manager.match_prefix(prompt, Scope::default()),
            BatchSize::PerIteration,
        );
    });
}

/// A state that is made anew, untimed, after it served `uses` measurements.
struct Reused<S, F> {
    make: F,
    state: S,
    uses: usize,
    left: usize,
}

impl<S, F: FnMut() -> S> Reused<S, F> {
    fn new(uses: usize, mut make: F) -> Self {
        let state = make();
        Self {
            make,
            state,
            uses,
            left: uses,
        }
    }

    /// Measures `routine`, which times itself, `iterations` times.
    fn measure(
        &mut self,
        iterations: u64,
        mut routine: impl FnMut(&mut S) -> Duration,
    ) -> Duration {
        let once = |_| {
            if self.left == 0 {
                self.state = (self.make)();
                self.left = self.uses;
            }
            self.left -= 1;
            routine(&mut self.state)
        };
        (0..iterations).map(once).sum()
    }
}

fn time<T>(call: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    black_box(call());
    start.elapsed()
}

fn inserting(c: &mut Criterion) {
    let mut tokens = Tokens(1);
    let prompts = leaves(&mut tokens);
    let mut trees = Reused::new(EXTRA_PROMPTS, || tree(&prompts));
    c.bench_function("insert/commit", |b| {
        b.iter_custom(|iterations| {
            trees.measure(iterations, |manager| {
                begin(manager, ID, tokens.take(PROMPT));
                manager.grow(ID, PROMPT).expect("room");
                let elapsed = time(|| manager.commit(ID, PROMPT, &[]));
                manager.release(ID).expect("live");
                elapsed
            })
        });
    });
}

fn serving(c: &mut Criterion) {
    let mut tokens = Tokens(1);
    let prompts = leaves(&mut tokens);
    let mut trees = Reused::new(EXTRA_PROMPTS, || tree(&prompts));
    c.bench_function("serve/cold", |b| {
        b.iter_custom(|iterations| {
            trees.measure(iterations, |manager| {
                let prompt = tokens.take(PROMPT);
                time(|| serve(manager, prompt))
            })
        });
    });
    let mut manager = tree(&prompts);
    let prompt = insert_path(&mut manager, &mut tokens, 1);
    c.bench_function("serve/cached", |b| {
        b.iter_batched(
            || prompt.clone(),
            |prompt| serve(&mut manager, prompt),
            BatchSize::SmallInput,
        );
    });
}

fn evicting(c: &mut Criterion) {
    let mut tokens = Tokens(1);
    let prompts = leaves(&mut tokens);
    let extra: Vec<_> = (0..EXTRA_PROMPTS).map(|_| tokens.take(PROMPT)).collect();
    let mut trees = Reused::new(100, || tree(&prompts));
    c.bench_function("evict/256_tokens", |b| {
        b.iter_custom(|iterations| {
            trees.measure(iterations, |manager| time(|| manager.evict(256 / BLOCK)))
        });
    });
    let mut full = Reused::new(1, || {
        let mut manager = tree(&prompts);
        for prompt in &extra {
            serve(&mut manager, prompt.clone());
        }
        manager
    });
    let mut group = c.benchmark_group("evict");
    group.sample_size(20);
    group.bench_function("half", |b| {
        b.iter_custom(|iterations| {
            full.measure(iterations, |manager| {
                let half = manager.stats().cached_blocks / 2;
                time(|| assert_eq!(manager.evict(half), half))
            })
        });
    });
    group.finish();
}

/// Block tables, a row of `COLUMNS` entries a sequence, kept from step to step.
struct TableRows {
    entries: Vec<BlockId>,
    stamps: Vec<u64>,
}

const RUNNING: usize = 256;
const CONTEXT: usize = 1_024;
const STEPS: usize = 64;
const COLUMNS: usize = 2 * CONTEXT / BLOCK;

impl Rows for TableRows {
    fn stamp(&self, row: usize) -> u64 {
        self.stamps[row]
    }

    fn write(&mut self, row: usize, column: usize, blocks: &[BlockId], stamp: u64) {
        let at = row * COLUMNS + column;
        self.entries[at..at + blocks.len()].copy_from_slice(blocks);
        self.stamps[row] = stamp;
    }
}

/// 256 sequences of about 1,024 tokens, each with one more token reserved.
struct Decoding {
    manager: KvManager,
    ids: Vec<SequenceId>,
    ones: Vec<usize>,
    new_tokens: Vec<TokenId>,
    lacking: Vec<usize>,
    rows: TableRows,
    slots: Vec<i64>,
}

impl Decoding {
    fn new(tokens: &mut Tokens) -> Self {
        let mut manager = manager(RUNNING * COLUMNS);
        let ids: Vec<_> = (0..RUNNING as SequenceId).collect();
        for &id in &ids {
            // Staggered: in every step another sixteenth begins a block.
            let n = CONTEXT - STEPS / 2 - BLOCK + id as usize % BLOCK;
            begin(&mut manager, id, tokens.take(n));
            manager.grow(id, n).expect("room");
            manager.commit(id, n, &[]).expect("reserved");
            manager.grow(id, 1).expect("room");
        }
        let mut decoding = Self {
            manager,
            ids,
            ones: vec![1; RUNNING],
            new_tokens: tokens.take(RUNNING),
            lacking: Vec::new(),
            rows: TableRows {
                entries: vec![0; RUNNING * COLUMNS],
                stamps: vec![0; RUNNING],
            },
            slots: vec![0; RUNNING],
        };
        // A table's first growth makes room for many: that is behind us.
        (0..BLOCK).for_each(|_| decoding.step());
        decoding
    }

    /// The bookkeeping between two runs of the model.
    fn step(&mut self) {
        let (manager, ids, ones) = (&mut self.manager, &self.ids, &self.ones);
        let committed = manager.commit_many(ids, ones, &self.new_tokens, ones);
        committed.expect("reserved");
        let grown = manager.grow_many(ids, ones, &mut self.lacking);
        grown.expect("room");
        black_box(manager.copies());
        let updated = manager.update_rows(ids, COLUMNS, &mut self.rows);
        updated.expect("wide enough");
        let written = manager.slots_of(ids, ones, RUNNING, |at, slot, n| {
            for i in 0..n {
                self.slots[at + i] = (slot + i) as i64;
            }
        });
        written.expect("reserved");
    }
}

fn decoding(c: &mut Criterion) {
    let mut tokens = Tokens(1);
    let mut running = Reused::new(STEPS, || Decoding::new(&mut tokens));
    c.bench_function("decode/step", |b| {
        b.iter_custom(|iterations| {
            running.measure(iterations, |decoding| time(|| decoding.step()))
        });
    });
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    matching(&mut criterion);
    inserting(&mut criterion);
    serving(&mut criterion);
    evicting(&mut criterion);
    decoding(&mut criterion);
    criterion.final_summary();
}
