//! Matrices of float32 in the caller's memory.
//!
//! Memory is never seen as a `&[f32]`: rows may lie at any stride and alignment, and the result of one operation may be the
//! very array that it reads.

use std::marker::PhantomData;

use crate::{Error, Result};

/// Rows of contiguous floats, to be read; from one row to the next is any number of bytes.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    base: *const u8,
    rows: usize,
    columns: usize,
    stride: isize,
    memory: PhantomData<&'a [f32]>,
}

// SAFETY: a shape and an address; the memory is readable from any thread by the promise of `from_raw_parts`.
unsafe impl Send for Rows<'_> {}
// SAFETY: as above.
unsafe impl Sync for Rows<'_> {}

impl<'a> Rows<'a> {
    /// Describes an array `[rows, columns]` of any alignment by the bytes from one row to the next.
    ///
    /// # Safety
    /// All elements are valid for reads during `'a`, and nobody else writes them while a call reads them.
    pub unsafe fn from_raw_parts(base: *const u8, shape: [usize; 2], stride: isize) -> Self {
        let [rows, columns] = shape;
        Self {
            base,
            rows,
            columns,
            stride,
            memory: PhantomData,
        }
    }

    /// A contiguous slice as rows.
    ///
    /// # Panics
    /// The slice's length is not a multiple of `columns`.
    pub fn from_slice(data: &'a [f32], columns: usize) -> Self {
        let (shape, stride) = contiguous(data.len(), columns);
        // SAFETY: a slice is what the shape says it is.
        unsafe { Self::from_raw_parts(data.as_ptr().cast(), shape, stride) }
    }

    /// `[rows, columns]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Where the first row is.
    pub(crate) fn start(&self) -> *const u8 {
        self.base
    }

    /// Bytes from one row to the next.
    pub(crate) fn stride(&self) -> isize {
        self.stride
    }

    /// # Safety
    /// `row` is in bounds.
    #[inline(always)]
    pub(crate) unsafe fn row(&self, row: usize) -> *const f32 {
        // SAFETY: in bounds by the caller's promise, valid by that of `from_raw_parts`.
        unsafe { self.base.offset(row as isize * self.stride).cast() }
    }

    /// # Errors
    /// The shape is not `expected`.
    pub(crate) fn expect(&self, argument: &'static str, expected: [usize; 2]) -> Result<()> {
        expect(argument, self.shape(), expected)
    }
}

/// Rows of contiguous floats, to be written. Like [`Rows`].
#[derive(Debug)]
pub struct RowsMut<'a> {
    base: *mut u8,
    rows: usize,
    columns: usize,
    stride: isize,
    memory: PhantomData<&'a mut [f32]>,
}

// SAFETY: a shape and an address; operations give every element to one thread.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for RowsMut<'_> {}

impl<'a> RowsMut<'a> {
    /// Like [`Rows::from_raw_parts`].
    ///
    /// # Safety
    /// All elements are valid for reads and writes during `'a` and distinct. Nobody else uses them during a call, but for
    /// arguments of that very call that it allows to be the same memory.
    pub unsafe fn from_raw_parts(base: *mut u8, shape: [usize; 2], stride: isize) -> Self {
        let [rows, columns] = shape;
        Self {
            base,
            rows,
            columns,
            stride,
            memory: PhantomData,
        }
    }

    /// A contiguous slice as rows.
    ///
    /// # Panics
    /// The slice's length is not a multiple of `columns`.
    pub fn from_slice(data: &'a mut [f32], columns: usize) -> Self {
        let (shape, stride) = contiguous(data.len(), columns);
        // SAFETY: a slice is what the shape says it is.
        unsafe { Self::from_raw_parts(data.as_mut_ptr().cast(), shape, stride) }
    }

    /// `[rows, columns]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// # Safety
    /// `row` is in bounds.
    #[inline(always)]
    pub(crate) unsafe fn row(&self, row: usize) -> *mut f32 {
        // SAFETY: in bounds by the caller's promise, valid by that of `from_raw_parts`.
        unsafe { self.base.offset(row as isize * self.stride).cast() }
    }

    /// # Errors
    /// The shape is not `expected`.
    pub(crate) fn expect(&self, argument: &'static str, expected: [usize; 2]) -> Result<()> {
        expect(argument, self.shape(), expected)
    }
}

fn expect(argument: &'static str, came: [usize; 2], expected: [usize; 2]) -> Result<()> {
    if came == expected {
        return Ok(());
    }
    Err(Error::invalid(
        argument,
        format!("got shape {came:?}, expected {expected:?}"),
    ))
}

fn contiguous(len: usize, columns: usize) -> ([usize; 2], isize) {
    assert!(
        columns > 0 && len.is_multiple_of(columns),
        "{len} floats are not [_, {columns}]"
    );
    ([len / columns, columns], (columns * 4) as isize)
}
