//! Values named by a small index. An index is used again after its value is removed; no value ever moves.

use std::ops::{Index, IndexMut};

/// The name of a live value in a [`Slab`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key(pub(crate) u32);

#[derive(Debug)]
pub(crate) struct Slab<T> {
    values: Vec<Option<T>>,
    vacant: Vec<Key>,
}

impl<T> Slab<T> {
    pub(crate) const fn new() -> Self {
        Self {
            values: Vec::new(),
            vacant: Vec::new(),
        }
    }

    pub(crate) fn insert(&mut self, value: T) -> Key {
        if let Some(key) = self.vacant.pop() {
            self.values[key.0 as usize] = Some(value);
            return key;
        }
        self.values.push(Some(value));
        Key((self.values.len() - 1) as u32)
    }

    pub(crate) fn remove(&mut self, key: Key) -> T {
        self.vacant.push(key);
        let value = self.values[key.0 as usize].take();
        value.expect("a key names a live value")
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len() - self.vacant.len()
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        self.values.get(key.0 as usize)?.as_ref()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        let keys = (0..).map(Key);
        let pairs = keys.zip(&self.values);
        pairs.filter_map(|(key, value)| Some((key, value.as_ref()?)))
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.values.iter_mut().flatten()
    }
}

impl<T> Index<Key> for Slab<T> {
    type Output = T;

    fn index(&self, key: Key) -> &T {
        let value = self.values[key.0 as usize].as_ref();
        value.expect("a key names a live value")
    }
}

impl<T> IndexMut<Key> for Slab<T> {
    fn index_mut(&mut self, key: Key) -> &mut T {
        let value = self.values[key.0 as usize].as_mut();
        value.expect("a key names a live value")
    }
}
