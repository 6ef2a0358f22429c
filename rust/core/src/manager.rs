//! The KV manager: who has which blocks. The bookkeeping of paged KV, and nothing of the KV itself.
//!
//! The life of a sequence:
//!
//! ```text
//! begin ─► grow ─► copies ─► (KV written to slots) ─► commit ─► grow … ─► release
//! ```
//!
//! * Its *known* tokens are the prompt and what `commit` added. KV of the first *committed* ones is written; slots
//!   for the first *reserved* ones are in its table. `committed <= reserved`, `committed <= known`.
//! * Its committed whole blocks are the tree's blocks for those tokens, so equal prefixes are one memory.
//! * A block is written only while one sequence has it and the tree does not: otherwise `grow` owes a copy first.
//! * A sequence alive when its namespace is cleared is *private* from then on: nothing of it enters the tree.
//!
//! Every call succeeds, or fails and changes nothing. A call costs O(tokens given + blocks taken or given back),
//! so a step costs the same at the end of a long sequence as at its beginning.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use crate::block::{BlockCopy, BlockId, SequenceId, TokenId, common_prefix};
use crate::error::{Error, Result};
use crate::pool::BlockPool;
use crate::radix::{BlockHash, RadixTree, hash_block};
use crate::sequence::{Sequence, cacheable, whole};
use crate::store::BlockStore;

/// The answer of [`KvManager::begin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// The sequence is live and holds its prefix hit.
    Ready {
        /// Tokens of the hit: whole blocks, and at least one token of the prompt is left to compute.
        cached_tokens: usize,
    },
    /// A live sequence is about to commit blocks that this prompt shares. Nothing was recorded.
    WaitFor {
        /// The live sequence.
        leader: SequenceId,
        /// Tokens that it must have committed: the whole blocks that the two prompts share.
        tokens: usize,
    },
}

/// What a [`KvManager`] has now, and what it did so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Size of the pool.
    pub num_blocks: usize,
    /// Blocks with nothing in them.
    pub free_blocks: usize,
    /// Blocks that a prefix hit can find and eviction can take.
    pub cached_blocks: usize,
    /// Blocks of live sequences and of owed copies.
    pub held_blocks: usize,
    /// The most blocks that were ever held at once.
    pub max_held_blocks: usize,
    /// Live sequences.
    pub sequences: usize,
    /// Tokens of all prompts that were begun and then given slots.
    pub query_tokens: u64,
    /// Those of `query_tokens` that were found in the prefix cache.
    pub hit_tokens: u64,
    /// Cached blocks that eviction made free.
    pub evicted_blocks: u64,
}

/// Block tables, block pool and prefix cache of one KV memory.
#[derive(Debug)]
pub struct KvManager {
    pub(crate) block_size: usize,
    prefix_caching: bool,
    pub(crate) store: BlockStore,
    pub(crate) sequences: HashMap<SequenceId, Sequence, FixedState>,
    /// Sequences with whole blocks of the prompt still to commit, oldest first.
    pub(crate) leaders: Vec<SequenceId>,
    query_tokens: u64,
    hit_tokens: u64,
}

impl KvManager {
    /// A manager of `num_blocks` free blocks of `block_size` tokens, both 1 to 2³¹ − 1.
    ///
    /// Without `prefix_caching` every sequence is private.
    pub fn new(num_blocks: usize, block_size: usize, prefix_caching: bool) -> Result<Self> {
        Self::with_hash(num_blocks, block_size, prefix_caching, hash_block)
    }

    /// Like [`KvManager::new`], with another hash for the prefix tree. Any function is right, a good one is fast.
    pub fn with_hash(
        num_blocks: usize,
        block_size: usize,
        prefix_caching: bool,
        hash: BlockHash,
    ) -> Result<Self> {
        const MAX: usize = i32::MAX as usize;
        for (argument, value) in [("num_blocks", num_blocks), ("block_size", block_size)] {
            if !(1..=MAX).contains(&value) {
                return Err(Error::invalid(
                    argument,
                    format!("got {value}, expected 1 to {MAX}"),
                ));
            }
        }
        Ok(Self {
            block_size,
            prefix_caching,
            store: BlockStore {
                pool: BlockPool::new(num_blocks),
                tree: RadixTree::new(block_size, hash),
                owed: Vec::new(),
                evicted: 0,
            },
            sequences: HashMap::default(),
            leaders: Vec::new(),
            query_tokens: 0,
            hit_tokens: 0,
        })
    }

