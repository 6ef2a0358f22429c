//! What a KV manager is made of.

use crate::radix::{BlockHash, hash_block};

/// What a [`KvManager`] is made of.
#[derive(Debug, Clone)]
pub struct Config {
    /// Size of the pool, 1 to 2³¹ − 1.
    pub num_blocks: usize,
    /// Tokens of a block, 1 to 2³¹ − 1.
    pub block_size: usize,
    /// Without it every sequence is private.
    pub prefix_caching: bool,
    /// Whether a hit may end inside a block, whose beginning is then copied.
    pub partial_hits: bool,
    /// How many different blocks may be pinned. A prompt must fit in the others.
    pub pin_budget: usize,
    /// How many blocks the buffered events may name; 0: no events.
    pub event_capacity: usize,
    /// The hash of the prefix tree. Any function is right, a good one is fast.
    pub hash: BlockHash,
}

impl Config {
    /// Prefix caching, and nothing else.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            num_blocks,
            block_size,
            prefix_caching: true,
            partial_hits: false,
            pin_budget: 0,
            event_capacity: 0,
            hash: hash_block,
        }
    }
}
