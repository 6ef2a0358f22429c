//! A caller's array to write numbers to.

use std::marker::PhantomData;

use pyo3::prelude::*;

use super::dtype::Scalar;
use super::view::View;

/// A checked array: `T`, writable, aligned, contiguous rows. One dimension is one row.
pub(crate) struct Rows<'a, T> {
    data: *mut u8,
    rows: usize,
    columns: usize,
    /// Bytes from a row to the next.
    stride: isize,
    array: PhantomData<(View<'a>, T)>,
}

impl<'a, T: Scalar> Rows<'a, T> {
    /// Checks an array of two dimensions; `shape` names them for messages.
    pub(crate) fn matrix(
        argument: &'static str,
        value: &'a Bound<'_, PyAny>,
        shape: &str,
    ) -> PyResult<Self> {
        let view = checked::<T>(argument, value, 2, shape)?;
        Ok(Self {
            data: view.data(),
            rows: view.shape()[0],
            columns: view.shape()[1],
            stride: view.strides()[0],
            array: PhantomData,
        })
    }

    /// Checks an array of one dimension: one row.
    pub(crate) fn vector(argument: &'static str, value: &'a Bound<'_, PyAny>) -> PyResult<Self> {
        let view = checked::<T>(argument, value, 1, "[n]")?;
        Ok(Self {
            data: view.data(),
            rows: 1,
            columns: view.shape()[0],
            stride: 0,
            array: PhantomData,
        })
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Writes `values` to a row, from `column` on, as far as the row goes.
    pub(crate) fn write(&mut self, row: usize, column: usize, values: impl IntoIterator<Item = T>) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        for (column, value) in (column..self.columns).zip(values) {
            // SAFETY: row and column are within the shape, which numpy vouches for together with the strides; the
            // array is aligned, writable and alive. No reference to its memory is made.
            unsafe { self.row(row).add(column).write(value) }
        }
    }

    /// Writes one item.
    pub(crate) fn put(&mut self, row: usize, column: usize, value: T) {
        assert!(row < self.rows && column < self.columns);
        // SAFETY: as above.
        unsafe { self.row(row).add(column).write(value) }
    }

    /// Reads one item.
    pub(crate) fn read(&self, row: usize, column: usize) -> T {
        assert!(row < self.rows && column < self.columns);
        // SAFETY: as above; every bit pattern is a `T`.
        unsafe { self.row(row).add(column).read() }
    }

    fn row(&self, row: usize) -> *mut T {
        // Wrapping: only callers know that the row exists.
        self.data
            .wrapping_offset(row as isize * self.stride)
            .cast::<T>()
    }
}

#[inline(always)]
fn checked<'a, T: Scalar>(
    argument: &'static str,
    value: &'a Bound<'_, PyAny>,
    rank: usize,
    shape: &str,
) -> PyResult<View<'a>> {
    let view = View::new(argument, value)?;
    if view.dtype() != T::DTYPE || view.shape().len() != rank {
        return Err(view.unlike(&format!("{} of shape {shape}", T::NAME)));
    }
    view.expect_contiguous(rank - 1)?;
    view.expect_writable()?;
    view.expect_aligned()?;
    Ok(view)
}
