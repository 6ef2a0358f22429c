//! New arrays, made without a detour: each is what a call answers with.

use leafkv_core::{BlockCopy, BlockId};
use numpy::{PyArray1, PyArray2, PyArray3, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;

/// A float32 array `[tokens, heads, head_dim]`, whose every element the caller will write.
pub(crate) fn empty(py: Python<'_>, shape: [usize; 3]) -> Bound<'_, PyAny> {
    // SAFETY: floats have no invalid bits, and the kernel writes all before Python sees any.
    unsafe { PyArray3::<f32>::new(py, shape, false) }.into_any()
}

/// A new float32 array `[rows, columns]`, to be filled before Python sees it.
pub(crate) struct Matrix<'py>(Bound<'py, PyArray2<f32>>);

impl<'py> Matrix<'py> {
    pub(crate) fn new(py: Python<'py>, shape: [usize; 2]) -> Self {
        Self(PyArray2::zeros(py, shape, false))
    }

    /// Its items, row after row.
    pub(crate) fn items(&mut self) -> &mut [f32] {
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
