//! Verification of what the manager, the pool and the tree must agree on.

use std::collections::HashSet;

use crate::block::BlockId;
use crate::error::{Error, Result};
use crate::manager::KvManager;
use crate::sequence::Sequence;
use crate::store::BlockStore;

impl KvManager {
    /// Verifies every invariant. O(pool + tree + sequences).
    pub fn check_invariants(&self) -> Result<()> {
        self.check().map_err(Error::Invariant)
    }

    fn check(&self) -> Result<(), String> {
        let BlockStore {
            pool,
            tree,
            owed,
            pins,
            ..
        } = &self.store;
        pool.check()?;
        tree.check(pool)?;
        pins.check()?;
        let destinations: HashSet<_> = owed.iter().map(|copy| copy.destination).collect();
        let sources: HashSet<_> = owed.iter().map(|copy| copy.source).collect();
        if destinations.len() != owed.len() || !destinations.is_disjoint(&sources) {
            return Err(format!(
                "two copies write one block, or one reads what another writes: {owed:?}"
            ));
        }
        let mut references = vec![0; pool.ever_used()];
        let mut seen_in = vec![0; pool.ever_used()];
        for (number, (id, sequence)) in (1..).zip(self.sequences.iter()) {
            let fail = |what| Err(format!("sequence {id}: {what}: {sequence:?}"));
            if let Err(what) = sequence.check(self, &destinations) {
                return fail(what);
            }
            for &block in &sequence.table {
                references[block as usize] += 1;
                if std::mem::replace(&mut seen_in[block as usize], number) == number {
                    return fail("a block is twice in the table");
                }
            }
        }
        if destinations
            .iter()
            .any(|&block| references[block as usize] == 0)
        {
            return Err(format!("a copy is owed to nobody: {owed:?}"));
        }
        for &block in pins.paths().flatten() {
            references[block as usize] += 1;
            if !pool.is_findable(block) {
                return Err(format!("block {block} is pinned, and not cached"));
            }
        }
        for copy in owed {
            references[copy.source as usize] += 1;
        }
        for (block, &expected) in (0..).zip(&references) {
            if pool.references(block) != expected {
                let counted = pool.references(block);
                return Err(format!(
                    "block {block} has {expected} references, counted {counted}"
                ));
            }
        }
        let mut leaders = self.leaders.clone();
        leaders.sort_unstable();
        let leading = self
            .sequences
            .iter()
            .filter(|(_, sequence)| sequence.leads(self.block_size));
        let mut expected: Vec<_> = leading.map(|(id, _)| id).collect();
        expected.sort_unstable();
        if leaders != expected {
            return Err(format!("leaders are {leaders:?}, should be {expected:?}"));
        }
        Ok(())
    }
}

impl Sequence {
    fn check(
        &self,
        manager: &KvManager,
        destinations: &HashSet<BlockId>,
    ) -> Result<(), &'static str> {
        let store = &manager.store;
        let full = manager.block_size.whole_blocks(self.committed);
        if self.committed > self.reserved
            || self.committed > self.known.len()
            || self.prompt > self.known.len()
        {
            return Err("committed tokens are known and reserved");
        }
        if self.table.len() != manager.block_size.blocks_for(self.reserved) {
            return Err("the table has the blocks of the reserved tokens");
        }
        let mut cached = Vec::new();
        if self.unchanged > self.table.len() || self.stamp > manager.last_stamp {
            return Err("more of it is written to a row than there is");
        }
        if let Some(scope) = self.scope() {
            store
                .tree
                .find(&self.known[..self.committed], scope, |run| {
                    cached.extend_from_slice(run);
                });
            if cached != self.table[..full] {
                return Err("its committed whole blocks are not the tree's");
            }
        }
        // A partly used block may be the tree's: after a fork or a truncate.
        let partial = self.partial_block(manager.block_size);
        for (index, &block) in self.table.iter().enumerate().skip(cached.len()) {
            let may_be_findable = self.namespace.is_some() && Some(index) == partial;
            if store.pool.is_findable(block) && !may_be_findable {
                return Err("a block is in the tree that should not be");
            }
            if index >= full && Some(index) != partial && !store.is_writable(block) {
                return Err("a reserved block is not writable");
            }
            if destinations.contains(&block) && Some(index) != partial {
                return Err("a copy is owed to a block that does not need it");
            }
        }
        Ok(())
    }
}
