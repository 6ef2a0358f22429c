//! What went wrong in engines of this kind, as stories with one ending each.

use leafkv_core::{Admission, BlockId, Config, Error, KvManager, Scope, SequenceId, TokenId};

const READY_COLD: Admission = Admission::Ready { cached_tokens: 0 };

fn manager(num_blocks: usize, block_size: usize) -> KvManager {
    KvManager::new(Config::new(num_blocks, block_size)).unwrap()
}

/// A prompt that shares nothing with another seed's.
fn prompt(seed: usize, len: usize) -> Vec<TokenId> {
    let tokens = (0..len).map(|position| (seed * 1_000_003 + position) as TokenId);
    tokens.collect()
}

fn lookup(manager: &KvManager, tokens: &[TokenId], namespace: &[u8]) -> usize {
    manager.lookup(tokens, namespace.into()).unwrap()
}

fn begin(manager: &mut KvManager, id: SequenceId, tokens: &[TokenId]) -> Admission {
    manager
        .begin(id, tokens.to_vec(), Scope::default())
        .unwrap()
}

/// Computes the tokens from the last committed one on, in one step.
fn compute(manager: &mut KvManager, id: SequenceId, len: usize, new_tokens: &[TokenId]) {
    manager
        .grow(id, len - manager.num_committed(id).unwrap())
        .unwrap();
    manager.copies();
    manager.commit(id, len, new_tokens).unwrap();
}

/// A whole life: begin, compute the prompt, release. Returns the hit.
fn run(manager: &mut KvManager, id: SequenceId, tokens: &[TokenId]) -> usize {
    let Admission::Ready { cached_tokens } = begin(manager, id, tokens) else {
        panic!("nobody else is running");
    };
    compute(manager, id, tokens.len(), &[]);
    manager.release(id).unwrap();
    cached_tokens
}

fn assert_drained(manager: &KvManager) {
    manager.check_invariants().unwrap();
    let stats = manager.stats();
    assert_eq!((stats.held_blocks, stats.sequences), (0, 0));
    assert_eq!(stats.free_blocks + stats.cached_blocks, stats.num_blocks);
}

#[test]
fn forks_give_every_block_back_once() {
    let mut manager = manager(64, 8);
    begin(&mut manager, 0, &prompt(0, 60));
    compute(&mut manager, 0, 60, &[]);
    manager.fork(0, 1).unwrap();
    manager.fork(0, 2).unwrap();
    for id in 0..3 {
        compute(&mut manager, id, 70, &prompt(id as usize + 1, 10));
        manager.check_invariants().unwrap();
    }
    for id in [1, 0, 2] {
        manager.release(id).unwrap();
        manager.check_invariants().unwrap();
        assert_eq!(manager.release(id), Err(Error::UnknownSequence(id)));
    }
    assert_drained(&manager);
    manager.evict(64);
    assert_eq!(manager.stats().free_blocks, 64);
}

#[test]
fn no_block_is_lost_whatever_the_length() {
    for caching in [false, true] {
        let mut manager = KvManager::new(Config {
            prefix_caching: caching,
            ..Config::new(32, 8)
        })
        .unwrap();
        for round in 0..2_000 {
            let tokens = prompt(round % 70, 1 + round % 37);
            run(&mut manager, round as SequenceId, &tokens);
        }
        assert_drained(&manager);
        assert!(caching || manager.stats().free_blocks == 32);
    }
}

#[test]
fn equal_hashes_never_make_equal_blocks() {
    let mut manager = KvManager::new(Config {
        hash: |_, _, _| 0,
        ..Config::new(64, 4)
    })
    .unwrap();
    for seed in 0..8 {
        assert_eq!(run(&mut manager, 0, &prompt(seed, 9)), 0);
    }
    for seed in 0..8 {
        assert_eq!(lookup(&manager, &prompt(seed, 9), b""), 8);
    }
    assert_eq!(manager.evict(64), 16);
    assert_drained(&manager);
}

#[test]
fn a_block_is_known_by_all_that_comes_before_it() {
    let mut manager = manager(64, 4);
    // The same last block and the same length, after another first block.
    run(&mut manager, 0, &[1, 1, 1, 1, 5, 5, 5, 5, 9]);
    assert_eq!(lookup(&manager, &[2, 2, 2, 2, 5, 5, 5, 5, 9], b""), 0);
    assert_eq!(lookup(&manager, &[5, 5, 5, 5, 9], b""), 0);
}

