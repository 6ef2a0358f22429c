//! The block pool: reference counts and the free list, in flat vectors.
//!
//! A block is in exactly one state, which follows from two facts about it:
//!
//! | state  | references | findable in the tree |
//! |--------|------------|----------------------|
//! | free   | 0          | no                   |
//! | cached | 0          | yes                  |
//! | held   | > 0        | either               |
//!
//! `free + cached + held == num_blocks`, always. Every operation is O(1) a block. The books grow with the blocks
//! in use: a pool costs nothing until it is used. All that is known of a block is 16 bytes in one place, because
//! whoever asks for one thing will ask for the other.

use crate::block::BlockId;
use crate::slab::Key as NodeId;

#[derive(Debug, Clone, Copy, Default)]
struct Block {
    references: u32,
    /// The node of the tree that finds it.
    node: Option<NodeId>,
    /// Logical time, meaningful for a block of the tree.
    last_used: u64,
}

/// Who is free, cached, held. Knows nothing of tokens.
#[derive(Debug)]
pub(crate) struct BlockPool {
    num_blocks: usize,
    /// Blocks that were ever in use: ids beyond are free.
    blocks: Vec<Block>,
    /// A stack: the block freed last is warm in the CPU's caches and goes first.
    free: Vec<BlockId>,
    held: usize,
    max_held: usize,
}

impl BlockPool {
    /// A pool of free blocks.
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self {
            num_blocks,
            blocks: Vec::new(),
            free: Vec::new(),
            held: 0,
            max_held: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.num_blocks
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len() + self.num_blocks - self.blocks.len()
    }

    /// Blocks that were ever in use: ids beyond have no books yet.
    pub(crate) fn ever_used(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn held(&self) -> usize {
        self.held
    }

    pub(crate) fn max_held(&self) -> usize {
        self.max_held
    }

    pub(crate) fn cached(&self) -> usize {
        self.len() - self.free() - self.held
    }

    pub(crate) fn references(&self, block: BlockId) -> u32 {
        self.blocks[block as usize].references
    }

    pub(crate) fn is_findable(&self, block: BlockId) -> bool {
        self.node(block).is_some()
    }

    /// The node of the tree that finds a block.
    pub(crate) fn node(&self, block: BlockId) -> Option<NodeId> {
        self.blocks[block as usize].node
    }

    /// When a block of the tree was last used (logical time).
    pub(crate) fn last_used(&self, block: BlockId) -> u64 {
        self.blocks[block as usize].last_used
    }

    /// A block of the tree is used.
    pub(crate) fn touch(&mut self, block: BlockId, now: u64) {
        self.blocks[block as usize].last_used = now;
    }

    /// A block of the tree goes over to another node.
    pub(crate) fn set_node(&mut self, block: BlockId, node: NodeId) {
        self.blocks[block as usize].node = Some(node);
    }

    /// How many blocks the tree can find. O(pool).
    pub(crate) fn count_findable(&self) -> usize {
        self.blocks
            .iter()
            .filter(|state| state.node.is_some())
            .count()
    }

    /// Appends `n` free blocks to `out`, each with one reference. The caller made sure that they are there.
    pub(crate) fn allocate(&mut self, n: usize, out: &mut Vec<BlockId>) {
        let used_before = n.min(self.free.len());
        for block in self.free.drain(self.free.len() - used_before..).rev() {
            self.blocks[block as usize].references = 1;
            out.push(block);
        }
        let first_use = self.blocks.len()..self.blocks.len() + n - used_before;
        debug_assert!(first_use.end <= self.num_blocks, "the caller made room");
        out.extend(first_use.clone().map(|id| id as BlockId));
        self.blocks.resize(
            first_use.end,
            Block {
                references: 1,
                ..Block::default()
            },
        );
        self.count_held(n);
    }

    /// Adds a reference to a held or cached block.
    pub(crate) fn hold(&mut self, block: BlockId) {
        let state = &mut self.blocks[block as usize];
        debug_assert!(
            state.references > 0 || state.node.is_some(),
            "a free block is allocated, not held"
        );
        state.references += 1;
        if state.references == 1 {
            self.count_held(1);
        }
    }

    /// Takes a reference back; true if it was the last one. The block is then cached or free.
    pub(crate) fn unhold(&mut self, block: BlockId) -> bool {
        let state = &mut self.blocks[block as usize];
        state.references -= 1;
        let last = state.references == 0;
        if last {
            self.held -= 1;
            if state.node.is_none() {
                self.free.push(block);
            }
        }
        last
    }

    /// The tree finds this block in `node` from now on.
    pub(crate) fn publish(&mut self, block: BlockId, node: NodeId, now: u64) {
        let state = &mut self.blocks[block as usize];
        debug_assert!(
            state.references > 0 && state.node.is_none(),
            "only a written block is published, once"
        );
        state.node = Some(node);
        state.last_used = now;
    }

    /// The tree no longer finds this block; without references it is free.
    pub(crate) fn withdraw(&mut self, run: &[BlockId]) {
        // The last one first: they are then used again in this order.
        for &block in run.iter().rev() {
            let state = &mut self.blocks[block as usize];
            debug_assert!(state.node.is_some(), "only a published block is withdrawn");
            state.node = None;
            if state.references == 0 {
                self.free.push(block);
            }
        }
    }

    fn count_held(&mut self, more: usize) {
        self.held += more;
        self.max_held = self.max_held.max(self.held);
    }

    /// Verifies the states both ways: the free list against the blocks, the counters against both.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut listed = vec![false; self.blocks.len()];
        for &block in &self.free {
            if std::mem::replace(&mut listed[block as usize], true) {
                return Err(format!("block {block} is twice in the free list"));
            }
        }
        for (block, (state, &listed)) in self.blocks.iter().zip(&listed).enumerate() {
            if listed != (state.references == 0 && state.node.is_none()) {
                return Err(format!(
                    "block {block} is {state:?}, in the free list: {listed}"
                ));
            }
        }
        let held = self
            .blocks
            .iter()
            .filter(|state| state.references > 0)
            .count();
        if held != self.held || self.max_held < held {
            return Err(format!(
                "{held} blocks are held, counted {} (at most {})",
                self.held, self.max_held
            ));
        }
        Ok(())
    }
}
