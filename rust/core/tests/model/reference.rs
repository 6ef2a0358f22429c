//! The model: what is cached is a map from whole prefixes, a reference is counted by counting, what to evict is found
//! by searching all. Blocks are numbers that are never used again.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use leafkv_core::{SequenceId, Stats};

use super::log::{Change, Event, Log, Prefix};
use super::op::{Cell, Op, Prompt, Setup};

mod batch;
mod calls;
mod pick;

/// A block by the model's own number.
pub type Block = u64;

#[derive(Debug, Clone)]
pub struct Sequence {
    pub namespace: u8,
    pub generation: usize,
    pub private: bool,
    pub age: usize,
    pub prompt: usize,
    pub known: Vec<Cell>,
    pub committed: usize,
    pub reserved: usize,
    pub table: Vec<Block>,
    /// What the slots hold: committed tokens and then drafts.
    pub written: Vec<Cell>,
    /// Tokens of the prompt and of its hit, until slots are reserved for the first time.
    pub query: Option<(usize, usize)>,
}

#[derive(Debug, Clone, Copy)]
pub struct Cached {
    pub block: Block,
    pub last_used: u64,
}

#[derive(Debug, Clone)]
pub struct Pin {
    pub namespace: u8,
    pub blocks: Vec<Block>,
    /// `None`: never.
    pub ends: Option<u64>,
}

/// A call with its arguments.
#[derive(Debug, Clone)]
pub enum Call {
    /// There is nothing that the operation could be done to.
    Nothing,
    Begin {
        id: SequenceId,
        prompt: Prompt,
    },
    Ask(Prompt),
    Grow {
        id: SequenceId,
        n: usize,
    },
    /// The cells from the last committed one on.
    Write {
        id: SequenceId,
        cells: Vec<Cell>,
    },
    Commit {
        id: SequenceId,
        n: usize,
        new_tokens: Vec<u32>,
    },
    Fork {
        parent: SequenceId,
        child: SequenceId,
    },
    Truncate {
        id: SequenceId,
        n: usize,
    },
    Release {
        id: SequenceId,
    },
    GrowMany {
        ids: Vec<SequenceId>,
        counts: Vec<usize>,
    },
    CommitMany {
        ids: Vec<SequenceId>,
        counts: Vec<usize>,
        new_tokens: Vec<u32>,
        new_counts: Vec<usize>,
    },
    Rows {
        items: Vec<(SequenceId, usize)>,
        columns: usize,
        spoil: u8,
    },
    Copies,
    Evict(usize),
    Clear(Option<u8>),
    Pin {
        prompt: Prompt,
        ttl: Option<u64>,
    },
    Unpin(usize),
    SetTime(u64),
    Events,
    Listen,
}

/// What the call must answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    Done,
    Count(usize),
    Flag(bool),
    /// All that is wrong with it; the manager may name any.
    Refused(BTreeSet<&'static str>),
    OutOfBlocks {
        needed: usize,
        allocatable: usize,
    },
    Ready(usize),
    WaitFor(SequenceId, usize),
    Copies(Vec<(Block, Block)>),
    Lacking(Vec<usize>),
    Pinned {
        tokens: usize,
        partial: bool,
    },
    Events(Vec<Event>),
    Found {
        tokens: usize,
        blocks: Vec<Block>,
    },
}

/// Stands among the wrong arguments for an id that is no sequence's.
pub const UNKNOWN: &str = "unknown sequence";

pub fn refused(argument: &'static str) -> Answer {
    Answer::Refused(BTreeSet::from([argument]))
}

#[derive(Debug, Clone)]
pub struct Model {
    pub setup: Setup,
    pub cached: BTreeMap<(u8, Prefix), Cached>,
    pub sequences: BTreeMap<SequenceId, Sequence>,
    /// Source and destination.
    pub owed: Vec<(Block, Block)>,
    /// By the order in which they were given.
    pub pins: BTreeMap<usize, Pin>,
    pub pins_given: usize,
    pub log: Log,
    pub generations: BTreeMap<u8, usize>,
    pub now: u64,
    owner_counts_time: bool,
    next_block: Block,
    clock: u64,
    born: usize,
    max_held: usize,
    query_tokens: usize,
    hit_tokens: usize,
    partial_hit_tokens: usize,
    stored: usize,
    evicted: usize,
    /// The last operation as a call, and its answer.
    pub call: Call,
    pub answer: Answer,
    /// What a listener gets who takes the events after every operation.
    pub polled: Option<Vec<Event>>,
    /// Situations that the last operation met.
    pub seen: Vec<&'static str>,
}

