//! The manager under test, with all that the model must not know: which block is which, what memory holds, who listens.

use std::collections::{BTreeMap, BTreeSet};

use leafkv_core::{
    Admission, BlockCopy, BlockId, Change, Config, Digest, Error, Event, KvManager, Media, Scope,
    SequenceId, block_digests, hash_block,
};

use super::log::{self, Prefix};
use super::memory::{Memory, kv};
use super::mirror::Mirror;
use super::op::{Cell, Op, Prompt, Setup, spans};
use super::reference::{Answer, Block, Call, Model, UNKNOWN};
use super::rows::Rows;

/// How often the situations that matter were met.
pub type Seen = BTreeMap<&'static str, usize>;

#[derive(Debug)]
pub struct World {
    manager: KvManager,
    /// The manager's names of the model's live blocks.
    blocks: BTreeMap<Block, BlockId>,
    tables: BTreeMap<SequenceId, Vec<BlockId>>,
    memory: Memory,
    rows: Rows,
    mirrors: Vec<Mirror>,
    /// The manager's names of the model's pins.
    pins: Vec<u64>,
    digests: BTreeMap<(u8, Prefix), Digest>,
    pub seen: Seen,
}

/// The last namespace has none of the bytes of the others.
fn bytes(namespace: u8) -> Vec<u8> {
    vec![b'n'; usize::from(namespace)]
}

fn media(prompt: &Prompt) -> Vec<Media> {
    prompt.media.iter().map(|span| span.media()).collect()
}

/// Runs operations from the first to the last, compares after each, and takes everything down.
pub fn run(setup: Setup, ops: &[Op]) -> Seen {
    let mut model = Model::new(setup);
    let mut world = World::new(&model);
    for op in ops {
        model.apply(op);
        world.step(&model);
    }
    world.drain(model)
}

impl World {
    pub fn new(model: &Model) -> Self {
        let Setup {
            num_blocks,
            block_size,
            prefix_caching,
            partial_hits,
            pin_budget,
            event_capacity,
            collide,
            ..
        } = model.setup;
        let config = Config {
            prefix_caching,
            partial_hits,
            pin_budget,
            event_capacity,
            // Where all hashes are equal, only comparing tells blocks apart.
            hash: if collide { |_, _, _| 0 } else { hash_block },
            ..Config::new(num_blocks, block_size)
        };
        let manager = KvManager::new(config).unwrap();
        let mirrors = manager.snapshot().iter().map(Mirror::new).collect();
        let world = Self {
            manager,
            blocks: BTreeMap::new(),
            tables: BTreeMap::new(),
            memory: Memory::new(num_blocks, block_size),
            rows: Rows::new(),
            mirrors,
            pins: Vec::new(),
            digests: BTreeMap::new(),
            seen: Seen::new(),
        };
        assert_eq!(world.manager.snapshot().is_ok(), event_capacity > 0);
        world
    }

    /// The model made an operation: so does the manager, and all that can be seen of the two is the same.
    pub fn step(&mut self, model: &Model) {
        for what in &model.seen {
            self.see(what);
        }
        self.perform(model);
        if let Some(expected) = &model.polled {
            let events = self.manager.events();
            self.check_events(&events, expected, model);
        }
        self.compare(model);
    }

