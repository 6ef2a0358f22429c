//! The prefix cache: a path-compressed radix tree over whole blocks of tokens, one root per namespace.
//!
//! A node is an edge: a run of blocks with the tokens they hold, owned by the node, at a depth counted in
//! blocks. Nodes live in a slab and name each other by index; children know their parent, and *one* hash table
//! for the whole tree finds a child by (parent, tokens of its first block). The hash only says where to look:
//! tokens are compared, so a collision costs time and never a wrong block.
//!
//! Invariants, all verified by [`RadixTree::check`]:
//! * every block of the tree has one place in it, and `places` names the node;
//! * no node is empty, except the roots, and a root has children;
//! * a held block has only held ancestors, so whatever is not held can be evicted from the tails;
//! * `evictable` holds exactly the leaves whose tail block has no reference, by last use.
//!
//! A block is last used when a sequence that has it lets go of it: before that it cannot be evicted, so nothing
//! earlier matters. The last use is kept per block, not per node: letting go in the middle of an edge splits
//! nothing, and eviction still takes exactly the least recently used block that nothing depends on.
//!
//! Cost: finding and inserting are O(tokens), a split O(edge), eviction O(log leaves) a node and O(1) a block.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, Hash, Hasher};
use std::mem;
use std::sync::Arc;

use foldhash::fast::FixedState;
use hashbrown::HashTable;

use crate::block::{BlockId, TokenId, common_prefix};
use crate::pool::BlockPool;
use crate::slab::{Key as NodeId, Slab};

/// Hashes the first block of an edge together with its parent. See [`hash_block`].
pub type BlockHash = fn(parent: u32, tokens: &[TokenId]) -> u64;

/// The default [`BlockHash`]: foldhash with a fixed seed.
pub fn hash_block(parent: u32, tokens: &[TokenId]) -> u64 {
    let mut hasher = FixedState::default().build_hasher();
    hasher.write_u32(parent);
    tokens.hash(&mut hasher);
    hasher.finish()
}

#[derive(Debug)]
struct Node {
    tokens: Vec<TokenId>,
    blocks: Vec<BlockId>,
    /// Depth of the first block.
    start: usize,
    /// `None`: a root.
    parent: Option<NodeId>,
    children: u32,
    namespace: Arc<[u8]>,
}

impl Node {
    /// Depth at which the children start.
    fn end(&self) -> usize {
        self.start + self.blocks.len()
    }

    /// What the table that finds this node hashes.
    fn hash(&self, hash_block: BlockHash, block_size: usize) -> u64 {
        match self.parent {
            Some(parent) => hash_block(parent.0, &self.tokens[..block_size]),
            None => hash_namespace(&self.namespace),
        }
    }

    /// The deepest block, if nothing in the tree depends on it.
    fn leaf_tail(&self) -> Option<BlockId> {
        self.blocks.last().copied().filter(|_| self.children == 0)
    }
}

/// Where a block is in the tree, and when it was last used (logical time).
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    /// `None`: not in the tree.
    node: Option<NodeId>,
    last_used: u64,
}

/// Which prefixes are computed, and in which blocks.
#[derive(Debug)]
pub(crate) struct RadixTree {
    block_size: usize,
    hash: BlockHash,
    nodes: Slab<Node>,
    /// Roots by namespace.
    roots: HashTable<NodeId>,
    /// All other nodes by parent and first block.
    children: HashTable<NodeId>,
    /// By block id, for the blocks that were ever in the tree.
    places: Vec<Place>,
    /// Leaves whose tail has no reference, by the tail's last use. Two leaves never share a last use.
    evictable: BTreeSet<(u64, NodeId)>,
    clock: u64,
    eviction_visits: u64,
}

impl RadixTree {
    /// An empty tree.
    pub(crate) fn new(block_size: usize, hash: BlockHash) -> Self {
        Self {
            block_size,
            hash,
            nodes: Slab::new(),
            roots: HashTable::new(),
            children: HashTable::new(),
            places: Vec::new(),
            evictable: BTreeSet::new(),
            clock: 0,
            eviction_visits: 0,
        }
    }

    /// Nodes looked at by all evictions so far: the measure of their work.
    pub(crate) fn eviction_visits(&self) -> u64 {
        self.eviction_visits
    }

