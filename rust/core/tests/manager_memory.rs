//! How much memory the books take: measured by a counting allocator, in a process of its own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use leafkv_core::{Config, KvManager, TokenId};

thread_local! {
    /// Bytes that this thread has: the test harness has others.
    static LIVE: Cell<usize> = const { Cell::new(0) };
}

fn count(change: impl FnOnce(usize) -> usize) {
    LIVE.set(change(LIVE.get()));
}

struct Counting;

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(|live| live.wrapping_add(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(|live| live.wrapping_sub(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn live() -> usize {
    LIVE.get()
}

fn run(manager: &mut KvManager, id: u64, tokens: &[TokenId]) {
    manager
        .begin(id, tokens.to_vec(), b"tenant".into())
        .unwrap();
    manager
        .grow(id, tokens.len() - manager.num_committed(id).unwrap())
        .unwrap();
    manager.commit(id, tokens.len(), &[]).unwrap();
    manager.release(id).unwrap();
}

/// Prefixes in three levels: 100 of 512 tokens, 10 of 256 below each, 10 of 128 below each of those.
fn shaped(index: usize) -> Vec<TokenId> {
    let level = |name: usize, len: usize| (0..len).map(move |at| (name * 1_000 + at) as TokenId);
    let (first, second) = (index / 100, 1_000 + index / 10);
    level(first, 512)
        .chain(level(second, 256))
        .chain(level(10_000 + index, 128))
        .collect()
}

/// Bytes a cached token that the manager takes, tokens included, once `fill` is done.
fn bytes_per_token(config: Config, fill: impl Fn(&mut KvManager)) -> f64 {
    let (before, block_size) = (live(), config.block_size);
    let mut manager = KvManager::new(config).unwrap();
    fill(&mut manager);
    let tokens = manager.stats().cached_blocks * block_size;
    let per_token = (live() - before) as f64 / tokens as f64;
    // Nothing but the flat books of the pool is left when everything is evicted.
    let blocks = manager.evict(usize::MAX);
    let left = live() - before;
    assert!(left < 64 * blocks, "{left} bytes for {blocks} free blocks");
    drop(manager);
    assert_eq!(live(), before);
    per_token
}

#[allow(clippy::print_stdout)]
fn the_tree_takes_few_bytes_a_token() {
    const TREE: usize = (100 * 512 + 1_000 * 256 + 10_000 * 128) / 16;
    let config = |partial_hits| Config {
        partial_hits,
        ..Config::new(TREE, 16)
    };
    let fill = |manager: &mut KvManager| {
        (0..10_000).for_each(|index| run(manager, 0, &shaped(index)));
        assert_eq!(manager.stats().cached_blocks, TREE);
    };
    let plain = bytes_per_token(config(false), fill);
    let partial = bytes_per_token(config(true), fill);
    // Each answer grows its leaf a token at a time.
    let decoded = bytes_per_token(config(false), |manager| {
        for index in 0..1_000 {
            let tokens = shaped(index);
            manager.begin(0, tokens.clone(), b"tenant".into()).unwrap();
            let hit = manager.num_committed(0).unwrap();
            manager.grow(0, tokens.len() - hit).unwrap();
            manager.commit(0, tokens.len(), &[]).unwrap();
            for end in 897..=897 + index % 1_000 {
                manager.grow(0, 1).unwrap();
                manager.commit(0, end, &[3]).unwrap();
            }
            manager.release(0).unwrap();
        }
    });
    // The worst: every block is a leaf of its own.
    let leaves = |partial_hits| {
        bytes_per_token(config(partial_hits), |manager| {
            (0..50_000).for_each(|leaf| run(manager, 0, &[leaf; 16]));
        })
    };
    let (single, single_partial) = (leaves(false), leaves(true));
    println!(
        "bytes a cached token: {plain:.2}, with partial hits {partial:.2}, after decoding {decoded:.2}, \
         in leaves of one block {single:.1}, with partial hits {single_partial:.1}"
    );
    assert!(
        plain < 8.0 && partial < 8.0 && decoded < 8.0,
        "{plain} {partial} {decoded}"
    );
    assert!(
        single < 20.0 && single_partial < 30.0,
        "{single} {single_partial}"
    );
}

/// Five million blocks, each another, through a small pool.
fn churn_leaves_nothing() {
    let mut manager = KvManager::new(Config::new(1_000, 1)).unwrap();
    let mut round = 0;
    let mut churn = |manager: &mut KvManager, rounds: u32| {
        for _ in 0..rounds {
            round += 1;
            let tokens: Vec<TokenId> = (0..1_000).map(|at| round * 1_000 + at).collect();
            run(manager, 0, &tokens);
        }
    };
    churn(&mut manager, 100);
    let warm = live();
    churn(&mut manager, 4_900);
    assert!(manager.stats().stored_blocks >= 5_000_000);
    assert!(live() <= warm + 4_096, "grew by {} bytes", live() - warm);
}

/// One test, so that nothing else allocates meanwhile.
#[test]
fn memory_follows_the_content() {
    const BLOCK: usize = 4;
    let shared: Vec<TokenId> = (0..10_000).collect();
    let before = live();

    // A long prefix, split by 10,000 others at every token. From its start on: if the halves of a split kept the
    // buffer of the whole, this order would keep them all.
    let mut manager = KvManager::new(Config::new(30_000, BLOCK)).unwrap();
    run(&mut manager, 0, &shared);
    for len in 0..10_000 {
        let own = 1_000_000 + len as TokenId;
        run(&mut manager, 1, &[&shared[..len], &[own; BLOCK]].concat());
    }
    manager.check_invariants().unwrap();
    let blocks = manager.stats().cached_blocks;
    assert!(blocks > 12_000, "{blocks}");
    let per_token = (live() - before) / (blocks * BLOCK);
    assert!(per_token < 100, "{per_token} bytes a token");

    // Nothing but the flat books of the pool is left when everything is evicted.
    assert_eq!(manager.evict(usize::MAX), blocks);
    let left = live() - before;
    assert!(left < 64 * blocks, "{left} bytes for {blocks} free blocks");

    // Errors, aborts and namespaces leave nothing behind.
    let churn = |manager: &mut KvManager, rounds: std::ops::Range<u64>| {
        for round in rounds {
            let namespace = round.to_le_bytes();
            let tokens = vec![round as TokenId; 9];
            manager
                .begin(round, tokens.clone(), namespace[..].into())
                .unwrap();
            assert!(manager.begin(round, tokens, namespace[..].into()).is_err());
            manager.grow(round, 9).unwrap();
            manager.commit(round, round as usize % 10, &[]).unwrap();
            manager.fork(round, u64::MAX).unwrap();
            assert!(manager.grow(u64::MAX, usize::MAX).is_err());
            manager.grow(u64::MAX, 3).unwrap();
            manager.release(u64::MAX).unwrap();
            manager.release(round).unwrap();
            manager.clear(Some(&namespace));
        }
    };
    churn(&mut manager, 0..1_000);
    let warm = live();
    churn(&mut manager, 1_000..50_000);
    assert!(live() <= warm + 4_096, "grew by {} bytes", live() - warm);
    assert_eq!(manager.stats().free_blocks, 30_000);
    drop(manager);
    assert_eq!(live(), before);

    for _ in 0..1_000 {
        let mut manager = KvManager::new(Config::new(64, BLOCK)).unwrap();
        run(&mut manager, 0, &shared[..100]);
        manager
            .begin(1, shared[..50].to_vec(), b"tenant".into())
            .unwrap();
        manager.fork(1, 2).unwrap();
    }
    assert_eq!(live(), before);

    the_tree_takes_few_bytes_a_token();
    churn_leaves_nothing();
}
