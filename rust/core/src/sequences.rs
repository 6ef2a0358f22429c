//! The live sequences by id.
//!
//! A step makes several calls on the same sequences: the keys of the last ones are kept, as long as no sequence
//! begins or ends.

use std::borrow::Cow;
use std::collections::HashMap;
use std::mem;
use std::ops::{Index, IndexMut};

use foldhash::fast::FixedState;

use crate::block::SequenceId;
use crate::error::{Error, Result};
use crate::sequence::Sequence;
use crate::slab::{Key, Slab};

#[derive(Debug)]
pub(crate) struct Sequences {
    keys: HashMap<SequenceId, Key, FixedState>,
    records: Slab<Sequence>,
    /// Selections so far.
    calls: u64,
    /// The selected sequences.
    batch: Vec<SequenceId>,
    batch_keys: Vec<Key>,
}

impl Sequences {
    pub(crate) fn new() -> Self {
        Self {
            keys: HashMap::default(),
            records: Slab::new(),
            calls: 0,
            batch: Vec::new(),
            batch_keys: Vec::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(crate) fn contains(&self, id: SequenceId) -> bool {
        self.keys.contains_key(&id)
    }

    pub(crate) fn key(&self, id: SequenceId) -> Result<Key> {
        self.keys
            .get(&id)
            .copied()
            .ok_or(Error::UnknownSequence(id))
    }

    /// Finds the sequences of one call, each of which may be named once. [`Sequences::batch_key`] has their keys.
    pub(crate) fn select(&mut self, ids: &[SequenceId]) -> Result<()> {
        if self.batch == ids {
            return Ok(());
        }
        self.forget_batch();
        let added = self.add_to_batch(ids);
        if added.is_err() {
            self.forget_batch();
        }
        added
    }

    fn add_to_batch(&mut self, ids: &[SequenceId]) -> Result<()> {
        self.calls += 1;
        for (index, &id) in ids.iter().enumerate() {
            let key = self.key(id)?;
            let record = &mut self.records[key];
            if mem::replace(&mut record.last_call, self.calls) == self.calls {
                let problem = format!("item {index} is {id}, which is there twice");
                return Err(Error::invalid("seq_ids", problem));
            }
            self.batch_keys.push(key);
        }
        self.batch.extend_from_slice(ids);
        Ok(())
    }

    /// The key of a selected sequence.
    pub(crate) fn batch_key(&self, index: usize) -> Key {
        self.batch_keys[index]
    }

    /// The keys of sequences that may be named more than once.
    pub(crate) fn keys(&self, ids: &[SequenceId]) -> Result<Cow<'_, [Key]>> {
        if self.batch == ids {
            return Ok(Cow::Borrowed(&self.batch_keys));
        }
        ids.iter().map(|&id| self.key(id)).collect()
    }

    fn forget_batch(&mut self) {
        self.batch.clear();
        self.batch_keys.clear();
    }

    pub(crate) fn get(&self, id: SequenceId) -> Result<&Sequence> {
        Ok(&self.records[self.key(id)?])
    }

    pub(crate) fn get_mut(&mut self, id: SequenceId) -> Result<&mut Sequence> {
        let key = self.key(id)?;
        Ok(&mut self.records[key])
    }

    pub(crate) fn insert(&mut self, id: SequenceId, sequence: Sequence) {
        self.forget_batch();
        let key = self.records.insert(sequence);
        self.keys.insert(id, key);
    }

    pub(crate) fn remove(&mut self, id: SequenceId) -> Result<Sequence> {
        let key = self.keys.remove(&id).ok_or(Error::UnknownSequence(id))?;
        self.forget_batch();
        Ok(self.records.remove(key))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SequenceId, &Sequence)> {
        self.keys.iter().map(|(&id, &key)| (id, &self.records[key]))
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.records.values_mut()
    }
}

impl Index<Key> for Sequences {
    type Output = Sequence;

    fn index(&self, key: Key) -> &Sequence {
        &self.records[key]
    }
}

impl IndexMut<Key> for Sequences {
    fn index_mut(&mut self, key: Key) -> &mut Sequence {
        &mut self.records[key]
    }
}