#[test]
fn namespaces_share_nothing() {
    let mut manager = manager(64, 4);
    let tokens = prompt(0, 9);
    run(&mut manager, 0, &tokens);
    for other in [&b"\0"[..], b"a", b"\0\0", b"model/adapter"] {
        assert_eq!(lookup(&manager, &tokens, other), 0);
        assert_eq!(
            manager.begin(1, tokens.clone(), other.into()),
            Ok(READY_COLD)
        );
        compute(&mut manager, 1, 9, &[]);
        manager.release(1).unwrap();
        assert_eq!(lookup(&manager, &tokens, other), 8);
    }
    assert_eq!(manager.clear(Some(b"a")), 2);
    assert_eq!(manager.clear(Some(b"a")), 0);
    assert_eq!(lookup(&manager, &tokens, b"a"), 0);
    assert_eq!(lookup(&manager, &tokens, b"\0"), 8);
    assert_eq!(manager.clear(None), 8);
    assert_drained(&manager);
}

#[test]
fn who_lives_through_a_clear_goes_on_alone() {
    let mut manager = manager(64, 4);
    let tokens = prompt(0, 12);
    begin(&mut manager, 0, &tokens);
    compute(&mut manager, 0, 8, &[]);
    assert_eq!(manager.clear(None), 0);
    manager.check_invariants().unwrap();
    // It neither leads, nor shares what it computes from now on.
    assert_eq!(begin(&mut manager, 1, &tokens), READY_COLD);
    compute(&mut manager, 0, 12, &[]);
    assert_eq!(lookup(&manager, &tokens, b""), 0);
    manager.fork(0, 2).unwrap();
    manager.release(0).unwrap();
    manager.release(2).unwrap();
    assert_eq!(manager.stats().cached_blocks, 0);
    // Who came after is as everybody else.
    compute(&mut manager, 1, 12, &[]);
    manager.release(1).unwrap();
    assert_eq!(lookup(&manager, &tokens, b""), 8);
}

#[test]
fn a_recycled_block_is_not_found_under_its_old_name() {
    let mut manager = manager(4, 4);
    let (p, q) = (prompt(0, 16), prompt(1, 16));
    run(&mut manager, 0, &p);
    run(&mut manager, 0, &q);
    assert_eq!(lookup(&manager, &p, b""), 0);
    assert_eq!(run(&mut manager, 0, &p), 0);
    assert_eq!(run(&mut manager, 0, &p), 12);
    assert!(manager.stats().cached_blocks <= 4);
}

#[test]
fn what_was_not_committed_is_not_cached() {
    let tokens = prompt(0, 16);
    for committed in 0..=16 {
        let mut manager = manager(8, 4);
        begin(&mut manager, 0, &tokens);
        manager.grow(0, 16).unwrap();
        manager.commit(0, committed, &[]).unwrap();
        manager.release(0).unwrap();
        assert_eq!(manager.stats().cached_blocks, committed / 4);
        assert_eq!(lookup(&manager, &tokens, b""), (committed / 4 * 4).min(12));
        assert_drained(&manager);
    }
}

#[test]
fn a_cached_prompt_leaves_a_token_to_compute() {
    for len in [4, 8, 9] {
        let mut manager = manager(8, 4);
        let tokens = prompt(0, len);
        assert_eq!(run(&mut manager, 0, &tokens), 0);
        for _ in 0..3 {
            assert_eq!(run(&mut manager, 0, &tokens), (len - 1) / 4 * 4);
            assert_eq!(manager.stats().cached_blocks, len / 4);
            assert_drained(&manager);
        }
    }
}

#[test]
fn edges_split_at_every_offset_and_never_run_empty() {
    let base = prompt(0, 33);
    for len in 1..4 {
        let mut manager = manager(8, 4);
        run(&mut manager, 0, &base[..len]);
        assert_eq!(manager.stats().cached_blocks, 0);
    }
    for order in [1, 5, 7, 11] {
        let mut manager = manager(256, 4);
        run(&mut manager, 0, &base);
        for step in 0..33 {
            let shared = step * order % 33;
            let mut tokens = base[..shared].to_vec();
            tokens.extend(prompt(step + 1, 9));
            assert_eq!(run(&mut manager, 0, &tokens), shared / 4 * 4);
            manager.check_invariants().unwrap();
        }
        while manager.evict(3) > 0 {
            manager.check_invariants().unwrap();
        }
        assert_eq!(manager.stats().free_blocks, 256);
    }
}

