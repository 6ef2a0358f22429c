//! What a decoder computes around attention: products with weights, norms, rotations, activations, the best logits, and
//! tokens drawn from them.
//!
//! **The invariant.** Under one instruction set, the bits of a row's result depend on that row and the weights alone:
//! never on the other rows of the batch, how work is split, or the number of threads. (In products in bfloat16 the CPU's maker
//! matters, too.)
//!
//! Every operation takes rows of float32 and writes to memory of the caller.

mod activations;
mod draw;
mod embed;
mod lanes;
mod linear;
mod norm;
mod outputs;
mod product;
mod rope;
mod rows;
mod silu;
mod split;
#[cfg(test)]
mod tests;
mod top;
mod weight;

pub use draw::{Draw, draw};
pub use embed::embed;
pub use linear::{Input, LinearOptions, Precision, linear};
pub use norm::rms_norm;
pub use rope::{HeadNorms, Projected, rope_write_kv};
pub use rows::{Rows, RowsMut};
pub use silu::silu_mul;
pub use top::{argmax, top_k};
pub use weight::{Weight, WeightKind, WeightRows};
