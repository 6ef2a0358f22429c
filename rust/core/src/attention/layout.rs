//! How one layer's keys and values lie in memory: dtypes, the two layouts, checked views.
//!
//! Both layouts are arrays of blocks, then KV heads, at any byte strides (K and V of one cache are usually strided
//! views of one array). They differ inside a (block, head):
//!
//! * **rows**: tokens at any stride, `head_dim` contiguous elements each. Any block size, any head dimension.
//! * **tiled**: `block_size / 16` *tiles* of [`TILE`] consecutive tokens, contiguous, so that one vector load serves
//!   all query heads of a group without shuffles. With D = `head_dim`:
//!
//!   | dtype    | K tile         | V tile         |
//!   |----------|----------------|----------------|
//!   | f32, f16 | `[D][16]`      | `[16][D]`      |
//!   | bf16     | `[D/2][16][2]` | `[8][D][2]`    |
//!   | int8     | `[D/4][16][4]` | `[4][D][4]`    |
//!
//!   K is transposed: a vector holds one dimension (for bf16: a pair, for int8: four of them) of 16 tokens. V's vectors
//!   hold one token (a pair of tokens, four) and 16 dimensions. bf16 therefore needs an even D, int8 a multiple of 4.
//!
//! int8 has a f32 scale for each token, head and side, in arrays of their own ([`Scales`]): an element is its integer
//! times the scale.
//!
//! Memory is never seen as a `&[T]`: the caller may write other slots of it while we read, and it need not be aligned.

use std::marker::PhantomData;

use half::{bf16, f16};

use super::float::{Float, FloatDtype};
use crate::simd::Simd;
use crate::{Error, Result};

/// Tokens in a tile, in either layout the granule in which KV reaches the kernel.
pub const TILE: usize = 16;

/// Element type of a KV cache. Arithmetic is in f32, for int8 in exact integer sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Integers in -127..=127, times a scale per token and head.
    Int8,
}

impl KvDtype {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Int8 => 1,
        }
    }

    /// Neighbours that a tile keeps together: dimensions in K, tokens in V.
    pub(crate) const fn step(self) -> usize {
        match self {
            Self::F32 | Self::F16 => 1,
            Self::Bf16 => 2,
            Self::Int8 => 4,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::Int8 => "int8",
        }
    }
}

/// What lies inside a (block, head), see the module's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// One row of `head_dim` elements a token.
    Rows,
    /// Tiles of [`TILE`] tokens.
    Tiled,
}

/// Which of the two arrays of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Keys.
    Key,
    /// Values.
    Value,
}

impl Side {
    /// The argument's name as callers know it.
    pub const fn argument(self) -> &'static str {
        match self {
            Self::Key => "key_cache",
            Self::Value => "value_cache",
        }
    }

    /// The name of its scales.
    pub const fn scales_argument(self) -> &'static str {
        match self {
            Self::Key => "k_scale",
            Self::Value => "v_scale",
        }
    }
}

/// Shape and kind of one layer's cache, the same for K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSpec {
    /// Element type.
    pub dtype: KvDtype,
    /// Order inside a (block, head).
    pub layout: KvLayout,
    /// Blocks.
    pub num_blocks: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// Elements a token and head.
    pub head_dim: usize,
}

/// One array of a cache: where block 0 begins, and byte strides of blocks, heads and (in rows) tokens.
#[derive(Debug, Clone, Copy)]
pub struct KvArray {
    /// First element of block 0, head 0.
    pub base: *mut u8,
    /// Bytes from one block to the next.
    pub block_stride: isize,
    /// Bytes from one head to the next.
    pub head_stride: isize,
    /// Bytes from one token to the next; rows only.
    pub token_stride: isize,
}

/// The scales of an int8 cache's one side, f32 `[num_blocks, num_kv_heads, block_size]`: where those of block 0 begin,
/// and byte strides of blocks and heads. Those of a (block, head) are contiguous.
#[derive(Debug, Clone, Copy)]
pub struct Scales {
    /// Scale of block 0, head 0, token 0; at any alignment.
    pub base: *mut u8,
    /// Bytes from one block to the next.
    pub block_stride: isize,
    /// Bytes from one head to the next.
    pub head_stride: isize,
}

/// One layer of a KV cache.
#[derive(Debug, Clone, Copy)]
pub struct KvLayer<'a> {
    spec: KvSpec,
    key: KvArray,
    value: KvArray,
    scales: Option<[Scales; 2]>,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: a `KvLayer` is shapes and addresses; who may touch the memory, and when, is the promise of `KvLayer::new`.
unsafe impl Send for KvLayer<'_> {}
// SAFETY: as above.
unsafe impl Sync for KvLayer<'_> {}

