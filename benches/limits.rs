//! What this machine can do at best, on the threads that attention uses: read memory, and multiply and add.

use std::hint::{black_box, spin_loop};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leafkv_core::Isa;
use leafkv_core::attention::KvDtype;
use rayon::{ThreadPool, ThreadPoolBuilder};

const LINE: usize = 64;
/// Independent chains of multiply-adds: more than latency times units, fewer than registers.
const CHAINS: usize = 12;
/// Rounds of them a second, roughly.
const ROUNDS: f64 = 0.5e9;

/// Threads like those of the kernel: the caller, and workers that sleep meanwhile.
pub(crate) struct Limits {
    pool: ThreadPool,
    threads: usize,
}

impl Limits {
    pub(crate) fn new(threads: usize) -> Self {
        let workers = threads.saturating_sub(1).max(1);
        let pool = ThreadPoolBuilder::new().num_threads(workers).build();
        Self {
            pool: pool.expect("threads"),
            threads,
        }
    }

    /// Runs `work` on all threads; returns how long that took.
    fn run(&self, work: impl Fn() + Sync) -> Duration {
        let start = Instant::now();
        self.pool.in_place_scope(|scope| {
            for _ in 1..self.threads {
                scope.spawn(|_| work());
            }
            work();
        });
        start.elapsed()
    }

    /// Runs `work` on runs of `0..n`, a few for each thread.
    fn share(&self, n: usize, work: impl Fn(std::ops::Range<usize>) + Sync) -> Duration {
        let run = n.div_ceil(8 * self.threads).max(1);
        let next = AtomicUsize::new(0);
        self.run(|| {
            loop {
                let start = next.fetch_add(run, Ordering::Relaxed);
                if start >= n {
                    return;
                }
                work(start..n.min(start + run));
            }
        })
    }

    /// Reads memory from its beginning to its end. Returns bytes per second.
    pub(crate) fn stream(&self, memory: &[u8]) -> f64 {
        const PAGE: usize = 4096;
        let pages = memory.len() / PAGE;
        let elapsed = self.share(pages, |run| {
            read(&memory[run.start * PAGE..run.end * PAGE], None);
        });
        (pages * PAGE) as f64 / elapsed.as_secs_f64()
    }

    /// Reads `pieces` bytes at each of `offsets` in turn, and prefetches those that come `ahead` later. Returns bytes
    /// per second.
    pub(crate) fn gather(
        &self,
        memory: &[u8],
        offsets: &[usize],
        piece: usize,
        ahead: usize,
    ) -> f64 {
        let at = |i: usize| &memory[offsets[i]..offsets[i] + piece];
        let elapsed = self.share(offsets.len(), |run| {
            for i in run {
                read(at(i), (i + ahead < offsets.len()).then(|| at(i + ahead)));
            }
        });
        (offsets.len() * piece) as f64 / elapsed.as_secs_f64()
    }

    /// Floating-point operations per second of the instruction that attention over `dtype` lives on; `None` where it
    /// is not known. Runs for about `time`, within limits: an attention that others interrupt is compared with a peak that they interrupt, too.
    pub(crate) fn peak(&self, isa: Isa, dtype: KvDtype, time: Duration) -> Option<f64> {
        let (chains, operations) = instruction(isa, dtype)?;
        let rounds = (time.as_secs_f64().clamp(3e-5, 2e-2) * ROUNDS) as usize;
        let (ready, total) = (AtomicUsize::new(0), Mutex::new(0.0));
        self.run(|| {
            ready.fetch_add(1, Ordering::AcqRel);
            while ready.load(Ordering::Acquire) < self.threads {
                spin_loop();
            }
            let start = Instant::now();
            chains(rounds);
            let rate = (rounds * CHAINS * operations) as f64 / start.elapsed().as_secs_f64();
            *total.lock().expect("no panic") += rate;
        });
        Some(total.into_inner().expect("no panic"))
    }
}

/// Reads a piece of memory, and prefetches another of the same length.
fn read(piece: &[u8], ahead: Option<&[u8]>) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: just detected.
        return unsafe { read_avx2(piece, ahead) };
    }
    read_lines(piece, ahead);
}

/// The same, compiled for wider loads.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2(piece: &[u8], ahead: Option<&[u8]>) {
    read_lines(piece, ahead);
}

