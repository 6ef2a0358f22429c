//! `KvManager` against a slow, obvious model, on random operations, tiny pools and a vocabulary of two tokens.
//!
//! The model predicts every answer, error, counter and event, what is cached and what goes; only the names of blocks
//! are the manager's. See `model/mod.rs`.

mod model;

use std::sync::Mutex;

use leafkv_core::TokenId;
use model::op::{Op, Prompt, Setup, Who};
use model::reference::Model;
use model::world::{Seen, World};
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, RngSeed, TestRunner};
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};

fn token() -> impl Strategy<Value = TokenId> {
    proptest::bool::weighted(0.12).prop_map(TokenId::from)
}

fn tokens(max: usize) -> impl Strategy<Value = Vec<TokenId>> {
    proptest::collection::vec(token(), 0..=max)
}

fn prompt() -> impl Strategy<Value = Prompt> {
    let gap = prop_oneof![1 => Just(-1_i8), 30 => 0..5_i8];
    let length = prop_oneof![1 => Just(0_u8), 30 => 1..4_u8];
    let spans = proptest::collection::vec((gap, length, 0..2_u8), 1..3);
    let usual = any::<u8>().prop_map(Prompt::usual_spans);
    let spans = prop_oneof![30 => Just(Vec::new()), 15 => usual, 2 => spans];
    let namespace = prop_oneof![6 => Just(0_u8), 2 => Just(1), 1 => Just(2)];
    let reads_cache = proptest::bool::weighted(0.9);
    let parts = (namespace, tokens(14), spans, reads_cache);
    parts.prop_map(|(namespace, tokens, spans, reads_cache)| {
        Prompt::new(namespace, tokens, &spans).reading_cache(reads_cache)
    })
}

fn op() -> impl Strategy<Value = Op> {
    let new_id = || 0..8_u64;
    let who = || prop_oneof![1 => Just(Who::Named(0)), 60 => (0..60_usize).prop_map(Who::Live)];
    let over = || prop_oneof![1 => Just(0_usize), 8 => Just(1), 3 => 2..9_usize];
    let next = || proptest::option::weighted(0.3, token());
    let ttl = || prop_oneof![4 => Just(None), 8 => (1..6_u64).prop_map(Some), 1 => Just(Some(0)), 1 => Just(Some(u64::MAX))];
    let differ = || proptest::bool::weighted(0.05);
    let columns = prop_oneof![15 => Just(20_usize), 1 => 0..4_usize];
    let spoil = prop_oneof![3 => Just(7_u8), 2 => any::<u8>()];
    let grow_items = proptest::collection::vec((who(), 0..4_usize), 0..5);
    let commit_items = proptest::collection::vec((who(), over(), next()), 0..5);
    let row_items = proptest::collection::vec((who(), 0..3_usize), 0..4);
    prop_oneof![
        12 => (new_id(), prompt()).prop_map(|(id, prompt)| Op::Begin { id, prompt }),
        8 => (who(), new_id(), 0..14_usize, tokens(5))
            .prop_map(|(who, id, keep, more)| Op::Follow { who, id, keep, more }),
        3 => prompt().prop_map(Op::Ask),
        5 => (who(), 0..4_usize).prop_map(|(who, n)| Op::Grow { who, n }),
        3 => (who(), 0..9_usize, tokens(9)).prop_map(|(who, n, drafts)| Op::Write { who, n, drafts }),
        4 => (who(), over(), next()).prop_map(|(who, over, next)| Op::Commit { who, over, next }),
        50 => (who(), prop_oneof![1 => Just(7_usize), 1 => 0..5_usize], tokens(5)).prop_map(|(who, n, drafts)| Op::Continue { who, n, drafts }),
        9 => (who(), new_id()).prop_map(|(parent, child)| Op::Fork { parent, child }),
        6 => (who(), over()).prop_map(|(who, over)| Op::Truncate { who, over }),
        16 => who().prop_map(Op::Release),
        4 => (grow_items, differ()).prop_map(|(items, sloppy)| Op::GrowMany { items, sloppy }),
        4 => (commit_items, differ()).prop_map(|(items, sloppy)| Op::CommitMany { items, sloppy }),
        10 => (row_items, columns, spoil).prop_map(|(items, columns, spoil)| Op::Rows { items, columns, spoil }),
        2 => Just(Op::Copies),
        2 => (0..4_usize).prop_map(Op::Evict),
        2 => proptest::option::weighted(0.8, 0..3_u8).prop_map(Op::Clear),
        1 => (prompt(), ttl()).prop_map(|(prompt, ttl)| Op::Pin { prompt, ttl }),
        4 => (who(), ttl()).prop_map(|(who, ttl)| Op::PinOf { who, ttl }),
        2 => (0..256_usize).prop_map(Op::Unpin),
        1 => (0..5_u64).prop_map(Op::SetTime),
        2 => Just(Op::Events),
        1 => Just(Op::Listen),
    ]
}

fn setup() -> impl Strategy<Value = Setup> {
    let sizes = (
        prop_oneof![2..=5_usize, 1..=16_usize, 8..=16_usize],
        1..=4_usize,
    );
    let capacity = prop_oneof![2 => Just(0_usize), 1 => 1..5_usize, 2 => Just(100)];
    let budgets = (prop_oneof![1 => Just(0_usize), 1 => 1..4_usize], capacity);
    let flag = proptest::bool::weighted;
    let flags = (flag(0.92), flag(0.7), flag(0.5), flag(0.5));
    (sizes, budgets, flags).prop_map(|(sizes, budgets, flags)| Setup {
        num_blocks: sizes.0,
        block_size: sizes.1,
        pin_budget: budgets.0,
        event_capacity: budgets.1,
        prefix_caching: flags.0,
        partial_hits: flags.1,
        collide: flags.2,
        attentive: flags.3,
    })
}