impl<'a> KvLayer<'a> {
    /// Describes a layer. int8 needs the scales of K and V, the other dtypes have none.
    ///
    /// # Errors
    /// A dimension is zero, or the layout cannot hold this block size or head dimension; scales are missing or too many.
    ///
    /// # Safety
    /// For `'a`, every element and scale that `spec` and the strides reach is valid memory: readable, initialised, and writable
    /// if the layer is given to [`write_kv`](super::write_kv) or [`rope_write_kv`](crate::ops::rope_write_kv). While a call
    /// runs, nobody else writes a slot that it reads or writes, nor scales of the 16 slots of a block (0 to 15, 16 to 31,
    /// ...) that such a one is among.
    pub unsafe fn new(
        spec: KvSpec,
        key: KvArray,
        value: KvArray,
        scales: Option<[Scales; 2]>,
    ) -> Result<Self> {
        for (what, n) in [
            ("blocks", spec.num_blocks),
            ("KV heads", spec.num_kv_heads),
            ("tokens a block", spec.block_size),
            ("elements a head", spec.head_dim),
        ] {
            if n == 0 || i32::try_from(n).is_err() {
                return Err(Error::invalid("key_cache", format!("{n} {what}")));
            }
        }
        if spec.layout == KvLayout::Tiled {
            if !spec.block_size.is_multiple_of(TILE) {
                return Err(Error::invalid(
                    "key_cache",
                    format!(
                        "the tiled layout needs a block size that is a multiple of {TILE}, got {}",
                        spec.block_size
                    ),
                ));
            }
            if !spec.head_dim.is_multiple_of(spec.dtype.step()) {
                return Err(Error::invalid(
                    "key_cache",
                    format!(
                        "the tiled layout of {} needs a head_dim that is a multiple of {}, got {}: use the rows layout",
                        spec.dtype.name(),
                        spec.dtype.step(),
                        spec.head_dim
                    ),
                ));
            }
        }
        if scales.is_some() != (spec.dtype == KvDtype::Int8) {
            let problem = format!(
                "a cache of {} {} scales",
                spec.dtype.name(),
                if scales.is_some() { "has no" } else { "needs" }
            );
            return Err(Error::invalid(Side::Key.scales_argument(), problem));
        }
        Ok(Self {
            spec,
            key,
            value,
            scales,
            memory: PhantomData,
        })
    }

    /// Shape and kind.
    pub fn spec(&self) -> &KvSpec {
        &self.spec
    }

    fn array(&self, side: Side) -> &KvArray {
        match side {
            Side::Key => &self.key,
            Side::Value => &self.value,
        }
    }

    /// Bytes from one token's row to the next; rows only.
    pub(crate) fn token_stride(&self, side: Side) -> isize {
        self.array(side).token_stride
    }

    /// Where the row of `token` (of a block) begins; rows only.
    ///
    /// # Safety
    /// `block`, `head` and `token` are below the spec's.
    #[inline(always)]
    pub(crate) unsafe fn row(
        &self,
        side: Side,
        block: usize,
        head: usize,
        token: usize,
    ) -> *mut u8 {
        let a = self.array(side);
        // SAFETY: in bounds by the caller's promise, reachable by that of `new`.
        unsafe {
            self.head(side, block, head)
                .offset(token as isize * a.token_stride)
        }
    }

    /// Where a (block, head) begins.
    ///
    /// # Safety
    /// `block` and `head` are below the spec's.
    #[inline(always)]
    pub(crate) unsafe fn head(&self, side: Side, block: usize, head: usize) -> *mut u8 {
        let a = self.array(side);
        // SAFETY: in bounds by the caller's promise, reachable by that of `new`.
        unsafe {
            a.base
                .offset(block as isize * a.block_stride + head as isize * a.head_stride)
        }
    }

    /// The scale of `token` (of a block); those of the tokens after it in the block follow. int8 only.
    ///
    /// # Safety
    /// `block`, `head` and `token` are below the spec's, and the layer has scales.
    #[inline(always)]
    pub(crate) unsafe fn scale(
        &self,
        side: Side,
        block: usize,
        head: usize,
        token: usize,
    ) -> *mut f32 {
        // SAFETY: in bounds by the caller's promise, reachable by that of `new`.
        unsafe {
            let [key, value] = self.scales.as_ref().unwrap_unchecked();
            let a = if side == Side::Key { key } else { value };
            a.base
                .offset(block as isize * a.block_stride + head as isize * a.head_stride)
                .cast::<f32>()
                .add(token)
        }
    }

