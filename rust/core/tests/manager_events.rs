//! Events tell a listener what it would see in a snapshot, whenever its snapshot was taken.

use leafkv_core::{Admission, Change, Config, Event, KvManager, Scope, SequenceId, TokenId};

fn manager(num_blocks: usize) -> KvManager {
    let event_capacity = 1_000;
    KvManager::new(Config {
        event_capacity,
        ..Config::new(num_blocks, 2)
    })
    .unwrap()
}

fn begin(manager: &mut KvManager, id: SequenceId, tokens: &[TokenId]) -> Admission {
    let scope = Scope::default();
    manager.begin(id, tokens.to_vec(), scope).unwrap()
}

/// Computes a prompt of which nothing is cached.
fn run(manager: &mut KvManager, id: SequenceId, tokens: &[TokenId]) {
    let cold = Admission::Ready { cached_tokens: 0 };
    assert_eq!(begin(manager, id, tokens), cold);
    manager.grow(id, tokens.len()).unwrap();
    manager.commit(id, tokens.len(), &[]).unwrap();
    manager.release(id).unwrap();
}

#[test]
fn what_is_removed_after_a_snapshot_is_told_after_it() {
    let mut manager = manager(8);
    run(&mut manager, 0, &[1, 2, 3, 4, 5, 6]);
    assert_eq!(manager.evict(1), 1);
    let snapshot = manager.snapshot().unwrap();
    // The removal before it is still in the buffer.
    assert_eq!(manager.evict(2), 2);
    let later = |event: &Event| event.number >= snapshot.number;
    let events: Vec<Event> = manager.events().into_iter().filter(later).collect();
    let [
        Event {
            change: Change::Removed { blocks, .. },
            ..
        },
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    let [Change::Stored { blocks: stored, .. }] = &snapshot.stored[..] else {
        panic!("{snapshot:?}");
    };
    assert_eq!(*blocks, [stored[1], stored[0]]);
}

#[test]
fn a_hit_that_is_truncated_before_its_use_is_not_reused() {
    for (kept, expected) in [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)] {
        let mut manager = manager(8);
        run(&mut manager, 0, &[1, 2, 3, 4, 5]);
        begin(&mut manager, 1, &[1, 2, 3, 4, 5]);
        manager.truncate(1, kept).unwrap();
        manager.events();
        manager.grow(1, 8).unwrap();
        let reused: usize = manager.events().iter().map(blocks_reused).sum();
        assert_eq!(reused, expected, "{kept} tokens kept");
        manager.check_invariants().unwrap();
    }
}

fn blocks_reused(event: &Event) -> usize {
    match &event.change {
        Change::Reused { blocks, .. } => blocks.len(),
        _ => 0,
    }
}