    fn see(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    fn perform(&mut self, model: &Model) {
        let answer = &model.answer;
        let manager = &mut self.manager;
        match &model.call {
            Call::Nothing => (),
            Call::Begin { id, prompt } => {
                let (namespace, media) = (bytes(prompt.namespace), media(prompt));
                let scope = Scope {
                    namespace: &namespace,
                    media: &media,
                };
                let tokens = prompt.tokens.clone();
                expect(
                    if prompt.reads_cache {
                        manager.begin(*id, tokens, scope)
                    } else {
                        let begun = manager.begin_uncached(*id, tokens, scope);
                        begun.map(|()| Admission::Ready { cached_tokens: 0 })
                    },
                    answer,
                    |admission| match admission {
                        Admission::Ready { cached_tokens } => Answer::Ready(cached_tokens),
                        Admission::WaitFor { leader, tokens } => Answer::WaitFor(leader, tokens),
                    },
                );
            }
            Call::Ask(prompt) => self.ask(prompt, answer),
            Call::Grow { id, n } => expect(manager.grow(*id, *n), answer, |()| Answer::Done),
            Call::Write { id, cells } => self.write(*id, cells, model),
            Call::Commit { id, n, new_tokens } => {
                expect(manager.commit(*id, *n, new_tokens), answer, |()| {
                    Answer::Done
                });
            }
            Call::Fork { parent, child } => {
                expect(manager.fork(*parent, *child), answer, |()| Answer::Done);
            }
            Call::Truncate { id, n } => {
                expect(manager.truncate(*id, *n), answer, |()| Answer::Done);
            }
            Call::Release { id } => expect(manager.release(*id), answer, |()| Answer::Done),
            Call::GrowMany { ids, counts } => {
                let mut lacking = vec![99];
                let result = manager.grow_many(ids, counts, &mut lacking);
                expect(result, answer, |()| Answer::Lacking(lacking));
            }
            Call::CommitMany {
                ids,
                counts,
                new_tokens,
                new_counts,
            } => {
                let result = manager.commit_many(ids, counts, new_tokens, new_counts);
                expect(result, answer, |()| Answer::Done);
            }
            Call::Rows {
                items,
                columns,
                spoil,
            } => {
                self.rows.spoil(*spoil, items);
                let result = self.rows.update(manager, items, *columns);
                if result == Ok(true) {
                    self.see("incremental row write");
                }
                expect(result, answer, |_| Answer::Done);
            }
            Call::Copies => self.copies(answer),
            Call::Evict(n) => assert_eq!(&Answer::Count(manager.evict(*n)), answer),
            Call::Clear(namespace) => {
                let namespace = namespace.map(bytes);
                assert_eq!(&Answer::Count(manager.clear(namespace.as_deref())), answer);
            }
            Call::Pin { prompt, ttl } => {
                let (namespace, media) = (bytes(prompt.namespace), media(prompt));
                let scope = Scope {
                    namespace: &namespace,
                    media: &media,
                };
                let pins = &mut self.pins;
                expect(manager.pin(&prompt.tokens, scope, *ttl), answer, |pin| {
                    assert!(!pins.contains(&pin.id), "a pin's id is used again");
                    pins.push(pin.id);
                    let (tokens, partial) = (pin.tokens, pin.partial);
                    Answer::Pinned { tokens, partial }
                });
            }
            Call::Unpin(index) => {
                let id = self.pins.get(*index).copied().unwrap_or(u64::MAX);
                assert_eq!(&Answer::Flag(manager.unpin(id)), answer);
            }
            Call::SetTime(now) => expect(manager.set_time(*now), answer, |()| Answer::Done),
            Call::Events => {
                let events = manager.events();
                let Answer::Events(expected) = answer else {
                    unreachable!()
                };
                self.check_events(&events, expected, model);
            }
            Call::Listen => {
                self.mirrors.truncate(1);
                self.mirrors
                    .extend(manager.snapshot().iter().map(Mirror::new));
            }
        }
    }

    fn ask(&self, prompt: &Prompt, answer: &Answer) {
        let (namespace, media) = (bytes(prompt.namespace), media(prompt));
        let scope = Scope {
            namespace: &namespace,
            media: &media,
        };
        let found = self.manager.lookup(&prompt.tokens, scope);
        match self.manager.match_prefix(&prompt.tokens, scope) {
            Err(error) => {
                assert_eq!(found, Err(error.clone()));
                expect(Err::<(), _>(error), answer, |()| Answer::Done);
            }
            Ok(matched) => {
                let Answer::Found { tokens, blocks } = answer else {
                    panic!("{matched:?} is not {answer:?}")
                };
                assert_eq!(found, Ok(*tokens), "{prompt:?}");
                let expected: Vec<BlockId> =
                    blocks.iter().map(|block| self.blocks[block]).collect();
                assert_eq!(matched, expected, "{prompt:?}");
            }
        }
    }

    fn copies(&mut self, answer: &Answer) {
        let Answer::Copies(expected) = answer else {
            unreachable!()
        };
        let copies = self.manager.copies();
        let pair = |copy: &BlockCopy| (copy.source, copy.destination);
        let expected = expected
            .iter()
            .map(|(source, destination)| (self.blocks[source], self.blocks[destination]));
        assert_eq!(
            copies.iter().map(pair).collect::<BTreeSet<_>>(),
            expected.collect()
        );
        let destinations: BTreeSet<_> = copies.iter().map(|copy| copy.destination).collect();
        assert_eq!(
            destinations.len(),
            copies.len(),
            "two copies write one block"
        );
        self.memory.copy(&copies);
        if copies.len() > 1 {
            self.see("several copies at once");
        }
    }

    fn write(&mut self, id: SequenceId, cells: &[Cell], model: &Model) {
        self.copies(&model.answer);
        let runs = self.manager.slots(id, cells.len()).unwrap();
        let slots: Vec<usize> = runs
            .flat_map(|(first, length)| first..first + length)
            .collect();
        assert_eq!(slots.len(), cells.len());
        let sequence = &model.sequences[&id];
        let all = kv(sequence.namespace, sequence.generation, &sequence.written);
        let size = model.setup.block_size;
        for (slot, position) in slots.into_iter().zip(sequence.committed..) {
            let block = self.tables[&id][position / size];
            let written = sequence.table[position / size];
            assert!(!model.is_findable(written), "a cached block is written");
            assert_eq!(slot, block as usize * size + position % size);
            self.memory.write(slot, all[position]);
        }
    }

    fn digest(&mut self, namespace: u8, prefix: &Prefix, block_size: usize) -> Digest {
        let key = (namespace, prefix.clone());
        if let Some(&digest) = self.digests.get(&key) {
            return digest;
        }
        let prompt = Prompt::of(namespace, prefix, &[]);
        let (namespace, media) = (bytes(namespace), media(&prompt));
        let scope = Scope {
            namespace: &namespace,
            media: &media,
        };
        let digests = block_digests(block_size, &prompt.tokens, scope).unwrap();
        let digest = digests[prefix.len() / block_size - 1];
        self.digests.insert(key, digest);
        digest
    }

    fn change(&mut self, change: &log::Change, size: usize) -> Change {
        let mut digests = |namespace: u8, blocks: &[Prefix]| {
            blocks
                .iter()
                .map(|block| self.digest(namespace, block, size))
                .collect()
        };
        match change {
            log::Change::Stored { namespace, blocks } => {
                let above = &blocks[0][..blocks[0].len() - size];
                let new = &blocks[blocks.len() - 1][above.len()..];
                Change::Stored {
                    namespace: bytes(*namespace).into(),
                    parent: Some(above).filter(|above| !above.is_empty()).map(|above| {
                        let above: Vec<Digest> = digests(*namespace, &[above.to_vec()]);
                        above[0]
                    }),
                    blocks: digests(*namespace, blocks),
                    tokens: new.iter().map(|&(token, _)| token).collect(),
                    media: spans(new).iter().map(|span| span.media()).collect(),
                }
            }
            log::Change::Reused { namespace, blocks } => Change::Reused {
                namespace: bytes(*namespace).into(),
                blocks: digests(*namespace, blocks),
            },
            log::Change::Removed { namespace, blocks } => Change::Removed {
                namespace: bytes(*namespace).into(),
                blocks: digests(*namespace, blocks),
            },
            log::Change::Cleared { namespace } => Change::Cleared {
                namespace: namespace.map(|namespace| bytes(namespace).into()),
            },
        }
    }

    /// The events are the model's, and who follows them knows what is cached.
    fn check_events(&mut self, events: &[Event], expected: &[log::Event], model: &Model) {
        let size = model.setup.block_size;
        let expected: Vec<Event> = expected
            .iter()
            .map(|event| Event {
                number: event.number,
                change: self.change(&event.change, size),
            })
            .collect();
        assert_eq!(events, expected);
        let Ok(snapshot) = self.manager.snapshot() else {
            return;
        };
        let cached = self.cached(model);
        for index in 0..self.mirrors.len() {
            if !self.mirrors[index].follow(events) {
                self.mirrors[index] = Mirror::new(&snapshot);
                self.see("gap in events");
            }
            assert_eq!(
                self.mirrors[index].digests(),
                cached,
                "mirror {index} knows what is cached"
            );
        }
    }

    fn cached(&mut self, model: &Model) -> BTreeSet<(Vec<u8>, Digest)> {
        let size = model.setup.block_size;
        let keys = model.cached.keys();
        keys.map(|(namespace, prefix)| (bytes(*namespace), self.digest(*namespace, prefix, size)))
            .collect()
    }

    fn compare(&mut self, model: &Model) {
        assert_eq!(self.manager.check_invariants(), Ok(()));
        assert_eq!(self.manager.stats(), model.stats());
        assert_eq!(self.manager.allocatable_blocks(), model.allocatable());
        assert_eq!(self.manager.time(), model.now);
        self.compare_tables(model);
        self.compare_cached(model);
        self.compare_sequences(model);
        self.compare_snapshot(model);
    }

    /// The snapshot has what is cached.
    fn compare_snapshot(&mut self, model: &Model) {
        let Ok(snapshot) = self.manager.snapshot() else {
            return;
        };
        assert_eq!(snapshot.number, model.log.next);
        assert_eq!(Mirror::new(&snapshot).digests(), self.cached(model));
    }

    /// The blocks of the two correspond, one to one.
    fn compare_tables(&mut self, model: &Model) {
        let live = model.live();
        self.blocks.retain(|block, _| live.contains(block));
        for (id, sequence) in &model.sequences {
            let table = self.manager.block_table(*id).unwrap().to_vec();
            assert_eq!(table.len(), sequence.table.len(), "table of sequence {id}");
            for (&block, &name) in sequence.table.iter().zip(&table) {
                assert_eq!(
                    *self.blocks.entry(block).or_insert(name),
                    name,
                    "table of sequence {id}: {table:?}"
                );
            }
            self.rows
                .table_changed(*id, self.tables.get(id).map(Vec::as_slice), Some(&table));
            self.tables.insert(*id, table);
        }
        let names: BTreeSet<BlockId> = self.blocks.values().copied().collect();
        assert_eq!(
            names.len(),
            self.blocks.len(),
            "a block has two contents: {:?}",
            self.blocks
        );
        assert!(
            names
                .iter()
                .all(|&name| (name as usize) < model.setup.num_blocks)
        );
        let gone: Vec<SequenceId> = self
            .tables
            .keys()
            .filter(|id| !model.sequences.contains_key(id))
            .copied()
            .collect();
        for id in gone {
            self.tables.remove(&id);
            self.rows.table_changed(id, None, None);
        }
    }

    /// Each cached block is found, and holds the KV of its prefix.
    fn compare_cached(&self, model: &Model) {
        let size = model.setup.block_size;
        for ((namespace, prefix), cached) in &model.cached {
            let prompt = Prompt::of(*namespace, prefix, &[8]);
            let expected: Vec<BlockId> = model
                .whole_blocks(*namespace, prefix)
                .iter()
                .map(|block| self.blocks[block])
                .collect();
            let (name, media) = (bytes(*namespace), media(&prompt));
            let scope = Scope {
                namespace: &name,
                media: &media,
            };
            assert_eq!(
                self.manager.match_prefix(&prompt.tokens, scope),
                Ok(expected),
                "{prefix:?} is cached"
            );
            assert_eq!(
                self.manager.lookup(&prompt.tokens, scope),
                Ok(prefix.len()),
                "{prefix:?} is cached"
            );
            let kv = kv(*namespace, model.generation(*namespace), prefix);
            let last = prefix.len() - size;
            for (position, kv) in (last..).zip(&kv[last..]) {
                let read = self
                    .memory
                    .read(self.blocks[&cached.block], position % size);
                assert_eq!(read, Some(*kv), "token {position} of the cached {prefix:?}");
            }
        }
    }

    /// Each sequence's written tokens are in memory, and its slots are the reserved ones.
    fn compare_sequences(&self, model: &Model) {
        let size = model.setup.block_size;
        for (&id, sequence) in &model.sequences {
            assert_eq!(self.manager.num_committed(id), Ok(sequence.committed));
            let known = sequence.known.iter().map(|cell| cell.0);
            assert_eq!(self.manager.tokens(id).unwrap(), known.collect::<Vec<_>>());
            let open = sequence.reserved - sequence.committed;
            assert!(
                self.manager.slots(id, open).is_ok() && self.manager.slots(id, open + 1).is_err()
            );
            let kv = kv(sequence.namespace, sequence.generation, &sequence.written);
            for (position, kv) in kv.into_iter().enumerate() {
                // What is still to be copied here is read where it is.
                let block = model.read_at(sequence.table[position / size]);
                let read = self.memory.read(self.blocks[&block], position % size);
                assert_eq!(read, Some(kv), "token {position} of sequence {id}");
            }
        }
    }

    /// After the last sequence and the last pin are gone nothing is held, and everything can be evicted.
    pub fn drain(mut self, mut model: Model) -> Seen {
        let mut ops: Vec<Op> = Vec::new();
        ops.extend(
            model
                .sequences
                .keys()
                .map(|&id| Op::Release(super::op::Who::Named(id))),
        );
        ops.extend(model.pins.keys().map(|&index| Op::Unpin(index)));
        ops.extend([Op::Copies, Op::Events]);
        ops.extend(vec![Op::Evict(1); model.setup.num_blocks]);
        ops.push(Op::Events);
        for op in &ops {
            model.apply(op);
            self.step(&model);
        }
        assert_eq!(self.manager.stats().free_blocks, model.setup.num_blocks);
        self.seen
    }
}

/// The result is the answer, or fails as it says.
fn expect<T: std::fmt::Debug>(
    result: Result<T, Error>,
    answer: &Answer,
    to_answer: impl FnOnce(T) -> Answer,
) {
    match result {
        Ok(value) => assert_eq!(&to_answer(value), answer),
        Err(Error::OutOfBlocks {
            needed,
            allocatable,
        }) => {
            assert_eq!(
                &Answer::OutOfBlocks {
                    needed,
                    allocatable
                },
                answer
            );
        }
        Err(error) => {
            let argument = match &error {
                Error::InvalidArgument { argument, .. } => argument,
                Error::UnknownSequence(_) => UNKNOWN,
                _ => panic!("{error:?} is not {answer:?}"),
            };
            let Answer::Refused(wrong) = answer else {
                panic!("{error:?} is not {answer:?}")
            };
            assert!(wrong.contains(argument), "{error:?} is not {answer:?}");
        }
    }
}
