//! Memory that calculations write to and read back, kept from call to call.

/// Bytes of a cache line: a vector on two of them takes two loads.
pub(crate) const LINE: usize = 64;
/// What the sets of a first-level cache span.
const PAGE: usize = 4096;

/// Memory on cache lines of its own that grows on demand. Initialised, with anything.
#[derive(Debug, Default)]
pub(crate) struct Buffer(Vec<Line>);

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

impl Buffer {
    pub(crate) fn floats(&mut self, n: usize) -> *mut f32 {
        let lines = n.div_ceil(16);
        if self.0.len() < lines {
            // Nobody needs the old contents: free them before taking more.
            self.0 = Vec::new();
            self.0 = vec![Line([0.0; 16]); lines];
        }
        self.0.as_mut_ptr().cast()
    }
}

/// Bytes from one row of so many bytes to the next, whole cache lines: rows that are a multiple of a page apart would all
/// compete for the same few places of the first-level cache.
pub(crate) const fn stride(bytes: usize) -> usize {
    let lines = bytes.next_multiple_of(LINE);
    match competes(lines) {
        true => lines + LINE,
        false => lines,
    }
}

/// Whether rows so many bytes apart do.
pub(crate) const fn competes(stride: usize) -> bool {
    stride.is_multiple_of(PAGE)
}
