//! LeafKV's core: everything that has to be fast or provably right, and no Python.
//!
//! The crate is three parts:
//!
//! * **Bookkeeping** ([`KvManager`]): who owns which block, and which prefixes are already computed. It shares only [`Error`]
//!   with the others.
//! * **Attention** ([`attention`]): reading and writing the KV memory that those blocks name.
//! * **Operations** ([`ops`]): what a decoder computes around attention. One of them, [`ops::rope_write_kv`], writes that
//!   memory, too.

pub mod attention;
mod batch;
mod block;
mod buffer;
mod cached;
mod check;
mod config;
mod digest;
mod error;
mod events;
mod manager;
pub mod ops;
mod pins;
mod pool;
mod radix;
pub mod running;
mod sequence;
mod sequences;
mod simd;
mod slab;
mod stats;
mod store;
mod threads;

pub use batch::Rows;
pub use block::{BlockCopy, BlockId, Media, Scope, SequenceId, TokenId};
pub use config::Config;
pub use digest::{Digest, block_digests};
pub use error::{Error, Result};
pub use events::{Change, Event, Snapshot};
pub use manager::{Admission, KvManager};
pub use pins::Pin;
pub use radix::{BlockHash, hash_block};
pub use simd::Isa;
pub use stats::Stats;
