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
//! The last use is kept per block, not per node: a hit or a release in the middle of an edge splits nothing, and
//! the eviction order is still exactly that of the least recently used block that nothing depends on.
//!
//! Cost: finding and inserting are O(tokens), a split O(edge), eviction O(log leaves) a node and O(1) a block.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hash, Hasher};
use std::mem;
use std::ops::{Index, IndexMut};

use foldhash::fast::FixedState;
use hashbrown::HashTable;

use crate::block::{BlockId, TokenId, common_prefix};
use crate::pool::BlockPool;

/// Hashes the first block of an edge together with its parent. See [`hash_block`].
pub type BlockHash = fn(parent: u32, tokens: &[TokenId]) -> u64;

/// The default [`BlockHash`]: foldhash with a fixed seed.
pub fn hash_block(parent: u32, tokens: &[TokenId]) -> u64 {
    let mut hasher = FixedState::default().build_hasher();
    hasher.write_u32(parent);
    tokens.hash(&mut hasher);
    hasher.finish()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct NodeId(u32);

impl NodeId {
    const NONE: Self = Self(u32::MAX);
}

#[derive(Debug)]
struct Node {
    tokens: Vec<TokenId>,
    blocks: Vec<BlockId>,
    /// Depth of the first block.
    start: usize,
    parent: NodeId,
    root: NodeId,
    children: u32,
    /// Of a root; empty elsewhere.
    namespace: Box<[u8]>,
}

impl Node {
    /// Depth at which the children start.
    fn end(&self) -> usize {
        self.start + self.blocks.len()
    }

    fn is_root(&self) -> bool {
        self.parent == NodeId::NONE
    }

    /// The deepest block, if nothing in the tree depends on it.
    fn leaf_tail(&self) -> Option<BlockId> {
        self.blocks.last().copied().filter(|_| self.children == 0)
    }
}

/// Nodes by index. An index is used again, a node never moves.
#[derive(Debug, Default)]
struct Slab {
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
}

impl Slab {
    fn insert(&mut self, node: Node) -> NodeId {
        if let Some(id) = self.vacant.pop() {
            self.nodes[id.0 as usize] = Some(node);
            return id;
        }
        self.nodes.push(Some(node));
        NodeId((self.nodes.len() - 1) as u32)
    }

    fn remove(&mut self, id: NodeId) -> Node {
        self.vacant.push(id);
        self.nodes[id.0 as usize]
            .take()
            .expect("a removed node was there")
    }

    fn len(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    fn iter(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        let ids = (0..).map(NodeId);
        ids.zip(&self.nodes)
            .filter_map(|(id, node)| Some((id, node.as_ref()?)))
    }
}

impl Index<NodeId> for Slab {
    type Output = Node;

    fn index(&self, id: NodeId) -> &Node {
        self.nodes[id.0 as usize]
            .as_ref()
            .expect("a node id is live")
    }
}

impl IndexMut<NodeId> for Slab {
    fn index_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id.0 as usize]
            .as_mut()
            .expect("a node id is live")
    }
}

/// Where a block is in the tree, and when it was last used (logical time).
#[derive(Debug, Clone, Copy)]
struct Place {
    node: NodeId,
    last_used: u64,
}

/// Which prefixes are computed, and in which blocks.
#[derive(Debug)]
pub(crate) struct RadixTree {
    block_size: usize,
    hash: BlockHash,
    nodes: Slab,
    /// Roots by namespace.
    roots: HashTable<NodeId>,
    /// All other nodes by parent and first block.
    children: HashTable<NodeId>,
    /// By block id. The node of a block outside the tree is `NONE`.
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
            nodes: Slab::default(),
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
            Some(last) => self.places[table[last] as usize].node,
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
        if self.nodes[at].children == 0 && !self.nodes[at].is_root() {
            self.nodes[at].tokens.extend_from_slice(tokens);
            self.nodes[at].blocks.extend_from_slice(blocks);
        } else {
            self.nodes[at].children += 1;
            at = self.nodes.insert(Node {
                tokens: tokens.to_vec(),
                blocks: blocks.to_vec(),
                start: depth,
                parent: at,
                root: self.nodes[at].root,
                children: 0,
                namespace: Box::default(),
            });
            self.index(at);
        }
        let place = Place {
            node: at,
            last_used: self.clock,
        };
        for &block in blocks {
            pool.publish(block);
            if block as usize >= self.places.len() {
                self.places.resize(
                    block as usize + 1,
                    Place {
                        node: NodeId::NONE,
                        last_used: 0,
                    },
                );
            }
            self.places[block as usize] = place;
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
        let Place { node, last_used } = self.places[block as usize];
        if self.nodes[node].leaf_tail() == Some(block) {
            self.evictable.remove(&(last_used, node));
        }
    }