    /// Finds the longest known prefix of whole blocks. `found` gets its blocks, a run at a time, in order.
    ///
    /// Returns their number.
    pub(crate) fn find(
        &self,
        namespace: &[u8],
        tokens: &[TokenId],
        mut found: impl FnMut(&[BlockId]),
    ) -> usize {
        let end = tokens.len() / self.block_size;
        let mut depth = 0;
        let mut at = self.root(namespace);
        while let Some(parent) = at
            && depth < end
        {
            let rest = &tokens[depth * self.block_size..end * self.block_size];
            at = self.child(parent, &rest[..self.block_size]);
            if let Some(child) = at {
                let edge = &self.nodes[child];
                let same = common_prefix(&edge.tokens, rest) / self.block_size;
                found(&edge.blocks[..same]);
                depth += same;
                if same < edge.blocks.len() {
                    break;
                }
            }
        }
        depth
    }

    /// Enters the whole blocks of `tokens` from depth `from` on, held in `table`, whose blocks before are in the
    /// tree. Where a block is known already, the table is re-pointed to it and its own block given back.
    pub(crate) fn insert(
        &mut self,
        pool: &mut BlockPool,
        namespace: &[u8],
        tokens: &[TokenId],
        table: &mut [BlockId],
        from: usize,
    ) {
        let size = self.block_size;
        let end = tokens.len() / size;
        if from == end {
            return;
        }
        let mut depth = from;
        let mut at = match from.checked_sub(1) {
            Some(last) => self.places[table[last] as usize]
                .node
                .expect("the caller says so"),
            None => self.root_or_new(namespace),
        };
        // Follow what is there.
        loop {
            let edge = &self.nodes[at];
            let offset = depth - edge.start;
            let same = common_prefix(
                &edge.tokens[offset * size..],
                &tokens[depth * size..end * size],
            ) / size;
            for (mine, &known) in table[depth..]
                .iter_mut()
                .zip(&edge.blocks[offset..offset + same])
            {
                pool.unhold(mem::replace(mine, known));
                pool.hold(known);
            }
            let length = edge.blocks.len();
            depth += same;
            if same > 0 {
                self.on_held(table[depth - 1]);
            }
            if depth == end {
                return;
            }
            if offset + same < length {
                at = self.split(at, offset + same);
                break;
            }
            match self.child(at, &tokens[depth * size..(depth + 1) * size]) {
                Some(child) => at = child,
                None => break,
            }
        }
        // The rest is new: a leaf grows in place, anything else gets a child.
        let (tokens, blocks) = (&tokens[depth * size..end * size], &table[depth..end]);
        if self.nodes[at].leaf_tail().is_some() {
            self.nodes[at].tokens.extend_from_slice(tokens);
            self.nodes[at].blocks.extend_from_slice(blocks);
        } else {
            self.nodes[at].children += 1;
            at = self.nodes.insert(Node {
                tokens: tokens.to_vec(),
                blocks: blocks.to_vec(),
                start: depth,
                parent: Some(at),
                children: 0,
                namespace: self.nodes[at].namespace.clone(),
            });
            self.index(at);
        }
        let place = Place {
            node: Some(at),
            last_used: self.clock,
        };
        for &block in blocks {
            pool.publish(block);
            let index = block as usize;
            if index >= self.places.len() {
                self.places.resize(index + 1, Place::default());
            }
            self.places[index] = place;
        }
    }

    /// Marks a path of held blocks, from its root down, as used just now.
    pub(crate) fn touch(&mut self, path: &[BlockId]) {
        self.clock += 1;
        for &block in path {
            self.places[block as usize].last_used = self.clock;
        }
    }

    /// `block` got its first reference: its node is no longer evictable, if it was.
    pub(crate) fn on_held(&mut self, block: BlockId) {
        if let Some(key) = self.leaf_key(block) {
            self.evictable.remove(&key);
        }
    }

    /// `block` lost its last reference: its node is evictable from now on, if nothing follows the block.
    pub(crate) fn on_unheld(&mut self, block: BlockId) {
        if let Some(key) = self.leaf_key(block) {
            self.evictable.insert(key);
        }
    }