#[inline(always)]
fn read_lines(piece: &[u8], ahead: Option<&[u8]>) {
    const STEP: usize = 4 * LINE;
    let mut sums = [0_u64; STEP / 8];
    for (i, lines) in piece.as_chunks::<STEP>().0.iter().enumerate() {
        if let Some(ahead) = ahead {
            for line in 0..STEP / LINE {
                prefetch(ahead.as_ptr().wrapping_add(i * STEP + line * LINE));
            }
        }
        for (sum, word) in sums.iter_mut().zip(lines.as_chunks::<8>().0) {
            *sum ^= u64::from_ne_bytes(*word);
        }
    }
    black_box(sums);
}

/// Into the second-level cache, as the kernel does.
#[cfg(target_arch = "x86_64")]
fn prefetch(p: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: a prefetch may name any address.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
}

#[cfg(not(target_arch = "x86_64"))]
fn prefetch(_: *const u8) {}

/// A loop of so many rounds of `CHAINS` instructions, and the operations of one of these.
type Instruction = (fn(usize), usize);

macro_rules! chains {
    ($name:ident, $features:literal, $start:expr, |$sum:ident| $step:expr) => {
        fn $name(rounds: usize) {
            #[target_feature(enable = $features)]
            fn run(rounds: usize) {
                // Unknown to the compiler, which would else make one chain of all.
                let mut sums = black_box([$start; CHAINS]);
                for _ in 0..rounds {
                    for sum in &mut sums {
                        let $sum = *sum;
                        *sum = $step;
                    }
                }
                black_box(sums);
            }
            // SAFETY: `instruction` names it where the CPU has the features.
            unsafe { run(rounds) };
        }
    };
}

#[cfg(target_arch = "x86_64")]
fn instruction(isa: Isa, dtype: KvDtype) -> Option<Instruction> {
    use std::arch::x86_64::*;
    chains!(avx2, "avx2,fma", _mm256_set1_ps(1.0), |sum| {
        _mm256_fmadd_ps(sum, _mm256_set1_ps(0.999), _mm256_set1_ps(0.001))
    });
    chains!(avx512, "avx512f", _mm512_set1_ps(1.0), |sum| {
        _mm512_fmadd_ps(sum, _mm512_set1_ps(0.999), _mm512_set1_ps(0.001))
    });
    chains!(bf16, "avx512f,avx512bf16", _mm512_set1_ps(1.0), |sum| {
        let one = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1.0), _mm512_set1_ps(1.0));
        _mm512_dpbf16_ps(sum, one, one)
    });
    match isa {
        Isa::Avx2 => Some((avx2, 16)),
        Isa::Avx512Bf16 if dtype == KvDtype::Bf16 => Some((bf16, 64)),
        Isa::Amx if dtype == KvDtype::Bf16 => Some((amx, 2 * 16 * 16 * 32 / AMX_CYCLES)),
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => Some((avx512, 32)),
        _ => None,
    }
}

/// Cycles of a product of tiles: so many rounds of other instructions take as long as one of these.
#[cfg(target_arch = "x86_64")]
const AMX_CYCLES: usize = 16;

/// Products of AMX tiles, 16 by 32 with 32 by 16.
#[cfg(target_arch = "x86_64")]
fn amx(rounds: usize) {
    const { assert!(CHAINS == 12) };
    #[repr(align(64))]
    struct Shapes([u8; 64]);
    let mut shapes = Shapes([0; 64]);
    shapes.0[0] = 1;
    for tile in 0..8 {
        (shapes.0[16 + 2 * tile], shapes.0[48 + tile]) = (64, 16);
    }
    // SAFETY: `instruction` names it where this CPU has AMX, and the system's leave to use it.
    unsafe {
        std::arch::asm!(
            "ldtilecfg [{shapes}]",
            "2:",
            ".rept 3",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            ".endr",
            "dec {rounds}",
            "jnz 2b",
            "tilerelease",
            shapes = in(reg) &shapes,
            rounds = inout(reg) rounds.div_ceil(AMX_CYCLES) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(nostack, readonly),
        );
    }
}

#[cfg(target_arch = "aarch64")]
fn instruction(isa: Isa, _: KvDtype) -> Option<Instruction> {
    use std::arch::aarch64::*;
    chains!(neon, "neon", vdupq_n_f32(1.0), |sum| vfmaq_f32(
        vdupq_n_f32(0.001),
        sum,
        vdupq_n_f32(0.999)
    ));
    (isa == Isa::Neon).then_some((neon, 8))
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn instruction(_: Isa, _: KvDtype) -> Option<Instruction> {
    None
}