    /// `block` lost its last reference: its node is evictable from now on, if nothing follows the block.
    pub(crate) fn on_unheld(&mut self, block: BlockId) {
        let Place { node, last_used } = self.places[block as usize];
        if self.nodes[node].leaf_tail() == Some(block) {
            self.evictable.insert((last_used, node));
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
        let only = namespace.map(|namespace| self.root(namespace));
        let doomed = |node: &Node| only.is_none_or(|root| Some(node.root) == root);
        let ids: Vec<NodeId> = self
            .nodes
            .iter()
            .filter(|(_, node)| doomed(node))
            .map(|(id, _)| id)
            .collect();
        for &id in &ids {
            self.unindex(id);
            if let Some(tail) = self.nodes[id].leaf_tail() {
                self.evictable
                    .remove(&(self.places[tail as usize].last_used, id));
            }
        }
        for &id in &ids {
            for block in self.nodes.remove(id).blocks {
                self.places[block as usize].node = NodeId::NONE;
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
            parent: NodeId::NONE,
            root: NodeId::NONE,
            children: 0,
            namespace: namespace.into(),
        });
        self.nodes[root].root = root;
        self.index(root);
        root
    }

    fn child(&self, parent: NodeId, first_block: &[TokenId]) -> Option<NodeId> {
        let is_it = |&id: &NodeId| {
            let node = &self.nodes[id];
            node.parent == parent && node.tokens[..self.block_size] == *first_block
        };
        self.children
            .find((self.hash)(parent.0, first_block), is_it)
            .copied()
    }

    /// Makes a node findable from its parent, or a root by its namespace.
    fn index(&mut self, id: NodeId) {
        let (nodes, hash, size) = (&self.nodes, self.hash, self.block_size);
        if nodes[id].is_root() {
            let key = |&id: &NodeId| hash_namespace(&nodes[id].namespace);
            self.roots.insert_unique(key(&id), id, key);
        } else {
            let key = |&id: &NodeId| hash(nodes[id].parent.0, &nodes[id].tokens[..size]);
            self.children.insert_unique(key(&id), id, key);
        }
    }

    fn unindex(&mut self, id: NodeId) {
        let node = &self.nodes[id];
        let (table, hash) = if node.is_root() {
            (&mut self.roots, hash_namespace(&node.namespace))
        } else {
            let hash = (self.hash)(node.parent.0, &node.tokens[..self.block_size]);
            (&mut self.children, hash)
        };
        if let Ok(entry) = table.find_entry(hash, |&other| other == id) {
            entry.remove();
        }
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
            root: node.root,
            children: 1,
            namespace: Box::default(),
        };
        upper.tokens.shrink_to_fit();
        upper.blocks.shrink_to_fit();
        node.start += at;
        let upper = self.nodes.insert(upper);
        self.nodes[id].parent = upper;
        for &block in &self.nodes[upper].blocks {
            self.places[block as usize].node = upper;
        }
        self.index(upper);
        self.index(id);
        upper
    }

    /// Removes the tail block of a leaf, and the leaf when that was all of it. Returns the node that now ends
    /// the path, if any.
    fn remove_tail(&mut self, pool: &mut BlockPool, id: NodeId, tail: BlockId) -> Option<NodeId> {
        self.places[tail as usize].node = NodeId::NONE;
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
        let parent = self.nodes.remove(id).parent;
        self.eviction_visits += 1;
        self.nodes[parent].children -= 1;
        if !self.nodes[parent].is_root() {
            return Some(parent);
        }
        if self.nodes[parent].children == 0 {
            self.unindex(parent);
            self.nodes.remove(parent);
        }
        None
    }

