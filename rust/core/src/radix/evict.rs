//! Eviction: which leaves can give blocks, and taking them, tails before what they continue.

use super::policy::EvictionPolicy;
use super::{NodeId, RadixTree};
use crate::block::BlockId;
use crate::pool::BlockPool;

impl<P: EvictionPolicy> RadixTree<P> {
    /// `block` got its first reference: its node is no longer evictable, if it was.
    pub(crate) fn on_held(&mut self, pool: &BlockPool, block: BlockId) {
        if let Some((rank, leaf)) = self.leaf_entry(pool, block) {
            self.evictable.remove(rank, leaf);
        }
    }

    /// `block` lost its last reference: its node is evictable from now on, if nothing follows the block.
    pub(crate) fn on_unheld(&mut self, pool: &BlockPool, block: BlockId) {
        if let Some((rank, leaf)) = self.leaf_entry(pool, block) {
            self.evictable.insert(rank, leaf);
        }
    }

    /// Evicts up to `n` blocks, those of lowest rank first, tails before what they depend on.
    pub(crate) fn evict(&mut self, pool: &mut BlockPool, n: usize) -> usize {
        if let Some(log) = &mut self.log {
            log.begin_removals();
        }
        let mut evicted = 0;
        while evicted < n
            && let Some((lowest, leaf)) = self.evictable.pop()
        {
            self.eviction_visits += 1;
            let mut at = Some(leaf);
            while let Some(node) = at
                && let Some(tail) = self.nodes[node].leaf_tail()
                && pool.references(tail) == 0
            {
                // What ranks with the first tail goes before any other leaf: no need to ask the set.
                let run = self.evictable_run(pool, node, lowest, n - evicted);
                if run == 0 {
                    self.evictable.insert(self.rank(pool, tail, node), node);
                    break;
                }
                at = self.remove_tails(pool, node, run);
                evicted += run;
            }
        }
        self.shrink_if_empty();
        evicted
    }

    /// How many blocks at the end of a leaf, `most` at most, have no reference and no higher rank than `lowest`.
    fn evictable_run(&self, pool: &BlockPool, leaf: NodeId, lowest: P::Rank, most: usize) -> usize {
        let node = &self.nodes[leaf];
        let stays = |index: usize| {
            let block = node.blocks[index];
            let rank = P::rank(pool.last_used(block), node.start() + index + 1);
            pool.references(block) > 0 || rank > lowest
        };
        // Towards the root, blocks are held sooner and rank higher: what goes is at the end, and often all.
        let (mut kept, mut end) = (node.blocks.len().saturating_sub(most), node.blocks.len());
        let mut middle = kept;
        while kept < end {
            if stays(middle) {
                kept = middle + 1;
            } else {
                end = middle;
            }
            middle = kept.midpoint(end);
        }
        node.blocks.len() - kept
    }

    /// Takes a held block that nothing in the tree depends on out of it.
    pub(crate) fn withdraw(&mut self, pool: &mut BlockPool, block: BlockId) {
        if let Some(log) = &mut self.log {
            log.begin_removals();
        }
        let node = pool.node(block);
        let above = node.and_then(|node| self.remove_tails(pool, node, 1));
        // Its ancestors are held too, so nothing becomes evictable.
        debug_assert!(above.is_none_or(|above| {
            let tail = self.nodes[above].leaf_tail();
            tail.is_none_or(|tail| pool.references(tail) > 0)
        }));
        self.shrink_if_empty();
    }

    /// The rank of a leaf's tail.
    pub(super) fn rank(&self, pool: &BlockPool, tail: BlockId, leaf: NodeId) -> P::Rank {
        P::rank(pool.last_used(tail), self.nodes[leaf].end())
    }

    /// The entry of `evictable` for a block, if it is the tail of a leaf.
    fn leaf_entry(&self, pool: &BlockPool, block: BlockId) -> Option<(P::Rank, NodeId)> {
        let leaf = pool.node(block)?;
        let is_tail = self.nodes[leaf].leaf_tail() == Some(block);
        is_tail.then(|| (self.rank(pool, block, leaf), leaf))
    }

    /// Removes the last `n` blocks of a leaf, and the leaf when that is all of it. Returns the node that now ends the
    /// path, if any.
    fn remove_tails(&mut self, pool: &mut BlockPool, id: NodeId, n: usize) -> Option<NodeId> {
        let size = self.block_size;
        let node = &mut self.nodes[id];
        let kept = node.blocks.len() - n;
        pool.withdraw(&node.blocks[kept..]);
        if let Some(log) = &mut self.log {
            log.removed(&node.namespace, &node.blocks[kept..]);
        }
        if kept > 0 {
            node.blocks.truncate(kept);
            node.tokens.truncate(kept * size);
            let end = node.end() * size;
            node.media
                .truncate(node.media.partition_point(|span| span.start < end));
            // Halving what is a quarter full keeps this O(1) a block.
            if node.tokens.len() < node.tokens.capacity() / 4 {
                node.tokens.shrink_to(node.tokens.len() * 2);
                node.blocks.shrink_to(node.blocks.len() * 2);
                node.media.shrink_to(node.media.len() * 2);
            }
            return Some(id);
        }
        self.unindex(id);
        let parent = self.nodes.remove(id).parent?;
        self.eviction_visits += 1;
        let above = &mut self.nodes[parent];
        above.children -= 1;
        if above.parent.is_none() && above.children == 0 {
            self.unindex(parent);
            self.nodes.remove(parent);
            return None;
        }
        Some(parent)
    }
}
