//! Memory that is kept from call to call, and that threads share.

use std::sync::atomic::AtomicU32;

use crate::buffer::Buffer;
use crate::simd::MAX_LANES;

/// Memory for the records of units that several items cover, and how many of those items are unfinished.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    records: Buffer,
    pending: Vec<AtomicU32>,
}

/// That memory, as the threads of one call share it.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    pub(super) records: *mut f32,
    pub(super) pending: &'a [AtomicU32],
}

// SAFETY: items write distinct records; a unit's are read by the item that finds all others of it finished.
unsafe impl Sync for Shared<'_> {}

impl Scratch {
    /// Makes ready for a call: `floats` for records, and a counter for each of `pending`.
    pub(super) fn share(
        &mut self,
        floats: usize,
        pending: impl Iterator<Item = u32>,
    ) -> Shared<'_> {
        self.pending.clear();
        self.pending.extend(pending.map(AtomicU32::new));
        Shared {
            records: self.records.floats(floats),
            pending: &self.pending,
        }
    }
}

/// Floats of an output row in scratch: whole vectors under any instruction set.
pub(super) const fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(MAX_LANES)
}
