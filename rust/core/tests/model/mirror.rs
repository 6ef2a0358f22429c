//! A listener that rebuilds what is cached from events alone, and starts again from a snapshot where some are missing.

use std::collections::{BTreeMap, BTreeSet};

use leafkv_core::{Change, Digest, Event, Snapshot};

#[derive(Debug, Default)]
pub struct Mirror {
    /// Blocks with their namespace and the block before them.
    blocks: BTreeMap<Digest, (Vec<u8>, Option<Digest>)>,
    /// The number of the next event.
    next: u64,
}

impl Mirror {
    pub fn new(snapshot: &Snapshot) -> Self {
        let mut mirror = Self {
            blocks: BTreeMap::new(),
            next: snapshot.number,
        };
        for change in &snapshot.stored {
            assert!(matches!(change, Change::Stored { .. }), "{change:?}");
            mirror.apply(change);
        }
        mirror
    }

    /// Takes the events that are new. False: some are missing, start again.
    #[must_use]
    pub fn follow(&mut self, events: &[Event]) -> bool {
        let first = self.next;
        for event in events.iter().filter(|event| event.number >= first) {
            if event.number != self.next {
                return false;
            }
            self.next += 1;
            self.apply(&event.change);
        }
        true
    }

    pub fn digests(&self) -> BTreeSet<(Vec<u8>, Digest)> {
        let blocks = self.blocks.iter();
        blocks
            .map(|(&digest, (namespace, _))| (namespace.clone(), digest))
            .collect()
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Stored {
                namespace,
                parent,
                blocks,
                ..
            } => {
                let mut above = *parent;
                for &block in blocks {
                    let known = |above: Digest| {
                        self.blocks
                            .get(&above)
                            .is_some_and(|(other, _)| **other == **namespace)
                    };
                    assert!(
                        above.is_none_or(known),
                        "a block is stored before its parent"
                    );
                    let before = self.blocks.insert(block, (namespace.to_vec(), above));
                    assert!(before.is_none(), "a block is stored twice");
                    above = Some(block);
                }
            }
            Change::Reused { blocks, .. } => {
                assert!(blocks.iter().all(|block| self.blocks.contains_key(block)));
            }
            Change::Removed { namespace, blocks } => {
                for block in blocks {
                    let removed = self.blocks.remove(block);
                    assert!(
                        removed.is_some_and(|(other, _)| *other == **namespace),
                        "an unknown block is removed"
                    );
                    let mut parents = self.blocks.values().map(|&(_, parent)| parent);
                    assert!(
                        !parents.any(|parent| parent == Some(*block)),
                        "a block goes before its children"
                    );
                }
            }
            Change::Cleared { namespace } => {
                let stays =
                    |other: &[u8]| namespace.as_deref().is_some_and(|cleared| cleared != other);
                self.blocks.retain(|_, (other, _)| stays(other));
            }
        }
    }
}
