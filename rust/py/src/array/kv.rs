//! What paged attention reads and writes in place, from checked numpy arrays. Everything goes through their strides, and
//! need not be aligned.

use leafkv_core::attention::{
    Blocks, FloatDtype, KvArray, KvDtype, KvLayer, KvLayout, KvSpec, Scales, Side, Vectors,
    VectorsMut,
};
use pyo3::prelude::*;

use super::dtype::{Dtype, Scalar};
use super::view::View;
use crate::error::to_py;

const VECTORS: &str = "float32, float16, bfloat16 or uint16 (the bits of bfloat16) of shape [tokens, heads, head_dim]";

impl<'a> View<'a> {
    /// A copy of a vector of `T`.
    pub(crate) fn vector<T: Scalar>(&self) -> PyResult<Vec<T>> {
        if self.dtype() != T::DTYPE || self.shape().len() != 1 {
            return Err(self.unlike(&format!("{} of shape [n]", T::NAME)));
        }
        Ok((0..self.shape()[0]).map(|i| self.read(i, 0)).collect())
    }

    /// A matrix of int32, to be read entry by entry.
    pub(crate) fn int32_matrix(&self) -> PyResult<impl Fn(usize, usize) -> i32> {
        self.expect(&[Dtype::I32], 2, "int32 of shape [rows, columns]")?;
        Ok(|i, j| self.read(i, j))
    }

    /// An array `[tokens, heads, head_dim]` of floats to read.
    pub(crate) fn vectors(&self) -> PyResult<Vectors<'a>> {
        let (dtype, shape, strides) = self.vectors_layout()?;
        // SAFETY: numpy vouches for shape and strides; the array lives for `'a`. That nobody writes it meanwhile is
        // the caller's duty, as documented.
        Ok(unsafe { Vectors::from_raw_parts(self.data(), dtype, shape, strides) })
    }

    /// An array `[tokens, heads, head_dim]` of floats to write, apart from all that is read.
    pub(crate) fn vectors_mut<'b>(
        &self,
        read: impl Iterator<Item = &'b View<'b>>,
    ) -> PyResult<VectorsMut<'a>> {
        let (dtype, shape, strides) = self.vectors_layout()?;
        self.expect_writable()?;
        if self.rows_overlap() {
            return Err(self.wrong(&format!(
                "strides {:?} of shape {shape:?} put rows onto each other",
                self.strides()
            )));
        }
        for other in read {
            self.expect_apart(other)?;
        }
        // SAFETY: as above; it is writable, and apart from what the call reads.
        Ok(unsafe { VectorsMut::from_raw_parts(self.data(), dtype, shape, strides) })
    }

    fn vectors_layout(&self) -> PyResult<(FloatDtype, [usize; 3], [isize; 2])> {
        let dtype = match self.dtype() {
            Dtype::F32 => FloatDtype::F32,
            Dtype::F16 => FloatDtype::F16,
            Dtype::Bf16 | Dtype::U16 => FloatDtype::Bf16,
            _ => return Err(self.unlike(VECTORS)),
        };
        let (&[tokens, heads, head_dim], strides) = (self.shape(), self.strides()) else {
            return Err(self.unlike(VECTORS));
        };
        self.expect_contiguous(2)?;
        Ok((dtype, [tokens, heads, head_dim], [strides[0], strides[1]]))
    }

    /// Whether rows of `[tokens, heads, head_dim]` may share memory. Two steps, the larger one clear of the smaller
    /// one's reach: so numpy lays out every array that was not made by hand.
    fn rows_overlap(&self) -> bool {
        let mut steps = [0, 1].map(|i| (self.strides()[i].unsigned_abs(), self.shape()[i]));
        steps.sort_unstable();
        let mut reach = self.shape()[2] * self.item_size();
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
        let [num_blocks, block @ ..] = self.shape() else {
            return Err(self.wrong("got a scalar, expected an array of blocks"));
        };
        self.expect_no_objects()?;
        self.expect_writable()?;
        self.expect_contiguous(1)?;
        let (bytes, stride) = (
            block.iter().product::<usize>() * self.item_size(),
            self.strides()[0],
        );
        if !self.is_empty() && *num_blocks > 1 && stride.unsigned_abs() < bytes {
            return Err(self.wrong("its blocks overlap each other"));
        }
        // SAFETY: numpy vouches for shape and strides; blocks are contiguous, apart and writable. That nobody else
        // uses them meanwhile is the caller's duty, as documented.
        Ok(unsafe { Blocks::from_raw_parts(self.data(), *num_blocks, stride, bytes) })
    }

    /// Pairs of blocks, int32 `[N, 2]`.
    pub(crate) fn pairs(&self) -> PyResult<Vec<(i32, i32)>> {
        let expected = "int32 of shape [N, 2]";
        self.expect(&[Dtype::I32], 2, expected)?;
        let [n, 2] = *self.shape() else {
            return Err(self.unlike(expected));
        };
        Ok((0..n).map(|i| (self.read(i, 0), self.read(i, 1))).collect())
    }

    fn kv_dtype(&self) -> Option<KvDtype> {
        match self.dtype() {
            Dtype::F32 => Some(KvDtype::F32),
            Dtype::F16 => Some(KvDtype::F16),
            Dtype::Bf16 | Dtype::U16 => Some(KvDtype::Bf16),
            Dtype::I8 => Some(KvDtype::Int8),
            _ => None,
        }
    }

    /// The scales of a cache's one side.
    fn kv_scales(&self, spec: &KvSpec) -> PyResult<Scales> {
        let shape = [spec.num_blocks, spec.num_kv_heads, spec.block_size];
        if self.dtype() != Dtype::F32 || self.shape() != shape {
            return Err(self.unlike(&format!("float32 of shape {shape:?}, one a token and head")));
        }
        self.expect_contiguous(2)?;
        Ok(Scales {
            base: self.data(),
            block_stride: self.strides()[0],
            head_stride: self.strides()[1],
        })
    }

    fn kv_array(&self) -> KvArray {
        let strides = self.strides();
        KvArray {
            base: self.data(),
            block_stride: strides[0],
            head_stride: strides[1],
            token_stride: if strides.len() == 4 { strides[2] } else { 0 },
        }
    }
}

