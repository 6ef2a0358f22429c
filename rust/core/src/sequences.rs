//! The live sequences by id. A call on many sequences looks each up once, and goes on with its key.

use std::collections::HashMap;
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
    /// Calls on many sequences so far.
    calls: u64,
}

impl Sequences {
    pub(crate) fn new() -> Self {
        Self {
            keys: HashMap::default(),
            records: Slab::new(),
            calls: 0,
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

    /// The keys of the sequences of one call; each may be named once.
    pub(crate) fn distinct_keys(&mut self, ids: &[SequenceId]) -> Result<Vec<Key>> {
        self.calls += 1;
        let keys = ids.iter().enumerate().map(|(index, &id)| {
            let key = self.key(id)?;
            let record = &mut self.records[key];
            if std::mem::replace(&mut record.last_call, self.calls) == self.calls {
                let problem = format!("item {index} is {id}, which is there twice");
                return Err(Error::invalid("seq_ids", problem));
            }
            Ok(key)
        });
        keys.collect()
    }

    pub(crate) fn get(&self, id: SequenceId) -> Result<&Sequence> {
        Ok(&self.records[self.key(id)?])
    }

    pub(crate) fn get_mut(&mut self, id: SequenceId) -> Result<&mut Sequence> {
        let key = self.key(id)?;
        Ok(&mut self.records[key])
    }

    pub(crate) fn insert(&mut self, id: SequenceId, sequence: Sequence) {
        let key = self.records.insert(sequence);
        self.keys.insert(id, key);
    }

    pub(crate) fn remove(&mut self, id: SequenceId) -> Result<Sequence> {
        let key = self.keys.remove(&id).ok_or(Error::UnknownSequence(id))?;
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