    /// Size of the pool.
    pub fn num_blocks(&self) -> usize {
        self.store.pool.len()
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Free and evictable blocks: what admission may count on. O(1).
    pub fn allocatable_blocks(&self) -> usize {
        self.store.allocatable()
    }

    /// Tokens that `begin` would find cached now.
    pub fn lookup(&self, tokens: &[TokenId], namespace: &[u8]) -> usize {
        self.store
            .tree
            .find(namespace, cacheable(tokens, self.block_size), |_| ())
            * self.block_size
    }

    /// Starts a sequence, holding its prefix hit; or names the live sequence that computes what it shares.
    pub fn begin(
        &mut self,
        id: SequenceId,
        tokens: Vec<TokenId>,
        namespace: &[u8],
    ) -> Result<Admission> {
        self.check_new(id, "seq_id")?;
        if tokens.is_empty() {
            return Err(Error::invalid("tokens", "got none, expected at least one"));
        }
        let (needed, num_blocks) = (tokens.len().div_ceil(self.block_size), self.num_blocks());
        if needed > num_blocks {
            let problem = format!(
                "{} tokens need {needed} blocks, the pool has {num_blocks}",
                tokens.len()
            );
            return Err(Error::invalid("tokens", problem));
        }
        if let Some((leader, shared)) = self.leader_of(&tokens, namespace)
            && shared > self.lookup(&tokens, namespace)
        {
            return Ok(Admission::WaitFor {
                leader,
                tokens: shared,
            });
        }
        let table = if self.prefix_caching {
            self.store
                .hold_prefix(namespace, cacheable(&tokens, self.block_size))
        } else {
            Vec::new()
        };
        let cached_tokens = table.len() * self.block_size;
        let sequence = Sequence {
            uncounted: Some((tokens.len(), cached_tokens)),
            namespace: self.prefix_caching.then(|| namespace.into()),
            prompt: tokens.len(),
            known: tokens,
            committed: cached_tokens,
            reserved: cached_tokens,
            table,
        };
        if sequence.leads(self.block_size) {
            self.leaders.push(id);
        }
        self.sequences.insert(id, sequence);
        Ok(Admission::Ready { cached_tokens })
    }

    /// Reserves slots for `n` more tokens. May owe a copy of the last block, see [`KvManager::copies`].
    pub fn grow(&mut self, id: SequenceId, n: usize) -> Result<()> {
        let sequence = live(&mut self.sequences, id)?;
        let reserved = sequence.reserved.saturating_add(n);
        let more = reserved.div_ceil(self.block_size) - sequence.table.len();
        let to_write = sequence
            .partial_block(self.block_size)
            .filter(|_| reserved > sequence.committed);
        let shared = to_write.filter(|&index| !self.store.is_writable(sequence.table[index]));
        let needed = more.saturating_add(usize::from(shared.is_some()));
        self.store.make_room(needed)?;
        self.store.pool.allocate(needed, &mut sequence.table);
        if let Some(index) = shared {
            // The block allocated last takes its place.
            let block = sequence.table.swap_remove(index);
            self.store.replace_by_copy(block, sequence.table[index]);
        }
        sequence.reserved = reserved;
        // A begin that is taken back, because the rest does not fit now, was no query.
        if let Some((prompt, hit)) = sequence.uncounted.take_if(|_| n > 0) {
            self.query_tokens += prompt as u64;
            self.hit_tokens += hit as u64;
        }
        Ok(())
    }

    /// The KV of the first `n` tokens is written. `new_tokens` continues the known tokens, which must reach `n`.
    ///
    /// Whole blocks enter the tree. Where it has the block already, the table is re-pointed to that one.
    pub fn commit(&mut self, id: SequenceId, n: usize, new_tokens: &[TokenId]) -> Result<()> {
        let sequence = live(&mut self.sequences, id)?;
        if !(sequence.committed..=sequence.reserved).contains(&n) {
            let (committed, reserved) = (sequence.committed, sequence.reserved);
            let problem =
                format!("got {n}, expected {committed} (committed) to {reserved} (reserved)");
            return Err(Error::invalid("n", problem));
        }
        let known = sequence.known.len() + new_tokens.len();
        if n > known {
            return Err(Error::invalid(
                "new_tokens",
                format!("{n} tokens committed, only {known} known"),
            ));
        }
        if let Some(tail) = sequence.partial_block(self.block_size)
            && let Some(copy) = self.store.owed_to(sequence.table[tail])
        {
            let (source, destination) = (copy.source, copy.destination);
            let problem = format!(
                "the copy of block {source} to {destination} is still owed: call copies() first"
            );
            return Err(Error::invalid("seq_id", problem));
        }
        let led = sequence.leads(self.block_size);
        sequence.known.extend_from_slice(new_tokens);
        if let Some(namespace) = &sequence.namespace {
            let BlockStore { pool, tree, .. } = &mut self.store;
            let from = sequence.committed / self.block_size;
            tree.insert(
                pool,
                namespace,
                &sequence.known[..n],
                &mut sequence.table,
                from,
            );
        }
        sequence.committed = n;
        if led && !sequence.leads(self.block_size) {
            self.leaders.retain(|&leader| leader != id);
        }
        Ok(())
    }

    /// Starts `child` with the committed tokens of `parent`, in the same blocks.
    pub fn fork(&mut self, parent: SequenceId, child: SequenceId) -> Result<()> {
        let parent = self
            .sequences
            .get(&parent)
            .ok_or(Error::UnknownSequence(parent))?;
        self.check_new(child, "child_id")?;
        let committed = parent.committed;
        let table = parent.table[..committed.div_ceil(self.block_size)].to_vec();
        self.store.share(&table);
        let child_sequence = Sequence {
            uncounted: None,
            namespace: parent.namespace.clone(),
            known: parent.known[..committed].to_vec(),
            prompt: parent.prompt.min(committed),
            committed,
            reserved: committed,
            table,
        };
        self.sequences.insert(child, child_sequence);
        Ok(())
    }

    /// Drops everything beyond the first `n` tokens: reserved slots, and committed tokens if any.
    pub fn truncate(&mut self, id: SequenceId, n: usize) -> Result<()> {
        let sequence = live(&mut self.sequences, id)?;
        if n > sequence.reserved {
            return Err(Error::invalid(
                "n",
                format!("got {n}, expected at most {} (reserved)", sequence.reserved),
            ));
        }
        self.store.touch(&sequence.table);
        self.store
            .unhold(&sequence.table[n.div_ceil(self.block_size)..]);
        sequence.table.truncate(n.div_ceil(self.block_size));
        sequence.reserved = n;
        if n < sequence.committed {
            sequence.committed = n;
            sequence.known.truncate(n);
            sequence.prompt = sequence.prompt.min(n);
            self.leaders.retain(|&leader| leader != id);
        }
        Ok(())
    }

    /// Ends a sequence. Its committed whole blocks stay cached, its other blocks are free.
    pub fn release(&mut self, id: SequenceId) -> Result<()> {
        let sequence = self
            .sequences
            .remove(&id)
            .ok_or(Error::UnknownSequence(id))?;
        self.store.touch(&sequence.table);
        self.store.unhold(&sequence.table);
        if sequence.leads(self.block_size) {
            self.leaders.retain(|&leader| leader != id);
        }
        Ok(())
    }

    /// Hands out the owed block copies, each once. Copy them before any other write of the step, all sources read
    /// before any destination is written.
    pub fn copies(&mut self) -> Vec<BlockCopy> {
        self.store.take_copies()
    }

    /// The blocks of a sequence, in order.
    pub fn block_table(&self, id: SequenceId) -> Result<&[BlockId]> {
        Ok(&self.get(id)?.table)
    }

    /// Committed tokens of a sequence.
    pub fn num_committed(&self, id: SequenceId) -> Result<usize> {
        Ok(self.get(id)?.committed)
    }

    /// The slots of the next `n` uncommitted tokens, as `(first slot, length)` of one run a block.
    pub fn slots(&self, id: SequenceId, n: usize) -> Result<impl Iterator<Item = (usize, usize)>> {
        let Sequence {
            committed,
            reserved,
            ref table,
            ..
        } = *self.get(id)?;
        if n > reserved - committed {
            let problem = format!(
                "got {n} for sequence {id}, expected at most {}, as reserved",
                reserved - committed
            );
            return Err(Error::invalid("counts", problem));
        }
        let (end, size) = (committed + n, self.block_size);
        Ok((committed / size..end.div_ceil(size)).map(move |index| {
            let (first, last) = (committed.max(index * size), end.min((index + 1) * size));
            (table[index] as usize * size + first % size, last - first)
        }))
    }

    /// Evicts up to `n` cached blocks, least recently used first. Returns how many.
    pub fn evict(&mut self, n: usize) -> usize {
        self.store.evict(n)
    }

    /// Forgets a namespace, or all of them. Returns how many cached blocks became free.
    pub fn clear(&mut self, namespace: Option<&[u8]>) -> usize {
        let forgotten = |other: &[u8]| namespace.is_none_or(|namespace| namespace == other);
        for sequence in self.sequences.values_mut() {
            sequence.namespace = sequence
                .namespace
                .take()
                .filter(|namespace| !forgotten(namespace));
        }
        self.leaders
            .retain(|leader| self.sequences[leader].namespace.is_some());
        let free = self.store.pool.free();
        self.store.tree.clear(&mut self.store.pool, namespace);
        self.store.pool.free() - free
    }

    /// All counters at once.
    pub fn stats(&self) -> Stats {
        let pool = &self.store.pool;
        Stats {
            num_blocks: pool.len(),
            free_blocks: pool.free(),
            cached_blocks: pool.cached(),
            held_blocks: pool.held(),
            max_held_blocks: pool.max_held(),
            sequences: self.sequences.len(),
            query_tokens: self.query_tokens,
            hit_tokens: self.hit_tokens,
            evicted_blocks: self.store.evicted,
        }
    }

    /// Tree nodes looked at by all evictions so far: a measure of their work, for tests and benchmarks.
    pub fn eviction_visits(&self) -> u64 {
        self.store.tree.eviction_visits()
    }

    fn get(&self, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or(Error::UnknownSequence(id))
    }

    fn check_new(&self, id: SequenceId, argument: &'static str) -> Result<()> {
        if self.sequences.contains_key(&id) {
            return Err(Error::invalid(
                argument,
                format!("sequence {id} is live already"),
            ));
        }
        Ok(())
    }

    /// The live sequence whose prompt shares most whole blocks with this one, and how many tokens those are.
    fn leader_of(&self, tokens: &[TokenId], namespace: &[u8]) -> Option<(SequenceId, usize)> {
        let mut best = None;
        let mut most = (0, 0);
        for &id in &self.leaders {
            let leader = &self.sequences[&id];
            if leader.namespace.as_deref() != Some(namespace) {
                continue;
            }
            let prompt = &leader.known[..whole(leader.prompt, self.block_size)];
            let shared = whole(
                common_prefix(cacheable(tokens, self.block_size), prompt),
                self.block_size,
            );
            // Of equals the one that is furthest along, then the oldest.
            if shared > 0 && (shared, leader.committed) > most {
                most = (shared, leader.committed);
                best = Some((id, shared));
            }
        }
        best
    }
}

fn live(
    sequences: &mut HashMap<SequenceId, Sequence, FixedState>,
    id: SequenceId,
) -> Result<&mut Sequence> {
    sequences.get_mut(&id).ok_or(Error::UnknownSequence(id))
}
