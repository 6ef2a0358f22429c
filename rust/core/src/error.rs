//! The one error type of the core. Every variant maps to one Python exception.

/// What can go wrong in the core. A failed call changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is malformed: its name, and what came against what was expected.
    #[error("{argument}: {problem}")]
    InvalidArgument {
        /// The argument's name as the caller knows it.
        argument: &'static str,
        /// What came and what was expected.
        problem: String,
    },
    /// The pool cannot give this many blocks, even after evicting all it may evict.
    #[error("out of blocks: {needed} needed, {allocatable} allocatable")]
    OutOfBlocks {
        /// Blocks that the call needed.
        needed: usize,
        /// Blocks that are free or evictable.
        allocatable: usize,
    },
    /// No live sequence has this id.
    #[error("unknown sequence {0}")]
    UnknownSequence(u64),
    /// A data structure contradicts itself: a bug in LeafKV, never the caller's fault.
    #[error("broken invariant: {0}")]
    Invariant(String),
}

impl Error {
    /// Shorthand for [`Error::InvalidArgument`].
    pub fn invalid(argument: &'static str, problem: impl Into<String>) -> Self {
        Self::InvalidArgument {
            argument,
            problem: problem.into(),
        }
    }
}

/// The core's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;
