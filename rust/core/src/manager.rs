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
//! Every call succeeds, or fails and changes nothing. A call of a step costs O(tokens given + blocks taken or given
//! back), the same at the end of a long sequence as at its beginning. A fork copies table and tokens; `begin` looks at
//! every running prefill, once; each owed copy is found by a walk of all, so `copies` is best called every step.

use crate::block::{
    BlockCopy, BlockId, BlockSize, Scope, SequenceId, TokenId, check_media, common_media,
    common_prefix,
};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::events::EventLog;
use crate::pins::{Clock, Pins};
use crate::pool::BlockPool;
use crate::radix::RadixTree;
use crate::sequence::{Sequence, cacheable};
use crate::sequences::Sequences;
use crate::slab::Key;
use crate::store::{BlockStore, Hit};

/// The answer of [`KvManager::begin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// The sequence is live and holds its prefix hit.
    Ready {
        /// Tokens of the hit; at least one token of the prompt is left to compute.
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

/// Block tables, block pool and prefix cache of one KV memory.
#[derive(Debug)]
pub struct KvManager {
    pub(crate) block_size: BlockSize,
    prefix_caching: bool,
    pub(crate) store: BlockStore,
    pub(crate) sequences: Sequences,
    /// Sequences with whole blocks of the prompt still to commit, oldest first.
    pub(crate) leaders: Vec<SequenceId>,
    pub(crate) clock: Clock,
    /// The last name given to a writing of a table to a row.
    pub(crate) last_stamp: u64,
    pub(crate) query_tokens: u64,
    pub(crate) hit_tokens: u64,
    pub(crate) partial_hit_tokens: u64,
}

impl KvManager {
    /// A manager of a pool of free blocks.
    pub fn new(config: Config) -> Result<Self> {
        const MAX: usize = i32::MAX as usize;
        let Config {
            num_blocks,
            block_size,
            pin_budget,
            ..
        } = config;
        for (argument, value) in [("num_blocks", num_blocks), ("block_size", block_size)] {
            if !(1..=MAX).contains(&value) {
                let problem = format!("got {value}, expected 1 to {MAX}");
                return Err(Error::invalid(argument, problem));
            }
        }
        if pin_budget >= num_blocks {
            let problem = format!("got {pin_budget}, expected less than the {num_blocks} blocks");
            return Err(Error::invalid("pin_budget", problem));
        }
        let log = (config.event_capacity > 0)
            .then(|| Box::new(EventLog::new(block_size, config.event_capacity)));
        Ok(Self {
            block_size: BlockSize::new(block_size),
            prefix_caching: config.prefix_caching,
            store: BlockStore {
                pool: BlockPool::new(num_blocks),
                tree: RadixTree::new(block_size, config.hash, config.partial_hits, log),
                owed: Vec::new(),
                pins: Pins::new(pin_budget),
                evicted: 0,
            },
            sequences: Sequences::new(),
            leaders: Vec::new(),
            clock: Clock::default(),
            last_stamp: 0,
            query_tokens: 0,
            hit_tokens: 0,
            partial_hit_tokens: 0,
        })
    }

    /// Size of the pool.
    pub fn num_blocks(&self) -> usize {
        self.store.pool.len()
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.block_size.tokens()
    }

    /// Free and evictable blocks: what admission may count on. O(1).
    pub fn allocatable_blocks(&self) -> usize {
        self.store.allocatable()
    }

    /// Starts a sequence, holding its prefix hit; or names the live sequence that computes what it shares.
    pub fn begin(
        &mut self,
        id: SequenceId,
        tokens: Vec<TokenId>,
        scope: Scope<'_>,
    ) -> Result<Admission> {
        self.check_begin(id, &tokens, scope)?;
        if let Some((leader, shared)) = self.leader_of(&tokens, scope)
            && shared > self.store.count_hit(cacheable(&tokens), scope)
        {
            return Ok(Admission::WaitFor {
                leader,
                tokens: shared,
            });
        }
        self.tick();
        let hit = if self.prefix_caching {
            self.store.hold_hit(cacheable(&tokens), scope)
        } else {
            Hit::default()
        };
        let cached_tokens = hit.tokens;
        self.start(id, tokens, scope, hit);
        Ok(Admission::Ready { cached_tokens })
    }

    /// Starts a sequence that computes all of its tokens: it takes nothing from the cache, and waits for nobody.
    ///
    /// Its own blocks are found by others as usual. For whoever wants more of the prompt's tokens than their KV.
    pub fn begin_uncached(
        &mut self,
        id: SequenceId,
        tokens: Vec<TokenId>,
        scope: Scope<'_>,
    ) -> Result<()> {
        self.check_begin(id, &tokens, scope)?;
        self.tick();
        self.start(id, tokens, scope, Hit::default());
        Ok(())
    }

    fn check_begin(&self, id: SequenceId, tokens: &[TokenId], scope: Scope<'_>) -> Result<()> {
        self.check_new(id, "seq_id")?;
        check_media(scope.media, tokens.len())?;
        if tokens.is_empty() {
            return Err(Error::invalid("tokens", "got none, expected at least one"));
        }
        let needed = self.block_size.blocks_for(tokens.len());
        let usable = self.num_blocks() - self.store.pins.budget();
        if needed > usable {
            let tokens = tokens.len();
            let mut problem =
                format!("{tokens} tokens need {needed} blocks, the pool has {usable}");
            if self.store.pins.budget() > 0 {
                problem.push_str(" that pins cannot take");
            }
            return Err(Error::invalid("tokens", problem));
        }
        Ok(())
    }

    /// Logical time goes on with each sequence that starts, unless somebody else counts it.
    fn tick(&mut self) {
        if !self.clock.set_by_owner {
            self.clock.now += 1;
            self.store.expire_pins(self.clock.now);
        }
    }

    fn start(&mut self, id: SequenceId, tokens: Vec<TokenId>, scope: Scope<'_>, hit: Hit) {
        let namespace = self.prefix_caching.then(|| scope.namespace.into());
        let (prompt, cached) = (tokens.len(), hit.tokens);
        let media = scope.media.into();
        let mut sequence = Sequence::new(namespace, media, tokens, prompt, cached, hit.path);
        sequence.uncounted = Some((prompt, cached));
        if sequence.leads(self.block_size) {
            self.leaders.push(id);
        }
        self.sequences.insert(id, sequence);
    }

    /// Reserves slots for `n` more tokens. May owe a copy of the last block, see [`KvManager::copies`].
    pub fn grow(&mut self, id: SequenceId, n: usize) -> Result<()> {
        let key = self.sequences.key(id)?;
        self.grow_one(key, n)
    }

    #[inline]
    pub(crate) fn grow_one(&mut self, key: Key, n: usize) -> Result<()> {
        if self.grow_in_place(key, n) {
            return Ok(());
        }
        self.grow_by_blocks(key, n)
    }

    #[inline(never)]
    fn grow_by_blocks(&mut self, key: Key, n: usize) -> Result<()> {
        let size = self.block_size;
        let sequence = &self.sequences[key];
        let reserved = sequence.reserved.saturating_add(n);
        let shared = sequence
            .partial_block(size)
            .filter(|_| reserved > sequence.committed)
            .filter(|&index| !self.store.is_writable(sequence.table[index]));
        let missing = reserved.saturating_sub(sequence.table.len() * size.tokens());
        self.take_blocks(key, size.blocks_for(missing), shared)?;
        self.sequences[key].reserved = reserved;
        if n > 0 {
            self.count_query(key);
        }
        Ok(())
    }

    /// Grows a sequence if it takes nothing but a number, as for most decoding tokens.
    #[inline]
    fn grow_in_place(&mut self, key: Key, n: usize) -> bool {
        let size = self.block_size;
        let sequence = &mut self.sequences[key];
        let reserved = sequence.reserved.saturating_add(n);
        if reserved > sequence.table.len() * size.tokens() || sequence.uncounted.is_some() {
            return false;
        }
        if let Some(index) = sequence.partial_block(size)
            && !self.store.is_writable(sequence.table[index])
        {
            return false;
        }
        sequence.reserved = reserved;
        true
    }

    /// Gives a sequence `more` blocks, and one in place of the block at `shared`, which others have too.
    fn take_blocks(&mut self, key: Key, more: usize, mut shared: Option<usize>) -> Result<()> {
        let store = &mut self.store;
        let sequence = &mut self.sequences[key];
        if let Some(index) = shared
            && more == store.allocatable()
            && store.can_take_over(sequence.table[index])
        {
            store.take_over(sequence.table[index]);
            shared = None;
        }
        let needed = more.saturating_add(usize::from(shared.is_some()));
        store.make_room(needed)?;
        store.pool.allocate(needed, &mut sequence.table);
        if let Some(index) = shared {
            // The block allocated last takes its place.
            let block = sequence.table.swap_remove(index);
            store.replace_by_copy(block, sequence.table[index]);
            sequence.changed(index);
        }
        Ok(())
    }

    /// Counts a prompt when it first gets slots: a begin that is taken back, because the rest does not fit now, was no
    /// query.
    fn count_query(&mut self, key: Key) {
        let size = self.block_size;
        let sequence = &mut self.sequences[key];
        let Some((prompt, hit)) = sequence.uncounted.take() else {
            return;
        };
        self.query_tokens += prompt as u64;
        self.hit_tokens += hit as u64;
        self.partial_hit_tokens += size.divide(hit).1 as u64;
        // What truncation has dropped of the hit serves nobody.
        let reused = size.whole_blocks(hit.min(sequence.committed));
        if let (Some(log), Some(namespace)) = (&mut self.store.tree.log, &sequence.namespace)
            && reused > 0
        {
            log.reused(namespace, &sequence.table[..reused]);
        }
    }

    /// The KV of the first `n` tokens is written. `new_tokens` continues the known tokens, which must reach `n`.
    ///
    /// Whole blocks enter the tree. Where it has the block already, the table is re-pointed to that one.
    pub fn commit(&mut self, id: SequenceId, n: usize, new_tokens: &[TokenId]) -> Result<()> {
        let key = self.sequences.key(id)?;
        self.check_commit(key, n, new_tokens.len())
            .map_err(|(argument, problem)| Error::invalid(argument.unwrap_or("n"), problem))?;
        self.commit_one(id, key, n, new_tokens);
        Ok(())
    }

    /// What is wrong with a commit, and with which argument; `None`: the number of tokens.
    #[inline]
    pub(crate) fn check_commit(
        &self,
        key: Key,
        n: usize,
        new_tokens: usize,
    ) -> Result<(), (Option<&'static str>, String)> {
        let sequence = &self.sequences[key];
        let in_order = sequence.committed <= n && n <= sequence.reserved;
        let known = n <= sequence.known.len() + new_tokens;
        if in_order && known && self.store.owed.is_empty() {
            return Ok(());
        }
        self.look_closely(sequence, n, new_tokens)
    }

    #[inline(never)]
    fn look_closely(
        &self,
        sequence: &Sequence,
        n: usize,
        new_tokens: usize,
    ) -> Result<(), (Option<&'static str>, String)> {
        let (committed, reserved) = (sequence.committed, sequence.reserved);
        if !(committed..=reserved).contains(&n) {
            let problem =
                format!("got {n}, expected {committed} (committed) to {reserved} (reserved)");
            return Err((None, problem));
        }
        let known = sequence.known.len() + new_tokens;
        if n > known {
            let problem = format!("{n} tokens committed, only {known} known");
            return Err((Some("new_tokens"), problem));
        }
        if let Some(tail) = sequence.partial_block(self.block_size)
            && let Some(copy) = self.store.owed_to(sequence.table[tail])
        {
            let (source, destination) = (copy.source, copy.destination);
            let problem = format!(
                "the copy of block {source} to {destination} is still owed: call copies() first"
            );
            return Err((Some("seq_id"), problem));
        }
        Ok(())
    }

    /// A commit that is right.
    #[inline]
    pub(crate) fn commit_one(
        &mut self,
        id: SequenceId,
        key: Key,
        n: usize,
        new_tokens: &[TokenId],
    ) {
        let size = self.block_size;
        let sequence = &mut self.sequences[key];
        match new_tokens {
            [token] => sequence.known.push(*token),
            tokens => sequence.known.extend_from_slice(tokens),
        }
        if size.whole_blocks(n) > size.whole_blocks(sequence.committed) {
            self.publish(id, key, n);
        }
        self.sequences[key].committed = n;
    }

    /// Enters the whole blocks of the first `n` tokens into the tree.
    #[inline(never)]
    fn publish(&mut self, id: SequenceId, key: Key, n: usize) {
        let size = self.block_size;
        let sequence = &mut self.sequences[key];
        let from = size.whole_blocks(sequence.committed);
        let led = sequence.leads(size);
        if let Some(namespace) = sequence.namespace.as_deref() {
            let BlockStore { pool, tree, .. } = &mut self.store;
            let media = &sequence.media;
            let scope = Scope { namespace, media };
            let known = &sequence.known[..n];
            if tree.insert(pool, known, scope, &mut sequence.table, from) > 0 {
                sequence.changed(from);
            }
        }
        sequence.committed = n;
        if led && !sequence.leads(size) {
            self.leaders.retain(|&leader| leader != id);
        }
    }

    /// Starts `child` with the committed tokens of `parent`, in the same blocks.
    pub fn fork(&mut self, parent: SequenceId, child: SequenceId) -> Result<()> {
        let parent = self.sequences.get(parent)?;
        self.check_new(child, "child_id")?;
        let committed = parent.committed;
        check_cut(parent, committed, "parent_id")?;
        let table = parent.table[..self.block_size.blocks_for(committed)].to_vec();
        let media = parent.media.iter().filter(|span| span.start < committed);
        let child_sequence = Sequence::new(
            parent.namespace.clone(),
            media.copied().collect(),
            parent.known[..committed].to_vec(),
            parent.prompt.min(committed),
            committed,
            table,
        );
        self.store.share(&child_sequence.table);
        self.sequences.insert(child, child_sequence);
        Ok(())
    }

    /// Drops everything beyond the first `n` tokens: reserved slots, and committed tokens if any.
    pub fn truncate(&mut self, id: SequenceId, n: usize) -> Result<()> {
        let sequence = self.sequences.get_mut(id)?;
        if n > sequence.reserved {
            let problem = format!("got {n}, expected at most {} (reserved)", sequence.reserved);
            return Err(Error::invalid("n", problem));
        }
        if n < sequence.committed {
            check_cut(sequence, n, "n")?;
        }
        let kept = self.block_size.blocks_for(n);
        // Last uses matter to those who are let go of, and these are cached only if the first one is.
        let whole = self.block_size.whole_blocks(n);
        if let Some(&first) = sequence.table.get(whole)
            && self.store.pool.is_findable(first)
        {
            self.store.touch(&sequence.table);
        }
        self.store.unhold(&sequence.table[kept..]);
        sequence.table.truncate(kept);
        sequence.changed(kept);
        sequence.reserved = n;
        if n < sequence.committed {
            sequence.committed = n;
            sequence.known.truncate(n);
            sequence.prompt = sequence.prompt.min(n);
            let media = sequence.media.iter().filter(|span| span.start < n);
            sequence.media = media.copied().collect();
            self.leaders.retain(|&leader| leader != id);
        }
        Ok(())
    }

    /// Ends a sequence. Its committed whole blocks stay cached, its other blocks are free.
    pub fn release(&mut self, id: SequenceId) -> Result<()> {
        let sequence = self.sequences.remove(id)?;
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
        Ok(&self.sequences.get(id)?.table)
    }

    /// Committed tokens of a sequence.
    pub fn num_committed(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequences.get(id)?.committed)
    }

    /// The known tokens of a sequence, in order: its prompt, and what `commit` added.
    pub fn tokens(&self, id: SequenceId) -> Result<&[TokenId]> {
        Ok(&self.sequences.get(id)?.known)
    }

    /// The slots of the next `n` uncommitted tokens, as `(first slot, length)` of one run a block.
    pub fn slots(&self, id: SequenceId, n: usize) -> Result<impl Iterator<Item = (usize, usize)>> {
        let sequence = self.sequences.get(id)?;
        sequence.check_slots(id, n)?;
        Ok(sequence.slots(n, self.block_size))
    }

    fn check_new(&self, id: SequenceId, argument: &'static str) -> Result<()> {
        if self.sequences.contains(id) {
            let problem = format!("sequence {id} is live already");
            return Err(Error::invalid(argument, problem));
        }
        Ok(())
    }

    /// The live sequence whose prompt shares most whole blocks with this one, and how many tokens those are.
    fn leader_of(&self, tokens: &[TokenId], scope: Scope<'_>) -> Option<(SequenceId, usize)> {
        let mut best = None;
        let mut most = (0, 0);
        for &id in &self.leaders {
            let Ok(leader) = self.sequences.get(id) else {
                continue;
            };
            if leader.namespace.as_deref() != Some(scope.namespace) {
                continue;
            }
            // What it has committed is found in the cache. Most leaders differ right there: no need to compare the rest.
            let start = self.block_size.whole_tokens(leader.committed);
            let next = start..start + self.block_size();
            let tokens = cacheable(tokens);
            if tokens.get(next.clone()) != leader.known.get(next) {
                continue;
            }
            let prompt = &leader.known[..self.block_size.whole_tokens(leader.prompt)];
            let common = common_prefix(tokens, prompt);
            let common = common.min(common_media(scope.media, &leader.media, 0));
            let shared = self.block_size.whole_tokens(common);
            // Of equals the one that is furthest along, then the oldest.
            if shared > 0 && (shared, leader.committed) > most {
                most = (shared, leader.committed);
                best = Some((id, shared));
            }
        }
        best
    }
}

