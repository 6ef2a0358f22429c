//! Threads for attention: one rayon pool per thread count, made on first use and kept.
//!
//! The calling thread works too, so a pool for `n` threads has `n - 1` workers, and a call that needs none never
//! wakes one. Threads do not survive `fork()`: a child that finds its parent's pools makes its own.

use std::collections::BTreeMap;
use std::process;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{Error, Result};

/// More threads than this is taken for a mistake.
const MAX_THREADS: usize = 1024;

/// The pools of one process, by thread count.
struct Registry {
    process: u32,
    pools: Mutex<BTreeMap<usize, Arc<ThreadPool>>>,
}

/// A thread count that a caller asked for, checked: `None` stands for all that this process may use.
pub(crate) fn resolve(num_threads: Option<usize>) -> Result<usize> {
    match num_threads {
        None => Ok(available()),
        Some(n) if (1..=MAX_THREADS).contains(&n) => Ok(n),
        Some(n) => Err(Error::invalid(
            "num_threads",
            format!("got {n}, expected 1 to {MAX_THREADS}"),
        )),
    }
}

/// Threads that this process may use. Asking the system takes tens of microseconds: once is enough.
fn available() -> usize {
    static AVAILABLE: OnceLock<usize> = OnceLock::new();
    *AVAILABLE.get_or_init(|| thread::available_parallelism().map_or(1, Into::into))
}

/// Runs `work` on `num_threads` threads at once, this one among them, and returns when all are done.
///
/// `work` is expected to claim pieces until none is left; where workers cannot be had, fewer threads run it.
pub(crate) fn run(num_threads: usize, work: impl Fn() + Sync) {
    match (num_threads > 1).then(|| pool(num_threads)).flatten() {
        None => work(),
        Some(pool) => pool.in_place_scope(|scope| {
            for _ in 1..num_threads {
                scope.spawn(|_| work());
            }
            work();
        }),
    }
}

fn pool(num_threads: usize) -> Option<Arc<ThreadPool>> {
    let mut pools = registry()
        .pools
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = pools.get(&num_threads) {
        return Some(Arc::clone(pool));
    }
    let pool = ThreadPoolBuilder::new()
        .num_threads(num_threads - 1)
        .thread_name(|i| format!("leafkv-{i}"))
        .build();
    let pool = Arc::new(pool.ok()?);
    pools.insert(num_threads, Arc::clone(&pool));
    Some(pool)
}

/// This process's registry. One that a parent process left behind is abandoned, never locked or dropped: its mutex may
/// have been held at the fork, and its threads are gone.
fn registry() -> &'static Registry {
    static CURRENT: AtomicPtr<Registry> = AtomicPtr::new(std::ptr::null_mut());
    let process = process::id();
    loop {
        let seen = CURRENT.load(Ordering::Acquire);
        // SAFETY: the pointer is null or came from `Box::leak` below, so it is valid for ever.
        if let Some(registry) = unsafe { seen.as_ref() }.filter(|r| r.process == process) {
            return registry;
        }
        let fresh = Box::leak(Box::new(Registry {
            process,
            pools: Mutex::default(),
        }));
        // The loser of a race leaks an empty registry, once in a process's life.
        let _ = CURRENT.compare_exchange(seen, fresh, Ordering::AcqRel, Ordering::Acquire);
    }
}