    /// Evicts up to `n` blocks, least recently used first, tails before what they depend on.
    pub(crate) fn evict(&mut self, pool: &mut BlockPool, n: usize) -> usize {
        let mut evicted = 0;
        while evicted < n
            && let Some((last_used, leaf)) = self.evictable.pop_first()
        {
            self.eviction_visits += 1;
            let mut at = Some(leaf);
            while let Some(node) = at
                && let Some(tail) = self.nodes[node].leaf_tail()
                && pool.references(tail) == 0
            {
                // What was used together with the tail goes before any other leaf: no need to ask the set.
                let used = self.places[tail as usize].last_used;
                if evicted == n || used > last_used {
                    self.evictable.insert((used, node));
                    break;
                }
                at = self.remove_tail(pool, node, tail);
                evicted += 1;
            }
        }
        self.shrink_if_empty();
        evicted
    }

    /// Forgets a namespace, or all of them. Its blocks are withdrawn; those that are held stay so.
    pub(crate) fn clear(&mut self, pool: &mut BlockPool, namespace: Option<&[u8]>) {
        let doomed = |node: &Node| namespace.is_none_or(|namespace| *node.namespace == *namespace);
        let nodes = self.nodes.iter().filter(|(_, node)| doomed(node));
        let ids: Vec<NodeId> = nodes.map(|(id, _)| id).collect();
        for &id in &ids {
            self.unindex(id);
            if let Some(tail) = self.nodes[id].leaf_tail() {
                self.on_held(tail);
            }
        }
        for &id in &ids {
            for block in self.nodes.remove(id).blocks {
                self.places[block as usize].node = None;
                pool.withdraw(block);
            }
        }
        self.shrink_if_empty();
    }

    fn root(&self, namespace: &[u8]) -> Option<NodeId> {
        let hash = hash_namespace(namespace);
        self.roots
            .find(hash, |&id| *self.nodes[id].namespace == *namespace)
            .copied()
    }

    fn root_or_new(&mut self, namespace: &[u8]) -> NodeId {
        if let Some(root) = self.root(namespace) {
            return root;
        }
        let root = self.nodes.insert(Node {
            tokens: Vec::new(),
            blocks: Vec::new(),
            start: 0,
            parent: None,
            children: 0,
            namespace: namespace.into(),
        });
        self.index(root);
        root
    }

    fn child(&self, parent: NodeId, first_block: &[TokenId]) -> Option<NodeId> {
        let is_it = |&id: &NodeId| {
            let node = &self.nodes[id];
            node.parent == Some(parent) && node.tokens[..self.block_size] == *first_block
        };
        self.children
            .find((self.hash)(parent.0, first_block), is_it)
            .copied()
    }

    /// Makes a node findable from its parent, or a root by its namespace.
    fn index(&mut self, id: NodeId) {
        let (nodes, hash, size) = (&self.nodes, self.hash, self.block_size);
        let table = match nodes[id].parent {
            Some(_) => &mut self.children,
            None => &mut self.roots,
        };
        let rehash = |&id: &NodeId| nodes[id].hash(hash, size);
        table.insert_unique(rehash(&id), id, rehash);
    }

    fn unindex(&mut self, id: NodeId) {
        let node = &self.nodes[id];
        let table = match node.parent {
            Some(_) => &mut self.children,
            None => &mut self.roots,
        };
        let hash = node.hash(self.hash, self.block_size);
        if let Ok(entry) = table.find_entry(hash, |&other| other == id) {
            entry.remove();
        }
    }

    /// The entry of `evictable` for a block, if it is the tail of a leaf.
    fn leaf_key(&self, block: BlockId) -> Option<(u64, NodeId)> {
        let Place { node, last_used } = self.places[block as usize];
        let is_leaf = |&node: &NodeId| self.nodes[node].leaf_tail() == Some(block);
        node.filter(is_leaf).map(|node| (last_used, node))
    }

