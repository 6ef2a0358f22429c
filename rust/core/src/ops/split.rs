//! Rows of a batch, shared out among threads.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::simd::{DefaultMode, Dispatch, Isa, Kernel, Simd};
use crate::{Result, threads};

/// Fewer elements than this are done before another thread has woken up.
const ALONE: usize = 1 << 14;

/// Shares a thread, so that one that comes late or is held up costs little.
const SHARES: usize = 4;

/// What an operation does to rows, to each by itself.
pub(super) trait Each: Sync {
    /// As [`Kernel::run`], for some of the rows.
    ///
    /// # Safety
    /// The rows are within those that [`run`] was told of, and nobody else was given them.
    unsafe fn rows<S: Simd>(&self, s: S, rows: Range<usize>);
}

/// How many threads rows of so many elements are worth, up to what the caller allows.
pub(super) fn threads([rows, columns]: [usize; 2], num_threads: Option<usize>) -> Result<usize> {
    let most = threads::resolve(num_threads)?;
    Ok(if rows * columns < ALONE {
        1
    } else {
        most.min(rows)
    })
}

/// Does rows `0..rows`, each once, on up to so many threads.
///
/// # Errors
/// This CPU lacks `isa`. Nothing is then done.
pub(super) fn run(isa: Isa, rows: usize, threads: usize, work: &impl Each) -> Result<()> {
    isa.expect_available()?;
    if threads == 1 {
        let _mode = DefaultMode::enter();
        isa.dispatch(Share(work, 0..rows));
        return Ok(());
    }
    let (share, next) = (rows.div_ceil(threads * SHARES), AtomicUsize::new(0));
    threads::run(threads, true, || {
        let _mode = DefaultMode::enter();
        loop {
            let first = next.fetch_add(share, Relaxed);
            if first >= rows {
                return;
            }
            isa.dispatch(Share(work, first..rows.min(first + share)));
        }
    });
    Ok(())
}

/// Rows that one thread does.
struct Share<'a, W>(&'a W, Range<usize>);

impl<W: Each> Dispatch for Share<'_, W> {
    type Output = ();
    fn run<S: Simd>(self, s: S) {
        // No matrix unit is needed.
        s.vectors().vectorize(self);
    }
}

impl<W: Each> Kernel for Share<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: `run` makes shares of all rows that do not overlap.
        unsafe { self.0.rows(s, self.1) };
    }
}
