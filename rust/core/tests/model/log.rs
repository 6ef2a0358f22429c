//! The model's events: a bounded buffer that forgets its oldest.

use super::op::Cell;

/// A block: all that comes up to its end.
pub type Prefix = Vec<Cell>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Each block the parent of the next.
    Stored {
        namespace: u8,
        blocks: Vec<Prefix>,
    },
    Reused {
        namespace: u8,
        blocks: Vec<Prefix>,
    },
    Removed {
        namespace: u8,
        blocks: Vec<Prefix>,
    },
    Cleared {
        namespace: Option<u8>,
    },
}

impl Change {
    fn weight(&self) -> usize {
        match self {
            Self::Stored { blocks, .. }
            | Self::Reused { blocks, .. }
            | Self::Removed { blocks, .. } => blocks.len(),
            Self::Cleared { .. } => 1,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub number: u64,
    pub change: Change,
}

#[derive(Debug, Clone)]
pub struct Log {
    capacity: usize,
    pub buffer: Vec<Event>,
    pub next: u64,
    /// Events before this number tell nothing more.
    sealed: u64,
    pub dropped: u64,
}

impl Log {
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            buffer: Vec::new(),
            next: 0,
            sealed: 0,
            dropped: 0,
        }
    }

    pub fn push(&mut self, change: Change) {
        if self.capacity == 0 {
            return;
        }
        let number = self.next;
        self.next += 1;
        self.buffer.push(Event { number, change });
        self.trim();
    }

    /// What one act removes from one namespace in a row is one event.
    pub fn removed(&mut self, namespace: u8, block: Prefix) {
        if let Some(Event {
            number,
            change:
                Change::Removed {
                    namespace: last,
                    blocks,
                },
        }) = self.buffer.last_mut()
            && *last == namespace
            && *number >= self.sealed
        {
            blocks.push(block);
            self.trim();
        } else {
            let blocks = vec![block];
            self.push(Change::Removed { namespace, blocks });
        }
    }

    /// An act begins.
    pub fn begin_removals(&mut self) {
        self.sealed = self.next;
    }

    pub fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.buffer)
    }

    fn trim(&mut self) {
        let weight =
            |buffer: &[Event]| -> usize { buffer.iter().map(|event| event.change.weight()).sum() };
        while self.buffer.len() > 1 && weight(&self.buffer) > self.capacity {
            self.buffer.remove(0);
            self.dropped += 1;
        }
    }
}