    /// Splits an edge after `at` of its blocks. The upper half is the new node, so that the children's parent
    /// stays. Returns the upper half.
    fn split(&mut self, id: NodeId, at: usize) -> NodeId {
        self.unindex(id);
        let node = &mut self.nodes[id];
        let (tokens, blocks) = (
            node.tokens.split_off(at * self.block_size),
            node.blocks.split_off(at),
        );
        let mut upper = Node {
            tokens: mem::replace(&mut node.tokens, tokens),
            blocks: mem::replace(&mut node.blocks, blocks),
            start: node.start,
            parent: node.parent,
            children: 1,
            namespace: node.namespace.clone(),
        };
        upper.tokens.shrink_to_fit();
        upper.blocks.shrink_to_fit();
        node.start += at;
        let upper = self.nodes.insert(upper);
        self.nodes[id].parent = Some(upper);
        for &block in &self.nodes[upper].blocks {
            self.places[block as usize].node = Some(upper);
        }
        self.index(upper);
        self.index(id);
        upper
    }

    /// Removes the tail block of a leaf, and the leaf when that was all of it. Returns the node that now ends
    /// the path, if any.
    fn remove_tail(&mut self, pool: &mut BlockPool, id: NodeId, tail: BlockId) -> Option<NodeId> {
        self.places[tail as usize].node = None;
        pool.withdraw(tail);
        let node = &mut self.nodes[id];
        if node.blocks.len() > 1 {
            node.blocks.pop();
            node.tokens.truncate(node.tokens.len() - self.block_size);
            // Halving what is a quarter full keeps this O(1) a block.
            if node.tokens.len() < node.tokens.capacity() / 4 {
                node.tokens.shrink_to(node.tokens.len() * 2);
                node.blocks.shrink_to(node.blocks.len() * 2);
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

    /// A tree that held many nodes gives their memory back when the last one goes.
    fn shrink_if_empty(&mut self) {
        if self.nodes.len() == 0 {
            self.nodes = Slab::new();
            self.roots = HashTable::new();
            self.children = HashTable::new();
        }
    }

    /// Verifies the structure, its indexes, and what it says about the pool. O(pool + tree).
    pub(crate) fn check(&self, pool: &BlockPool) -> Result<(), String> {
        let mut evictable = BTreeSet::new();
        let mut children = HashMap::<_, u32>::new();
        let mut blocks = 0;
        for (id, node) in self.nodes.iter() {
            let checked = self.check_node(pool, id, node);
            checked.map_err(|what| format!("node {}: {what}: {node:?}", id.0))?;
            if let Some(parent) = node.parent {
                *children.entry(parent).or_default() += 1;
            }
            let unheld = |&tail: &BlockId| pool.references(tail) == 0;
            let tail = node.leaf_tail().filter(unheld);
            evictable.extend(tail.and_then(|tail| self.leaf_key(tail)));
            blocks += node.blocks.len();
        }
        for (id, node) in self.nodes.iter() {
            if node.children != children.get(&id).copied().unwrap_or(0) {
                return Err(format!(
                    "node {} counts its children wrongly: {node:?}",
                    id.0
                ));
            }
        }
        let findable = pool.count_findable();
        let placed = self.places.iter().filter_map(|place| place.node).count();
        if blocks != findable || blocks != placed {
            return Err(format!(
                "{blocks} blocks in the tree, {findable} findable, {placed} placed"
            ));
        }
        if self.roots.len() + self.children.len() != self.nodes.len() {
            return Err("the tables that find nodes hold more than there are".to_owned());
        }
        if self.evictable != evictable {
            return Err(format!(
                "evictable is {:?}, should be {evictable:?}",
                self.evictable
            ));
        }
        let times: BTreeSet<u64> = evictable.iter().map(|&(last_used, _)| last_used).collect();
        if times.len() != evictable.len() {
            return Err(format!("two leaves share a last use: {evictable:?}"));
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
        if node.start != parent.end() || node.namespace != parent.namespace {
            return Err("it does not continue its parent");
        }
        if self.child(parent_id, &node.tokens[..size]) != Some(id) {
            return Err("its parent does not find it");
        }
        let held = |block: BlockId| pool.references(block) > 0;
        let last_used = |block: BlockId| self.places[block as usize].last_used;
        let mut above = parent.blocks.last();
        for block in &node.blocks {
            if self.places[*block as usize].node != Some(id) || !pool.is_findable(*block) {
                return Err("the pool or the places disagree about a block");
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

fn hash_namespace(namespace: &[u8]) -> u64 {
    FixedState::default().hash_one(namespace)
}
