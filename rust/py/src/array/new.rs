//! New arrays, made without a detour: each is what a call answers with.

use leafkv_core::{BlockCopy, BlockId};
use numpy::ndarray::{Dimension, IntoDimension};
use numpy::{Element, PyArray, PyArray1, PyArray2, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;

/// A float32 array, whose every element the caller will write.
pub(crate) fn empty<D: IntoDimension>(py: Python<'_>, shape: D) -> Bound<'_, PyAny> {
    // SAFETY: floats have no invalid bits, and the kernel writes all before Python sees any.
    unsafe { PyArray::<f32, D::Dim>::new(py, shape, false) }.into_any()
}

/// A new array, to be filled before Python sees it.
pub(crate) struct Fresh<'py, T, D>(Bound<'py, PyArray<T, D>>);

impl<'py, T: Element, D: Dimension> Fresh<'py, T, D> {
    pub(crate) fn new(py: Python<'py>, shape: impl IntoDimension<Dim = D>) -> Self {
        Self(PyArray::zeros(py, shape, false))
    }

    /// Its items, row after row.
    pub(crate) fn items(&mut self) -> &mut [T] {
        // SAFETY: nobody else knows of the array, and its memory is contiguous and initialised.
        unsafe { std::slice::from_raw_parts_mut(self.0.data(), self.0.len()) }
    }

    pub(crate) fn into_any(self) -> Bound<'py, PyAny> {
        self.0.into_any()
    }
}

/// Blocks as an int32 vector.
pub(crate) fn block_ids<'py>(
    py: Python<'py>,
    blocks: impl ExactSizeIterator<Item = BlockId>,
) -> Bound<'py, PyArray1<i32>> {
    PyArray1::from_iter(py, blocks.map(id_to_i32))
}

/// Copies as an int32 array of `(source, destination)` rows.
pub(crate) fn copy_pairs<'py>(py: Python<'py>, copies: &[BlockCopy]) -> Bound<'py, PyArray2<i32>> {
    // SAFETY: ints have no invalid bits; nobody else knows of the array, and its memory is contiguous.
    unsafe {
        let array = PyArray2::<i32>::new(py, [copies.len(), 2], false);
        let rows = array.data().cast::<[i32; 2]>();
        for (index, copy) in copies.iter().enumerate() {
            rows.add(index)
                .write([copy.source, copy.destination].map(id_to_i32));
        }
        array
    }
}

/// Block ids are below 2³¹.
pub(crate) fn id_to_i32(block: BlockId) -> i32 {
    block as i32
}
