//! Lives of sequences that end early, late, or under pressure: what must be left of them.

use std::sync::atomic::{AtomicUsize, Ordering};

use leafkv_core::{
    Admission, BlockId, Config, Error, KvManager, Media, Rows, Scope, SequenceId, TokenId,
    hash_block,
};

fn manager(num_blocks: usize, block_size: usize) -> KvManager {
    KvManager::new(Config {
        partial_hits: true,
        pin_budget: 2,
        ..Config::new(num_blocks, block_size)
    })
    .unwrap()
}

/// A prompt that shares nothing with another seed's.
fn prompt(seed: usize, len: usize) -> Vec<TokenId> {
    (0..len)
        .map(|position| (seed * 1_000_003 + position) as TokenId)
        .collect()
}

fn begin(manager: &mut KvManager, id: SequenceId, tokens: &[TokenId]) -> usize {
    match manager.begin(id, tokens.to_vec(), Scope::default()) {
        Ok(Admission::Ready { cached_tokens }) => cached_tokens,
        other => panic!("{other:?}"),
    }
}

/// Computes up to `len` tokens.
fn compute(manager: &mut KvManager, id: SequenceId, len: usize, new_tokens: &[TokenId]) {
    manager
        .grow(id, len - manager.num_committed(id).unwrap())
        .unwrap();
    manager.copies();
    manager.commit(id, len, new_tokens).unwrap();
}

fn run(manager: &mut KvManager, id: SequenceId, tokens: &[TokenId]) -> usize {
    let hit = begin(manager, id, tokens);
    compute(manager, id, tokens.len(), &[]);
    manager.release(id).unwrap();
    hit
}

fn assert_drained(manager: &KvManager) {
    manager.check_invariants().unwrap();
    let stats = manager.stats();
    assert_eq!(
        (stats.held_blocks, stats.sequences, stats.pinned_blocks),
        (0, 0, 0)
    );
    assert_eq!(stats.free_blocks + stats.cached_blocks, stats.num_blocks);
}

#[test]
fn every_slot_of_a_long_answer_is_given_back_once() {
    let mut manager = manager(64, 4);
    let tokens = prompt(0, 10);
    begin(&mut manager, 0, &tokens);
    for end in [4, 8, 10] {
        compute(&mut manager, 0, end, &[]);
    }
    for generated in 0..200 {
        compute(&mut manager, 0, 11 + generated, &[generated as TokenId]);
        let stats = manager.stats();
        assert_eq!(stats.held_blocks, (11 + generated).div_ceil(4));
        assert_eq!(
            stats.held_blocks + stats.free_blocks + stats.cached_blocks,
            64
        );
    }
    manager.release(0).unwrap();
    assert_eq!(manager.release(0), Err(Error::UnknownSequence(0)));
    assert_drained(&manager);
    // All whole blocks are cached, the block of the last tokens is free.
    assert_eq!(manager.stats().cached_blocks, 210 / 4);
}

/// A thousand prompts, most with a beginning in common, 256 at a time, in far too small a pool.
#[test]
fn after_a_flood_of_requests_every_block_is_free_or_cached() {
    let mut manager = manager(200, 4);
    let mut running: Vec<(SequenceId, usize)> = Vec::new();
    let (mut next, mut preempted) = (0, 0);
    while next < 1_000 || !running.is_empty() {
        while running.len() < 256 && next < 1_000 {
            let seed = next as usize;
            let tokens = [prompt(seed % 7, seed % 23), prompt(seed, 1 + seed % 31)].concat();
            next += 1;
            if let Ok(Admission::Ready { .. }) =
                manager.begin(next, tokens.clone(), Scope::default())
            {
                running.push((next, tokens.len()));
            }
        }
        running.retain(|&(id, len)| {
            let rest = len - manager.num_committed(id).unwrap();
            match manager.grow(id, rest.min(5)) {
                Ok(()) => {
                    manager.copies();
                    let end = manager.num_committed(id).unwrap() + rest.min(5);
                    manager.commit(id, end, &[]).unwrap();
                }
                Err(Error::OutOfBlocks { .. }) => preempted += 1,
                Err(other) => panic!("{other}"),
            }
            let ended = manager.num_committed(id) == Ok(len) || preempted % 3 == 1;
            if ended {
                manager.release(id).unwrap();
            }
            !ended
        });
        manager.check_invariants().unwrap();
    }
    assert!(preempted > 0);
    assert_drained(&manager);
    let cached = manager.stats().cached_blocks;
    assert_eq!(manager.evict(usize::MAX), cached);
    assert_eq!(manager.stats().free_blocks, 200);
}

