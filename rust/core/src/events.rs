//! What happens in the prefix tree, told to whoever keeps a mirror of it: routers, indexers, disk tiers.
//!
//! Events are numbered without gaps. The buffer is bounded: the oldest go first, and the gap in the numbers tells
//! the listener to start again from a snapshot. A manager without events has no log, and does none of this.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

use crate::block::{BlockId, Media, TokenId, touching};
use crate::digest::{self, Digest};

/// One change of the prefix tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// 0, 1, 2, … A number that is missing is an event that was lost.
    pub number: u64,
    /// What happened.
    pub change: Change,
}

/// What happened in the prefix tree. Blocks are named by their digests, see [`crate::block_digests`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A run of blocks can be found from now on.
    Stored {
        /// The namespace.
        namespace: Arc<[u8]>,
        /// The block before the first one; `None` at the beginning of a prompt.
        parent: Option<Digest>,
        /// The blocks, each the parent of the next.
        blocks: Vec<Digest>,
        /// Their tokens.
        tokens: Vec<TokenId>,
        /// The media spans that touch them, at their positions in the prompt.
        media: Vec<Media>,
    },
    /// A prompt was served from these blocks, its first ones.
    Reused {
        /// The namespace.
        namespace: Arc<[u8]>,
        /// The blocks.
        blocks: Vec<Digest>,
    },
    /// These blocks cannot be found any more. Blocks go before the blocks they depend on.
    Removed {
        /// The namespace.
        namespace: Arc<[u8]>,
        /// The blocks.
        blocks: Vec<Digest>,
    },
    /// No block of the namespace can be found any more.
    Cleared {
        /// The namespace; `None` for all.
        namespace: Option<Arc<[u8]>>,
    },
}

impl Change {
    /// What it takes in the buffer: its blocks, and one for an event without any.
    fn weight(&self) -> usize {
        let blocks = match self {
            Self::Stored { blocks, .. }
            | Self::Reused { blocks, .. }
            | Self::Removed { blocks, .. } => blocks.len(),
            Self::Cleared { .. } => 0,
        };
        blocks.max(1)
    }
}

/// All that can be found at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The number of the first event that is not in here.
    pub number: u64,
    /// [`Change::Stored`], parents before children.
    pub stored: Vec<Change>,
}

/// An event tells of this many removed blocks at most.
const MAX_REMOVED: usize = 256;

/// The digests of the tree's blocks, and the events that nobody has taken yet.
#[derive(Debug)]
pub(crate) struct EventLog {
    block_size: usize,
    capacity: usize,
    /// By block id, for the blocks that were ever in the tree.
    digests: Vec<Digest>,
    buffer: VecDeque<Event>,
    /// Of all events in the buffer.
    weight: usize,
    next: u64,
    /// Events before this number tell no more than they did when their call ended.
    closed: u64,
    dropped: u64,
}

impl EventLog {
    pub(crate) fn new(block_size: usize, capacity: usize) -> Self {
        Self {
            block_size,
            capacity,
            digests: Vec::new(),
            buffer: VecDeque::new(),
            weight: 0,
            next: 0,
            closed: 0,
            dropped: 0,
        }
    }

    /// The number of the next event.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// A call begins whose removals may be told together.
    pub(crate) fn begin_removals(&mut self) {
        self.closed = self.next;
    }

    /// Events that left the buffer without being taken.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(crate) fn digest(&self, block: BlockId) -> Digest {
        self.digests[block as usize]
    }

    pub(crate) fn digests(&self, blocks: &[BlockId]) -> Vec<Digest> {
        blocks.iter().map(|&block| self.digest(block)).collect()
    }

    /// Hands out what is in the buffer.
    pub(crate) fn take(&mut self) -> Vec<Event> {
        self.weight = 0;
        mem::take(&mut self.buffer).into()
    }

    /// `blocks` with these tokens, the first one at `position`, entered the tree below `parent`.
    pub(crate) fn stored(
        &mut self,
        namespace: &Arc<[u8]>,
        parent: Option<BlockId>,
        position: usize,
        tokens: &[TokenId],
        media: &[Media],
        blocks: &[BlockId],
    ) {
        let size = self.block_size;
        let parent = parent.map(|block| self.digest(block));
        let mut above = parent.unwrap_or_else(|| digest::root(size, namespace));
        let mut chain = Vec::with_capacity(blocks.len());
        for (index, (&block, tokens)) in blocks.iter().zip(tokens.chunks_exact(size)).enumerate() {
            let start = position + index * size;
            above = digest::block(&above, tokens, touching(media, start..start + size));
            chain.push(above);
            let index = block as usize;
            if index >= self.digests.len() {
                self.digests.resize(index + 1, Digest::default());
            }
            self.digests[index] = above;
        }
        self.push(Change::Stored {
            namespace: namespace.clone(),
            parent,
            blocks: chain,
            tokens: tokens.to_vec(),
            media: media.to_vec(),
        });
    }

    pub(crate) fn reused(&mut self, namespace: &[u8], blocks: &[BlockId]) {
        self.push(Change::Reused {
            namespace: namespace.into(),
            blocks: self.digests(blocks),
        });
    }

    /// The end of a path left the tree.
    pub(crate) fn removed(&mut self, namespace: &Arc<[u8]>, path: &[BlockId]) {
        for run in path.rchunks(MAX_REMOVED) {
            let removed = run.iter().rev().map(|&block| self.digests[block as usize]);
            if let Some(Event {
                number,
                change:
                    Change::Removed {
                        namespace: last,
                        blocks,
                    },
            }) = self.buffer.back_mut()
                && *number >= self.closed
                && last == namespace
                && blocks.len() + run.len() <= MAX_REMOVED
            {
                blocks.extend(removed);
                self.weight += run.len();
                self.trim();
            } else {
                let blocks = removed.collect();
                self.push(Change::Removed {
                    namespace: namespace.clone(),
                    blocks,
                });
            }
        }
    }

    pub(crate) fn cleared(&mut self, namespace: Option<&[u8]>) {
        self.push(Change::Cleared {
            namespace: namespace.map(Arc::from),
        });
    }

    fn push(&mut self, change: Change) {
        self.weight += change.weight();
        self.buffer.push_back(Event {
            number: self.next,
            change,
        });
        self.next += 1;
        self.trim();
    }

    /// Drops the oldest events that are too much. The last one stays, so that a gap is always followed by something.
    fn trim(&mut self) {
        while self.weight > self.capacity && self.buffer.len() > 1 {
            let oldest = self.buffer.pop_front();
            self.weight -= oldest.map_or(0, |event| event.change.weight());
            self.dropped += 1;
        }
    }
}