/// A media span is kept whole, or not at all.
fn check_cut(sequence: &Sequence, n: usize, argument: &'static str) -> Result<()> {
    match sequence.span_across(n) {
        Some(span) => {
            let (start, end) = (span.start, span.end());
            let problem = format!("{n} tokens end inside the media span of {start} to {end}");
            Err(Error::invalid(argument, problem))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rejected drafts cost the same at the end of a long sequence as at its beginning.
    #[test]
    fn only_cached_blocks_that_are_let_go_of_are_marked_as_used() {
        let mut manager = KvManager::new(Config::new(8, 4)).unwrap();
        manager.begin(1, vec![1; 12], Scope::default()).unwrap();
        manager.grow(1, 12).unwrap();
        manager.commit(1, 12, &[]).unwrap();
        let root = manager.block_table(1).unwrap()[0];
        let before = manager.store.pool.last_used(root);
        for drafts in [1, 4, 9] {
            manager.grow(1, drafts).unwrap();
            manager.truncate(1, 12).unwrap();
        }
        assert_eq!(manager.store.pool.last_used(root), before);
        // Inside a cached block, which the next `grow` lets go of; then of whole ones.
        for n in [10, 8, 4] {
            let before = manager.store.pool.last_used(root);
            manager.truncate(1, n).unwrap();
            assert!(manager.store.pool.last_used(root) > before, "{n}");
        }
        manager.check_invariants().unwrap();
    }
}
