//! Core errors as Python exceptions. The classes live in `leafkv.errors`, where users read them.

use leafkv_core::Error;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

static INVALID_INPUT: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static OUT_OF_BLOCKS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static UNKNOWN_SEQUENCE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static INVARIANT: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The Python exception that a core error becomes.
pub(crate) fn to_py(error: Error) -> PyErr {
    let (cell, name) = match error {
        Error::OutOfBlocks { .. } => (&OUT_OF_BLOCKS, "OutOfBlocksError"),
        Error::UnknownSequence(_) => (&UNKNOWN_SEQUENCE, "UnknownSequenceError"),
        Error::Invariant(_) => (&INVARIANT, "InvariantError"),
        _ => (&INVALID_INPUT, "InvalidInputError"),
    };
    Python::attach(|py| match cell.import(py, "leafkv.errors", name) {
        Ok(class) => PyErr::from_type(class.clone(), error.to_string()),
        Err(import_failed) => import_failed,
    })
}

/// An `InvalidInputError` made in the bindings themselves: a wrong dtype, shape or stride.
pub(crate) fn invalid(argument: &'static str, problem: impl Into<String>) -> PyErr {
    to_py(Error::invalid(argument, problem))
}
