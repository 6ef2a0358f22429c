//! Verification of the tree: its structure, its indexes, and what it says about the pool.

use std::collections::{BTreeSet, HashMap};

use super::policy::EvictionPolicy;
use super::{Node, NodeId, RadixTree};
use crate::block::{BlockId, touching};
use crate::pool::BlockPool;

impl<P: EvictionPolicy> RadixTree<P> {
    /// Verifies every invariant. O(pool + tree).
    pub(crate) fn check(&self, pool: &BlockPool) -> Result<(), String> {
        let mut evictable = BTreeSet::new();
        let mut times = BTreeSet::new();
        let mut children = HashMap::<_, u32>::new();
        let mut blocks = 0;
        for (id, node) in self.nodes.iter() {
            let checked = self.check_node(pool, id, node);
            checked.map_err(|what| format!("node {}: {what}: {node:?}", id.number()))?;
            if let Some(parent) = node.parent {
                *children.entry(parent).or_default() += 1;
            }
            if let Some(tail) = node.leaf_tail()
                && pool.references(tail) == 0
            {
                evictable.insert((self.rank(pool, tail, id), id));
                if !times.insert(pool.last_used(tail)) {
                    return Err(format!("two leaves share a last use: {node:?}"));
                }
            }
            blocks += node.blocks.len();
        }
        for (id, node) in self.nodes.iter() {
            if node.children != children.get(&id).copied().unwrap_or(0) {
                return Err(format!(
                    "node {} counts its children wrongly: {node:?}",
                    id.number()
                ));
            }
        }
        let findable = pool.count_findable();
        if blocks != findable {
            return Err(format!("{blocks} blocks in the tree, {findable} findable"));
        }
        let indexed = self.siblings.as_ref().map(|siblings| siblings.len());
        if self.roots.len() + self.children.len() != self.nodes.len()
            || indexed.is_some_and(|indexed| indexed != self.children.len())
        {
            return Err("the indexes that find nodes hold more than there are".to_owned());
        }
        if !self.evictable.iter().eq(evictable.iter().copied()) {
            return Err(format!(
                "evictable is {:?}, should be {evictable:?}",
                self.evictable
            ));
        }
        Ok(())
    }

    fn check_node(&self, pool: &BlockPool, id: NodeId, node: &Node) -> Result<(), &'static str> {
        let size = self.block_size;
        let Some(parent_id) = node.parent else {
            if self.root(&node.namespace) != Some(id) {
                return Err("its namespace does not find it");
            }
            if node.start != 0 || !node.blocks.is_empty() || node.children == 0 {
                return Err("a root is at the top, without blocks, with children");
            }
            return Ok(());
        };
        let parent = self
            .nodes
            .get(parent_id)
            .ok_or("its parent does not exist")?;
        if node.blocks.is_empty() || node.tokens.len() != node.blocks.len() * size {
            return Err("an edge is whole blocks of tokens, at least one");
        }
        if node.start() != parent.end() || node.namespace != parent.namespace {
            return Err("it does not continue its parent");
        }
        let range = node.start() * size..node.end() * size;
        if touching(&node.media, range.clone()).len() != node.media.len() {
            return Err("it has media that do not touch it");
        }
        let (tokens, media) = node.first_block(size);
        let hash = (self.hash)(parent_id.number(), tokens, media);
        if self.children.find(hash, |&other| other == id).is_none() {
            return Err("its parent does not find it");
        }
        if let Some(siblings) = &self.siblings
            && siblings.closest(parent_id, range.start, tokens, media) != Some((id, size))
        {
            return Err("it is not where it belongs among its siblings");
        }
        let held = |block: BlockId| pool.references(block) > 0;
        let last_used = |block: BlockId| pool.last_used(block);
        let mut above = parent.blocks.last();
        for block in &node.blocks {
            if pool.node(*block) != Some(id) {
                return Err("the pool disagrees about a block");
            }
            if let Some(&above) = above {
                if held(*block) && !held(above) {
                    return Err("a held block has an ancestor that is not held");
                }
                if !held(*block) && last_used(above) < last_used(*block) {
                    return Err("a block was used without its ancestor");
                }
            }
            above = Some(block);
        }
        Ok(())
    }
}
