//! One call of attention, as all that take part in it see it.

use super::layout::{KvLayer, Vectors, VectorsMut};
use super::plan::{Mask, Plan, Schedule};
use super::scratch::Shared;

/// One call of attention: what every item needs.
pub(super) struct Call<'a> {
    pub(super) plan: &'a Plan,
    pub(super) schedule: &'a Schedule,
    pub(super) mask: Mask,
    pub(super) scale: f32,
    pub(super) query: Vectors<'a>,
    pub(super) layer: KvLayer<'a>,
    pub(super) out: &'a VectorsMut<'a>,
    pub(super) shared: Shared<'a>,
}
