//! Python ints, strictly: no floats, no bools, and never a bare `OverflowError`.

use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::error::invalid;

/// An int, or something that is one by `__index__` (numpy's integers). `None` where it is not in 0..2⁶⁴.
pub(crate) fn integer(value: &Bound<'_, PyAny>) -> Option<u64> {
    if value.is_instance_of::<PyBool>() {
        return None;
    }
    value.extract().ok()
}

/// A sequence id.
pub(crate) fn sequence_id(argument: &'static str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let problem = || format!("got {}, expected an int, 0 to 2**64 - 1", show(value));
    integer(value).ok_or_else(|| invalid(argument, problem()))
}

/// A number of tokens or blocks.
pub(crate) fn count(argument: &'static str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    at_least(0, "an int >= 0", argument, value)
}

/// A size: an int of at least 1.
pub(crate) fn positive(argument: &'static str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    at_least(1, "an int of at least 1", argument, value)
}

fn at_least(
    least: usize,
    expected: &str,
    argument: &'static str,
    value: &Bound<'_, PyAny>,
) -> PyResult<usize> {
    let number = integer(value).and_then(|n| usize::try_from(n).ok());
    let problem = || format!("got {}, expected {expected}", show(value));
    number
        .filter(|&n| n >= least)
        .ok_or_else(|| invalid(argument, problem()))
}

/// A size that may be left out.
pub(crate) fn optional(
    argument: &'static str,
    value: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<usize>> {
    value.map(|n| positive(argument, n)).transpose()
}

/// All items of a list or another iterable, through one of the functions above.
pub(crate) fn each<T>(
    argument: &'static str,
    values: &Bound<'_, PyAny>,
    convert: fn(&'static str, &Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let items = values.try_iter().map_err(|_| {
        invalid(
            argument,
            format!("got {}, expected a sequence of ints", show(values)),
        )
    })?;
    items.map(|item| convert(argument, &item?)).collect()
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