    /// Where a token's elements lie, in either layout, from the start of its (block, head).
    pub(crate) fn token_walk(&self, side: Side, token: usize) -> Walk {
        let KvSpec {
            dtype, head_dim, ..
        } = self.spec;
        let (size, step) = (dtype.size(), dtype.step());
        let (tile, i) = (token / TILE, token % TILE);
        let tile_start = tile * TILE * head_dim * size;
        let (start, run, stride) = match (self.spec.layout, side) {
            (KvLayout::Rows, _) => (token as isize * self.token_stride(side), head_dim, 0),
            (KvLayout::Tiled, Side::Key) => {
                let start = tile_start + i * step * size;
                (start as isize, step, TILE * step * size)
            }
            (KvLayout::Tiled, Side::Value) => {
                let first = i / step * head_dim * step + i % step;
                let run = if step == 1 { head_dim } else { 1 };
                ((tile_start + first * size) as isize, run, step * size)
            }
        };
        Walk {
            start,
            size,
            run,
            stride,
        }
    }

    /// One element, widened. For the oracle and tests: slow.
    ///
    /// # Panics
    /// An index is out of bounds.
    pub fn element(&self, side: Side, block: usize, head: usize, token: usize, dim: usize) -> f32 {
        let s = &self.spec;
        assert!(block < s.num_blocks && head < s.num_kv_heads);
        assert!(token < s.block_size && dim < s.head_dim);
        let walk = self.token_walk(side, token);
        // SAFETY: the indices were checked.
        unsafe {
            let p = self.head(side, block, head).offset(walk.at(dim));
            match s.dtype {
                KvDtype::F32 => p.cast::<f32>().read_unaligned(),
                KvDtype::F16 => f16::from_bits(p.cast::<u16>().read_unaligned()).to_f32(),
                KvDtype::Bf16 => bf16::from_bits(p.cast::<u16>().read_unaligned()).to_f32(),
                KvDtype::Int8 => {
                    let scale = self.scale(side, block, head, token).read_unaligned();
                    f32::from(p.cast::<i8>().read()) * scale
                }
            }
        }
    }
}

/// How to walk the elements of one token, see [`KvLayer::token_walk`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Walk {
    /// Bytes to element 0.
    start: isize,
    /// Bytes of an element.
    size: usize,
    /// How many elements lie together.
    run: usize,
    /// Bytes from one run to the next, if there is one.
    stride: usize,
}

impl Walk {
    fn at(&self, dim: usize) -> isize {
        self.start + (dim / self.run * self.stride + dim % self.run * self.size) as isize
    }

    /// Asks for the memory of a token's `dims` elements, to be written to. No run is further from the next than a line.
    #[inline(always)]
    pub(crate) fn prefetch<S: Simd>(&self, s: S, dims: usize, head: *const u8) {
        let bytes = if self.run == dims {
            dims * self.size
        } else {
            dims / self.run * self.stride
        };
        for line in (0..bytes).step_by(64) {
            s.prefetch_write(head.wrapping_offset(self.start).wrapping_add(line));
        }
    }

    /// Writes a token's elements from `first` on, whole runs or a part of the only one; `head` is the start of its
    /// (block, head).
    ///
    /// # Safety
    /// They are the token's and writable.
    #[inline(always)]
    pub(crate) unsafe fn scatter<T: Copy>(&self, first: usize, elements: &[T], head: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            let head = head.offset(self.start);
            // Each division is by a constant.
            match self.run {
                1 => spread::<T, 1>(elements, head.add(first * self.stride), self.stride),
                2 => spread::<T, 2>(elements, head.add(first / 2 * self.stride), self.stride),
                4 => spread::<T, 4>(elements, head.add(first / 4 * self.stride), self.stride),
                _ => head
                    .add(first * self.size)
                    .copy_from_nonoverlapping(elements.as_ptr().cast(), size_of_val(elements)),
            }
        }
    }
}

/// Writes runs of `N` elements, `stride` bytes apart.
///
/// # Safety
/// There is room for them.
#[inline(always)]
unsafe fn spread<T: Copy, const N: usize>(elements: &[T], mut to: *mut u8, stride: usize) {
    for run in elements.as_chunks::<N>().0 {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[T; N]>().write_unaligned(*run) };
        to = to.wrapping_add(stride);
    }
}

/// An array `[tokens, heads, head_dim]` that is read: queries, or new keys and values. The innermost dimension is
/// contiguous; strides are in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Vectors<'a> {
    base: *const u8,
    dtype: FloatDtype,
    tokens: usize,
    heads: usize,
    head_dim: usize,
    token_stride: isize,
    head_stride: isize,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: shapes and an address; the memory is readable from any thread by the promise of `from_raw_parts`.
unsafe impl Send for Vectors<'_> {}
// SAFETY: as above.
unsafe impl Sync for Vectors<'_> {}

