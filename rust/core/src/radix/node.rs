//! A node of the tree: an edge of whole blocks, or a root.

use std::sync::Arc;

use crate::block::{BlockId, Media, TokenId, common_media, common_prefix, touching};
use crate::slab::Key as NodeId;

#[derive(Debug)]
pub(super) struct Node {
    pub(super) tokens: Vec<TokenId>,
    pub(super) blocks: Vec<BlockId>,
    /// The media spans that touch it.
    pub(super) media: Vec<Media>,
    pub(super) namespace: Arc<[u8]>,
    /// Under which the table that finds this node has it.
    pub(super) hash: u64,
    /// Depth of the first block.
    pub(super) start: u32,
    /// `None`: a root.
    pub(super) parent: Option<NodeId>,
    pub(super) children: u32,
}

impl Node {
    pub(super) fn root(namespace: &[u8]) -> Self {
        Self {
            tokens: Vec::new(),
            blocks: Vec::new(),
            media: Vec::new(),
            namespace: namespace.into(),
            hash: 0,
            start: 0,
            parent: None,
            children: 0,
        }
    }

    pub(super) fn start(&self) -> usize {
        self.start as usize
    }

    /// Depth at which the children start.
    pub(super) fn end(&self) -> usize {
        self.start() + self.blocks.len()
    }

    /// The tokens of its first block, and the media spans that touch them.
    pub(super) fn first_block(&self, block_size: usize) -> (&[TokenId], &[Media]) {
        let position = self.start() * block_size;
        let media = touching(&self.media, position..position + block_size);
        (&self.tokens[..block_size], media)
    }

    /// How many tokens a prompt shares with this edge from `depth` on. Those before are the same.
    pub(super) fn common(
        &self,
        depth: usize,
        tokens: &[TokenId],
        media: &[Media],
        block_size: usize,
    ) -> usize {
        let position = depth * block_size;
        let mine = &self.tokens[position - self.start() * block_size..];
        let common = common_prefix(mine, &tokens[position..]);
        if self.media.is_empty() && media.is_empty() {
            return common;
        }
        common.min(common_media(&self.media, media, position) - position)
    }

    /// The deepest block, if nothing in the tree depends on it.
    pub(super) fn leaf_tail(&self) -> Option<BlockId> {
        self.blocks.last().copied().filter(|_| self.children == 0)
    }
}

/// Extends a vector that will be kept for long: what it has too much is an eighth at most, not a half.
pub(super) fn extend_sparingly<T: Copy>(vector: &mut Vec<T>, more: &[T]) {
    if vector.capacity() - vector.len() < more.len() {
        vector.reserve_exact(more.len().max(vector.len() / 8));
    }
    vector.extend_from_slice(more);
}