/// One row, as a caller keeps it.
struct Row([BlockId; 8], u64);

impl Rows for Row {
    fn stamp(&self, _: usize) -> u64 {
        self.1
    }

    fn write(&mut self, _: usize, column: usize, blocks: &[BlockId], stamp: u64) {
        self.0[column..column + blocks.len()].copy_from_slice(blocks);
        self.1 = stamp;
    }
}

#[test]
fn what_the_caller_writes_into_its_rows_changes_no_table() {
    let mut manager = manager(16, 4);
    let tokens = prompt(0, 16);
    begin(&mut manager, 0, &tokens);
    compute(&mut manager, 0, 16, &[]);
    let mut row = Row([0; 8], 0);
    manager.update_rows(&[0], 8, &mut row).unwrap();
    let table = manager.block_table(0).unwrap().to_vec();
    assert_eq!(row.0[..4], table);
    row.0.fill(15);
    manager.release(0).unwrap();
    assert_drained(&manager);
    assert_eq!(manager.match_prefix(&tokens, Scope::default()), Ok(table));
}

/// Each way through a life, ended after each of its steps.
#[test]
fn an_abort_leaves_nothing_behind_whenever_it_comes() {
    type Step = fn(&mut KvManager);
    let steps: [Step; 9] = [
        |manager| assert_eq!(begin(manager, 1, &prompt(0, 23)), 18),
        |manager| manager.grow(1, 2).unwrap(),
        |manager| manager.fork(1, 2).unwrap(),
        |manager| manager.grow(2, 3).unwrap(),
        |manager| assert_eq!(manager.copies().len(), 2),
        |manager| manager.commit(1, 20, &[]).unwrap(),
        |manager| manager.commit(2, 20, &[7, 8]).unwrap(),
        |manager| manager.truncate(1, 17).unwrap(),
        |manager| compute(manager, 1, 19, &[5, 6]),
    ];
    for end in 0..=steps.len() {
        for order in [[1, 2], [2, 1]] {
            let mut manager = manager(16, 4);
            run(
                &mut manager,
                0,
                &[&prompt(0, 18)[..], &[1, 2, 3, 4]].concat(),
            );
            for step in &steps[..end] {
                step(&mut manager);
                manager.check_invariants().unwrap();
            }
            for id in order {
                let _ = manager.release(id);
                assert_eq!(manager.release(id), Err(Error::UnknownSequence(id)));
                manager.check_invariants().unwrap();
            }
            manager.copies();
            assert_drained(&manager);
            manager.evict(usize::MAX);
            assert_eq!(manager.stats().free_blocks, 16, "after {end} steps");
        }
    }
}

#[test]
fn who_waits_holds_nothing_and_goes_on_when_the_leader_is_gone() {
    let mut manager = manager(16, 4);
    let tokens = prompt(0, 20);
    begin(&mut manager, 0, &tokens);
    manager.grow(0, 20).unwrap();
    let before = manager.stats();
    for id in 1..50 {
        let wait = Admission::WaitFor {
            leader: 0,
            tokens: 16,
        };
        assert_eq!(
            manager.begin(id, tokens.clone(), Scope::default()),
            Ok(wait)
        );
        assert_eq!(manager.release(id), Err(Error::UnknownSequence(id)));
    }
    assert_eq!((manager.stats(), manager.time()), (before, 1));
    manager.release(0).unwrap();
    assert_eq!(begin(&mut manager, 1, &tokens), 0);
    manager.release(1).unwrap();
    assert_drained(&manager);
}

#[test]
fn tables_and_slots_fit_whatever_the_length_is_to_a_block() {
    for len in [1, 7, 8, 9, 15, 16, 17] {
        let mut manager = manager(8, 8);
        begin(&mut manager, 0, &prompt(0, len));
        assert_eq!(manager.block_table(0), Ok(&[][..]));
        manager.grow(0, len).unwrap();
        assert_eq!(manager.block_table(0).unwrap().len(), len.div_ceil(8));
        let runs: Vec<(usize, usize)> = manager.slots(0, len).unwrap().collect();
        assert_eq!(runs.iter().map(|(_, length)| length).sum::<usize>(), len);
        assert!(
            runs.iter()
                .all(|&(first, length)| first % 8 == 0 && (1..=8).contains(&length))
        );
        manager.commit(0, len, &[]).unwrap();
        manager.truncate(0, 0).unwrap();
        assert_eq!(manager.stats().held_blocks, 0);
        manager.release(0).unwrap();
        assert_drained(&manager);
        assert_eq!(manager.stats().cached_blocks, len / 8);
    }
}