impl<'a> Vectors<'a> {
    /// Describes an array of any alignment by its element type, its shape `[tokens, heads, head_dim]` and the byte strides
    /// of the first two dimensions.
    ///
    /// # Safety
    /// All elements are valid for reads during `'a`, and nobody writes them while a call reads them.
    pub unsafe fn from_raw_parts(
        base: *const u8,
        dtype: FloatDtype,
        shape: [usize; 3],
        strides: [isize; 2],
    ) -> Self {
        Self {
            base,
            dtype,
            tokens: shape[0],
            heads: shape[1],
            head_dim: shape[2],
            token_stride: strides[0],
            head_stride: strides[1],
            memory: PhantomData,
        }
    }

    /// A contiguous slice as `[tokens, heads, head_dim]`.
    ///
    /// # Panics
    /// The slice's length is not a multiple of `heads * head_dim`.
    pub fn from_slice<T: Float>(data: &'a [T], heads: usize, head_dim: usize) -> Self {
        let (shape, strides) = contiguous(data, heads, head_dim);
        // SAFETY: a slice is what the strides say it is.
        unsafe { Self::from_raw_parts(data.as_ptr().cast(), T::DTYPE, shape, strides) }
    }

    /// Element type.
    pub fn dtype(&self) -> FloatDtype {
        self.dtype
    }

    /// `[tokens, heads, head_dim]`.
    pub fn shape(&self) -> [usize; 3] {
        [self.tokens, self.heads, self.head_dim]
    }

    /// One element, widened. For the oracle and tests.
    ///
    /// # Panics
    /// An index is out of bounds.
    pub fn element(&self, token: usize, head: usize, dim: usize) -> f32 {
        assert!(token < self.tokens && head < self.heads && dim < self.head_dim);
        // SAFETY: the indices were checked.
        unsafe {
            let row = self.row(token, head);
            self.dtype.read(row.add(dim * self.dtype.size()))
        }
    }

    /// # Safety
    /// `token` and `head` are in bounds.
    #[inline(always)]
    pub(crate) unsafe fn row(&self, token: usize, head: usize) -> *const u8 {
        // SAFETY: in bounds by the caller's promise, valid by that of `from_raw_parts`.
        unsafe {
            self.base
                .offset(token as isize * self.token_stride + head as isize * self.head_stride)
        }
    }
}

/// An array `[tokens, heads, head_dim]` that is written: the output. Like [`Vectors`].
#[derive(Debug)]
pub struct VectorsMut<'a> {
    base: *mut u8,
    dtype: FloatDtype,
    shape: [usize; 3],
    strides: [isize; 2],
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: shapes and an address; the kernel gives every row to one thread.
unsafe impl Send for VectorsMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for VectorsMut<'_> {}

impl<'a> VectorsMut<'a> {
    /// Like [`Vectors::from_raw_parts`].
    ///
    /// # Safety
    /// All elements are valid for writes during `'a`, distinct, and nobody else reads or writes them.
    pub unsafe fn from_raw_parts(
        base: *mut u8,
        dtype: FloatDtype,
        shape: [usize; 3],
        strides: [isize; 2],
    ) -> Self {
        Self {
            base,
            dtype,
            shape,
            strides,
            memory: PhantomData,
        }
    }

    /// A contiguous slice as `[tokens, heads, head_dim]`.
    ///
    /// # Panics
    /// The slice's length is not a multiple of `heads * head_dim`.
    pub fn from_slice<T: Float>(data: &'a mut [T], heads: usize, head_dim: usize) -> Self {
        let (shape, strides) = contiguous(data, heads, head_dim);
        // SAFETY: a slice is what the strides say it is.
        unsafe { Self::from_raw_parts(data.as_mut_ptr().cast(), T::DTYPE, shape, strides) }
    }

    /// Element type.
    pub fn dtype(&self) -> FloatDtype {
        self.dtype
    }

    /// `[tokens, heads, head_dim]`.
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// # Safety
    /// `token` and `head` are in bounds.
    #[inline(always)]
    pub(crate) unsafe fn row(&self, token: usize, head: usize) -> *mut u8 {
        let [token_stride, head_stride] = self.strides;
        // SAFETY: in bounds by the caller's promise, valid by that of `from_raw_parts`.
        unsafe {
            self.base
                .offset(token as isize * token_stride + head as isize * head_stride)
        }
    }
}

/// Shape and strides of a slice.
fn contiguous<T>(data: &[T], heads: usize, head_dim: usize) -> ([usize; 3], [isize; 2]) {
    let (len, row) = (data.len(), heads * head_dim);
    assert!(
        row > 0 && len.is_multiple_of(row),
        "{len} elements are not [_, {heads}, {head_dim}]"
    );
    let strides = [row, head_dim].map(|elements| (elements * size_of::<T>()) as isize);
    ([len / row, heads, head_dim], strides)
}
