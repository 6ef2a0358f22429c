//! A simulated KV memory: every slot knows of which prefix it holds the KV.

use std::hash::{DefaultHasher, Hash, Hasher};

use leafkv_core::{BlockCopy, BlockId};

use super::op::Cell;

/// The KV of one position: a fingerprint of all that it depends on.
pub type Kv = u64;

/// The KV of every position of a prompt. What a namespace means changes when it is cleared.
pub fn kv(namespace: u8, generation: usize, cells: &[Cell]) -> Vec<Kv> {
    let fingerprint = |value: &dyn Fn(&mut DefaultHasher)| {
        let mut hasher = DefaultHasher::new();
        value(&mut hasher);
        hasher.finish()
    };
    let mut last = fingerprint(&|hasher| (namespace, generation).hash(hasher));
    let chain = cells.iter().map(|cell| {
        last = fingerprint(&|hasher| (last, cell).hash(hasher));
        last
    });
    chain.collect()
}

#[derive(Debug)]
pub struct Memory {
    block_size: usize,
    /// `None`: never written.
    slots: Vec<Option<Kv>>,
}

impl Memory {
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            block_size,
            slots: vec![None; num_blocks * block_size],
        }
    }

    pub fn write(&mut self, slot: usize, kv: Kv) {
        self.slots[slot] = Some(kv);
    }

    /// All sources are read before any destination is written.
    pub fn copy(&mut self, copies: &[BlockCopy]) {
        let before = self.slots.clone();
        let range = |block: BlockId| {
            block as usize * self.block_size..(block as usize + 1) * self.block_size
        };
        for copy in copies {
            self.slots[range(copy.destination)].copy_from_slice(&before[range(copy.source)]);
        }
    }

    pub fn read(&self, block: BlockId, offset: usize) -> Option<Kv> {
        self.slots[block as usize * self.block_size + offset]
    }
}
