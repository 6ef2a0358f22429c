//! Python ints, strictly: no floats, no bools, and never a bare `OverflowError`.

use leafkv_core::{SequenceId, TokenId};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::error::invalid;

/// A kind of number that arguments are, from 0 on.
pub(crate) trait Int: Copy {
    /// The largest one: one less than a power of two.
    const MAX: u64;
    const EXPECTED: &'static str;
    /// A number that is at most `MAX`; a larger one loses its high bits.
    fn cut(number: u64) -> Self;
}

impl Int for TokenId {
    const MAX: u64 = TokenId::MAX as u64;
    const EXPECTED: &'static str = "an int, 0 to 4294967295";
    fn cut(number: u64) -> Self {
        number as Self
    }
}

impl Int for SequenceId {
    const MAX: u64 = u64::MAX;
    const EXPECTED: &'static str = "an int, 0 to 2**64 - 1";
    fn cut(number: u64) -> Self {
        number
    }
}

/// A number of tokens or blocks.
impl Int for usize {
    const MAX: u64 = usize::MAX as u64;
    const EXPECTED: &'static str = "an int >= 0";
    fn cut(number: u64) -> Self {
        number as Self
    }
}

/// An int, or something that is one by `__index__` (numpy's integers). `None` where it is not in 0..2⁶⁴.
pub(crate) fn integer(value: &Bound<'_, PyAny>) -> Option<u64> {
    if value.is_instance_of::<PyBool>() {
        return None;
    }
    value.extract().ok()
}

/// One number of a kind.
pub(crate) fn int<T: Int>(argument: &'static str, value: &Bound<'_, PyAny>) -> PyResult<T> {
    let number = integer(value).filter(|&number| number <= T::MAX);
    number
        .map(T::cut)
        .ok_or_else(|| unlike(argument, value, T::EXPECTED))
}

/// A sequence id.
pub(crate) fn sequence_id(
    argument: &'static str,
    value: &Bound<'_, PyAny>,
) -> PyResult<SequenceId> {
    int(argument, value)
}

/// A number of tokens or blocks.
pub(crate) fn count(argument: &'static str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    int(argument, value)
}

/// A size: an int of at least 1.
pub(crate) fn positive(argument: &'static str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    let number = integer(value).and_then(|number| usize::try_from(number).ok());
    number
        .filter(|&number| number >= 1)
        .ok_or_else(|| unlike(argument, value, "an int of at least 1"))
}

/// A size that may be left out.
pub(crate) fn optional(
    argument: &'static str,
    value: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<usize>> {
    value.map(|n| positive(argument, n)).transpose()
}

/// An error: `value` is not what was `expected`, in words.
pub(crate) fn unlike(argument: &'static str, value: &Bound<'_, PyAny>, expected: &str) -> PyErr {
    invalid(
        argument,
        format!("got {}, expected {expected}", show(value)),
    )
}

/// A value for an error message: its type, and its `repr` where that is short.
pub(crate) fn show(value: &Bound<'_, PyAny>) -> String {
    let kind = value
        .get_type()
        .name()
        .map_or_else(|_| "object".to_owned(), |name| name.to_string());
    match value.repr() {
        Ok(repr) if repr.to_string().len() <= 40 => format!("{repr} ({kind})"),
        _ => format!("an object of type {kind}"),
    }
}
