//! Threads for attention and the operations around it: one rayon pool per thread count, made on first use and kept.
//!
//! The calling thread works too, so a pool for `n` threads has `n - 1` workers, and a call that needs none never
//! wakes one. Nobody waits for workers to wake up, only for those that have begun. Waking takes longer than most calls, so
//! a worker that has helped stays awake for a moment: a model's calls follow each other closely. Threads do not survive
//! `fork()`: a child that finds its parent's pools makes its own.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicPtr, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};
use std::{hint, mem, process};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{Error, Result};

/// More threads than this is taken for a mistake.
const MAX_THREADS: usize = 1024;

/// How long a caller watches the last workers before it sleeps. Each has two pieces left at most, but one that waits for
/// this very core gets it only then.
const SPIN: Duration = Duration::from_micros(5);

/// How long a worker stays awake for the next call: from one step of a model to the next, with some Python between them.
const LINGER: Duration = Duration::from_micros(400);
/// Of that, how long it keeps its core to itself.
const EAGER: Duration = Duration::from_micros(40);

/// Jobs for each worker that may wait for one: whoever calls while workers are held elsewhere does the work alone, and
/// leaves no more behind.
const MOST_WAITING: usize = 4;

/// The pools of one process, by thread count.
struct Registry {
    process: u32,
    pools: Mutex<BTreeMap<usize, Arc<Workers>>>,
}

/// Workers, and what keeps them apart from each other.
struct Workers {
    pool: ThreadPool,
    /// Jobs that are posted and that none has begun.
    waiting: AtomicUsize,
    /// Workers that are awake and look at `calls`.
    lingering: AtomicUsize,
    /// How many calls there have been, and the last one.
    calls: AtomicUsize,
    last: Mutex<Option<Arc<Call>>>,
}

impl Workers {
    /// `None` where the system has no threads to give.
    fn new(count: usize) -> Option<Arc<Self>> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(count)
            .thread_name(|i| format!("leafkv-{i}"))
            .build();
        Some(Arc::new(Self {
            pool: pool.ok()?,
            waiting: AtomicUsize::new(0),
            lingering: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
            last: Mutex::default(),
        }))
    }

    /// Tells workers that are awake of a call; says how many they are, or soon were: one that goes to sleep looks once more
    /// after it has left their number.
    fn announce(&self, call: &Arc<Call>) -> usize {
        *lock(&self.last) = Some(Arc::clone(call));
        self.calls.fetch_add(1, SeqCst);
        self.lingering.load(SeqCst)
    }

    /// A worker's time after its job: it helps with whatever is called for, until nothing is for a while.
    fn linger(&self) {
        let mut seen = self.calls.load(SeqCst);
        loop {
            self.lingering.fetch_add(1, SeqCst);
            let idle = Instant::now();
            while self.calls.load(SeqCst) == seen && idle.elapsed() < LINGER {
                if idle.elapsed() < EAGER {
                    hint::spin_loop();
                } else {
                    thread::yield_now();
                }
            }
            self.lingering.fetch_sub(1, SeqCst);
            let calls = self.calls.load(SeqCst);
            if calls == seen {
                return;
            }
            seen = calls;
            let call = lock(&self.last).clone();
            if let Some(call) = call {
                call.help();
            }
        }
    }
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

/// Runs `work` on up to `num_threads` threads at once, this one among them, and returns when all that began are done.
/// Workers that are asleep are left so unless `wake`: it takes this thread 8 microseconds, and them some 40.
///
/// `work` is expected to claim pieces until none is left. Short work is over before a sleeping worker wakes up: one
/// that comes after this thread has returned from `work` finds the door closed, and nobody waits for it.
pub(crate) fn run(num_threads: usize, wake: bool, work: impl Fn() + Sync) {
    match (num_threads > 1).then(|| workers(num_threads)).flatten() {
        None => work(),
        Some(workers) => share(&workers, num_threads - 1, wake, &work),
    }
}