pub fn whole(tokens: usize, block_size: usize) -> usize {
    tokens / block_size * block_size
}

fn common(a: &[Cell], b: &[Cell]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Model {
    pub fn new(mut setup: Setup) -> Self {
        setup.pin_budget = setup.pin_budget.min(setup.num_blocks - 1);
        Self {
            setup,
            cached: BTreeMap::new(),
            sequences: BTreeMap::new(),
            owed: Vec::new(),
            pins: BTreeMap::new(),
            pins_given: 0,
            log: Log::new(setup.event_capacity),
            generations: BTreeMap::new(),
            now: 0,
            owner_counts_time: false,
            next_block: 0,
            clock: 0,
            born: 0,
            max_held: 0,
            query_tokens: 0,
            hit_tokens: 0,
            partial_hit_tokens: 0,
            stored: 0,
            evicted: 0,
            call: Call::Nothing,
            answer: Answer::Done,
            polled: None,
            seen: Vec::new(),
        }
    }

    pub fn apply(&mut self, op: &Op) {
        self.seen.clear();
        self.call = self.pick(op);
        self.answer = self.predict(self.call.clone());
        self.max_held = self.max_held.max(self.held());
        self.polled = self.setup.attentive.then(|| self.log.take());
    }

    fn see(&mut self, what: &'static str) {
        self.seen.push(what);
    }

    pub fn generation(&self, namespace: u8) -> usize {
        self.generations.get(&namespace).copied().unwrap_or(0)
    }

    /// Everything that has a reference, as often as it has one.
    fn references_all(&self) -> impl Iterator<Item = Block> {
        let tables = self.sequences.values().flat_map(|sequence| &sequence.table);
        let sources = self.owed.iter().map(|(source, _)| source);
        let pinned = self.pins.values().flat_map(|pin| &pin.blocks);
        tables.chain(sources).chain(pinned).copied()
    }

    fn references(&self, block: Block) -> usize {
        self.references_all()
            .filter(|&other| other == block)
            .count()
    }

    pub fn is_findable(&self, block: Block) -> bool {
        self.cached.values().any(|cached| cached.block == block)
    }

    fn is_writable(&self, block: Block) -> bool {
        self.references(block) == 1 && !self.is_findable(block)
    }

    fn held(&self) -> usize {
        self.references_all().collect::<BTreeSet<_>>().len()
    }

    fn pinned(&self) -> BTreeSet<Block> {
        self.pins
            .values()
            .flat_map(|pin| &pin.blocks)
            .copied()
            .collect()
    }

    /// Held or cached.
    pub fn live(&self) -> BTreeSet<Block> {
        let cached = self.cached.values().map(|cached| cached.block);
        self.references_all().chain(cached).collect()
    }

    pub fn allocatable(&self) -> usize {
        self.setup.num_blocks - self.held()
    }

    fn free(&self) -> usize {
        self.setup.num_blocks - self.live().len()
    }

    /// All cached whole blocks from the beginning.
    pub fn whole_blocks(&self, namespace: u8, cells: &[Cell]) -> Vec<Block> {
        let size = self.setup.block_size;
        let prefixes = (1..=cells.len() / size).map(|blocks| cells[..blocks * size].to_vec());
        prefixes
            .map_while(|prefix| Some(self.cached.get(&(namespace, prefix))?.block))
            .collect()
    }

    /// The blocks and the tokens that a prompt hits. One token is left.
    pub fn hit(&self, namespace: u8, cells: &[Cell]) -> (Vec<Block>, usize) {
        let cells = &cells[..cells.len().saturating_sub(1)];
        let mut blocks = self.whole_blocks(namespace, cells);
        let (prefix, rest) = cells.split_at(blocks.len() * self.setup.block_size);
        let mut tokens = prefix.len();
        if self.setup.partial_hits
            && let Some((block, shared)) = self.partial(namespace, prefix, rest)
        {
            blocks.push(block);
            tokens += shared;
        }
        (blocks, tokens)
    }

    /// Of the blocks right behind a prefix, the one that shares most with the rest: of equals the next in the order of
    /// a dictionary, or else the one before.
    fn partial(&self, namespace: u8, prefix: &[Cell], rest: &[Cell]) -> Option<(Block, usize)> {
        let size = self.setup.block_size;
        let rest = &rest[..rest.len().min(size)];
        let candidates = self.cached.iter().filter_map(|((other, cells), cached)| {
            let (above, block) = cells.split_at_checked(prefix.len())?;
            let follows = *other == namespace && above == prefix && block.len() == size;
            let shared = common(block, rest);
            (follows && shared > 0).then_some((block, shared, cached.block))
        });
        let best = candidates.max_by(|(a, a_shared, _), (b, b_shared, _)| {
            let rank = |block: &[Cell]| {
                (
                    block > rest,
                    if block > rest {
                        Err(Reverse(block.to_vec()))
                    } else {
                        Ok(block.to_vec())
                    },
                )
            };
            a_shared.cmp(b_shared).then_with(|| rank(a).cmp(&rank(b)))
        });
        best.map(|(_, shared, block)| (block, shared))
    }

    fn leader(&self, namespace: u8, cells: &[Cell]) -> Option<(SequenceId, usize)> {
        let size = self.setup.block_size;
        let candidates = self.sequences.iter().filter_map(|(&id, leader)| {
            let prompt = whole(leader.prompt, size);
            if leader.private || leader.namespace != namespace || leader.committed >= prompt {
                return None;
            }
            let shared = whole(
                common(&leader.known[..prompt], &cells[..cells.len() - 1]),
                size,
            );
            Some((shared, leader.committed, Reverse(leader.age), id))
        });
        candidates.max().map(|(shared, _, _, id)| (id, shared))
    }

    fn touch(&mut self, table: &[Block]) {
        self.clock += 1;
        for cached in self.cached.values_mut() {
            if table.contains(&cached.block) {
                cached.last_used = self.clock;
            }
        }
    }

    fn evict(&mut self, n: usize) -> usize {
        self.log.begin_removals();
        for evicted in 0..n {
            let is_leaf = |(namespace, prefix): &(u8, Prefix)| {
                let extends = |(other, cells): &(u8, Prefix)| {
                    other == namespace && cells.len() > prefix.len() && cells.starts_with(prefix)
                };
                !self.cached.keys().any(extends)
            };
            let evictable = self
                .cached
                .iter()
                .filter(|(key, cached)| is_leaf(key) && self.references(cached.block) == 0);
            let Some((key, _)) = evictable.min_by_key(|(_, cached)| cached.last_used) else {
                return evicted;
            };
            self.remove(&key.clone());
        }
        n
    }

    fn remove(&mut self, key: &(u8, Prefix)) {
        self.cached.remove(key);
        self.evicted += 1;
        self.log.removed(key.0, key.1.clone());
    }

    fn new_block(&mut self) -> Block {
        self.next_block += 1;
        self.next_block
    }

    /// References went away: copies to blocks that nobody has any more are not made.
    fn drop_dead_copies(&mut self) {
        while let Some(dead) = self
            .owed
            .iter()
            .position(|&(_, destination)| self.references(destination) == 0)
        {
            self.owed.remove(dead);
            self.see("copy died");
        }
    }

    fn is_owed_to(&self, block: Block) -> bool {
        self.owed
            .iter()
            .any(|&(_, destination)| destination == block)
    }

    /// The block where the KV of a table's block is now.
    pub fn read_at(&self, block: Block) -> Block {
        let owed = self
            .owed
            .iter()
            .find(|&&(_, destination)| destination == block);
        owed.map_or(block, |&(source, _)| source)
    }

    /// The whole blocks of a hit are used, as far as they were not truncated since.
    fn reused(&mut self, sequence: &Sequence, hit: usize) {
        let size = self.setup.block_size;
        let prefix = |count: usize| sequence.known[..count * size].to_vec();
        let blocks: Vec<Prefix> = (1..=hit.min(sequence.committed) / size)
            .map(prefix)
            .collect();
        if !blocks.is_empty() && !sequence.private {
            let namespace = sequence.namespace;
            self.log.push(Change::Reused { namespace, blocks });
        }
        if sequence.committed < hit {
            self.see("a hit is truncated before it is used");
        }
    }

    pub fn stats(&self) -> Stats {
        let (free, held) = (self.free(), self.held());
        Stats {
            num_blocks: self.setup.num_blocks,
            free_blocks: free,
            cached_blocks: self.setup.num_blocks - free - held,
            held_blocks: held,
            max_held_blocks: self.max_held,
            pinned_blocks: self.pinned().len(),
            sequences: self.sequences.len(),
            query_tokens: self.query_tokens as u64,
            hit_tokens: self.hit_tokens as u64,
            partial_hit_tokens: self.partial_hit_tokens as u64,
            stored_blocks: self.stored as u64,
            evicted_blocks: self.evicted as u64,
            dropped_events: self.log.dropped,
        }
    }
}