/// The model as proptest drives it.
struct Reference;

impl ReferenceStateMachine for Reference {
    type State = Model;
    type Transition = Op;

    fn init_state() -> BoxedStrategy<Model> {
        setup().prop_map(Model::new).boxed()
    }

    fn transitions(_: &Model) -> BoxedStrategy<Op> {
        thread_local! {
            static OP: BoxedStrategy<Op> = op().boxed();
        }
        OP.with(Clone::clone)
    }

    fn apply(mut model: Model, op: &Op) -> Model {
        model.apply(op);
        model
    }
}

/// The manager as proptest drives it.
struct Manager;

static SEEN: Mutex<Seen> = Mutex::new(Seen::new());

impl StateMachineTest for Manager {
    type SystemUnderTest = World;
    type Reference = Reference;

    fn init_test(model: &Model) -> World {
        World::new(model)
    }

    fn apply(mut world: World, model: &Model, _: Op) -> World {
        world.step(model);
        world
    }

    fn teardown(world: World, model: Model) {
        let met = world.drain(model);
        let mut seen = SEEN.lock().unwrap();
        for (what, times) in met {
            *seen.entry(what).or_default() += times;
        }
    }
}

/// Situations that random operations must lead to, again and again.
const SITUATIONS: [&str; 43] = [
    "a hit is truncated before it is used",
    "a shared tail cannot be taken over",
    "block pinned twice",
    "compute what is cached",
    "clear with pins",
    "commit_many",
    "copy died",
    "copy of a copy",
    "copy on write",
    "copy out of a pin",
    "copy out of the tree",
    "evict to make room",
    "expiry",
    "expiry in begin",
    "fork before the copy",
    "fork would cut a span",
    "gap in events",
    "grow after one that lacks",
    "hit",
    "hit ends inside a span",
    "hit with media",
    "incremental row write",
    "known already",
    "lacking in grow_many",
    "media stored",
    "only media differ",
    "out of blocks",
    "partial hit among children",
    "partial hit of a block that nobody has",
    "partial hit of an only child",
    "partial pin",
    "pin over the budget",
    "refused commit_many",
    "refused grow_many",
    "several copies at once",
    "take-over",
    "truncate committed tokens",
    "truncate drops a span",
    "truncate would cut a span",
    "wait for a leader",
    "wait for media",
    "wait for more than the hit",
    "whole pin",
];

fn cases() -> u32 {
    let cases = std::env::var("LEAFKV_MODEL_CASES");
    cases.map_or(8_000, |cases| {
        cases.parse().expect("LEAFKV_MODEL_CASES is a number")
    })
}

#[test]
fn the_manager_does_what_the_model_does() {
    let config = Config {
        cases: cases(),
        max_shrink_iters: 20_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/regressions/manager_model.txt",
        ))),
        rng_seed: RngSeed::Fixed(1),
        ..Config::default()
    };
    let strategy = Reference::sequential_strategy(1..120);
    let result = TestRunner::new(config.clone()).run(&strategy, |(model, ops, counter)| {
        Manager::test_sequential(config.clone(), model, ops, counter);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let seen = SEEN.lock().unwrap();
    let often = cases() as usize / 500;
    let is_rare = |what: &&str| seen.get(what).copied().unwrap_or(0) < often;
    let rare: Vec<_> = SITUATIONS
        .into_iter()
        .filter(|what| is_rare(what))
        .collect();
    assert!(rare.is_empty(), "{rare:?} are too rare: {seen:?}");
}

/// Beams of a search: each step the best go on twice, in the names of the worst.
#[test]
fn beams_are_given_new_parents_over_many_steps() {
    for partial_hits in [false, true] {
        let mut seen = Seen::new();
        for seed in 0..40_usize {
            let setup = Setup {
                num_blocks: 200,
                block_size: 1 + seed % 4,
                prefix_caching: seed % 5 > 0,
                partial_hits,
                pin_budget: 0,
                event_capacity: 100,
                collide: false,
                attentive: seed % 2 > 0,
            };
            let mut ops = vec![Op::Begin {
                id: 0,
                prompt: Prompt::new(0, vec![0; 5 + seed % 3], &[]),
            }];
            // All grow, all are written, all are committed.
            let step = |beams: u64, n: usize, bit: u32| {
                let all = move |_| (0..beams).map(move |id| (Who::Named(id), id >> bit & 1));
                (0..3).flat_map(all).map(move |(who, token)| Op::Continue {
                    who,
                    n,
                    drafts: vec![token as TokenId],
                })
            };
            ops.extend(step(1, 7, 0));
            let parent = Who::Named(0);
            ops.extend((1..4).map(|child| Op::Fork { parent, child }));
            for round in 0..30_usize {
                ops.extend(step(4, 1, round as u32 % 2));
                let (best, worst) = ((round * 7 + seed) % 4, (round * 5 + seed * 3 + 1) % 4);
                if best != worst {
                    ops.push(Op::Release(Who::Named(worst as u64)));
                    let parent = Who::Named(best as u64);
                    let child = worst as u64;
                    ops.push(Op::Fork { parent, child });
                }
            }
            for (what, times) in model::world::run(setup, &ops) {
                *seen.entry(what).or_default() += times;
            }
        }
        for what in ["copy on write", "known already", "several copies at once"] {
            assert!(
                seen.get(what).is_some_and(|&times| times > 20),
                "{what}: {seen:?}"
            );
        }
    }
}
