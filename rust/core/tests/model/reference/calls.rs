//! What each call does, and what it answers.

use std::collections::BTreeSet;

use leafkv_core::{SequenceId, TokenId};

use super::{Answer, Cached, Call, Model, Pin, Sequence, UNKNOWN, refused};
use crate::model::log::{Change, Prefix};
use crate::model::op::{Cell, Prompt};

impl Model {
    pub(super) fn predict(&mut self, call: Call) -> Answer {
        match call {
            Call::Nothing | Call::Listen => Answer::Done,
            Call::Begin { id, prompt } => self.begin(id, &prompt),
            Call::Ask(prompt) => self.ask(&prompt),
            Call::Grow { id, n } => self.grow(id, n),
            Call::Write { id, cells } => self.write(id, &cells),
            Call::Commit { id, n, new_tokens } => {
                match self.wrong_commit(id, n, new_tokens.len()) {
                    Some(wrong) => Answer::Refused(wrong),
                    None => {
                        self.commit(id, n, &new_tokens);
                        Answer::Done
                    }
                }
            }
            Call::Fork { parent, child } => self.fork(parent, child),
            Call::Truncate { id, n } => self.truncate(id, n),
            Call::Release { id } => self.release(id),
            Call::GrowMany { ids, counts } => self.grow_many(&ids, &counts),
            Call::CommitMany {
                ids,
                counts,
                new_tokens,
                new_counts,
            } => self.commit_many(&ids, &counts, &new_tokens, &new_counts),
            Call::Rows { items, columns, .. } => self.rows(&items, columns),
            Call::Copies => Answer::Copies(std::mem::take(&mut self.owed)),
            Call::Evict(n) => Answer::Count(self.evict(n)),
            Call::Clear(namespace) => self.clear(namespace),
            Call::Pin { prompt, ttl } => self.pin(&prompt, ttl),
            Call::Unpin(index) => Answer::Flag(self.pins.remove(&index).is_some()),
            Call::SetTime(now) => self.set_time(now),
            Call::Events => Answer::Events(self.log.take()),
        }
    }

    fn ask(&mut self, prompt: &Prompt) -> Answer {
        if !prompt.is_well_formed() {
            return refused("media");
        }
        let cells = prompt.cells();
        let (_, tokens) = self.hit(prompt.namespace, &cells);
        let blocks = self.whole_blocks(prompt.namespace, &cells);
        Answer::Found { tokens, blocks }
    }

    fn begin(&mut self, id: SequenceId, prompt: &Prompt) -> Answer {
        let size = self.setup.block_size;
        let mut wrong = BTreeSet::new();
        if self.sequences.contains_key(&id) {
            wrong.insert("seq_id");
        }
        if !prompt.is_well_formed() {
            wrong.insert("media");
        }
        let usable = self.setup.num_blocks - self.setup.pin_budget;
        if prompt.tokens.is_empty() || prompt.tokens.len().div_ceil(size) > usable {
            wrong.insert("tokens");
        }
        if !wrong.is_empty() {
            return Answer::Refused(wrong);
        }
        let (namespace, cells) = (prompt.namespace, prompt.cells());
        let (table, hit) = if prompt.reads_cache {
            self.hit(namespace, &cells)
        } else {
            if self.hit(namespace, &cells).1 > 0 || self.leader(namespace, &cells).is_some() {
                self.see("compute what is cached");
            }
            Default::default()
        };
        if prompt.reads_cache
            && let Some((leader, shared)) = self.leader(namespace, &cells)
            && shared > hit
        {
            self.see("wait for a leader");
            if hit > 0 {
                self.see("wait for more than the hit");
            }
            if cells[..shared].iter().any(|(_, span)| span.is_some()) {
                self.see("wait for media");
            }
            return Answer::WaitFor(leader, shared);
        }
        if !self.owner_counts_time {
            self.now += 1;
            self.expire();
        }
        self.note_hit(namespace, &cells, &table, hit);
        self.born += 1;
        let sequence = Sequence {
            namespace,
            generation: self.generation(namespace),
            private: !self.setup.prefix_caching,
            age: self.born,
            prompt: cells.len(),
            written: cells[..hit].to_vec(),
            query: Some((cells.len(), hit)),
            known: cells,
            committed: hit,
            reserved: hit,
            table,
        };
        self.sequences.insert(id, sequence);
        Answer::Ready(hit)
    }

