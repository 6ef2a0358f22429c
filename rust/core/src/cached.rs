//! The part of the KV manager that is about cached prefixes, whoever computed them: looking, evicting, forgetting,
//! pinning, telling.

use crate::block::{BlockId, Scope, TokenId, check_media};
use crate::error::{Error, Result};
use crate::events::{Event, Snapshot};
use crate::manager::KvManager;
use crate::pins::{Clock, NEVER, Pin};
use crate::sequence::cacheable;

impl KvManager {
    /// Tokens that `begin` would find cached now.
    pub fn lookup(&self, tokens: &[TokenId], scope: Scope<'_>) -> Result<usize> {
        check_media(scope.media, tokens.len())?;
        Ok(self.store.count_hit(cacheable(tokens), scope))
    }

    /// The blocks of the longest cached prefix of whole blocks, be it the whole prompt.
    pub fn match_prefix(&self, tokens: &[TokenId], scope: Scope<'_>) -> Result<Vec<BlockId>> {
        check_media(scope.media, tokens.len())?;
        Ok(self.store.find(tokens, scope))
    }

    /// Evicts up to `n` cached blocks, least recently used first. Returns how many.
    pub fn evict(&mut self, n: usize) -> usize {
        self.store.evict(n)
    }

    /// Forgets a namespace, or all of them, and ends its pins. Returns how many cached blocks became free.
    pub fn clear(&mut self, namespace: Option<&[u8]>) -> usize {
        let forgotten = |other: &[u8]| namespace.is_none_or(|namespace| namespace == other);
        for sequence in self.sequences.values_mut() {
            sequence.namespace = sequence
                .namespace
                .take()
                .filter(|namespace| !forgotten(namespace));
        }
        let sequences = &self.sequences;
        self.leaders.retain(|&leader| {
            sequences
                .get(leader)
                .is_ok_and(|leader| leader.namespace.is_some())
        });
        let free = self.store.pool.free();
        self.store.clear(namespace);
        self.store.pool.free() - free
    }

    /// Keeps the cached whole blocks of a prompt from being evicted, as many as the budget of pins allows, until the
    /// time is `ttl` later than now; without it until [`KvManager::unpin`].
    pub fn pin(&mut self, tokens: &[TokenId], scope: Scope<'_>, ttl: Option<u64>) -> Result<Pin> {
        check_media(scope.media, tokens.len())?;
        if self.store.pins.budget() == 0 {
            let problem = "it is 0: a manager that pins is made with a budget of blocks for it";
            return Err(Error::invalid("pin_budget", problem));
        }
        if ttl == Some(0) {
            return Err(Error::invalid("ttl", "got 0, expected at least 1"));
        }
        let ends = ttl.map_or(NEVER, |ttl| self.clock.now.saturating_add(ttl));
        let (id, blocks) = self.store.pin(tokens, scope, ends);
        Ok(Pin {
            id,
            tokens: blocks * self.block_size.tokens(),
            partial: blocks < self.block_size.whole_blocks(tokens.len()),
        })
    }

    /// Ends a pin; false if it has ended already, or never was.
    pub fn unpin(&mut self, id: u64) -> bool {
        self.store.unpin(id)
    }

    /// The logical time: sequences admitted so far, or what [`KvManager::set_time`] said last.
    pub fn time(&self) -> u64 {
        self.clock.now
    }

    /// Sets the logical time, which from now on is the caller's to count. Pins whose time has come end.
    pub fn set_time(&mut self, now: u64) -> Result<()> {
        if now < self.clock.now {
            let problem = format!("got {now}, expected at least {}", self.clock.now);
            return Err(Error::invalid("now", problem));
        }
        self.clock = Clock {
            now,
            set_by_owner: true,
        };
        self.store.expire_pins(now);
        Ok(())
    }

    /// The events since the last call, oldest first; a gap in their numbers is what the buffer could not keep.
    pub fn events(&mut self) -> Vec<Event> {
        let log = self.store.tree.log.as_mut();
        log.map(|log| log.take()).unwrap_or_default()
    }

    /// All that can be found now, and the number of the next event, in one act.
    pub fn snapshot(&self) -> Result<Snapshot> {
        self.store.tree.snapshot().ok_or_else(|| {
            let problem = "it is 0: a manager that tells events is made with a buffer for them";
            Error::invalid("event_capacity", problem)
        })
    }
}
