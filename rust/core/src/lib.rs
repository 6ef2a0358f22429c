//! LeafKV's core: everything that has to be fast or provably right, and no Python.
//!
//! The crate is two independent halves that share only [`Error`]:
//!
//! * **Bookkeeping**: who owns which block, and which prefixes are already computed.
//! * **Attention**: reading and writing the KV memory that those blocks name.

pub mod attention;
mod error;
mod simd;
mod threads;

pub use error::{Error, Result};
pub use simd::Isa;
