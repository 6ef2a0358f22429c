//! The prefix cache: a path-compressed radix tree over whole blocks of tokens, one root per namespace.
//!
//! A node is an edge: a run of blocks with the tokens they hold and the media spans that touch them, owned by the
//! node, at a depth counted in blocks. Nodes live in a slab and name each other by index; children know their
//! parent, and *one* hash table for the whole tree finds a child by (parent, first block). The hash only says where
//! to look: tokens and media are compared, so a collision costs time and never a wrong block.
//!
//! Invariants, all verified by [`RadixTree::check`]:
//! * every block of the tree has one place in it, and the pool knows the node;
//! * no node is empty, except the roots, and a root has children;
//! * a held block has only held ancestors, so whatever is not held can be evicted from the tails;
//! * `evictable` holds exactly the leaves whose tail block has no reference, by the rank of their tail.
//!
//! A block is last used when a sequence that has it lets go of it: before that it cannot be evicted, so nothing
//! earlier matters. The last use is kept per block, not per node: letting go in the middle of an edge splits
//! nothing, and eviction still takes exactly the least recently used block that nothing depends on.
//!
//! Cost: finding and inserting are O(tokens), a split O(edge), eviction O(log leaves) a node and O(1) a block.

mod check;
mod evict;
mod node;
mod policy;
mod siblings;

use std::hash::{BuildHasher, Hash, Hasher};
use std::mem;

use foldhash::fast::FixedState;
use hashbrown::HashTable;

use crate::block::{BlockId, Media, Scope, TokenId, touching};
use crate::events::{Change, EventLog, Snapshot};
use crate::pool::BlockPool;
use crate::slab::{Key as NodeId, Slab};
use node::{Node, extend_sparingly};
use policy::{Evictable, EvictionPolicy, Lru};
use siblings::Siblings;

/// Hashes the first block of an edge, with the media spans that touch it, together with its parent.
/// See [`hash_block`].
pub type BlockHash = fn(parent: u32, tokens: &[TokenId], media: &[Media]) -> u64;

/// The default [`BlockHash`]: foldhash with a fixed seed.
pub fn hash_block(parent: u32, tokens: &[TokenId], media: &[Media]) -> u64 {
    let mut hasher = FixedState::default().build_hasher();
    hasher.write_u32(parent);
    tokens.hash(&mut hasher);
    if !media.is_empty() {
        media.hash(&mut hasher);
    }
    hasher.finish()
}

/// How much of a prompt is known in whole blocks, and the node where that ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Match {
    pub(crate) blocks: usize,
    node: Option<NodeId>,
}

/// Which prefixes are computed, and in which blocks.
#[derive(Debug)]
pub(crate) struct RadixTree<P: EvictionPolicy = Lru> {
    block_size: usize,
    hash: BlockHash,
    nodes: Slab<Node>,
    /// Roots by namespace.
    roots: HashTable<NodeId>,
    /// All other nodes by parent and first block.
    children: HashTable<NodeId>,
    /// The same nodes in order, where partial hits are wanted.
    siblings: Option<Siblings>,
    /// Leaves whose tail has no reference. Two leaves never share a last use.
    evictable: Evictable<P>,
    clock: u64,
    eviction_visits: u64,
    stored: u64,
    /// What happens here is told to whoever listens.
    pub(crate) log: Option<Box<EventLog>>,
}

impl RadixTree {
    /// An empty tree.
    pub(crate) fn new(
        block_size: usize,
        hash: BlockHash,
        partial_hits: bool,
        log: Option<Box<EventLog>>,
    ) -> Self {
        Self {
            block_size,
            hash,
            nodes: Slab::new(),
            roots: HashTable::new(),
            children: HashTable::new(),
            siblings: partial_hits.then(Siblings::default),
            evictable: Evictable::new(),
            clock: 0,
            eviction_visits: 0,
            stored: 0,
            log,
        }
    }
}

impl<P: EvictionPolicy> RadixTree<P> {
    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Nodes looked at by all evictions so far: the measure of their work.
    pub(crate) fn eviction_visits(&self) -> u64 {
        self.eviction_visits
    }

    /// Blocks that ever entered the tree.
    pub(crate) fn stored(&self) -> u64 {
        self.stored
    }

    /// Finds the longest known prefix of whole blocks. `found` gets its blocks, a run at a time, in order.
    pub(crate) fn find(
        &self,
        tokens: &[TokenId],
        scope: Scope<'_>,
        mut found: impl FnMut(&[BlockId]),
    ) -> Match {
        let end = tokens.len() / self.block_size;
        let tokens = &tokens[..end * self.block_size];
        let mut depth = 0;
        let mut at = self.root(scope.namespace);
        while let Some(parent) = at
            && depth < end
            && let Some(child) = self.child(parent, depth, tokens, scope.media)
        {
            let edge = &self.nodes[child];
            let common = edge.common(depth, tokens, scope.media, self.block_size);
            let same = common / self.block_size;
            found(&edge.blocks[..same]);
            depth += same;
            at = Some(child);
            if same < edge.blocks.len() {
                break;
            }
        }
        Match {
            blocks: depth,
            node: at,
        }
    }

