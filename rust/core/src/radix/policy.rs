//! Who is evicted first.
//!
//! The tree says which tails can go; a policy ranks them. Least recently used is the only one until a trace shows
//! that another gains.

use std::collections::BTreeSet;
use std::fmt::Debug;

use crate::slab::Key as NodeId;

/// The order of eviction: of all tails that can go, the one of the lowest rank goes first.
///
/// The rank of a block must not change while it is unreferenced, nor be below that of a block which depends on it:
/// a tail goes before what it continues.
pub(crate) trait EvictionPolicy: Debug {
    type Rank: Ord + Copy + Debug;

    /// The rank of a block that was last used at the logical time `last_used`, `depth` blocks below its root.
    fn rank(last_used: u64, depth: usize) -> Self::Rank;
}

/// Least recently used first.
#[derive(Debug)]
pub(crate) struct Lru;

impl EvictionPolicy for Lru {
    type Rank = u64;

    fn rank(last_used: u64, _depth: usize) -> u64 {
        last_used
    }
}

/// The leaves whose tail can go, ordered by its rank. O(log leaves) an operation.
#[derive(Debug)]
pub(crate) struct Evictable<P: EvictionPolicy>(BTreeSet<(P::Rank, NodeId)>);

impl<P: EvictionPolicy> Evictable<P> {
    pub(crate) const fn new() -> Self {
        Self(BTreeSet::new())
    }

    pub(crate) fn insert(&mut self, rank: P::Rank, leaf: NodeId) {
        self.0.insert((rank, leaf));
    }

    pub(crate) fn remove(&mut self, rank: P::Rank, leaf: NodeId) {
        self.0.remove(&(rank, leaf));
    }

    /// Takes out the leaf whose tail goes first.
    pub(crate) fn pop(&mut self) -> Option<(P::Rank, NodeId)> {
        self.0.pop_first()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (P::Rank, NodeId)> {
        self.0.iter().copied()
    }
}
