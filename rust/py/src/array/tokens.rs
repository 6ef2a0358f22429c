//! Token ids as Python has them: numpy arrays, `array.array`, lists and other sequences of ints.
//!
//! Arrays are copied in one pass, without a Python object per token. They are read through raw pointers, never
//! borrowed as a slice: another thread of a free-threaded Python may write to them meanwhile.

use std::fmt::Display;

use leafkv_core::TokenId;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyBytes, PyList, PySequence, PyString, PyTuple, PyType};

use crate::error::invalid;
use crate::int::{integer, show};

/// Token ids, copied. An error names `argument` and the first bad position.
pub(crate) fn token_ids(
    argument: &'static str,
    value: &Bound<'_, PyAny>,
) -> PyResult<Vec<TokenId>> {
    if let Ok(array) = value.cast::<PyUntypedArray>() {
        return from_array(argument, array);
    }
    if let Ok(list) = value.cast::<PyList>() {
        return from_items(argument, list.len(), list.iter().map(Ok));
    }
    if let Ok(tuple) = value.cast::<PyTuple>() {
        return from_items(argument, tuple.len(), tuple.iter().map(Ok));
    }
    if is_array_array(value)? {
        let array = value
            .py()
            .import("numpy")?
            .call_method1("asarray", (value,))?;
        return from_array(argument, array.cast::<PyUntypedArray>()?);
    }
    let is_text = value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyByteArray>();
    match value.cast::<PySequence>() {
        // What a sequence says of its length is no reason to ask for memory.
        Ok(sequence) if !is_text => from_items(argument, 0, sequence.try_iter()?),
        _ => Err(invalid(
            argument,
            format!(
                "got {}, expected token ids: an integer array or a sequence of ints",
                show(value)
            ),
        )),
    }
}

fn from_items<'py>(
    argument: &'static str,
    len: usize,
    items: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>,
) -> PyResult<Vec<TokenId>> {
    let mut tokens = Vec::with_capacity(len);
    for item in items {
        let item = item?;
        let token = integer(&item).and_then(|token| TokenId::try_from(token).ok());
        tokens.push(token.ok_or_else(|| bad_token(argument, tokens.len(), show(&item)))?);
    }
    Ok(tokens)
}

fn from_array(argument: &'static str, array: &Bound<'_, PyUntypedArray>) -> PyResult<Vec<TokenId>> {
    let dtype = array.dtype();
    if array.ndim() != 1 {
        let problem = format!(
            "got an array of shape {:?}, expected one dimension",
            array.shape()
        );
        return Err(invalid(argument, problem));
    }
    if dtype.is_native_byteorder() != Some(false) {
        // Signed ones are sign-extended: what is negative is too large.
        match (dtype.kind(), dtype.itemsize()) {
            (b'u', 1) => return read(argument, array, |token: u8| token.into()),
            (b'u', 2) => return read(argument, array, |token: u16| token.into()),
            (b'u', 4) => return read(argument, array, |token: u32| token.into()),
            (b'u', 8) => return read(argument, array, |token: u64| token),
            (b'i', 1) => return read(argument, array, |token: i8| token as u64),
            (b'i', 2) => return read(argument, array, |token: i16| token as u64),
            (b'i', 4) => return read(argument, array, |token: i32| token as u64),
            (b'i', 8) => return read(argument, array, |token: i64| token as u64),
            _ => {}
        }
    }
    Err(invalid(
        argument,
        format!("got an array of dtype {dtype}, expected native integers"),
    ))
}

/// Copies a one-dimensional array of `T`, an integer type, of any stride and alignment.
fn read<T: Copy + Display>(
    argument: &'static str,
    array: &Bound<'_, PyUntypedArray>,
    widen: impl Fn(T) -> u64,
) -> PyResult<Vec<TokenId>> {
    let (len, stride) = (array.len(), array.strides()[0]);
    // SAFETY: the array object is alive, as `array` is.
    let data = unsafe { (*array.as_array_ptr()).fields.data }.cast::<u8>();
    // SAFETY: numpy vouches for shape and strides: item `index < len` lies within the array's memory. The caller
    // checked that items are native integers of the size of `T`, of which every bit pattern is one.
    let item = |index: usize| unsafe {
        data.offset(index as isize * stride)
            .cast::<T>()
            .read_unaligned()
    };
    let mut seen = 0;
    let mut narrow = |token: T| {
        seen |= widen(token);
        widen(token) as TokenId
    };
    // Two loops: knowing the stride is what lets the compiler vectorise.
    let tokens: Vec<TokenId> = if stride == size_of::<T>() as isize {
        // SAFETY: as above.
        let item = |index: usize| unsafe { data.cast::<T>().add(index).read_unaligned() };
        (0..len).map(|index| narrow(item(index))).collect()
    } else {
        (0..len).map(|index| narrow(item(index))).collect()
    };
    if seen <= TokenId::MAX.into() {
        return Ok(tokens);
    }
    let is_bad = |&index: &usize| widen(item(index)) > TokenId::MAX.into();
    // Another thread may have put it right meanwhile: then the first item stands for it.
    let bad = (0..len).find(is_bad).unwrap_or_default();
    Err(bad_token(argument, bad, item(bad)))
}

fn bad_token(argument: &'static str, index: usize, got: impl Display) -> PyErr {
    invalid(
        argument,
        format!(
            "item {index} is {got}, expected an int, 0 to {}",
            TokenId::MAX
        ),
    )
}

fn is_array_array(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    static ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    value.is_instance(ARRAY.import(value.py(), "array", "array")?)
}
