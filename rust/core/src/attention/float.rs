//! Element types of queries, outputs, and new keys and values. Arithmetic is in float32: halves are widened, exactly, where
//! the kernel takes a row, and results are rounded, once, where it leaves one. Nothing else here knows of them.
//!
//! Both go a whole vector at a time; where a row ends inside one, through a copy of what is left of it.

use half::{bf16, f16};

use crate::simd::{MAX_LANES, Simd};

/// Element type of queries, outputs, and new keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FloatDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

/// A type of such elements.
pub trait Float: Copy {
    /// Which one it is.
    const DTYPE: FloatDtype;
}

impl Float for f32 {
    const DTYPE: FloatDtype = FloatDtype::F32;
}

impl Float for f16 {
    const DTYPE: FloatDtype = FloatDtype::F16;
}

impl Float for bf16 {
    const DTYPE: FloatDtype = FloatDtype::Bf16;
}

impl FloatDtype {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// One element, widened: slow.
    ///
    /// # Safety
    /// It is valid for reads.
    pub(super) unsafe fn read(self, p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::F32 => p.cast::<f32>().read_unaligned(),
                Self::F16 => f16::from_bits(p.cast::<u16>().read_unaligned()).to_f32(),
                Self::Bf16 => bf16::from_bits(p.cast::<u16>().read_unaligned()).to_f32(),
            }
        }
    }

    /// A row of `n` elements in float32, at any alignment: itself, or `room` with its elements.
    ///
    /// # Safety
    /// The row has `n` elements, and for halves `room` as many floats, in whole vectors.
    #[inline(always)]
    pub(super) unsafe fn widen<S: Simd>(
        self,
        s: S,
        row: *const u8,
        n: usize,
        room: *mut f32,
    ) -> *const f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::F32 => return row.cast(),
                Self::F16 => widen::<S, f16>(s, row.cast(), n, room),
                Self::Bf16 => widen::<S, bf16>(s, row.cast(), n, room),
            }
        }
        room
    }

    /// Where to calculate a row of `out` in float32: there, or in `room`, see [`FloatDtype::narrow`].
    #[inline(always)]
    pub(super) fn wide(self, out: *mut u8, room: *mut f32) -> *mut f32 {
        match self {
            Self::F32 => out.cast(),
            Self::F16 | Self::Bf16 => room,
        }
    }

    /// Rounds the `n` elements of `wide`, to nearest even, to a row of `out`. Floats are there already.
    ///
    /// # Safety
    /// The row has room for `n` elements, and for halves `wide` has as many floats, in whole vectors.
    #[inline(always)]
    pub(super) unsafe fn narrow<S: Simd>(self, s: S, wide: *const f32, n: usize, out: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::F32 => {}
                Self::F16 => narrow::<S, f16>(s, wide, n, out.cast()),
                Self::Bf16 => narrow::<S, bf16>(s, wide, n, out.cast()),
            }
        }
    }
}

/// Elements of 16 bits, in vectors.
///
/// # Safety of its functions
/// There are `LANES` elements, at any alignment.
#[allow(clippy::missing_safety_doc)] // said once, above
trait Half {
    unsafe fn load<S: Simd>(s: S, p: *const u16) -> S::F32;
    unsafe fn store<S: Simd>(s: S, p: *mut u16, a: S::F32);
}

macro_rules! half {
    ($type:ty, $load:ident, $store:ident) => {
        impl Half for $type {
            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, p: *const u16) -> S::F32 {
                // SAFETY: the caller's promise.
                unsafe { s.$load(p) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(s: S, p: *mut u16, a: S::F32) {
                // SAFETY: the caller's promise.
                unsafe { s.$store(p, a) };
            }
        }
    };
}

half!(f16, load_f16, store_f16);
half!(bf16, load_bf16_wide, store_bf16_narrow);

/// # Safety
/// As for [`FloatDtype::widen`].
#[inline(always)]
unsafe fn widen<S: Simd, H: Half>(s: S, row: *const u16, n: usize, to: *mut f32) {
    let (whole, left) = (n / S::LANES * S::LANES, n % S::LANES);
    // SAFETY: the caller's promise.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            s.store(to.add(i), H::load(s, row.add(i)));
        }
        if left > 0 {
            let mut piece = [0_u16; MAX_LANES];
            copy(row.add(whole), piece.as_mut_ptr(), left);
            s.store(to.add(whole), H::load(s, piece.as_ptr()));
        }
    }
}

/// # Safety
/// As for [`FloatDtype::narrow`].
#[inline(always)]
unsafe fn narrow<S: Simd, H: Half>(s: S, row: *const f32, n: usize, to: *mut u16) {
    let (whole, left) = (n / S::LANES * S::LANES, n % S::LANES);
    // SAFETY: the caller's promise.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            H::store(s, to.add(i), s.load(row.add(i)));
        }
        if left > 0 {
            let mut piece = [0_u16; MAX_LANES];
            H::store(s, piece.as_mut_ptr(), s.load(row.add(whole)));
            copy(piece.as_ptr(), to.add(whole), left);
        }
    }
}

/// Copies elements at any alignment.
///
/// # Safety
/// Both have `n` elements, apart from each other.
#[inline(always)]
unsafe fn copy(from: *const u16, to: *mut u16, n: usize) {
    // SAFETY: the caller's promise; bytes need no alignment.
    unsafe {
        to.cast::<u8>().copy_from_nonoverlapping(from.cast(), 2 * n);
    }
}
