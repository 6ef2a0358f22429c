//! Values named by a small index. An index is used again after its value is removed; no value ever moves.

use std::num::NonZeroU32;
use std::ops::{Index, IndexMut};

/// The name of a live value in a [`Slab`]. Where there may be none it takes no more room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key(NonZeroU32);

impl Key {
    pub(crate) const fn new(index: usize) -> Self {
        let number = NonZeroU32::new(index as u32 + 1);
        Self(number.expect("less than 2³² − 1 values"))
    }

    const fn index(self) -> usize {
        self.0.get() as usize - 1
    }

    /// As a number, for hashing.
    pub(crate) const fn number(self) -> u32 {
        self.0.get()
    }
}

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
            self.values[key.index()] = Some(value);
            return key;
        }
        self.values.push(Some(value));
        Key::new(self.values.len() - 1)
    }

    pub(crate) fn remove(&mut self, key: Key) -> T {
        self.vacant.push(key);
        let value = self.values[key.index()].take();
        value.expect("a key names a live value")
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len() - self.vacant.len()
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        self.values.get(key.index())?.as_ref()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        let keys = (0..).map(Key::new);
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
        let value = self.values[key.index()].as_ref();
        value.expect("a key names a live value")
    }
}

impl<T> IndexMut<Key> for Slab<T> {
    fn index_mut(&mut self, key: Key) -> &mut T {
        let value = self.values[key.index()].as_mut();
        value.expect("a key names a live value")
    }
}
