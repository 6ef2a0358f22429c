//! A numpy array as (pointer, shape, byte strides, dtype), and the checks that every use of one is made of.

use std::ffi::c_int;
use std::ops::Range;

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods, npyffi};
use pyo3::prelude::*;

use super::dtype::{Dtype, Scalar};
use crate::error::invalid;
use crate::int::show;

pub(crate) const MAX_RANK: usize = 8;

/// An array, alive as long as `'a`. Shape and strides are copies: Python may change the array object's own.
pub(crate) struct View<'a> {
    argument: &'static str,
    /// For messages, and what is rarely asked.
    array: &'a Bound<'a, PyUntypedArray>,
    data: *mut u8,
    dtype: Dtype,
    item_size: usize,
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [isize; MAX_RANK],
    flags: c_int,
}

impl<'a> View<'a> {
    // Inlined: a view is large, and most uses look at little of it.
    #[inline(always)]
    pub(crate) fn new(argument: &'static str, value: &'a Bound<'_, PyAny>) -> PyResult<Self> {
        match value.cast::<PyUntypedArray>() {
            Ok(array) => Self::of(argument, array),
            Err(_) => {
                let problem = format!("got {}, expected a numpy array", show(value));
                Err(invalid(argument, problem))
            }
        }
    }

    #[inline(always)]
    pub(crate) fn of(
        argument: &'static str,
        array: &'a Bound<'_, PyUntypedArray>,
    ) -> PyResult<Self> {
        let (rank, descr) = (array.ndim(), array.dtype());
        if rank > MAX_RANK {
            let problem = format!("got {rank} dimensions, expected at most {MAX_RANK}");
            return Err(invalid(argument, problem));
        }
        let item_size = descr.itemsize();
        let (mut shape, mut strides) = ([0; MAX_RANK], [0; MAX_RANK]);
        shape[..rank].copy_from_slice(array.shape());
        strides[..rank].copy_from_slice(array.strides());
        // SAFETY: the array object is alive, as `array` is, and the thread is attached to Python.
        let (data, flags) = unsafe {
            let fields = &*npyffi::_PyArray_GET_ITEM_DATA(array.as_array_ptr());
            (fields.data, fields.flags)
        };
        Ok(Self {
            argument,
            array,
            data: data.cast(),
            dtype: Dtype::of(&descr, item_size),
            item_size,
            rank,
            shape,
            strides,
            flags,
        })
    }

    pub(crate) fn argument(&self) -> &'static str {
        self.argument
    }

    pub(crate) fn data(&self) -> *mut u8 {
        self.data
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(crate) fn item_size(&self) -> usize {
        self.item_size
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Bytes from an item to the next, a dimension each.
    pub(crate) fn strides(&self) -> &[isize] {
        &self.strides[..self.rank]
    }

    /// Whether it has no elements, and so no memory: its strides then mean nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// One number of a 1- or 2-dimensional array of `T`.
    pub(crate) fn read<T: Scalar>(&self, i: usize, j: usize) -> T {
        debug_assert!(i < self.shape[0] && T::DTYPE == self.dtype);
        // SAFETY: callers stay inside the shape, for which numpy vouches; the array is alive; unaligned.
        unsafe {
            let at = i as isize * self.strides[0] + j as isize * self.strides[1];
            self.data.offset(at).cast::<T>().read_unaligned()
        }
    }

    /// An error about this argument.
    pub(crate) fn wrong(&self, problem: &str) -> PyErr {
        invalid(self.argument, problem)
    }

    /// An error: the array is not what was `expected`, in words.
    pub(crate) fn unlike(&self, expected: &str) -> PyErr {
        self.wrong(&format!("got {}, expected {expected}", self.what()))
    }

    /// Its dtype and shape in words.
    pub(crate) fn what(&self) -> String {
        format!("{} of shape {:?}", self.array.dtype(), self.shape())
    }

    /// Refuses any other element type or number of dimensions; `expected` says both in words.
    pub(crate) fn expect(&self, dtypes: &[Dtype], rank: usize, expected: &str) -> PyResult<()> {
        if dtypes.contains(&self.dtype) && self.rank == rank {
            Ok(())
        } else {
            Err(self.unlike(expected))
        }
    }

    pub(crate) fn expect_writable(&self) -> PyResult<()> {
        if self.flags & npyffi::NPY_ARRAY_WRITEABLE != 0 {
            Ok(())
        } else {
            Err(self.wrong("got a read-only array, expected one to write to"))
        }
    }

    pub(crate) fn expect_aligned(&self) -> PyResult<()> {
        if self.flags & npyffi::NPY_ARRAY_ALIGNED != 0 {
            Ok(())
        } else {
            Err(self.wrong("got a misaligned array, expected an aligned one"))
        }
    }

    pub(crate) fn expect_no_objects(&self) -> PyResult<()> {
        if self.array.dtype().has_object() {
            Err(self.wrong("its items are Python objects, which are more than bytes"))
        } else {
            Ok(())
        }
    }

    /// Refuses an array whose dimensions from `from` on are not one contiguous piece.
    pub(crate) fn expect_contiguous(&self, from: usize) -> PyResult<()> {
        let mut bytes = self.item_size as isize;
        for i in (from..self.rank).rev() {
            if !self.is_empty() && self.shape[i] > 1 && self.strides[i] != bytes {
                return Err(self.wrong(&format!(
                    "got strides {:?} of shape {:?}, expected dimensions from {from} on to be contiguous",
                    self.strides(),
                    self.shape()
                )));
            }
            bytes *= self.shape[i] as isize;
        }
        Ok(())
    }

    /// Refuses memory that is to be written here while it is read there.
    pub(crate) fn expect_apart(&self, other: &View<'_>) -> PyResult<()> {
        self.expect_apart_from(&other.extent(), other.argument)
    }

    /// The same of addresses that are read as `argument`.
    pub(crate) fn expect_apart_from(&self, read: &Range<usize>, argument: &str) -> PyResult<()> {
        let written = self.extent();
        if written.start < read.end && read.start < written.end {
            return Err(self.wrong(&format!("its memory overlaps that of {argument}")));
        }
        Ok(())
    }

    /// The addresses between its first and its last byte.
    pub(crate) fn extent(&self) -> Range<usize> {
        if self.is_empty() {
            return 0..0;
        }
        let (mut low, mut high) = (0_isize, self.item_size as isize);
        for (&n, &stride) in self.shape().iter().zip(self.strides()) {
            let reach = (n as isize - 1) * stride;
            low += reach.min(0);
            high += reach.max(0);
        }
        let base = self.data as isize;
        (base + low) as usize..(base + high) as usize
    }
}
