//! One call of attention, as all that take part in it see it.

use super::Options;
use super::layout::{KvLayer, Vectors, VectorsMut};
use super::plan::{Mask, Plan, Schedule};
use super::scratch::Shared;

/// One call of attention: what every item needs.
pub(super) struct Call<'a> {
    pub(super) plan: &'a Plan,
    pub(super) schedule: &'a Schedule,
    pub(super) mask: Mask,
    pub(super) options: Options<'a>,
    pub(super) query: Vectors<'a>,
    pub(super) layer: KvLayer<'a>,
    pub(super) out: &'a VectorsMut<'a>,
    /// `[tokens, heads]`, or null.
    pub(super) lse: *mut f32,
    pub(super) shared: Shared<'a>,
}

// SAFETY: `lse` is written row by row, each by one thread.
unsafe impl Sync for Call<'_> {}