/// A tenant, an adapter, a version of the weights: whatever is another namespace.
#[test]
fn a_prompt_of_another_namespace_finds_nothing_and_one_of_the_same_all() {
    let mut manager = manager(64, 4);
    let tokens = prompt(0, 17);
    for namespace in [&b"adapter 1"[..], b"adapter 2", b"", b"adapter 1\0"] {
        for hit in [0, 16] {
            let admission = manager.begin(0, tokens.clone(), namespace.into());
            assert_eq!(admission, Ok(Admission::Ready { cached_tokens: hit }));
            compute(&mut manager, 0, 17, &[]);
            manager.release(0).unwrap();
        }
    }
    // New weights under the old name: the namespace is cleared, and says so.
    assert_eq!(manager.clear(Some(b"adapter 1")), 4);
    assert_eq!(manager.lookup(&tokens, b"adapter 1".into()), Ok(0));
    assert_eq!(manager.lookup(&tokens, b"adapter 2".into()), Ok(16));
}

#[test]
fn media_of_another_digest_are_not_the_same_whichever_bit_differs() {
    let mut manager = manager(32, 4);
    let tokens = prompt(0, 20);
    let span = |digest| Media {
        start: 6,
        length: 8,
        digest,
    };
    let namespace = b"";
    let media = [span([0xa5; 32])];
    let scope = Scope {
        namespace,
        media: &media,
    };
    manager.begin(0, tokens.clone(), scope).unwrap();
    compute(&mut manager, 0, 20, &[]);
    manager.release(0).unwrap();
    assert_eq!(manager.lookup(&tokens, scope), Ok(19));
    for bit in 0..256 {
        let mut digest = [0xa5; 32];
        digest[bit / 8] ^= 1 << (bit % 8);
        let media = [span(digest)];
        // What comes before the span is the same.
        assert_eq!(
            manager.lookup(
                &tokens,
                Scope {
                    namespace,
                    media: &media
                }
            ),
            Ok(6)
        );
        assert_eq!(
            manager
                .match_prefix(
                    &tokens,
                    Scope {
                        namespace,
                        media: &media
                    }
                )
                .unwrap()
                .len(),
            1
        );
    }
    for other in [(5, 8), (7, 8), (6, 7), (6, 9)] {
        let media = [Media {
            start: other.0,
            length: other.1,
            digest: [0xa5; 32],
        }];
        let found = manager.lookup(
            &tokens,
            Scope {
                namespace,
                media: &media,
            },
        );
        assert_eq!(found, Ok(other.0.min(6)));
    }
    assert_eq!(manager.lookup(&tokens, Scope::default()), Ok(6));
}

#[test]
fn a_hit_is_what_is_cached_at_admission_and_is_held_from_then_on() {
    let mut manager = manager(10, 4);
    let tokens = prompt(0, 16);
    run(&mut manager, 0, &tokens);
    let longer = [&tokens[..], &prompt(1, 4)].concat();
    assert_eq!(manager.lookup(&longer, Scope::default()), Ok(16));
    assert_eq!(manager.evict(2), 2);
    assert_eq!(begin(&mut manager, 1, &longer), 8);
    assert_eq!(manager.evict(usize::MAX), 0);
    let held = manager.block_table(1).unwrap().to_vec();
    // Others take all that is left, and still not the hit.
    begin(&mut manager, 2, &prompt(2, 32));
    manager.grow(2, 32).unwrap();
    let lacking = Error::OutOfBlocks {
        needed: 3,
        allocatable: 0,
    };
    assert_eq!(manager.grow(1, 12), Err(lacking));
    assert_eq!(manager.block_table(1), Ok(&held[..]));
    manager.release(2).unwrap();
    compute(&mut manager, 1, 20, &[]);
    assert_eq!(manager.block_table(1).unwrap()[..2], held);
    manager.release(1).unwrap();
    assert_drained(&manager);
}

