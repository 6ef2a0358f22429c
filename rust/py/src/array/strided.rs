//! numpy arrays as (pointer, shape, byte strides): what paged attention reads and writes in place.
//!
//! No Rust slice or reference to an array's memory is ever made: Python code may hold other views of it, and write
//! slots that no running call looks at. Everything is read unaligned and through the strides that numpy vouches for.

use std::marker::PhantomData;
use std::ops::Range;

use leafkv_core::attention::{
    Blocks, KvArray, KvDtype, KvLayer, KvLayout, KvSpec, Side, Vectors, VectorsMut,
};
use numpy::{
    PyArray3, PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods, npyffi,
};
use pyo3::prelude::*;

use crate::error::invalid;

const MAX_RANK: usize = 8;

/// Element types that attention knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element {
    F32,
    F16,
    /// bfloat16 itself where a package defines it, or its bits as uint16.
    Bf16,
    I32,
    I64,
    Other,
}

impl Element {
    fn of(dtype: &Bound<'_, PyArrayDescr>) -> Self {
        if dtype.is_native_byteorder() == Some(false) {
            return Self::Other;
        }
        match (dtype.kind(), dtype.itemsize()) {
            (b'f', 4) => Self::F32,
            (b'f', 2) => Self::F16,
            (b'u', 2) => Self::Bf16,
            (b'i', 4) => Self::I32,
            (b'i', 8) => Self::I64,
            (_, 2) if dtype.typeobj().name().is_ok_and(|name| name == "bfloat16") => Self::Bf16,
            _ => Self::Other,
        }
    }
}

/// An array, alive as long as `'a`. Shape and strides are copies: Python may change the array object's own.
pub(crate) struct Strided<'a> {
    argument: &'static str,
    data: *mut u8,
    element: Element,
    item_size: usize,
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [isize; MAX_RANK],
    writable: bool,
    /// Whether its items are Python objects, or point to some.
    has_object: bool,
    array: PhantomData<&'a PyUntypedArray>,
}