fn share(workers: &Arc<Workers>, helpers: usize, wake: bool, work: &(dyn Fn() + Sync)) {
    let call = Arc::new(Call {
        door: AtomicUsize::new(0),
        // SAFETY: a pointer may outlive what it points to; `Call::help` sees to it that none is followed then.
        work: unsafe { mem::transmute::<*const (dyn Fn() + Sync + '_), Work>(work) },
        caller: thread::current(),
        panic: Mutex::default(),
    });
    let open = OpenDoor(&call);
    let awake = workers.announce(&call);
    for _ in awake..if wake { helpers } else { 0 } {
        if workers.waiting.fetch_add(1, Relaxed) >= MOST_WAITING * helpers {
            workers.waiting.fetch_sub(1, Relaxed);
            break;
        }
        let (call, all) = (Arc::clone(&call), Arc::clone(workers));
        workers.pool.spawn(move || {
            all.waiting.fetch_sub(1, Relaxed);
            call.help();
            all.linger();
        });
    }
    work();
    drop(open);
    if let Some(panic) = call.panic().take() {
        panic::resume_unwind(panic);
    }
}

/// What a worker is to run, for as long as its call's door is open or it is inside.
type Work = *const (dyn Fn() + Sync);

/// One call of [`run`], which workers may hear of when it is over.
struct Call {
    /// How many workers are in `work`, and [`CLOSED`] once no more may enter.
    door: AtomicUsize,
    work: Work,
    caller: Thread,
    /// The first panic of a worker.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

const CLOSED: usize = 1 << (usize::BITS - 1);

// SAFETY: `work` points to something `Sync`, the rest is `Send` and `Sync` by itself.
unsafe impl Send for Call {}
// SAFETY: see above.
unsafe impl Sync for Call {}

impl Call {
    /// A worker's part.
    fn help(&self) {
        let enter = |door| (door & CLOSED == 0).then_some(door + 1);
        if self.door.fetch_update(Acquire, Relaxed, enter).is_err() {
            return;
        }
        // SAFETY: this worker entered before the door was closed, and until it has left, `OpenDoor` keeps the caller,
        // also an unwinding one, in `share`, which borrows what this points to.
        let work = unsafe { &*self.work };
        if let Err(panic) = panic::catch_unwind(AssertUnwindSafe(work)) {
            self.panic().get_or_insert(panic);
        }
        if self.door.fetch_sub(1, Release) == CLOSED + 1 {
            // If it has left already, some later `park` of its returns at once, as any may.
            self.caller.unpark();
        }
    }

    fn panic(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        lock(&self.panic)
    }
}

/// Dropped, closes the door and waits for the workers inside.
struct OpenDoor<'a>(&'a Call);

impl Drop for OpenDoor<'_> {
    fn drop(&mut self) {
        if self.0.door.fetch_or(CLOSED, Acquire) & !CLOSED == 0 {
            return;
        }
        let closed = Instant::now();
        while self.0.door.load(Acquire) != CLOSED {
            if closed.elapsed() < SPIN {
                hint::spin_loop();
            } else {
                thread::park();
            }
        }
    }
}

fn workers(num_threads: usize) -> Option<Arc<Workers>> {
    let mut pools = lock(&registry().pools);
    if let Some(workers) = pools.get(&num_threads) {
        return Some(Arc::clone(workers));
    }
    let workers = Workers::new(num_threads - 1)?;
    pools.insert(num_threads, Arc::clone(&workers));
    Some(workers)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process's registry. One that a parent process left behind is abandoned, never locked or dropped: its mutex may
/// have been held at the fork, and its threads are gone.
fn registry() -> &'static Registry {
    static CURRENT: AtomicPtr<Registry> = AtomicPtr::new(std::ptr::null_mut());
    let process = process::id();
    loop {
        let seen = CURRENT.load(Acquire);
        // SAFETY: the pointer is null or came from `Box::leak` below, so it is valid for ever.
        if let Some(registry) = unsafe { seen.as_ref() }.filter(|r| r.process == process) {
            return registry;
        }
        let fresh = Box::leak(Box::new(Registry {
            process,
            pools: Mutex::default(),
        }));
        // The loser of a race leaks an empty registry, once in a process's life.
        let _ = CURRENT.compare_exchange(seen, fresh, AcqRel, Acquire);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// Pieces of work, and how often each was done.
    struct Pieces {
        next: AtomicUsize,
        done: Vec<AtomicUsize>,
    }

    impl Pieces {
        fn new(n: usize) -> Self {
            Self {
                next: AtomicUsize::new(0),
                done: (0..n).map(|_| AtomicUsize::new(0)).collect(),
            }
        }

        fn work(&self) {
            while let Some(piece) = self.done.get(self.next.fetch_add(1, Relaxed)) {
                thread::yield_now();
                piece.fetch_add(1, Relaxed);
            }
        }

        fn assert_done(&self) {
            assert!(self.done.iter().all(|n| n.load(Relaxed) == 1));
        }
    }

    /// Shares work between this thread and a worker of its own, which begin together.
    fn run_both(caller: impl Fn() + Sync, worker: impl Fn() + Sync) -> thread::Result<()> {
        let (both, me) = (Barrier::new(2), thread::current().id());
        let workers = Workers::new(1).unwrap();
        panic::catch_unwind(AssertUnwindSafe(|| {
            share(&workers, 1, true, &|| {
                both.wait();
                if thread::current().id() == me {
                    caller();
                } else {
                    worker();
                }
            });
        }))
    }

    #[test]
    fn each_piece_is_done_once_before_the_call_returns() {
        thread::scope(|scope| {
            for caller in 0..6 {
                scope.spawn(move || {
                    for round in 0..500 {
                        let pieces = Pieces::new(round % 7);
                        run(1 + (caller + round) % 5, round % 3 > 0, || pieces.work());
                        pieces.assert_done();
                    }
                });
            }
        });
    }

    #[test]
    fn calls_in_calls_do_not_wait_for_each_other() {
        let outer = Pieces::new(100);
        run(2, true, || {
            let inner = Pieces::new(3);
            run(2, true, || {
                inner.work();
                run(3, true, || outer.work());
            });
            inner.assert_done();
        });
        outer.assert_done();
    }

    #[test]
    fn a_worker_that_comes_late_is_not_waited_for_and_does_nothing() {
        let (busy, free) = (Barrier::new(3), Barrier::new(3));
        let (workers, calls) = (Workers::new(1).unwrap(), AtomicUsize::new(0));
        // Outlives the call, so that a worker that does run it can be seen.
        let work = || {
            calls.fetch_add(1, Relaxed);
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                share(&workers, 1, true, &|| {
                    busy.wait();
                    free.wait();
                });
            });
            busy.wait();
            for _ in 0..100 {
                share(&workers, 1, true, &work);
                assert!(workers.waiting.load(Relaxed) <= MOST_WAITING);
            }
            free.wait();
        });
        // The only worker takes jobs in the order in which they came.
        workers.pool.install(|| ());
        assert_eq!(calls.load(Relaxed), 100);
        assert_eq!(workers.waiting.load(Relaxed), 0);
    }

    #[test]
    fn a_panic_surfaces_when_nobody_works_any_more() {
        let panic = |who: &'static str| panic::resume_unwind(Box::new(who));
        let finished = AtomicBool::new(false);
        let finish = || {
            for _ in 0..1000 {
                thread::yield_now();
            }
            finished.store(true, Relaxed);
        };
        let who = |result: thread::Result<()>| *result.unwrap_err().downcast::<&str>().unwrap();

        assert_eq!(who(run_both(finish, || panic("worker"))), "worker");
        assert!(finished.swap(false, Relaxed));
        assert_eq!(who(run_both(|| panic("caller"), finish)), "caller");
        assert!(finished.swap(false, Relaxed));
        let both = run_both(|| panic("caller"), || panic("worker"));
        assert_eq!(who(both), "caller");
        run_both(|| (), finish).unwrap();
        assert!(finished.into_inner());
    }
}