    /// A tree that held many nodes gives their memory back when the last one goes.
    fn shrink_if_empty(&mut self) {
        if self.nodes.len() == 0 {
            self.nodes = Slab::default();
            self.roots = HashTable::new();
            self.children = HashTable::new();
        }
    }

    /// Verifies the structure, its indexes, and what it says about the pool. O(pool + tree).
    pub(crate) fn check(&self, pool: &BlockPool) -> Result<(), String> {
        let held = |block: BlockId| pool.references(block) > 0;
        let last_used = |block: BlockId| self.places[block as usize].last_used;
        let mut children = vec![0; self.nodes.nodes.len()];
        let mut evictable = BTreeSet::new();
        let (mut roots, mut blocks) = (0, 0);
        for (id, node) in self.nodes.iter() {
            let fail = |what: &str| Err(format!("node {}: {what}: {node:?}", id.0));
            if node.is_root() {
                roots += 1;
                if self.root(&node.namespace) != Some(id) {
                    return fail("its namespace does not find it");
                }
                if node.root != id
                    || node.start != 0
                    || !node.blocks.is_empty()
                    || node.children == 0
                {
                    return fail("a root is at the top, without blocks, with children");
                }
                continue;
            }
            let Some(Some(parent)) = self.nodes.nodes.get(node.parent.0 as usize) else {
                return fail("its parent does not exist");
            };
            children[node.parent.0 as usize] += 1;
            blocks += node.blocks.len();
            if node.blocks.is_empty() || node.tokens.len() != node.blocks.len() * self.block_size {
                return fail("an edge is whole blocks of tokens, at least one");
            }
            if node.start != parent.end() || node.root != parent.root || !node.namespace.is_empty()
            {
                return fail("it does not continue its parent");
            }
            if self.child(node.parent, &node.tokens[..self.block_size]) != Some(id) {
                return fail("its parent does not find it");
            }
            let path = parent.blocks.last().into_iter().chain(&node.blocks);
            for (&above, &block) in path.clone().zip(path.skip(1)) {
                if held(block) && !held(above) {
                    return fail("a held block has an ancestor that is not held");
                }
                if !held(block) && last_used(above) < last_used(block) {
                    return fail("a block was used without its ancestor");
                }
            }
            for &block in &node.blocks {
                if self.places[block as usize].node != id || !pool.is_findable(block) {
                    return fail("the pool or the places disagree about a block");
                }
            }
            if let Some(tail) = node.leaf_tail()
                && !held(tail)
            {
                evictable.insert((last_used(tail), id));
            }
        }
        for (id, node) in self.nodes.iter() {
            if node.children != children[id.0 as usize] {
                return Err(format!(
                    "node {} counts its children wrongly: {node:?}",
                    id.0
                ));
            }
        }
        let findable = pool.count_findable();
        let placed = self
            .places
            .iter()
            .filter(|place| place.node != NodeId::NONE)
            .count();
        if blocks != findable || blocks != placed {
            return Err(format!(
                "{blocks} blocks in the tree, {findable} findable, {placed} placed"
            ));
        }
        if self.roots.len() != roots || self.children.len() + roots != self.nodes.len() {
            return Err("the child tables hold more than the tree".to_owned());
        }
        if self.evictable != evictable {
            return Err(format!(
                "evictable is {:?}, should be {evictable:?}",
                self.evictable
            ));
        }
        if self
            .evictable
            .iter()
            .zip(self.evictable.iter().skip(1))
            .any(|(a, b)| a.0 == b.0)
        {
            return Err(format!("two leaves share a last use: {:?}", self.evictable));
        }
        Ok(())
    }
}

fn hash_namespace(namespace: &[u8]) -> u64 {
    FixedState::default().hash_one(namespace)
}