#[test]
fn a_partial_hit_copies_one_block_and_nothing_in_the_tree_is_written() {
    const BLOCK: usize = 8;
    let cached = prompt(0, 3 * BLOCK);
    for shared in 1..BLOCK {
        let mut manager = manager(16, BLOCK);
        run(&mut manager, 0, &cached);
        let tree = manager.match_prefix(&cached, Scope::default()).unwrap();
        let tokens = [&cached[..BLOCK + shared], &prompt(1, 9)].concat();
        assert_eq!(begin(&mut manager, 1, &tokens), BLOCK + shared);
        assert_eq!(manager.block_table(1).unwrap(), &tree[..2]);
        manager.grow(1, 9).unwrap();
        let table = manager.block_table(1).unwrap().to_vec();
        let copies = manager.copies();
        assert_eq!(copies.len(), 1);
        assert_eq!(
            (copies[0].source, copies[0].destination),
            (tree[1], table[1])
        );
        let written: Vec<usize> = manager
            .slots(1, 9)
            .unwrap()
            .flat_map(|(first, n)| first..first + n)
            .collect();
        assert_eq!(written[0], table[1] as usize * BLOCK + shared);
        assert!(
            written
                .iter()
                .all(|&slot| !tree.contains(&((slot / BLOCK) as BlockId)))
        );
        manager.commit(1, tokens.len(), &[]).unwrap();
        manager.release(1).unwrap();
        assert_eq!(manager.match_prefix(&cached, Scope::default()), Ok(tree));
        assert_eq!(manager.stats().partial_hit_tokens, shared as u64);
        assert_drained(&manager);
    }
}

/// A prompt of the whole pool whose tail block is hit in part, where nothing is left to copy to.
#[test]
fn a_prompt_that_fits_never_fails_because_of_what_is_cached() {
    for size in 2..6 {
        for shared in 0..size * 4 {
            let mut manager = KvManager::new(Config {
                partial_hits: true,
                ..Config::new(4, size)
            })
            .unwrap();
            run(&mut manager, 0, &prompt(0, 4 * size));
            let tokens = [&prompt(0, shared)[..], &prompt(1, 4 * size - shared)].concat();
            assert_eq!(begin(&mut manager, 1, &tokens), shared);
            compute(&mut manager, 1, 4 * size, &[]);
            manager.check_invariants().unwrap();
            manager.release(1).unwrap();
            assert_eq!(manager.stats().cached_blocks, 4);
            assert_drained(&manager);
        }
    }
}

#[test]
fn a_working_set_larger_than_the_pool_keeps_what_all_share() {
    // One prompt after another, in a circle of 1.2 pools: none finds itself, all find the common beginning.
    let mut manager = manager(100, 4);
    let tokens = |seed: usize| [prompt(0, 40), prompt(1 + seed % 12, 36)].concat();
    for seed in 0..12 {
        run(&mut manager, 0, &tokens(seed));
    }
    for seed in 12..60 {
        assert!(run(&mut manager, 0, &tokens(seed)) >= 40);
    }
    let stats = manager.stats();
    assert!(stats.hit_tokens * 2 > stats.query_tokens, "{stats:?}");
    assert!(stats.evicted_blocks > 0);
    // Pinned, it stays whatever comes.
    let pinned = manager.pin(&prompt(0, 8), Scope::default(), None).unwrap();
    assert_eq!((pinned.tokens, pinned.partial), (8, false));
    run(&mut manager, 0, &prompt(99, 98 * 4));
    assert_eq!(manager.lookup(&tokens(0), Scope::default()), Ok(8));
    assert!(manager.unpin(pinned.id));
    assert_drained(&manager);
}

static HASHED: AtomicUsize = AtomicUsize::new(0);

fn counting(parent: u32, tokens: &[TokenId], media: &[Media]) -> u64 {
    HASHED.fetch_add(tokens.len(), Ordering::Relaxed);
    hash_block(parent, tokens, media)
}

/// Tokens hashed while a prompt is computed in chunks and an answer a token at a time.
#[test]
fn a_prompt_is_hashed_at_most_once_whatever_the_chunks() {
    const LEN: usize = 128 * 1024;
    let tokens = prompt(0, LEN);
    for chunk in [512, 4_096, LEN] {
        let mut manager = KvManager::new(Config {
            hash: counting,
            ..Config::new(LEN / 16 + 100, 16)
        })
        .unwrap();
        HASHED.store(0, Ordering::Relaxed);
        begin(&mut manager, 0, &tokens);
        for end in (chunk..=LEN).step_by(chunk) {
            compute(&mut manager, 0, end, &[]);
        }
        for generated in 1..=1_000 {
            compute(&mut manager, 0, LEN + generated, &[3]);
        }
        let hashed = HASHED.load(Ordering::Relaxed);
        assert!(
            hashed <= LEN + 1_000,
            "{hashed} tokens hashed in chunks of {chunk}"
        );
    }
}