    /// Beyond the whole blocks that match, the block that shares most of the following tokens, and how many.
    pub(crate) fn find_partial(
        &self,
        matched: Match,
        tokens: &[TokenId],
        media: &[Media],
    ) -> Option<(BlockId, usize)> {
        let siblings = self.siblings.as_ref()?;
        let depth = matched.blocks;
        let rest = &tokens[depth * self.block_size..];
        let node = matched.node?;
        let edge = &self.nodes[node];
        if depth < edge.end() {
            let common = edge.common(depth, tokens, media, self.block_size);
            return (common > 0).then(|| (edge.blocks[depth - edge.start()], common));
        }
        let first = &rest[..rest.len().min(self.block_size)];
        let (child, common) = siblings.closest(node, depth * self.block_size, first, media)?;
        Some((self.nodes[child].blocks[0], common))
    }

    /// Enters the whole blocks of `tokens` from depth `from` on, held in `table`, whose blocks before are in the
    /// tree. Where a block is known already, the table is re-pointed to it and its own block given back.
    ///
    /// Returns how many were known.
    pub(crate) fn insert(
        &mut self,
        pool: &mut BlockPool,
        tokens: &[TokenId],
        scope: Scope<'_>,
        table: &mut [BlockId],
        from: usize,
    ) -> usize {
        let size = self.block_size;
        let end = tokens.len() / size;
        if from == end {
            return 0;
        }
        let tokens = &tokens[..end * size];
        let mut depth = from;
        let mut at = match from.checked_sub(1) {
            Some(last) => pool.node(table[last]).expect("the caller says so"),
            None => self.root_or_new(scope.namespace),
        };
        // Follow what is there.
        loop {
            let edge = &self.nodes[at];
            let same = edge.common(depth, tokens, scope.media, size) / size;
            let offset = depth - edge.start();
            let known = &edge.blocks[offset..offset + same];
            for (mine, &known) in table[depth..].iter_mut().zip(known) {
                pool.unhold(mem::replace(mine, known));
                pool.hold(known);
            }
            let edge_end = edge.end();
            depth += same;
            if same > 0 {
                self.on_held(pool, table[depth - 1]);
            }
            if depth == end {
                return depth - from;
            }
            if depth < edge_end {
                at = self.split(pool, at, offset + same);
                break;
            }
            match self.child(at, depth, tokens, scope.media) {
                Some(child) => at = child,
                None => break,
            }
        }
        self.append(pool, at, tokens, scope.media, table, depth);
        depth - from
    }

    /// Enters what is new: the whole blocks of `tokens` from `depth` on, which continue the node `at`.
    fn append(
        &mut self,
        pool: &mut BlockPool,
        mut at: NodeId,
        tokens: &[TokenId],
        media: &[Media],
        table: &[BlockId],
        depth: usize,
    ) {
        let position = depth * self.block_size;
        let blocks = &table[depth..tokens.len() / self.block_size];
        let new_media = touching(media, position..tokens.len());
        let new_tokens = &tokens[position..];
        let above = &mut self.nodes[at];
        // A leaf grows in place, anything else gets a child.
        if above.leaf_tail().is_some() {
            extend_sparingly(&mut above.tokens, new_tokens);
            extend_sparingly(&mut above.blocks, blocks);
            let more = match (above.media.last(), new_media) {
                // A span that reaches back into what is there.
                (Some(last), [first, rest @ ..]) if last == first => rest,
                _ => new_media,
            };
            extend_sparingly(&mut above.media, more);
        } else {
            above.children += 1;
            let namespace = above.namespace.clone();
            at = self.nodes.insert(Node {
                tokens: new_tokens.to_vec(),
                blocks: blocks.to_vec(),
                media: new_media.to_vec(),
                namespace,
                hash: 0,
                start: depth as u32,
                parent: Some(at),
                children: 0,
            });
            self.index(at);
        }
        for &block in blocks {
            pool.publish(block, at, self.clock);
        }
        self.stored += blocks.len() as u64;
        if let Some(log) = &mut self.log {
            let parent = depth.checked_sub(1).map(|above| table[above]);
            let namespace = &self.nodes[at].namespace;
            log.stored(namespace, parent, position, new_tokens, new_media, blocks);
        }
    }

    /// Marks a path of held blocks, from its root down, as used just now.
    pub(crate) fn touch(&mut self, pool: &mut BlockPool, path: &[BlockId]) {
        self.clock += 1;
        for &block in path {
            pool.touch(block, self.clock);
        }
    }

    /// Forgets a namespace, or all of them. Its blocks are withdrawn; those that are held stay so.
    pub(crate) fn clear(&mut self, pool: &mut BlockPool, namespace: Option<&[u8]>) {
        let doomed = |node: &Node| namespace.is_none_or(|namespace| *node.namespace == *namespace);
        let nodes = self.nodes.iter().filter(|(_, node)| doomed(node));
        let ids: Vec<NodeId> = nodes.map(|(id, _)| id).collect();
        for &id in &ids {
            self.unindex(id);
            if let Some(tail) = self.nodes[id].leaf_tail() {
                self.on_held(pool, tail);
            }
        }
        for &id in &ids {
            pool.withdraw(&self.nodes.remove(id).blocks);
        }
        self.shrink_if_empty();
        if let Some(log) = &mut self.log {
            log.cleared(namespace);
        }
    }