/// The arrays of one layer's cache.
pub(crate) struct Cache<'a> {
    key: View<'a>,
    value: View<'a>,
    /// Of int8: those of keys and of values.
    scales: [Option<View<'a>>; 2],
}

impl<'a> Cache<'a> {
    pub(crate) fn new(
        key: &'a Bound<'_, PyAny>,
        value: &'a Bound<'_, PyAny>,
        k_scale: Option<&'a Bound<'_, PyAny>>,
        v_scale: Option<&'a Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let scale = |side: Side, array: Option<&'a Bound<'_, PyAny>>| {
            array
                .map(|array| View::new(side.scales_argument(), array))
                .transpose()
        };
        Ok(Self {
            key: View::new(Side::Key.argument(), key)?,
            value: View::new(Side::Value.argument(), value)?,
            scales: [scale(Side::Key, k_scale)?, scale(Side::Value, v_scale)?],
        })
    }

    /// All arrays there are.
    pub(crate) fn views(&self) -> impl Iterator<Item = &View<'a>> {
        let scales = self.scales.iter().flatten();
        [&self.key, &self.value].into_iter().chain(scales)
    }

    pub(crate) fn num_kv_heads(&self) -> PyResult<usize> {
        layout(&self.key)?;
        Ok(self.key.shape()[1])
    }

    /// The layer, checked; `head_dim` is needed to tell a tiled cache's block size.
    pub(crate) fn layer(&self, head_dim: usize) -> PyResult<KvLayer<'a>> {
        let (key, value) = (&self.key, &self.value);
        let spec = spec(key, value, head_dim)?;
        let scales = match &self.scales {
            [Some(key), Some(value)] => Some([key.kv_scales(&spec)?, value.kv_scales(&spec)?]),
            [None, None] => None,
            [Some(one), None] | [None, Some(one)] => {
                return Err(one.wrong("came alone, expected k_scale and v_scale, or neither"));
            }
        };
        // SAFETY: numpy vouches for shapes and strides, which the spec repeats; the arrays live for `'a`. That nobody
        // writes slots in use meanwhile is the caller's duty, as documented.
        unsafe { KvLayer::new(spec, key.kv_array(), value.kv_array(), scales) }.map_err(to_py)
    }

    /// Refuses arrays that cannot take new keys and values: read-only, the same memory twice, or the source itself.
    pub(crate) fn expect_storable(&self, sources: &[&View<'_>]) -> PyResult<()> {
        for (i, array) in self.views().enumerate() {
            array.expect_writable()?;
            for source in sources {
                array.expect_apart(source)?;
            }
            // Where they interleave, as in one array for all, is not looked into.
            let same = |other: &&View<'_>| other.data() == array.data() && !array.is_empty();
            if let Some(other) = self.views().take(i).find(same) {
                return Err(array.wrong(&format!("it is the memory of {}", other.argument())));
            }
        }
        Ok(())
    }
}

