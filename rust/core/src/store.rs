//! Blocks and what is in them: the pool, the prefix tree and the owed copies acting as one.
//!
//! Knows blocks and paths of blocks, not sequences. Every path given here is a block table or its end: block
//! ids in order of position, those in the tree first.

use crate::block::{BlockCopy, BlockId, TokenId};
use crate::error::{Error, Result};
use crate::pool::BlockPool;
use crate::radix::RadixTree;

#[derive(Debug)]
pub(crate) struct BlockStore {
    pub(crate) pool: BlockPool,
    pub(crate) tree: RadixTree,
    /// Copies not yet handed out. A source has a reference of its own until then, so it cannot become a
    /// destination; destinations are unique because each was free when it was taken.
    pub(crate) owed: Vec<BlockCopy>,
    pub(crate) evicted: u64,
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

    /// Finds the longest cached prefix and holds it. Returns its blocks.
    pub(crate) fn hold_prefix(&mut self, namespace: &[u8], tokens: &[TokenId]) -> Vec<BlockId> {
        let mut path = Vec::new();
        self.tree
            .find(namespace, tokens, |run| path.extend_from_slice(run));
        if let Some(&tail) = path.last() {
            self.tree.on_held(tail);
            self.share(&path);
        }
        path
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
        self.tree.touch(&table[..cached]);
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
                    self.tree.on_unheld(block);
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
