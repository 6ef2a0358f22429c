//! The columns that `KVManager.grow_running` and `commit_running` work on.

use leafkv_core::running::{Column, Columns};
use pyo3::prelude::*;

use crate::array::out::Rows;
use crate::error::invalid;

/// An int64 array, a row of it a column.
pub(crate) struct RunningColumns<'a>(Rows<'a, i64>);

impl<'a> RunningColumns<'a> {
    pub(crate) fn new(columns: &'a Bound<'_, PyAny>) -> PyResult<Self> {
        let shape = "[columns, sequences]";
        let array = Rows::<i64>::matrix("columns", columns, shape)?;
        if array.rows() < Column::COUNT {
            let (got, least) = (array.rows(), Column::COUNT);
            let problem = format!("got {got} columns, expected at least {least}");
            return Err(invalid("columns", problem));
        }
        Ok(Self(array))
    }
}

impl Columns for RunningColumns<'_> {
    fn rows(&self) -> usize {
        self.0.columns()
    }

    fn get(&self, column: Column, row: usize) -> usize {
        self.0.read(column as usize, row) as usize
    }

    fn set(&mut self, column: Column, row: usize, value: usize) {
        self.0.put(column as usize, row, value as i64);
    }
}