impl<'a> Strided<'a> {
    pub(crate) fn new(argument: &'static str, value: &'a Bound<'_, PyAny>) -> PyResult<Self> {
        let Ok(array) = value.cast::<PyUntypedArray>() else {
            let kind = value.get_type();
            return Err(invalid(
                argument,
                format!("got {kind}, expected a numpy array"),
            ));
        };
        let (rank, dtype) = (array.ndim(), array.dtype());
        if rank > MAX_RANK {
            return Err(invalid(
                argument,
                format!("got {rank} dimensions, expected at most {MAX_RANK}"),
            ));
        }
        let (mut shape, mut strides) = ([0; MAX_RANK], [0; MAX_RANK]);
        shape[..rank].copy_from_slice(array.shape());
        strides[..rank].copy_from_slice(array.strides());
        // SAFETY: the array object is alive, as `value` is; nobody changes its shape meanwhile (`array`).
        let (data, flags) = unsafe {
            let fields = &*npyffi::_PyArray_GET_ITEM_DATA(array.as_array_ptr());
            (fields.data, fields.flags)
        };
        Ok(Self {
            argument,
            data: data.cast(),
            element: Element::of(&dtype),
            item_size: dtype.itemsize(),
            rank,
            shape,
            strides,
            writable: flags & npyffi::NPY_ARRAY_WRITEABLE != 0,
            has_object: dtype.has_object(),
            array: PhantomData,
        })
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    fn expect(&self, elements: &[Element], dtypes: &str, rank: usize) -> PyResult<()> {
        if !elements.contains(&self.element) {
            return Err(self.wrong(&format!("its dtype is not {dtypes}")));
        }
        if self.rank != rank {
            return Err(self.wrong(&format!("got {} dimensions, expected {rank}", self.rank)));
        }
        Ok(())
    }

    /// Whether it has no elements, and so no memory: its strides then mean nothing.
    fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    fn expect_writable(&self) -> PyResult<()> {
        if self.writable {
            Ok(())
        } else {
            Err(self.wrong("the array is read-only"))
        }
    }

    /// Refuses an array whose dimensions from `from` on are not one contiguous piece.
    fn expect_contiguous(&self, from: usize) -> PyResult<()> {
        let mut bytes = self.item_size as isize;
        for i in (from..self.rank).rev() {
            if !self.is_empty() && self.shape[i] > 1 && self.strides[i] != bytes {
                return Err(self.wrong(&format!(
                    "strides {:?} of shape {:?}: dimensions from {from} on must be contiguous",
                    &self.strides[..self.rank],
                    self.shape()
                )));
            }
            bytes *= self.shape[i] as isize;
        }
        Ok(())
    }

    fn wrong(&self, problem: &str) -> PyErr {
        invalid(self.argument, problem)
    }

    /// The addresses between its first and its last byte.
    fn extent(&self) -> Range<usize> {
        if self.is_empty() {
            return 0..0;
        }
        let (mut low, mut high) = (0_isize, self.item_size as isize);
        for (&n, &stride) in self.shape().iter().zip(&self.strides) {
            let reach = (n as isize - 1) * stride;
            low += reach.min(0);
            high += reach.max(0);
        }
        let base = self.data as isize;
        (base + low) as usize..(base + high) as usize
    }

    /// Refuses memory that is to be written here while it is read there.
    fn expect_apart(&self, other: &Strided<'_>) -> PyResult<()> {
        let (a, b) = (self.extent(), other.extent());
        if a.start < b.end && b.start < a.end {
            return Err(self.wrong(&format!("its memory overlaps that of {}", other.argument)));
        }
        Ok(())
    }

    /// One number of a 1- or 2-dimensional array of `T`.
    fn read<T: Copy>(&self, i: usize, j: usize) -> T {
        debug_assert!(i < self.shape[0] && size_of::<T>() == self.item_size);
        // SAFETY: callers stay inside the shape, for which numpy vouches; the array is alive; unaligned.
        unsafe {
            let at = i as isize * self.strides[0] + j as isize * self.strides[1];
            self.data.offset(at).cast::<T>().read_unaligned()
        }
    }

    /// A matrix of int32, to be read entry by entry.
    pub(crate) fn int32_matrix(&self) -> PyResult<impl Fn(usize, usize) -> i32> {
        self.expect(&[Element::I32], "int32", 2)?;
        Ok(|i, j| self.read(i, j))
    }

    /// A copy of a vector of int32.
    pub(crate) fn int32_vector(&self) -> PyResult<Vec<i32>> {
        self.expect(&[Element::I32], "int32", 1)?;
        Ok((0..self.shape[0]).map(|i| self.read(i, 0)).collect())
    }

    /// A copy of a vector of int64.
    pub(crate) fn int64_vector(&self) -> PyResult<Vec<i64>> {
        self.expect(&[Element::I64], "int64", 1)?;
        Ok((0..self.shape[0]).map(|i| self.read(i, 0)).collect())
    }

    /// A float32 array `[tokens, heads, head_dim]` to read.
    pub(crate) fn vectors(&self) -> PyResult<Vectors<'a>> {
        self.expect(&[Element::F32], "float32", 3)?;
        self.expect_contiguous(2)?;
        let [t, h, d, ..] = self.shape;
        // SAFETY: numpy vouches for shape and strides; the array lives for `'a`. That nobody writes it meanwhile is
        // the caller's duty, as documented.
        Ok(unsafe {
            Vectors::from_raw_parts(self.data, [t, h, d], [self.strides[0], self.strides[1]])
        })
    }

