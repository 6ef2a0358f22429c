//! One-dimensional integer input: numpy arrays, `array.array`, memoryviews, lists and other sequences of ints.
//!
//! Arrays are copied in one pass, without a Python object per item.

use std::fmt::Display;
use std::ops::BitOr;
use std::ptr::null_mut;

use numpy::{PY_ARRAY_API, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyByteArray, PyBytes, PyList, PyMemoryView, PySequence, PyString, PyTuple, PyType,
};

use super::dtype::Dtype;
use super::view::View;
use crate::error::invalid;
use crate::int::{Int, integer, show};

/// The integers of `value`, copied. An error names `argument` and the first bad position.
pub(crate) fn ints<T: Int>(argument: &'static str, value: &Bound<'_, PyAny>) -> PyResult<Vec<T>> {
    if let Ok(array) = value.cast::<PyUntypedArray>() {
        return from_array(argument, array);
    }
    if let Ok(list) = value.cast::<PyList>() {
        return from_items(argument, list.len(), list.iter().map(Ok));
    }
    if let Ok(tuple) = value.cast::<PyTuple>() {
        return from_items(argument, tuple.len(), tuple.iter().map(Ok));
    }
    if value.is_instance_of::<PyMemoryView>() || is_array_array(value)? {
        return from_array(argument, &array_over(value)?);
    }
    let is_text = value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyByteArray>();
    match value.cast::<PySequence>() {
        // What a sequence says of its length is no reason to ask for memory.
        Ok(sequence) if !is_text => from_items(argument, 0, sequence.try_iter()?),
        _ => {
            let problem = format!(
                "got {}, expected an integer array or a sequence of ints",
                show(value)
            );
            Err(invalid(argument, problem))
        }
    }
}

fn from_items<'py, T: Int>(
    argument: &'static str,
    len: usize,
    items: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>,
) -> PyResult<Vec<T>> {
    let mut numbers = Vec::with_capacity(len);
    for item in items {
        let item = item?;
        let number = integer(&item).filter(|&number| number <= T::MAX);
        let number = number.ok_or_else(|| bad_item::<T>(argument, numbers.len(), show(&item)))?;
        numbers.push(T::cut(number));
    }
    Ok(numbers)
}

fn from_array<T: Int>(
    argument: &'static str,
    array: &Bound<'_, PyUntypedArray>,
) -> PyResult<Vec<T>> {
    let view = View::of(argument, array)?;
    if view.shape().len() == 1 {
        // Signed ones are sign-extended: what is negative is too large.
        const SIGNED: u64 = i64::MAX as u64;
        match view.dtype() {
            Dtype::U8 => return read(&view, u64::MAX, |item: u8| item.into()),
            Dtype::U16 => return read(&view, u64::MAX, |item: u16| item.into()),
            Dtype::U32 => return read(&view, u64::MAX, |item: u32| item.into()),
            Dtype::U64 => return read(&view, u64::MAX, |item: u64| item),
            Dtype::I8 => return read(&view, SIGNED, |item: i8| item as u64),
            Dtype::I16 => return read(&view, SIGNED, |item: i16| item as u64),
            Dtype::I32 => return read(&view, SIGNED, |item: i32| item as u64),
            Dtype::I64 => return read(&view, SIGNED, |item: i64| item as u64),
            _ => {}
        }
    }
    Err(view.unlike("native integers of shape [n]"))
}

/// Copies a one-dimensional array of `S`, an integer type, of any stride and alignment; none may be above `max`.
fn read<S: Copy + Default + Display + BitOr<Output = S>, T: Int>(
    view: &View<'_>,
    max: u64,
    widen: impl Fn(S) -> u64,
) -> PyResult<Vec<T>> {
    let (data, len, stride) = (view.data(), view.shape()[0], view.strides()[0]);
    let max = max.min(T::MAX);
    // SAFETY: numpy vouches for shape and strides: item `index < len` lies within the array's memory. The caller
    // checked that items are native integers of the size of `S`, of which every bit pattern is one.
    let item = |index: usize| unsafe {
        let at = data.offset(index as isize * stride);
        at.cast::<S>().read_unaligned()
    };
    // Limits are one less than a power of two: no number is above one iff their union is not. In their own type, so that
    // many are done at once.
    let mut union = S::default();
    let mut cut = |item: S| {
        union = union | item;
        T::cut(widen(item))
    };
    // Two loops: knowing the stride is what lets the compiler vectorise.
    let numbers: Vec<T> = if stride == size_of::<S>() as isize {
        // SAFETY: as above.
        let item = |index: usize| unsafe { data.cast::<S>().add(index).read_unaligned() };
        (0..len).map(|index| cut(item(index))).collect()
    } else {
        (0..len).map(|index| cut(item(index))).collect()
    };
    if widen(union) <= max {
        return Ok(numbers);
    }
    let is_bad = |&index: &usize| widen(item(index)) > max;
    // Another thread may have put it right meanwhile: then the first item stands for it.
    let bad = (0..len).find(is_bad).unwrap_or_default();
    Err(bad_item::<T>(view.argument(), bad, item(bad)))
}

fn bad_item<T: Int>(argument: &'static str, index: usize, got: impl Display) -> PyErr {
    invalid(
        argument,
        format!("item {index} is {got}, expected {}", T::EXPECTED),
    )
}

fn is_array_array(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    static ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    value.is_instance(ARRAY.import(value.py(), "array", "array")?)
}

/// A numpy array over the memory of `value`, which has the buffer protocol. (abi3 has it from Python 3.11 on only.)
fn array_over<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyUntypedArray>> {
    let (py, object) = (value.py(), value.as_ptr());
    // SAFETY: a live object; without a dtype, a depth, flags or a context numpy takes it as it is. The answer is a new
    // reference, or null and an exception.
    let array = unsafe {
        let array = PY_ARRAY_API.PyArray_FromAny(py, object, null_mut(), 0, 0, 0, null_mut());
        Bound::from_owned_ptr_or_err(py, array)
    }?;
    Ok(array.cast_into()?)
}
