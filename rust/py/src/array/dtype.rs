//! Element types, as far as anyone here tells them apart.

use numpy::{PyArrayDescr, PyArrayDescrMethods};
use pyo3::prelude::*;

/// A native element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dtype {
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F16,
    F32,
    /// bfloat16 as a package defines it: numpy has none.
    Bf16,
    /// Anything else, numbers of foreign byte order included.
    Other,
}

impl Dtype {
    pub(crate) fn of(descr: &Bound<'_, PyArrayDescr>, item_size: usize) -> Self {
        if descr.is_native_byteorder() == Some(false) {
            return Self::Other;
        }
        match (descr.kind(), item_size) {
            (b'i', 1) => Self::I8,
            (b'i', 2) => Self::I16,
            (b'i', 4) => Self::I32,
            (b'i', 8) => Self::I64,
            (b'u', 1) => Self::U8,
            (b'u', 2) => Self::U16,
            (b'u', 4) => Self::U32,
            (b'u', 8) => Self::U64,
            (b'f', 2) => Self::F16,
            (b'f', 4) => Self::F32,
            (_, 2) if descr.typeobj().name().is_ok_and(|name| name == "bfloat16") => Self::Bf16,
            _ => Self::Other,
        }
    }
}

/// A Rust type of which every bit pattern is a value, and its element type.
pub(crate) trait Scalar: Copy {
    const DTYPE: Dtype;
    /// numpy's name of it.
    const NAME: &'static str;
}

macro_rules! scalars {
    ($($type:ty => $dtype:ident $name:literal),* $(,)?) => {
        $(impl Scalar for $type {
            const DTYPE: Dtype = Dtype::$dtype;
            const NAME: &'static str = $name;
        })*
    };
}

scalars! { i32 => I32 "int32", i64 => I64 "int64", u64 => U64 "uint64", f32 => F32 "float32" }