#[test]
fn a_request_never_evicts_its_own_prefix() {
    // The oldest prefix of a full pool: its request needs room, and gets it from the others.
    let mut manager = manager(12, 4);
    for seed in 0..3 {
        run(&mut manager, 0, &prompt(seed, 16));
    }
    let mut tokens = prompt(0, 16);
    tokens.extend(prompt(9, 8));
    assert_eq!(run(&mut manager, 0, &tokens), 16);
    assert_eq!(lookup(&manager, &tokens, b""), 20);
    assert_eq!(manager.stats().evicted_blocks, 2);
    // The tail of the least recently used one went.
    assert_eq!(lookup(&manager, &prompt(1, 17), b""), 8);
    assert_eq!(lookup(&manager, &prompt(2, 17), b""), 16);
}

#[test]
fn the_cache_makes_room_for_a_request_of_the_whole_pool() {
    let mut manager = manager(16, 4);
    for seed in 0..8 {
        run(&mut manager, 0, &prompt(seed, 8));
    }
    assert_eq!(
        (manager.stats().cached_blocks, manager.allocatable_blocks()),
        (16, 16)
    );
    run(&mut manager, 0, &prompt(9, 64));
    assert_eq!(manager.stats().evicted_blocks, 16);
    let too_long = manager.begin(0, prompt(9, 65), Scope::default());
    assert!(matches!(
        too_long,
        Err(Error::InvalidArgument {
            argument: "tokens",
            ..
        })
    ));
}

#[test]
fn cached_blocks_count_once_in_admission() {
    let mut manager = manager(16, 4);
    run(&mut manager, 0, &prompt(0, 48));
    assert_eq!(manager.allocatable_blocks(), 16);
    let mut tokens = prompt(0, 48);
    tokens.extend(prompt(1, 16));
    assert_eq!(
        begin(&mut manager, 1, &tokens),
        Admission::Ready { cached_tokens: 48 }
    );
    assert_eq!(manager.allocatable_blocks(), 4);
    let refused = manager.grow(1, 17);
    assert_eq!(
        refused,
        Err(Error::OutOfBlocks {
            needed: 5,
            allocatable: 4
        })
    );
    compute(&mut manager, 1, 64, &[]);
    assert_eq!(manager.stats().evicted_blocks, 0);
}

#[test]
fn branches_part_and_never_see_each_other() {
    let mut manager = manager(16, 4);
    begin(&mut manager, 0, &prompt(0, 6));
    compute(&mut manager, 0, 6, &[]);
    manager.fork(0, 1).unwrap();
    manager.grow(1, 1).unwrap();
    // A copy that is not made yet cannot be copied from: all read what the first one was to read.
    manager.fork(1, 2).unwrap();
    assert!(matches!(
        manager.commit(2, 6, &[]),
        Err(Error::InvalidArgument {
            argument: "seq_id",
            ..
        })
    ));
    manager.grow(2, 1).unwrap();
    let tails: Vec<BlockId> = (0..3)
        .map(|id| manager.block_table(id).unwrap()[1])
        .collect();
    let copies: Vec<_> = manager
        .copies()
        .iter()
        .map(|copy| (copy.source, copy.destination))
        .collect();
    assert_eq!(copies, [(tails[0], tails[1]), (tails[0], tails[2])]);
    assert!(manager.copies().is_empty());
    for id in 0..3 {
        assert_eq!(
            manager.block_table(id).unwrap()[0],
            manager.block_table(0).unwrap()[0]
        );
        compute(&mut manager, id, 8, &[7, id as TokenId]);
        manager.check_invariants().unwrap();
    }
    for branch in 0..3 {
        let mut tokens = prompt(0, 6);
        tokens.extend([7, branch, 0]);
        assert_eq!(lookup(&manager, &tokens, b""), 8);
    }
    assert_eq!(
        lookup(&manager, &[&prompt(0, 6)[..], &[7, 3, 0]].concat(), b""),
        4
    );
}

#[test]
fn drafts_never_enter_the_tree() {
    let mut manager = manager(16, 4);
    begin(&mut manager, 0, &prompt(0, 5));
    compute(&mut manager, 0, 5, &[]);
    manager.grow(0, 7).unwrap();
    manager.commit(0, 7, &[50, 51]).unwrap();
    manager.truncate(0, 7).unwrap();
    assert_eq!(manager.block_table(0).unwrap().len(), 2);
    compute(&mut manager, 0, 9, &[60, 61]);
    let mut tokens = prompt(0, 5);
    tokens.extend([50, 51, 60, 61]);
    assert_eq!(lookup(&manager, &tokens, b""), 8);
    manager.check_invariants().unwrap();
}

