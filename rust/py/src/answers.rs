//! What a `KVManager` answers with.

use pyo3::prelude::*;

/// `KVManager.begin` admitted the sequence; it now holds the blocks of its prefix hit.
#[pyclass(frozen, get_all, module = "leafkv._core")]
#[derive(Debug)]
pub(crate) struct Ready {
    /// Tokens whose KV is found in the prefix cache.
    ///
    /// Less than the prompt, and a multiple of the block size unless the manager has partial hits.
    pub(crate) cached_tokens: usize,
}

/// `KVManager.begin` did not admit the sequence: a running one is computing a prefix they share.
///
/// Nothing was recorded. Call `begin` again once `leader` has committed `tokens` tokens, or has ended.
#[pyclass(frozen, get_all, module = "leafkv._core")]
#[derive(Debug)]
pub(crate) struct WaitFor {
    /// The id of the running sequence.
    pub(crate) leader: u64,
    /// How many tokens the leader must have committed: whole blocks, shared with this prompt.
    pub(crate) tokens: usize,
}

/// A prefix that stays cached although nobody uses it, see `KVManager.pin`.
#[pyclass(frozen, get_all, module = "leafkv._core")]
#[derive(Debug)]
pub(crate) struct Pin {
    /// What `KVManager.unpin` takes. Never given twice.
    pin_id: u64,
    /// Tokens that stay cached: whole blocks, from the start of the prompt.
    pinned_tokens: usize,
    /// Whether that is less than all whole blocks of the prompt: the rest is not cached, or over the budget.
    partial: bool,
}

impl From<leafkv_core::Pin> for Pin {
    fn from(pin: leafkv_core::Pin) -> Self {
        let leafkv_core::Pin {
            id,
            tokens,
            partial,
        } = pin;
        Self {
            pin_id: id,
            pinned_tokens: tokens,
            partial,
        }
    }
}

/// Counters of a `KVManager`, read at once. Counters only ever rise; blocks are as of now.
#[pyclass(frozen, get_all, module = "leafkv._core")]
#[derive(Debug)]
pub(crate) struct Stats {
    /// Size of the pool: `free_blocks + cached_blocks + held_blocks`.
    num_blocks: usize,
    /// Blocks with nothing in them.
    pub(crate) free_blocks: usize,
    /// Blocks that a prefix hit can find and eviction can take.
    pub(crate) cached_blocks: usize,
    /// Blocks of live sequences, of owed copies and of pins.
    pub(crate) held_blocks: usize,
    /// High-water mark of `held_blocks`.
    max_held_blocks: usize,
    /// Different blocks that are pinned; they are held, too.
    pinned_blocks: usize,
    /// Live sequences.
    pub(crate) sequences: usize,
    /// Tokens of all prompts that were begun and then given slots.
    query_tokens: u64,
    /// Those of `query_tokens` that were found in the prefix cache.
    hit_tokens: u64,
    /// Those of `hit_tokens` that were found in a part of a block, which was copied.
    partial_hit_tokens: u64,
    /// Blocks that entered the prefix cache.
    stored_blocks: u64,
    /// Blocks that left the prefix cache because their memory was needed.
    evicted_blocks: u64,
    /// Events that were dropped because nobody took them in time.
    dropped_events: u64,
}

impl From<leafkv_core::Stats> for Stats {
    fn from(stats: leafkv_core::Stats) -> Self {
        let leafkv_core::Stats {
            num_blocks,
            free_blocks,
            cached_blocks,
            held_blocks,
            max_held_blocks,
            pinned_blocks,
            sequences,
            query_tokens,
            hit_tokens,
            partial_hit_tokens,
            stored_blocks,
            evicted_blocks,
            dropped_events,
        } = stats;
        Self {
            num_blocks,
            free_blocks,
            cached_blocks,
            held_blocks,
            max_held_blocks,
            pinned_blocks,
            sequences,
            query_tokens,
            hit_tokens,
            partial_hit_tokens,
            stored_blocks,
            evicted_blocks,
            dropped_events,
        }
    }
}

macro_rules! shown_as_in_python {
    ($($class:ident)*) => {
        $(#[pymethods]
        impl $class {
            fn __repr__(&self) -> String {
                // Rust's way to show a struct of numbers and truths, in Python's words.
                let fields = format!("{self:?}").replace(" { ", "(").replace(" }", ")");
                let fields = fields.replace(": true", ": True").replace(": false", ": False");
                fields.replace(": ", "=")
            }
        })*
    };
}

shown_as_in_python! { Ready WaitFor Pin Stats }
