//! The counters of a KV manager.

use crate::manager::KvManager;

/// What a [`KvManager`] has now, and what it did so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Size of the pool.
    pub num_blocks: usize,
    /// Blocks with nothing in them.
    pub free_blocks: usize,
    /// Blocks that a prefix hit can find and eviction can take.
    pub cached_blocks: usize,
    /// Blocks of live sequences, of owed copies and of pins.
    pub held_blocks: usize,
    /// The most blocks that were ever held at once.
    pub max_held_blocks: usize,
    /// Blocks of pins.
    pub pinned_blocks: usize,
    /// Live sequences.
    pub sequences: usize,
    /// Tokens of all prompts that were begun and then given slots.
    pub query_tokens: u64,
    /// Those of `query_tokens` that were found in the prefix cache.
    pub hit_tokens: u64,
    /// Those of `hit_tokens` that were found in part of a block, and copied.
    pub partial_hit_tokens: u64,
    /// Blocks that could be found from some time on.
    pub stored_blocks: u64,
    /// Blocks that eviction took from the prefix cache.
    pub evicted_blocks: u64,
    /// Events that nobody took before newer ones needed their room.
    pub dropped_events: u64,
}

impl KvManager {
    /// All counters at once.
    pub fn stats(&self) -> Stats {
        let pool = &self.store.pool;
        Stats {
            num_blocks: pool.len(),
            free_blocks: pool.free(),
            cached_blocks: pool.cached(),
            held_blocks: pool.held(),
            max_held_blocks: pool.max_held(),
            pinned_blocks: self.store.pins.num_blocks(),
            sequences: self.sequences.len(),
            query_tokens: self.query_tokens,
            hit_tokens: self.hit_tokens,
            partial_hit_tokens: self.partial_hit_tokens,
            stored_blocks: self.store.tree.stored(),
            evicted_blocks: self.store.evicted,
            dropped_events: self.store.tree.log.as_ref().map_or(0, |log| log.dropped()),
        }
    }

    /// Tree nodes looked at by all evictions so far: a measure of their work, for tests and benchmarks.
    pub fn eviction_visits(&self) -> u64 {
        self.store.tree.eviction_visits()
    }
}
