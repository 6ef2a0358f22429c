//! Pins: prefixes that stay cached for a while although nobody uses them.
//!
//! A pin holds its blocks like a sequence does, so nothing else has to know of pins. How many different blocks are
//! pinned is bounded by a budget, so that pins never fill the pool; a pin ends by itself when its time has come.
//! Time is logical: whatever number the owner counts up.

use std::collections::{BTreeSet, HashMap};

use foldhash::fast::FixedState;

use crate::block::BlockId;

/// The answer of [`crate::KvManager::pin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pin {
    /// Its name, for [`crate::KvManager::unpin`]. Never used again.
    pub id: u64,
    /// Tokens that stay cached: whole blocks from the beginning of the prompt.
    pub tokens: usize,
    /// Whether that is less than all whole blocks of the prompt: the rest is not cached, or over the budget.
    pub partial: bool,
}

/// Logical time: a tick for each admitted sequence, until the owner takes over.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    pub(crate) now: u64,
    pub(crate) set_by_owner: bool,
}

#[derive(Debug)]
struct Pinned {
    namespace: Box<[u8]>,
    path: Box<[BlockId]>,
    ends: u64,
}

/// Which blocks are pinned, and until when.
#[derive(Debug)]
pub(crate) struct Pins {
    budget: usize,
    next_id: u64,
    pins: HashMap<u64, Pinned, FixedState>,
    /// Pins by their end.
    ends: BTreeSet<(u64, u64)>,
    /// How many pins have a block.
    counts: HashMap<BlockId, u32, FixedState>,
}

/// The end of a pin without one.
pub(crate) const NEVER: u64 = u64::MAX;

impl Pins {
    pub(crate) fn new(budget: usize) -> Self {
        Self {
            budget,
            next_id: 0,
            pins: HashMap::default(),
            ends: BTreeSet::new(),
            counts: HashMap::default(),
        }
    }

    pub(crate) fn budget(&self) -> usize {
        self.budget
    }

    /// Different blocks that are pinned.
    pub(crate) fn num_blocks(&self) -> usize {
        self.counts.len()
    }

    /// How many blocks from the beginning of a path the budget allows.
    pub(crate) fn affordable(&self, path: &[BlockId]) -> usize {
        let mut left = self.budget - self.counts.len();
        let affordable = path.iter().take_while(|block| {
            let pinned = self.counts.contains_key(block);
            let affordable = pinned || left > 0;
            left -= usize::from(affordable && !pinned);
            affordable
        });
        affordable.count()
    }

    /// Records a pin of an affordable path until the time `ends`; an empty one only gets its name.
    pub(crate) fn add(&mut self, namespace: &[u8], path: Vec<BlockId>, ends: u64) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        if path.is_empty() {
            return id;
        }
        for &block in &path {
            *self.counts.entry(block).or_default() += 1;
        }
        self.ends.insert((ends, id));
        let pinned = Pinned {
            namespace: namespace.into(),
            path: path.into(),
            ends,
        };
        self.pins.insert(id, pinned);
        id
    }

    /// Ends a pin. Returns its blocks, to be let go of.
    pub(crate) fn remove(&mut self, id: u64) -> Option<Box<[BlockId]>> {
        let pin = self.pins.remove(&id)?;
        self.ends.remove(&(pin.ends, id));
        for block in &pin.path {
            if let Some(count) = self.counts.get_mut(block) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(block);
                }
            }
        }
        Some(pin.path)
    }

    /// A pin whose time has come.
    pub(crate) fn expired(&self, now: u64) -> Option<u64> {
        let &(ends, id) = self.ends.first()?;
        (ends <= now && ends != NEVER).then_some(id)
    }

    /// The pins of a namespace, or all of them.
    pub(crate) fn of(&self, namespace: Option<&[u8]>) -> Vec<u64> {
        let belongs = |pin: &Pinned| namespace.is_none_or(|namespace| namespace == &*pin.namespace);
        let pins = self.pins.iter().filter(|(_, pin)| belongs(pin));
        pins.map(|(&id, _)| id).collect()
    }

    /// The blocks of each pin.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &[BlockId]> {
        self.pins.values().map(|pin| &*pin.path)
    }

    /// Verifies the counts and the order of ends.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut counts: HashMap<BlockId, u32, FixedState> = HashMap::default();
        for &block in self.paths().flatten() {
            *counts.entry(block).or_default() += 1;
        }
        if counts != self.counts || counts.len() > self.budget {
            return Err(format!("pins are counted wrongly: {self:?}"));
        }
        let ends: BTreeSet<_> = self.pins.iter().map(|(&id, pin)| (pin.ends, id)).collect();
        if ends != self.ends {
            return Err(format!("pins end at other times: {self:?}"));
        }
        Ok(())
    }
}
