//! Paged attention beside the limits of the machine. What is measured and why: `benches/README.md`.
//!
//! Each call of the kernel is followed by calls of its limits, so that a machine whose speed drifts does not matter for
//! their ratios. `LEAFKV_BENCH_OUT` names a file to write them to, as a Markdown table.

#![expect(clippy::print_stdout, reason = "the results")]

mod limits;

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt::{self, Write as _};
use std::time::{Duration, Instant};

use criterion::Criterion;
use half::{bf16, f16};
use leafkv_core::Isa;
use leafkv_core::attention::{
    KvArray, KvDtype, KvLayer, KvLayout, KvSpec, Options, Plan, PlanShape, Scales, Vectors,
    VectorsMut, attend,
};

use limits::Limits;

const BLOCK: usize = 16;
/// The kernel prefetches a partition of 256 tokens ahead.
const AHEAD: usize = 256 / BLOCK;
/// All KV memory; a longer context names blocks of it more than once.
const ARENA: usize = 1 << 30;
/// What a cycle of calls reads at least, so that nothing is left in the CPU's caches from the one before.
const COLD: usize = 256 << 20;
/// What a limit reads at most.
const ENOUGH: usize = 256 << 20;
const DTYPES: [KvDtype; 4] = [KvDtype::F32, KvDtype::Bf16, KvDtype::F16, KvDtype::Int8];
const LAYOUTS: [KvLayout; 2] = [KvLayout::Tiled, KvLayout::Rows];

/// Heads of a model.
#[derive(Debug, Clone, Copy)]
struct Model {
    name: &'static str,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

const fn model(name: &'static str, heads: usize, kv_heads: usize, head_dim: usize) -> Model {
    Model {
        name,
        heads,
        kv_heads,
        head_dim,
    }
}

/// Llama 3 8B, SmolLM2 135M, and one without grouped heads.
const LLAMA: Model = model("llama", 32, 8, 128);
const SMOL: Model = model("smol", 9, 3, 64);
const MHA: Model = model("mha", 32, 32, 128);

/// New tokens of a sequence, and its tokens of KV, those included.
type Rows = (usize, usize);

/// Who computes what in a call.
#[derive(Debug, Clone)]
struct Batch {
    model: Model,
    sequences: Vec<Rows>,
    /// Tokens that all sequences begin with.
    shared: usize,
}

impl Batch {
    fn new(model: Model, count: usize, rows: Rows, shared: usize) -> Self {
        Self {
            model,
            sequences: vec![rows; count],
            shared,
        }
    }

    /// Different tokens of KV.
    fn tokens(&self) -> usize {
        let own = |&(_, kv): &Rows| kv - self.shared;
        self.shared + self.sequences.iter().map(own).sum::<usize>()
    }

    /// Multiplications and additions of the dot products.
    fn operations(&self) -> f64 {
        let seen = |&(new, kv): &Rows| (new * (2 * kv - new + 1) / 2) as f64;
        let pairs: f64 = self.sequences.iter().map(seen).sum();
        4.0 * (self.model.heads * self.model.head_dim) as f64 * pairs
    }

    /// `ids` are the blocks of the shared tokens, then each sequence's own.
    fn plan(&self, num_blocks: usize, ids: &[i32]) -> Plan {
        let shared = self.shared / BLOCK;
        let (mut first, mut starts, mut lens) = (vec![shared], vec![0], Vec::new());
        for (i, (new, kv)) in self.sequences.iter().enumerate() {
            first.push(first[i] + kv.div_ceil(BLOCK) - shared);
            starts.push(starts[i] + *new as i32);
            lens.push(*kv as i32);
        }
        let block = |s: usize, i: usize| {
            if i < shared {
                ids[i]
            } else {
                ids[first[s] + i - shared]
            }
        };
        let shape = PlanShape {
            num_heads: self.model.heads,
            num_kv_heads: self.model.kv_heads,
            head_dim: self.model.head_dim,
            block_size: BLOCK,
            num_blocks,
        };
        Plan::new(shape, ids.len(), block, &starts, &lens, None).expect("valid")
    }
}

/// A benchmark: a call, and those that do the same in parts.
struct Case {
    name: String,
    batch: Batch,
    parts: Vec<Batch>,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: &str, batch: Batch, parts: Vec<Batch>| {
        let name = format!("{name}/{}", batch.model.name);
        cases.push(Case { name, batch, parts });
    };
    for model in [LLAMA, SMOL] {
        for (count, context) in [1, 8, 32]
            .into_iter()
            .flat_map(|n| [512, 4_096, 16_384].map(|c| (n, c)))
        {
            let name = format!("decode-{count}x{context}");
            add(&name, Batch::new(model, count, (1, context), 0), vec![]);
        }
        add(
            "prefill-2048",
            Batch::new(model, 1, (2_048, 2_048), 0),
            vec![],
        );
        add(
            "chunk-256+4096",
            Batch::new(model, 1, (256, 256 + 4_096), 0),
            vec![],
        );
        let prefill = Batch::new(model, 1, (512, 512), 0);
        let decodes = Batch::new(model, 31, (1, 1_024), 0);
        let mut both = decodes.clone();
        both.sequences.extend(&prefill.sequences);
        add("mixed-512+31x1024", both, vec![prefill, decodes]);
    }
    for model in [LLAMA, SMOL, MHA] {
        add(
            "shared-32x4096+128",
            Batch::new(model, 32, (1, 4_096 + 128), 4_096),
            vec![],
        );
    }
    add(
        "unshared-32x4224",
        Batch::new(MHA, 32, (1, 4_096 + 128), 0),
        vec![],
    );
    cases
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In -1.7..1.7, whose variance is 1.
    fn float(&mut self) -> f32 {
        self.next() as i32 as f32 / (1_u32 << 31) as f32 * 1.7
    }