    /// What can be found now, and the number of the next event; `None` where events are off.
    pub(crate) fn snapshot(&self) -> Option<Snapshot> {
        let log = self.log.as_ref()?;
        let mut nodes: Vec<(NodeId, &Node)> = self
            .nodes
            .iter()
            .filter(|(_, node)| node.parent.is_some())
            .collect();
        nodes.sort_unstable_by_key(|&(id, node)| (node.start, id));
        let stored = nodes.into_iter().map(|(_, node)| {
            let above = node
                .parent
                .and_then(|above| self.nodes[above].blocks.last());
            Change::Stored {
                namespace: node.namespace.clone(),
                parent: above.map(|&block| log.digest(block)),
                blocks: log.digests(&node.blocks),
                tokens: node.tokens.clone(),
                media: node.media.to_vec(),
            }
        });
        Some(Snapshot {
            number: log.next(),
            stored: stored.collect(),
        })
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
        let root = self.nodes.insert(Node::root(namespace));
        self.index(root);
        root
    }

    /// The child of a node that continues it with the block of a prompt at `depth`, where the node ends.
    fn child(
        &self,
        parent: NodeId,
        depth: usize,
        tokens: &[TokenId],
        media: &[Media],
    ) -> Option<NodeId> {
        if self.nodes[parent].children == 0 {
            return None;
        }
        let position = depth * self.block_size;
        let range = position..position + self.block_size;
        let (tokens, media) = (&tokens[range.clone()], touching(media, range));
        let is_it = |&id: &NodeId| {
            let node = &self.nodes[id];
            node.parent == Some(parent) && node.first_block(self.block_size) == (tokens, media)
        };
        let hash = (self.hash)(parent.number(), tokens, media);
        self.children.find(hash, is_it).copied()
    }

    /// Makes a node findable from its parent, or a root by its namespace.
    fn index(&mut self, id: NodeId) {
        let size = self.block_size;
        let node = &mut self.nodes[id];
        let table = if let Some(parent) = node.parent {
            let (tokens, media) = node.first_block(size);
            if let Some(siblings) = &mut self.siblings {
                siblings.insert(parent, node.start() * size, tokens, media, id);
            }
            node.hash = (self.hash)(parent.number(), tokens, media);
            &mut self.children
        } else {
            node.hash = hash_namespace(&node.namespace);
            &mut self.roots
        };
        let hash = node.hash;
        table.insert_unique(hash, id, |&other| self.nodes[other].hash);
    }

    fn unindex(&mut self, id: NodeId) {
        let size = self.block_size;
        let node = &self.nodes[id];
        let table = if let Some(parent) = node.parent {
            if let Some(siblings) = &mut self.siblings {
                let (tokens, media) = node.first_block(size);
                siblings.remove(parent, node.start() * size, tokens, media);
            }
            &mut self.children
        } else {
            &mut self.roots
        };
        if let Ok(entry) = table.find_entry(node.hash, |&other| other == id) {
            entry.remove();
        }
    }

    /// Splits an edge after `at` of its blocks. The upper half is the new node, so that the children's parent
    /// stays. Returns the upper half.
    fn split(&mut self, pool: &mut BlockPool, id: NodeId, at: usize) -> NodeId {
        self.unindex(id);
        let size = self.block_size;
        let node = &mut self.nodes[id];
        let (start, middle, end) = (node.start(), node.start() + at, node.end());
        let lower_tokens = node.tokens.split_off(at * size);
        let lower_blocks = node.blocks.split_off(at);
        let mut upper = Node {
            tokens: mem::replace(&mut node.tokens, lower_tokens),
            blocks: mem::replace(&mut node.blocks, lower_blocks),
            media: touching(&node.media, start * size..middle * size).to_vec(),
            namespace: node.namespace.clone(),
            hash: 0,
            start: node.start,
            parent: node.parent,
            children: 1,
        };
        upper.tokens.shrink_to_fit();
        upper.blocks.shrink_to_fit();
        node.media = touching(&node.media, middle * size..end * size).to_vec();
        node.start = middle as u32;
        let upper = self.nodes.insert(upper);
        self.nodes[id].parent = Some(upper);
        for &block in &self.nodes[upper].blocks {
            pool.set_node(block, upper);
        }
        self.index(upper);
        self.index(id);
        upper
    }

    /// A tree that held many nodes gives their memory back when the last one goes.
    fn shrink_if_empty(&mut self) {
        if self.nodes.len() == 0 {
            self.nodes = Slab::new();
            self.roots = HashTable::new();
            self.children = HashTable::new();
        }
    }
}

fn hash_namespace(namespace: &[u8]) -> u64 {
    FixedState::default().hash_one(namespace)
}
