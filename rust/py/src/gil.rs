//! When other Python threads may run.

use pyo3::prelude::*;

/// Elements that are copied or converted before another Python thread would have noticed a released GIL.
pub(crate) const BRIEF_ELEMENTS: usize = 1 << 16;

/// Runs `work` without the GIL, unless it is over before anyone could make use of it.
pub(crate) fn maybe_detach<T: Send>(
    py: Python<'_>,
    brief: bool,
    work: impl FnOnce() -> T + Send,
) -> T {
    if brief { work() } else { py.detach(work) }
}