    /// The first `count` of permutations of `0..n`, one after the other.
    fn permutations(&mut self, n: usize, count: usize) -> Vec<i32> {
        let mut all = Vec::new();
        while all.len() < count {
            let mut ids: Vec<_> = (0..n as i32).collect();
            for i in (1..n).rev() {
                ids.swap(i, self.next() as usize % (i + 1));
            }
            all.extend(ids);
        }
        all.truncate(count);
        all
    }
}

/// KV memory in huge pages, as numpy allocates it, full of numbers of one dtype; and scales for int8.
struct Arena {
    base: *mut u8,
    dtype: Option<KvDtype>,
    scales: Vec<f32>,
}

impl Arena {
    const LAYOUT: Layout = match Layout::from_size_align(ARENA, 2 << 20) {
        Ok(layout) => layout,
        Err(_) => panic!(),
    };

    fn new() -> Self {
        // SAFETY: the size is not zero.
        let base = unsafe { alloc(Self::LAYOUT) };
        if base.is_null() {
            handle_alloc_error(Self::LAYOUT);
        }
        ask_for_huge_pages(base, ARENA);
        Self {
            base,
            dtype: None,
            scales: vec![0.01; ARENA / SMOL.head_dim],
        }
    }

    /// A pattern is enough: attention takes the same time whatever it sees.
    fn fill(&mut self, dtype: KvDtype) {
        if self.dtype == Some(dtype) {
            return;
        }
        let mut random = Random(1);
        let mut number = || {
            let x = random.float();
            match dtype {
                KvDtype::F32 => x.to_ne_bytes().to_vec(),
                KvDtype::F16 => f16::from_f32(x).to_ne_bytes().to_vec(),
                KvDtype::Bf16 => bf16::from_f32(x).to_ne_bytes().to_vec(),
                KvDtype::Int8 => ((x * 70.0) as i8).to_ne_bytes().to_vec(),
            }
        };
        let numbers = (1 << 20) / dtype.size();
        let pattern: Vec<u8> = (0..numbers).flat_map(|_| number()).collect();
        for at in (0..ARENA).step_by(pattern.len()) {
            // SAFETY: the pattern's length divides the arena's.
            unsafe {
                self.base
                    .add(at)
                    .copy_from_nonoverlapping(pattern.as_ptr(), pattern.len());
            };
        }
        self.dtype = Some(dtype);
    }

