//! How much memory the books take: measured by a counting allocator, in a process of its own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use leafkv_core::{Config, KvManager, TokenId};

static LIVE: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn live() -> usize {
    LIVE.load(Ordering::Relaxed)
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
}
