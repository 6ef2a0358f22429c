//! numpy arrays, and what stands in for them, at the boundary: the only module that knows numpy.

pub(crate) mod out;
pub(crate) mod strided;
pub(crate) mod tokens;