#[test]
fn a_shared_prefix_is_computed_once() {
    let mut manager = manager(256, 16);
    let shared = prompt(0, 64);
    let tokens = |id: SequenceId| [&shared[..], &prompt(1 + id as usize, 20)].concat();
    assert_eq!(begin(&mut manager, 0, &tokens(0)), READY_COLD);
    let wait = Admission::WaitFor {
        leader: 0,
        tokens: 64,
    };
    for id in 1..8 {
        assert_eq!(begin(&mut manager, id, &tokens(id)), wait);
    }
    // Half of it is not what they wait for.
    compute(&mut manager, 0, 40, &[]);
    assert_eq!(begin(&mut manager, 1, &tokens(1)), wait);
    assert_eq!(manager.stats().sequences, 1);
    // The leader ends early: the next one goes on from what was committed, and leads.
    manager.release(0).unwrap();
    assert_eq!(
        begin(&mut manager, 1, &tokens(1)),
        Admission::Ready { cached_tokens: 32 }
    );
    assert_eq!(
        begin(&mut manager, 2, &tokens(2)),
        Admission::WaitFor {
            leader: 1,
            tokens: 64
        }
    );
    compute(&mut manager, 1, 64, &[]);
    for id in 2..8 {
        assert_eq!(
            begin(&mut manager, id, &tokens(id)),
            Admission::Ready { cached_tokens: 64 }
        );
    }
    // Nobody waits for generated tokens, or for less than a block.
    compute(&mut manager, 1, 84, &prompt(99, 40));
    let generated = [&tokens(1)[..], &prompt(99, 40)].concat();
    assert_eq!(
        begin(&mut manager, 8, &generated),
        Admission::Ready { cached_tokens: 80 }
    );
    manager.check_invariants().unwrap();
}

/// Many prefixes of two blocks after one common block; then every new one evicts.
fn eviction_work(leaves: usize) -> (u64, u64) {
    let mut manager = manager(leaves * 2 + 1, 4);
    let tokens = |seed: usize| [&prompt(0, 4)[..], &prompt(1 + seed, 8)].concat();
    for seed in 0..leaves {
        run(&mut manager, 0, &tokens(seed));
    }
    assert_eq!(manager.stats().evicted_blocks, 0);
    for seed in leaves..leaves + 1_000 {
        run(&mut manager, 0, &tokens(seed));
        // The oldest goes, tail first, and nothing else does.
        assert_eq!(
            lookup(&manager, &[&tokens(seed - leaves)[..], &[0]].concat(), b""),
            4
        );
        assert_eq!(
            lookup(
                &manager,
                &[&tokens(seed - leaves + 1)[..], &[0]].concat(),
                b""
            ),
            12
        );
    }
    manager.check_invariants().unwrap();
    (manager.eviction_visits(), manager.stats().evicted_blocks)
}

#[test]
fn eviction_does_not_depend_on_the_number_of_leaves() {
    let (visits, evicted) = eviction_work(1_000);
    assert_eq!(evicted, 2_000);
    assert!(
        visits <= 2 * evicted,
        "{visits} nodes visited for {evicted} blocks"
    );
    assert_eq!(eviction_work(50_000), (visits, evicted));
}

#[test]
fn arguments_are_refused_by_name() {
    for (num_blocks, block_size, name) in [
        (0, 1, "num_blocks"),
        (1 << 31, 1, "num_blocks"),
        (1, 0, "block_size"),
    ] {
        let error = KvManager::new(Config::new(num_blocks, block_size)).unwrap_err();
        assert!(error.to_string().starts_with(name), "{error}");
    }
    let mut manager = manager(4, 4);
    begin(&mut manager, 0, &prompt(0, 5));
    manager.grow(0, 5).unwrap();
    let argument = |error| match error {
        Err(Error::InvalidArgument { argument, .. }) => argument,
        other => panic!("{other:?}"),
    };
    assert_eq!(argument(manager.commit(0, 6, &[1])), "n");
    manager.commit(0, 3, &[]).unwrap();
    assert_eq!(argument(manager.commit(0, 2, &[])), "n");
    assert_eq!(argument(manager.truncate(0, 6)), "n");
    manager.grow(0, 1).unwrap();
    assert_eq!(argument(manager.commit(0, 6, &[])), "new_tokens");
    assert_eq!(argument(manager.fork(0, 0)), "child_id");
    assert_eq!(argument(manager.slots(0, 4).map(|_| ())), "counts");
    let huge = manager.grow(0, usize::MAX);
    assert!(
        matches!(huge, Err(Error::OutOfBlocks { allocatable: 2, .. })),
        "{huge:?}"
    );
    manager.check_invariants().unwrap();
}