    fn bytes(&self) -> &[u8] {
        assert!(self.dtype.is_some());
        // SAFETY: allocated with this size, filled, and nobody writes it while it is borrowed.
        unsafe { std::slice::from_raw_parts(self.base, ARENA) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated so.
        unsafe { dealloc(self.base, Self::LAYOUT) };
    }
}

#[cfg(target_os = "linux")]
fn ask_for_huge_pages(base: *mut u8, size: usize) {
    const MADV_HUGEPAGE: i32 = 14;
    unsafe extern "C" {
        fn madvise(address: *mut u8, length: usize, advice: i32) -> i32;
    }
    // SAFETY: a hint about memory of our own. Without them it is only slower.
    unsafe { madvise(base, size, MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_: *mut u8, _: usize) {}

/// A batch with its memory: as in a model, one plan for many layers, each call another.
struct Run<'a> {
    plan: Plan,
    isa: Isa,
    layers: Vec<KvLayer<'a>>,
    next: usize,
    query: Vec<f32>,
    out: Vec<f32>,
    model: Model,
    memory: &'a [u8],
    /// Where the K and V of a (block, head) lie, in the order in which they are read, and how long they are.
    pieces: Vec<usize>,
    piece: usize,
    /// From a layer to the next.
    stride: usize,
    streamed: usize,
    /// What a call reads, scales included, and computes.
    bytes: f64,
    operations: f64,
}

impl<'a> Run<'a> {
    fn new(batch: &Batch, layout: KvLayout, isa: Isa, arena: &'a Arena) -> Self {
        let Model {
            heads,
            kv_heads,
            head_dim,
            ..
        } = batch.model;
        let dtype = arena.dtype.expect("full");
        let piece = 2 * BLOCK * head_dim * dtype.size();
        let stride = kv_heads * piece;
        let blocks = batch.tokens().div_ceil(BLOCK);
        let layers = COLD.div_ceil(blocks * stride);
        let num_blocks = blocks.min(ARENA / (stride * layers));

        let mut random = Random(2);
        let ids = random.permutations(num_blocks, blocks);
        let spec = KvSpec {
            dtype,
            layout,
            num_blocks,
            num_kv_heads: kv_heads,
            block_size: BLOCK,
            head_dim,
        };
        // [blocks, layers, KV heads, K and V, tokens and dimensions], and scales without the dimensions.
        let scales = 2 * BLOCK * size_of::<f32>();
        let layer = |layer: usize| {
            let array = |side: usize| KvArray {
                base: arena.base.wrapping_add(layer * stride + side * piece / 2),
                block_stride: (layers * stride) as isize,
                head_stride: piece as isize,
                token_stride: (head_dim * dtype.size()) as isize,
            };
            let scales = [0, 1].map(|side| Scales {
                base: arena
                    .scales
                    .as_ptr()
                    .cast_mut()
                    .cast::<u8>()
                    .wrapping_add(layer * kv_heads * scales + side * scales / 2),
                block_stride: (layers * kv_heads * scales) as isize,
                head_stride: scales as isize,
            });
            let scales = (dtype == KvDtype::Int8).then_some(scales);
            // SAFETY: `num_blocks` blocks of `layers` layers fit in the arena, which is full and not written meanwhile.
            unsafe { KvLayer::new(spec, array(0), array(1), scales) }.expect("valid")
        };
        let pieces = (0..kv_heads).flat_map(|head| {
            let at = move |id: &i32| *id as usize * layers * stride + head * piece;
            ids.iter().map(at)
        });
        let scale_bytes = if dtype == KvDtype::Int8 { scales } else { 0 };
        let bytes = blocks * kv_heads * (piece + scale_bytes);
        let new: usize = batch.sequences.iter().map(|(new, _)| new).sum();
        let floats = new * heads * head_dim;
        Self {
            plan: batch.plan(num_blocks, &ids),
            isa,
            layers: (0..layers).map(layer).collect(),
            next: 0,
            query: (0..floats).map(|_| random.float()).collect(),
            out: vec![0.0; floats],
            model: batch.model,
            memory: arena.bytes(),
            pieces: pieces.take(ENOUGH / piece).collect(),
            piece,
            stride,
            streamed: 0,
            bytes: bytes as f64,
            operations: batch.operations(),
        }
    }

    /// One call, of the next layer.
    fn call(&mut self) -> Duration {
        let Model {
            heads, head_dim, ..
        } = self.model;
        let layer = &self.layers[self.next % self.layers.len()];
        self.next += 1;
        let query = Vectors::from_slice(&self.query, heads, head_dim);
        let mut out = VectorsMut::from_slice(&mut self.out, heads, head_dim);
        let options = Options::new(1.0 / (head_dim as f32).sqrt());
        let start = Instant::now();
        attend(
            &self.plan, self.isa, &query, layer, &mut out, None, &options,
        )
        .expect("valid");
        start.elapsed()
    }

    /// As many bytes in one run, from where the last one ended.
    fn stream(&mut self, limits: &Limits) -> f64 {
        let n = (self.bytes as usize).min(ENOUGH);
        if self.streamed + n > self.memory.len() {
            self.streamed = 0;
        }
        let from = self.streamed;
        self.streamed += n;
        limits.stream(&self.memory[from..from + n])
    }

    /// The same bytes of a layer that was not read for long.
    fn gather(&self, limits: &Limits) -> f64 {
        let layer = (self.next + self.layers.len() / 2) % self.layers.len();
        limits.gather(
            &self.memory[layer * self.stride..],
            &self.pieces,
            self.piece,
            AHEAD,
        )
    }
}

/// What was measured, call by call.
#[derive(Default)]
struct Samples {
    seconds: Vec<f64>,
    stream: Vec<f64>,
    gather: Vec<f64>,
    peak: Vec<f64>,
    parts: Vec<f64>,
}

fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Medians; rates in units of 10^9.
struct Summary {
    name: String,
    milliseconds: f64,
    bytes: f64,
    operations: f64,
    /// Of stream, gather and peak: the limit, and the kernel's share of it.
    limits: [Option<(f64, f64)>; 3],
    /// Time of the parts, one after the other, by that of the whole.
    parts: Option<f64>,
}

impl Summary {
    const HEAD: &'static str = "\
        | benchmark | ms | GB/s | of stream | of gather | GFLOP/s | of peak | stream, GB/s | gather, GB/s | peak, GFLOP/s | parts / whole |\n\
        |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n";

    fn new(name: String, run: &Run<'_>, samples: &Samples) -> Option<Self> {
        let seconds = median(samples.seconds.iter().copied())?;
        let share = |limit: &[f64], work: f64| {
            let of = samples.seconds.iter().zip(limit);
            let ratio = median(of.map(|(seconds, limit)| work / seconds / limit))?;
            Some((median(limit.iter().copied())? / 1e9, ratio))
        };
        let parts = samples.parts.iter().zip(&samples.seconds);
        Some(Self {
            name,
            milliseconds: seconds * 1e3,
            bytes: run.bytes / seconds / 1e9,
            operations: run.operations / seconds / 1e9,
            limits: [
                share(&samples.stream, run.bytes),
                share(&samples.gather, run.bytes),
                share(&samples.peak, run.operations),
            ],
            parts: median(parts.map(|(parts, whole)| parts / whole)),
        })
    }
}

/// A row of the table.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit =
            |i: usize| self.limits[i].map_or(String::new(), |(limit, _)| format!("{limit:.1}"));
        let share = |i: usize| {
            self.limits[i].map_or(String::new(), |(_, share)| {
                format!("{:.0} %", 100.0 * share)
            })
        };
        let parts = self
            .parts
            .map_or(String::new(), |parts| format!("{parts:.2}"));
        write!(
            f,
            "| {} | {:.3} | {:.1} | {} | {} | {:.1} | {} | {} | {} | {} | {parts} |",
            self.name,
            self.milliseconds,
            self.bytes,
            share(0),
            share(1),
            self.operations,
            share(2),
            limit(0),
            limit(1),
            limit(2),
        )
    }
}

fn measure(
    c: &mut Criterion,
    case: &Case,
    layout: KvLayout,
    dtype: KvDtype,
    arena: &mut Arena,
    limits: &Limits,
) -> Option<Summary> {
    let isa = Isa::current().expect("valid");
    let name = format!("{}/{dtype:?}/{layout:?}", case.name).to_lowercase();
    let mut runs: Option<(Run<'_>, Vec<Run<'_>>)> = None;
    let mut samples = Samples::default();
    let mut arena = Some(arena);
    c.bench_function(&name, |b| {
        // Made when the benchmark was not filtered out, and kept.
        let (run, parts) = runs.get_or_insert_with(|| {
            let arena = arena.take().expect("once");
            arena.fill(dtype);
            let run = |batch: &Batch| Run::new(batch, layout, isa, arena);
            let mut all = (
                run(&case.batch),
                case.parts.iter().map(run).collect::<Vec<_>>(),
            );
            all.0.call();
            for part in &mut all.1 {
                part.call();
            }
            all
        });
        b.iter_custom(|iterations| {
            let once = |_| {
                let elapsed = run.call();
                samples.seconds.push(elapsed.as_secs_f64());
                samples.stream.push(run.stream(limits));
                samples.gather.push(run.gather(limits));
                samples.peak.extend(limits.peak(isa, dtype, elapsed));
                if !parts.is_empty() {
                    let sum: Duration = parts.iter_mut().map(Run::call).sum();
                    samples.parts.push(sum.as_secs_f64());
                }
                elapsed
            };
            (0..iterations).map(once).sum()
        });
    });
    let (run, _) = runs?;
    Summary::new(name, &run, &samples)
}

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(50))
        .measurement_time(Duration::from_millis(200))
        .nresamples(1_001)
        .configure_from_args();
    let threads = std::thread::available_parallelism().map_or(1, Into::into);
    let limits = Limits::new(threads);
    let mut arena = Arena::new();
    let mut table = format!(
        "{} threads, {}.\n\n{}",
        threads,
        Isa::current().expect("valid"),
        Summary::HEAD
    );
    for dtype in DTYPES {
        for case in cases() {
            for layout in LAYOUTS {
                if let Some(row) =
                    measure(&mut criterion, &case, layout, dtype, &mut arena, &limits)
                {
                    println!("{row}");
                    writeln!(table, "{row}").expect("a string");
                }
            }
        }
    }
    if let Some(path) = std::env::var_os("LEAFKV_BENCH_OUT") {
        std::fs::write(path, table).expect("a file that can be written");
    }
    criterion.final_summary();
}
