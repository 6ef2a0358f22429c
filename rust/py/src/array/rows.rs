//! Matrices of float32 that operations read and write in place, from checked numpy arrays.

use leafkv_core::ops::{Rows, RowsMut};
use pyo3::prelude::*;

use super::dtype::Dtype;
use super::view::View;

const MATRIX: &str = "float32 of shape [rows, columns]";

impl<'a> View<'a> {
    /// A float32 matrix to read.
    pub(crate) fn rows(&self) -> PyResult<Rows<'a>> {
        self.folded(2, MATRIX)
    }

    /// A float32 array of `rank` dimensions to read, of which all but the first are a row; `expected` says so in words.
    pub(crate) fn folded(&self, rank: usize, expected: &str) -> PyResult<Rows<'a>> {
        let (shape, stride) = self.rows_layout(rank, expected)?;
        // SAFETY: numpy vouches for shape and strides; the array lives for `'a`. That nobody writes it meanwhile is
        // the caller's duty, as documented.
        Ok(unsafe { Rows::from_raw_parts(self.data(), shape, stride) })
    }

    /// A float32 vector to read, as one row.
    pub(crate) fn row(&self) -> PyResult<Rows<'a>> {
        self.expect(&[Dtype::F32], 1, "float32 of shape [n]")?;
        self.expect_contiguous(0)?;
        // SAFETY: as above.
        Ok(unsafe { Rows::from_raw_parts(self.data(), [1, self.shape()[0]], 0) })
    }

    /// A float32 matrix to write, apart from all that is read.
    pub(crate) fn rows_mut<'b>(
        &self,
        read: impl IntoIterator<Item = &'b View<'b>>,
    ) -> PyResult<RowsMut<'a>> {
        self.folded_mut(2, MATRIX, read)
    }

    /// Like [`View::folded`], to write.
    pub(crate) fn folded_mut<'b>(
        &self,
        rank: usize,
        expected: &str,
        read: impl IntoIterator<Item = &'b View<'b>>,
    ) -> PyResult<RowsMut<'a>> {
        let ([rows, columns], stride) = self.rows_layout(rank, expected)?;
        self.expect_writable()?;
        if rows > 1 && stride.unsigned_abs() < columns * self.item_size() {
            return Err(self.wrong(&format!(
                "strides {:?} of shape {:?} put rows onto each other",
                self.strides(),
                self.shape()
            )));
        }
        for other in read {
            self.expect_apart(other)?;
        }
        // SAFETY: as above; it is writable, and apart from what the call reads, or what the operation may overwrite.
        Ok(unsafe { RowsMut::from_raw_parts(self.data(), [rows, columns], stride) })
    }

    fn rows_layout(&self, rank: usize, expected: &str) -> PyResult<([usize; 2], isize)> {
        self.expect(&[Dtype::F32], rank, expected)?;
        self.expect_contiguous(1)?;
        let columns = self.shape()[1..].iter().product();
        Ok(([self.shape()[0], columns], self.strides()[0]))
    }

    /// Whether it is the same memory, seen alike.
    pub(crate) fn is_same(&self, other: &View<'_>) -> bool {
        self.data() == other.data()
            && self.shape() == other.shape()
            && self.strides() == other.strides()
    }
}