    /// Which kind of hit it is. Says nothing about what happens.
    fn note_hit(&mut self, namespace: u8, cells: &[Cell], table: &[u64], hit: usize) {
        let size = self.setup.block_size;
        if hit > 0 {
            self.see("hit");
        }
        if cells[..hit].iter().any(|(_, span)| span.is_some()) {
            self.see("hit with media");
        }
        if cells
            .get(hit)
            .is_some_and(|(_, span)| span.is_some_and(|span| span.start < hit))
        {
            self.see("hit ends inside a span");
        }
        if !hit.is_multiple_of(size) {
            let prefix = &cells[..hit / size * size];
            let is_child = |(other, key): &&(u8, Prefix)| {
                *other == namespace && key.len() == prefix.len() + size && key.starts_with(prefix)
            };
            self.see(match self.cached.keys().filter(is_child).count() {
                1 => "partial hit of an only child",
                _ => "partial hit among children",
            });
            if self.references(table[table.len() - 1]) == 0 {
                self.see("partial hit of a block that nobody has");
            }
        }
        let other = |(_, key): &&(u8, Prefix)| {
            let same = key.len() > hit && cells.len() > hit && key[..hit] == cells[..hit];
            same && key[hit].0 == cells[hit].0 && key[hit].1 != cells[hit].1
        };
        if self
            .cached
            .keys()
            .any(|key| other(&&(key.0, key.1.clone())))
        {
            self.see("only media differ");
        }
    }

    pub(super) fn grow(&mut self, id: SequenceId, n: usize) -> Answer {
        let Some(mut sequence) = self.sequences.get(&id).cloned() else {
            return refused(UNKNOWN);
        };
        let size = self.setup.block_size;
        let (committed, reserved) = (sequence.committed, sequence.reserved.saturating_add(n));
        let tail = committed / size;
        let more = reserved.div_ceil(size) - sequence.table.len();
        let writes_tail = reserved > committed && committed % size != 0;
        let mut copy = writes_tail && !self.is_writable(sequence.table[tail]);
        let needed = more.saturating_add(usize::from(copy));
        let allocatable = self.allocatable();
        if needed > allocatable {
            if !copy || self.references(sequence.table[tail]) > 1 || needed - 1 > allocatable {
                self.see("out of blocks");
                if copy && needed - 1 <= allocatable {
                    self.see("a shared tail cannot be taken over");
                }
                return Answer::OutOfBlocks {
                    needed,
                    allocatable,
                };
            }
            self.take_over(sequence.table[tail]);
            copy = false;
        }
        let needed = more + usize::from(copy);
        let missing = needed.saturating_sub(self.free());
        if missing > 0 {
            self.see("evict to make room");
        }
        // A copy's source is given back only after its destination is taken.
        self.max_held = self.max_held.max(self.held() + needed);
        assert_eq!(self.evict(missing), missing);
        for _ in 0..more {
            sequence.table.push(self.new_block());
        }
        if copy {
            let (source, destination) = (sequence.table[tail], self.new_block());
            if self.is_owed_to(source) {
                self.see("copy of a copy");
            }
            if self.is_findable(source) {
                self.see("copy out of the tree");
            }
            if self.pins.values().any(|pin| pin.blocks.contains(&source)) {
                self.see("copy out of a pin");
            }
            self.see("copy on write");
            self.owed.push((self.read_at(source), destination));
            sequence.table[tail] = destination;
        }
        sequence.reserved = reserved;
        if n > 0
            && let Some((prompt, hit)) = sequence.query.take()
        {
            self.query_tokens += prompt;
            self.hit_tokens += hit;
            self.partial_hit_tokens += hit % size;
            self.reused(&sequence, hit);
        }
        self.sequences.insert(id, sequence);
        self.drop_dead_copies();
        Answer::Done
    }

    /// A cached block that only one sequence has becomes that sequence's own.
    fn take_over(&mut self, block: u64) {
        self.see("take-over");
        let evicted = self.evict(usize::MAX);
        if evicted > 0 {
            self.see("take-over after evicting");
        }
        let key = self
            .cached
            .iter()
            .find(|(_, cached)| cached.block == block)
            .map(|(key, _)| key.clone());
        self.log.begin_removals();
        self.remove(&key.expect("a tail that cannot be written is cached"));
    }