    /// A float32 array `[tokens, heads, head_dim]` to write, apart from all that is read.
    pub(crate) fn vectors_mut(&self, read: &[&Strided<'_>]) -> PyResult<VectorsMut<'a>> {
        self.expect(&[Element::F32], "float32", 3)?;
        self.expect_contiguous(2)?;
        self.expect_writable()?;
        if self.rows_overlap() {
            return Err(self.wrong(&format!(
                "strides {:?} of shape {:?} put rows onto each other",
                &self.strides[..3],
                self.shape()
            )));
        }
        for other in read {
            self.expect_apart(other)?;
        }
        let [t, h, d, ..] = self.shape;
        // SAFETY: as above; it is writable, and apart from what the call reads.
        Ok(unsafe {
            VectorsMut::from_raw_parts(self.data, [t, h, d], [self.strides[0], self.strides[1]])
        })
    }

    /// Whether rows of `[tokens, heads, head_dim]` may share memory. Two steps, the larger one clear of the smaller
    /// one's reach: so numpy lays out every array that was not made by hand.
    fn rows_overlap(&self) -> bool {
        let mut steps = [0, 1].map(|i| (self.strides[i].unsigned_abs(), self.shape[i]));
        steps.sort_unstable();
        let mut reach = self.shape[2] * self.item_size;
        for (stride, n) in steps {
            if n > 1 && stride < reach {
                return !self.is_empty();
            }
            reach += n.saturating_sub(1) * stride;
        }
        false
    }

    /// An array of contiguous blocks to copy.
    pub(crate) fn blocks(&self) -> PyResult<Blocks> {
        if self.rank == 0 {
            return Err(self.wrong("got a scalar, expected an array of blocks"));
        }
        if self.has_object {
            return Err(self.wrong("its items are Python objects, which are more than bytes"));
        }
        self.expect_writable()?;
        self.expect_contiguous(1)?;
        let bytes = self.shape[1..self.rank].iter().product::<usize>() * self.item_size;
        if !self.is_empty() && self.shape[0] > 1 && self.strides[0].unsigned_abs() < bytes {
            return Err(self.wrong("its blocks overlap each other"));
        }
        // SAFETY: numpy vouches for shape and strides; blocks are contiguous, apart and writable. That nobody else
        // uses them meanwhile is the caller's duty, as documented.
        Ok(unsafe { Blocks::from_raw_parts(self.data, self.shape[0], self.strides[0], bytes) })
    }

    pub(crate) fn pairs(&self) -> PyResult<Vec<(i32, i32)>> {
        let id = self.int32_matrix()?;
        if self.shape[1] != 2 {
            return Err(self.wrong(&format!("got shape {:?}, expected [N, 2]", self.shape())));
        }
        Ok((0..self.shape[0]).map(|i| (id(i, 0), id(i, 1))).collect())
    }

    fn kv_array(&self) -> KvArray {
        KvArray {
            base: self.data,
            block_stride: self.strides[0],
            head_stride: self.strides[1],
            token_stride: if self.rank == 4 { self.strides[2] } else { 0 },
        }
    }
}

/// One layer's cache from its two arrays; `head_dim` is needed to tell a tiled cache's block size.
pub(crate) fn kv_layer<'a>(
    key: &Strided<'a>,
    value: &Strided<'a>,
    head_dim: usize,
) -> PyResult<KvLayer<'a>> {
    let layout = match key.rank {
        3 => KvLayout::Tiled,
        4 => KvLayout::Rows,
        rank => {
            let problem = format!("got {rank} dimensions, expected 4 (rows) or 3 (tiled)");
            return Err(invalid(Side::Key.argument(), problem));
        }
    };
    for array in [key, value] {
        array.expect(
            &[Element::F32, Element::F16, Element::Bf16],
            "float32, float16, bfloat16 or uint16 (the bits of bfloat16)",
            key.rank,
        )?;
        array.expect_contiguous(key.rank - 1)?;
    }
    if value.shape != key.shape || value.element != key.element {
        return Err(value.wrong(&format!(
            "got shape {:?} and {:?}, expected those of key_cache, {:?} and {:?}",
            value.shape(),
            value.element,
            key.shape(),
            key.element
        )));
    }
    let inner = key.shape[key.rank - 1];
    let block_size = match layout {
        KvLayout::Rows if inner != head_dim => {
            return Err(key.wrong(&format!(
                "got head_dim {inner} (shape {:?}), expected {head_dim}",
                key.shape()
            )));
        }
        KvLayout::Rows => key.shape[2],
        KvLayout::Tiled if head_dim == 0 || !inner.is_multiple_of(head_dim) => {
            return Err(key.wrong(&format!(
                "got {inner} elements a block and head (shape {:?}), expected a multiple of head_dim, {head_dim}",
                key.shape()
            )));
        }
        KvLayout::Tiled => inner / head_dim,
    };
    let spec = KvSpec {
        dtype: match key.element {
            Element::F16 => KvDtype::F16,
            Element::Bf16 => KvDtype::Bf16,
            _ => KvDtype::F32,
        },
        layout,
        num_blocks: key.shape[0],
        num_kv_heads: key.shape[1],
        block_size,
        head_dim,
    };
    // SAFETY: numpy vouches for shapes and strides, which the spec repeats; the arrays live for `'a`. That nobody
    // writes slots in use meanwhile is the caller's duty, as documented.
    unsafe { KvLayer::new(spec, key.kv_array(), value.kv_array()) }.map_err(crate::error::to_py)
}

/// Refuses caches that cannot take new keys and values: read-only, the same memory twice, or the source itself.
pub(crate) fn expect_storable(
    caches: [&Strided<'_>; 2],
    sources: [&Strided<'_>; 2],
) -> PyResult<()> {
    for cache in caches {
        cache.expect_writable()?;
        for source in sources {
            cache.expect_apart(source)?;
        }
    }
    if caches[0].data == caches[1].data && !caches[0].extent().is_empty() {
        return Err(caches[1].wrong("it is the memory of key_cache"));
    }
    Ok(())
}

/// A new float32 array `[tokens, heads, head_dim]`, whose every element the caller will write.
pub(crate) fn empty(py: Python<'_>, shape: [usize; 3]) -> Bound<'_, PyAny> {
    // SAFETY: floats have no invalid bits, and the kernel writes all before Python sees any.
    unsafe { PyArray3::<f32>::new(py, shape, false) }.into_any()
}
