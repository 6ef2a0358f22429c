//! Blocks and what is in them: the pool, the prefix tree and the owed copies acting as one.
//!
//! Knows blocks and paths of blocks, not sequences. Every path given here is a block table or its end: block
//! ids in order of position, those in the tree first.

use crate::block::{BlockCopy, BlockId, Scope, TokenId};
use crate::error::{Error, Result};
use crate::pins::Pins;
use crate::pool::BlockPool;
use crate::radix::RadixTree;

#[derive(Debug)]
pub(crate) struct BlockStore {
    pub(crate) pool: BlockPool,
    pub(crate) tree: RadixTree,
    /// Copies not yet handed out. A source has a reference of its own until then, so it cannot become a
    /// destination; destinations are unique because each was free when it was taken.
    pub(crate) owed: Vec<BlockCopy>,
    pub(crate) pins: Pins,
    pub(crate) evicted: u64,
}

/// A prefix hit: its blocks, and how many tokens it covers. The last block may be hit in part.
#[derive(Debug, Default)]
pub(crate) struct Hit {
    pub(crate) path: Vec<BlockId>,
    pub(crate) tokens: usize,
}

impl BlockStore {
    /// Free blocks and those that eviction would free. Everything without a reference is one of the two,
    /// because a held block has only held ancestors.
    pub(crate) fn allocatable(&self) -> usize {
        self.pool.len() - self.pool.held()
    }

    /// Makes sure that `n` blocks are free, evicting as needed, or changes nothing.
    pub(crate) fn make_room(&mut self, n: usize) -> Result<()> {
        let allocatable = self.allocatable();
        if n > allocatable {
            return Err(Error::OutOfBlocks {
                needed: n,
                allocatable,
            });
        }
        self.evict(n.saturating_sub(self.pool.free()));
        Ok(())
    }

    pub(crate) fn evict(&mut self, n: usize) -> usize {
        let evicted = self.tree.evict(&mut self.pool, n);
        self.evicted += evicted as u64;
        evicted
    }

    /// Takes a block out of the tree that one sequence has, if that is all that keeps it from being written.
    ///
    /// Everything else that can be evicted goes first: only then nothing in the tree depends on the block.
    pub(crate) fn take_over(&mut self, block: BlockId) {
        self.evict(self.pool.cached());
        self.tree.withdraw(&mut self.pool, block);
        self.evicted += 1;
    }

    /// Whether [`BlockStore::take_over`] is possible: whoever depends on the block has a reference to it, too.
    pub(crate) fn can_take_over(&self, block: BlockId) -> bool {
        self.pool.references(block) == 1 && self.pool.is_findable(block)
    }

    /// Tokens that a prompt hits.
    pub(crate) fn count_hit(&self, tokens: &[TokenId], scope: Scope<'_>) -> usize {
        let matched = self.tree.find(tokens, scope, |_| ());
        let partial = self.tree.find_partial(matched, tokens, scope.media);
        matched.blocks * self.tree.block_size() + partial.map_or(0, |(_, tokens)| tokens)
    }

    /// The blocks of all whole blocks that are cached.
    pub(crate) fn find(&self, tokens: &[TokenId], scope: Scope<'_>) -> Vec<BlockId> {
        let mut path = Vec::new();
        self.tree
            .find(tokens, scope, |run| path.extend_from_slice(run));
        path
    }

    /// Finds the longest cached prefix and holds it.
    pub(crate) fn hold_hit(&mut self, tokens: &[TokenId], scope: Scope<'_>) -> Hit {
        let mut path = Vec::new();
        let matched = self
            .tree
            .find(tokens, scope, |run| path.extend_from_slice(run));
        let mut hit = matched.blocks * self.tree.block_size();
        if let Some((block, tokens)) = self.tree.find_partial(matched, tokens, scope.media) {
            path.push(block);
            hit += tokens;
        }
        self.hold(&path);
        Hit { path, tokens: hit }
    }