    fn write(&mut self, id: SequenceId, cells: &[Cell]) -> Answer {
        let copies = std::mem::take(&mut self.owed);
        let sequence = self.sequences.get_mut(&id).expect("picked");
        sequence.written.truncate(sequence.committed);
        sequence.written.extend(cells);
        Answer::Copies(copies)
    }

    /// What is wrong with a commit.
    pub(super) fn wrong_commit(
        &self,
        id: SequenceId,
        n: usize,
        new_tokens: usize,
    ) -> Option<BTreeSet<&'static str>> {
        let Some(sequence) = self.sequences.get(&id) else {
            return Some(BTreeSet::from([UNKNOWN]));
        };
        let mut wrong = BTreeSet::new();
        if !(sequence.committed..=sequence.reserved).contains(&n) {
            wrong.insert("n");
        }
        if n > sequence.known.len() + new_tokens {
            wrong.insert("new_tokens");
        }
        let tail = sequence
            .table
            .get(sequence.committed / self.setup.block_size);
        if tail.is_some_and(|&tail| self.is_owed_to(tail)) {
            wrong.insert("seq_id");
        }
        (!wrong.is_empty()).then_some(wrong)
    }

    pub(super) fn commit(&mut self, id: SequenceId, n: usize, new_tokens: &[TokenId]) {
        let size = self.setup.block_size;
        let mut sequence = self.sequences.remove(&id).expect("checked");
        sequence
            .known
            .extend(new_tokens.iter().map(|&token| (token, None)));
        let mut stored = Vec::new();
        for index in sequence.committed / size..n / size {
            if sequence.private {
                break;
            }
            let prefix = sequence.known[..(index + 1) * size].to_vec();
            let mine = sequence.table[index];
            let fresh = Cached {
                block: mine,
                last_used: self.clock,
            };
            let known = self
                .cached
                .entry((sequence.namespace, prefix.clone()))
                .or_insert(fresh)
                .block;
            if known == mine {
                stored.push(prefix);
            } else {
                sequence.table[index] = known;
                self.see("known already");
            }
        }
        self.stored += stored.len();
        if let Some(last) = stored.last() {
            if last.iter().any(|(_, span)| span.is_some()) {
                self.see("media stored");
            }
            let namespace = sequence.namespace;
            self.log.push(Change::Stored {
                namespace,
                blocks: stored,
            });
        }
        sequence.committed = n;
        // Drafts that turned out differently are to be written again.
        let right = super::common(&sequence.written, &sequence.known);
        if right < sequence.known.len() {
            sequence.written.truncate(right);
        }
        self.sequences.insert(id, sequence);
    }

    fn fork(&mut self, parent: SequenceId, child: SequenceId) -> Answer {
        let mut wrong = BTreeSet::new();
        if self.sequences.contains_key(&child) {
            wrong.insert("child_id");
        }
        let parent = self.sequences.get(&parent).cloned();
        if parent.is_none() {
            wrong.insert(UNKNOWN);
        }
        if parent
            .as_ref()
            .is_some_and(|parent| cuts(&parent.known, parent.committed))
        {
            self.see("fork would cut a span");
            wrong.insert("parent_id");
        }
        let Some(mut sequence) = parent.filter(|_| wrong.is_empty()) else {
            return Answer::Refused(wrong);
        };
        let n = sequence.committed;
        sequence.known.truncate(n);
        sequence.written.truncate(n);
        sequence.prompt = sequence.prompt.min(n);
        sequence.reserved = n;
        sequence.table.truncate(n.div_ceil(self.setup.block_size));
        if sequence.table.iter().any(|&block| self.is_owed_to(block)) {
            self.see("fork before the copy");
        }
        sequence.query = None;
        self.sequences.insert(child, sequence);
        Answer::Done
    }

    fn truncate(&mut self, id: SequenceId, n: usize) -> Answer {
        let Some(mut sequence) = self.sequences.get(&id).cloned() else {
            return refused(UNKNOWN);
        };
        if n > sequence.reserved {
            return refused("n");
        }
        if n < sequence.committed && cuts(&sequence.known, n) {
            self.see("truncate would cut a span");
            return refused("n");
        }
        self.touch(&sequence.table);
        sequence.table.truncate(n.div_ceil(self.setup.block_size));
        sequence.reserved = n;
        sequence.written.truncate(n);
        if n < sequence.committed {
            if sequence
                .known
                .iter()
                .skip(n)
                .any(|(_, span)| span.is_some())
            {
                self.see("truncate drops a span");
            }
            sequence.committed = n;
            sequence.known.truncate(n);
            sequence.prompt = sequence.prompt.min(n);
            self.see("truncate committed tokens");
        }
        self.sequences.insert(id, sequence);
        self.drop_dead_copies();
        Answer::Done
    }

    fn release(&mut self, id: SequenceId) -> Answer {
        let Some(sequence) = self.sequences.get(&id) else {
            return refused(UNKNOWN);
        };
        let table = sequence.table.clone();
        self.touch(&table);
        self.sequences.remove(&id);
        self.drop_dead_copies();
        Answer::Done
    }

    fn clear(&mut self, namespace: Option<u8>) -> Answer {
        let free = self.free();
        let cleared = |other: u8| namespace.is_none_or(|namespace| namespace == other);
        let pins = self.pins.len();
        self.pins.retain(|_, pin| !cleared(pin.namespace));
        if self.pins.len() < pins {
            self.see("clear with pins");
        }
        self.cached.retain(|&(other, _), _| !cleared(other));
        for sequence in self.sequences.values_mut() {
            sequence.private |= cleared(sequence.namespace);
        }
        for other in (0..4).filter(|&other| cleared(other)) {
            *self.generations.entry(other).or_default() += 1;
        }
        self.log.push(Change::Cleared { namespace });
        Answer::Count(self.free() - free)
    }

    fn pin(&mut self, prompt: &Prompt, ttl: Option<u64>) -> Answer {
        let mut wrong = BTreeSet::new();
        if !prompt.is_well_formed() {
            wrong.insert("media");
        }
        if self.setup.pin_budget == 0 {
            wrong.insert("pin_budget");
        }
        if ttl == Some(0) {
            wrong.insert("ttl");
        }
        if !wrong.is_empty() {
            return Answer::Refused(wrong);
        }
        let mut pinned = self.pinned();
        let mut blocks = Vec::new();
        let found = self.whole_blocks(prompt.namespace, &prompt.cells());
        for &block in &found {
            pinned.insert(block);
            if pinned.len() > self.setup.pin_budget {
                self.see("pin over the budget");
                break;
            }
            blocks.push(block);
        }
        let size = self.setup.block_size;
        let (tokens, whole) = (blocks.len() * size, prompt.tokens.len() / size);
        let partial = blocks.len() < whole;
        if !blocks.is_empty() {
            self.see(if partial { "partial pin" } else { "whole pin" });
            if self
                .pins
                .values()
                .any(|pin| pin.blocks.iter().any(|block| blocks.contains(block)))
            {
                self.see("block pinned twice");
            }
            let namespace = prompt.namespace;
            let ends = ttl.and_then(|ttl| self.now.checked_add(ttl));
            self.pins.insert(
                self.pins_given,
                Pin {
                    namespace,
                    blocks,
                    ends,
                },
            );
        }
        self.pins_given += 1;
        Answer::Pinned { tokens, partial }
    }

    fn set_time(&mut self, now: u64) -> Answer {
        if now < self.now {
            return refused("now");
        }
        self.now = now;
        self.owner_counts_time = true;
        self.expire();
        Answer::Done
    }

    fn expire(&mut self) {
        let (pins, now) = (self.pins.len(), self.now);
        self.pins
            .retain(|_, pin| pin.ends.is_none_or(|ends| ends > now));
        if self.pins.len() < pins {
            self.see("expiry");
            if !self.owner_counts_time {
                self.see("expiry in begin");
            }
        }
    }
}

/// Whether a span has tokens before and after `n`.
fn cuts(cells: &[Cell], n: usize) -> bool {
    n > 0 && cells[n - 1].1.is_some_and(|span| span.end() > n)
}
