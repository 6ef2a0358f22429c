//! A caller's array to write results to.

use std::marker::PhantomData;

use numpy::{
    Element, PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods, npyffi,
};
use pyo3::prelude::*;

use crate::error::invalid;
use crate::int::show;

/// A checked array: `T`, writable, aligned, contiguous rows. One dimension is one row.
pub(crate) struct Rows<'a, T> {
    data: *mut u8,
    rows: usize,
    columns: usize,
    /// Bytes from a row to the next.
    stride: isize,
    array: PhantomData<(&'a PyUntypedArray, T)>,
}

impl<'a, T: Element + Copy> Rows<'a, T> {
    /// Checks an array of `dimensions` (1 or 2) dimensions.
    pub(crate) fn new(
        argument: &'static str,
        value: &'a Bound<'_, PyAny>,
        dimensions: usize,
    ) -> PyResult<Self> {
        let dtype = PyArrayDescr::of::<T>(value.py());
        let Ok(array) = value.cast::<PyUntypedArray>() else {
            let problem = format!("got {}, expected a numpy array of {dtype}", show(value));
            return Err(invalid(argument, problem));
        };
        if !array.dtype().is_equiv_to(&dtype) || array.ndim() != dimensions {
            let (shape, got) = (array.shape(), array.dtype());
            let problem = format!(
                "got {got} of shape {shape:?}, expected {dtype} of {dimensions} dimension(s)"
            );
            return Err(invalid(argument, problem));
        }
        let (shape, strides) = (array.shape(), array.strides());
        let columns = shape[dimensions - 1];
        if columns > 1 && strides[dimensions - 1] != size_of::<T>() as isize {
            return Err(invalid(
                argument,
                format!("got strides {strides:?}, expected contiguous rows"),
            ));
        }
        // SAFETY: the array object is alive, as `value` is.
        let fields = unsafe { &(*array.as_array_ptr()).fields };
        let (flags, data) = (fields.flags, fields.data);
        if flags & npyffi::NPY_ARRAY_WRITEABLE == 0 || flags & npyffi::NPY_ARRAY_ALIGNED == 0 {
            return Err(invalid(
                argument,
                "got a read-only or misaligned array, expected one to write to",
            ));
        }
        Ok(Self {
            data: data.cast(),
            rows: if dimensions == 1 { 1 } else { shape[0] },
            columns,
            stride: if dimensions == 1 { 0 } else { strides[0] },
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
            unsafe {
                let row = self.data.offset(row as isize * self.stride).cast::<T>();
                row.add(column).write(value);
            }
        }
    }
}
