//! The record of a live sequence, and what is whole blocks of it.

use crate::block::{BlockId, TokenId};

/// A live sequence.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// `None`: private.
    pub(crate) namespace: Option<Box<[u8]>>,
    pub(crate) known: Vec<TokenId>,
    /// How many of the known tokens are the prompt's.
    pub(crate) prompt: usize,
    pub(crate) committed: usize,
    pub(crate) reserved: usize,
    pub(crate) table: Vec<BlockId>,
    /// Tokens of its prompt and of its prefix hit, until the statistics have them.
    pub(crate) uncounted: Option<(usize, usize)>,
}

impl Sequence {
    /// Whether it is about to commit whole blocks that other prompts may share.
    pub(crate) fn leads(&self, block_size: usize) -> bool {
        self.namespace.is_some() && self.committed < whole(self.prompt, block_size)
    }

    /// Index of the block that is written next, if it has committed tokens already.
    pub(crate) fn partial_block(&self, block_size: usize) -> Option<usize> {
        (!self.committed.is_multiple_of(block_size)).then_some(self.committed / block_size)
    }
}

/// The tokens that fill whole blocks.
pub(crate) fn whole(tokens: usize, block_size: usize) -> usize {
    tokens - tokens % block_size
}

/// The part of a prompt that may come from the cache: whole blocks that leave a token to compute.
pub(crate) fn cacheable(tokens: &[TokenId], block_size: usize) -> &[TokenId] {
    &tokens[..whole(tokens.len().saturating_sub(1), block_size)]
}