    /// Holds a path of the tree from its root down.
    fn hold(&mut self, path: &[BlockId]) {
        if let Some(&tail) = path.last() {
            self.tree.on_held(&self.pool, tail);
            self.share(path);
        }
    }

    /// Pins what is cached of a prompt's whole blocks and affordable. Returns the pin's id and its blocks' number.
    pub(crate) fn pin(&mut self, tokens: &[TokenId], scope: Scope<'_>, ends: u64) -> (u64, usize) {
        let mut path = self.find(tokens, scope);
        path.truncate(self.pins.affordable(&path));
        self.hold(&path);
        let blocks = path.len();
        (self.pins.add(scope.namespace, path, ends), blocks)
    }

    pub(crate) fn unpin(&mut self, id: u64) -> bool {
        let path = self.pins.remove(id);
        self.unhold(path.as_deref().unwrap_or_default());
        path.is_some()
    }

    /// Ends the pins whose time has come.
    pub(crate) fn expire_pins(&mut self, now: u64) {
        while let Some(id) = self.pins.expired(now) {
            self.unpin(id);
        }
    }

    /// Forgets a namespace, or all of them, and their pins.
    pub(crate) fn clear(&mut self, namespace: Option<&[u8]>) {
        for id in self.pins.of(namespace) {
            self.unpin(id);
        }
        self.tree.clear(&mut self.pool, namespace);
    }

    /// Adds a reference to blocks that are held already.
    pub(crate) fn share(&mut self, path: &[BlockId]) {
        for &block in path {
            self.pool.hold(block);
        }
    }

    /// Marks the part of a held table that is in the tree as used just now.
    pub(crate) fn touch(&mut self, table: &[BlockId]) {
        let cached = table.partition_point(|&block| self.pool.is_findable(block));
        self.tree.touch(&mut self.pool, &table[..cached]);
    }

    /// Gives back one reference to each block of a table's end. A copy owed to a block that is free now dies.
    pub(crate) fn unhold(&mut self, path: &[BlockId]) {
        // Tails first: they are then reused in the order of the table. Of those in the tree only the deepest
        // can be the tail of a leaf.
        let mut deepest = true;
        for &block in path.iter().rev() {
            let last = self.pool.unhold(block);
            if self.pool.is_findable(block) {
                if last && deepest {
                    self.tree.on_unheld(&self.pool, block);
                }
                deepest = false;
            } else if last {
                self.cancel_copy_to(block);
            }
        }
    }

    /// Whether KV may be written to a held block: nobody else reads it, now or later.
    pub(crate) fn is_writable(&self, block: BlockId) -> bool {
        self.pool.references(block) == 1 && !self.pool.is_findable(block)
    }

    pub(crate) fn owed_to(&self, block: BlockId) -> Option<BlockCopy> {
        self.owed
            .iter()
            .copied()
            .find(|copy| copy.destination == block)
    }

    /// Owes a copy of `block` to `destination`, and gives the caller's reference to `block` back.
    pub(crate) fn replace_by_copy(&mut self, block: BlockId, destination: BlockId) {
        // All sources are read before any destination is written, so what is about to be copied here is read
        // where it still is.
        let source = self.owed_to(block).map_or(block, |copy| copy.source);
        self.pool.hold(source);
        self.owed.push(BlockCopy {
            source,
            destination,
        });
        self.unhold(&[block]);
    }

    /// Hands out the owed copies; their sources are no longer held for them.
    pub(crate) fn take_copies(&mut self) -> Vec<BlockCopy> {
        let copies = std::mem::take(&mut self.owed);
        for copy in &copies {
            self.unhold(&[copy.source]);
        }
        copies
    }

    fn cancel_copy_to(&mut self, block: BlockId) {
        if let Some(index) = self.owed.iter().position(|copy| copy.destination == block) {
            let source = self.owed.swap_remove(index).source;
            self.unhold(&[source]);
        }
    }
}
