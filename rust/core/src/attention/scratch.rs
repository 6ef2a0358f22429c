//! Memory that is kept from call to call: what threads share, and buffers of their own.

use std::sync::atomic::AtomicU32;

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

/// Memory on cache lines of its own that grows on demand. Initialised, with anything.
#[derive(Debug, Default)]
pub(super) struct Buffer(Vec<Line>);

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

impl Buffer {
    pub(super) fn floats(&mut self, n: usize) -> *mut f32 {
        let lines = n.div_ceil(16);
        if self.0.len() < lines {
            // Nobody needs the old contents: free them before taking more.
            self.0 = Vec::new();
            self.0 = vec![Line([0.0; 16]); lines];
        }
        self.0.as_mut_ptr().cast()
    }
}