/// A cache's layout, told by its rank, and its axes in words.
fn layout(key: &View<'_>) -> PyResult<(KvLayout, &'static str)> {
    match key.shape().len() {
        3 => Ok((KvLayout::Tiled, "[blocks, heads, block_size * head_dim]")),
        4 => Ok((KvLayout::Rows, "[blocks, heads, block_size, head_dim]")),
        rank => {
            let problem = format!("got {rank} dimensions, expected 4 (rows) or 3 (tiled)");
            Err(key.wrong(&problem))
        }
    }
}

fn spec(key: &View<'_>, value: &View<'_>, head_dim: usize) -> PyResult<KvSpec> {
    let shape = key.shape();
    let (layout, axes) = layout(key)?;
    for array in [key, value] {
        if array.kv_dtype().is_none() || array.shape().len() != shape.len() {
            return Err(array.unlike(&format!(
                "float32, float16, bfloat16, uint16 (the bits of bfloat16) or int8 of shape {axes}"
            )));
        }
        array.expect_contiguous(shape.len() - 1)?;
    }
    let (inner, outer) = (shape[shape.len() - 1], &shape[..shape.len() - 1]);
    let dtype = key
        .kv_dtype()
        .filter(|_| value.kv_dtype() == key.kv_dtype());
    let Some(dtype) = dtype.filter(|_| value.shape().starts_with(outer)) else {
        return Err(value.unlike(&format!("those of key_cache, {}", key.what())));
    };
    if value.shape() != shape {
        return Err(value.wrong(&format!(
            "got shape {:?}, and key_cache has {shape:?}: values of another head_dim than the keys', as in \
             multi-head latent attention (MLA), are not supported",
            value.shape()
        )));
    }
    let block_size = match layout {
        KvLayout::Rows if inner != head_dim => {
            return Err(key.wrong(&format!(
                "got head_dim {inner} (shape {shape:?}), expected {head_dim}"
            )));
        }
        KvLayout::Rows => shape[2],
        KvLayout::Tiled if head_dim == 0 || !inner.is_multiple_of(head_dim) => {
            return Err(key.wrong(&format!(
                "got {inner} elements a block and head (shape {shape:?}), expected a multiple of head_dim, {head_dim}"
            )));
        }
        KvLayout::Tiled => inner / head_dim,
    };
    Ok(KvSpec {
        dtype,
        layout,
        num_blocks: shape[0],
        num_kv_heads: shape[1],
        block_size,
        head_dim,
    })
}
