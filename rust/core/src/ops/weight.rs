//! Matrices of weights as files have them: row-major, in the caller's memory, some of them quantized.

use std::marker::PhantomData;

use crate::{Error, Result};

/// Columns of a quantized block, and of one step of the kernel.
pub(super) const BLOCK: usize = 32;

/// How the elements of a row are stored. The quantized ones are GGUF's: a row is blocks of 32 elements, each with a
/// scale d (f16) in front.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightKind {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// d, 32 signed bytes q: d q.
    Q8_0,
    /// d, 16 bytes, whose lower halves are the first 16 elements q, the upper ones the others: d (q - 8), where 0 is never
    /// negative.
    Q4_0,
    /// d, an offset m (f16), and bytes as in `Q4_0`: d q + m.
    Q4_1,
}

impl WeightKind {
    /// Every kind.
    pub const ALL: [Self; 6] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
    ];

    /// What callers call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
        }
    }

    /// Bytes of 32 elements.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4 * BLOCK,
            Self::F16 | Self::Bf16 => 2 * BLOCK,
            Self::Q8_0 => 2 + BLOCK,
            Self::Q4_0 => 2 + BLOCK / 2,
            Self::Q4_1 => 4 + BLOCK / 2,
        }
    }

    /// Whether a row is made of whole blocks.
    pub const fn is_quantized(self) -> bool {
        matches!(self, Self::Q8_0 | Self::Q4_0 | Self::Q4_1)
    }

    /// Columns of a row of so many bytes of quantized blocks; `None` where they are not whole.
    pub const fn columns(self, row_bytes: usize) -> Option<usize> {
        match row_bytes.is_multiple_of(self.block_bytes()) {
            true => Some(row_bytes / self.block_bytes() * BLOCK),
            false => None,
        }
    }

    /// Bytes of a row; `None` where quantized blocks do not fill it.
    pub const fn row_bytes(self, columns: usize) -> Option<usize> {
        match self.is_quantized() && !columns.is_multiple_of(BLOCK) {
            true => None,
            // No float has a fraction of a byte.
            false => Some(columns * self.block_bytes() / BLOCK),
        }
    }
}

/// Rows of one kind, one after another in memory, at any alignment.
#[derive(Debug, Clone, Copy)]
pub struct WeightRows<'a> {
    pub(super) base: *const u8,
    pub(super) rows: usize,
    columns: usize,
    pub(super) kind: WeightKind,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: an address and a shape; the memory is readable from any thread by the promise of `from_raw_parts`.
unsafe impl Send for WeightRows<'_> {}
// SAFETY: as above.
unsafe impl Sync for WeightRows<'_> {}

impl<'a> WeightRows<'a> {
    /// # Safety
    /// `rows` rows of [`WeightKind::row_bytes`] of `columns` each are valid for reads during `'a`, and nobody writes them.
    /// Where no row has so many columns, nothing is read.
    pub unsafe fn from_raw_parts(
        base: *const u8,
        [rows, columns]: [usize; 2],
        kind: WeightKind,
    ) -> Self {
        Self {
            base,
            rows,
            columns,
            kind,
            memory: PhantomData,
        }
    }
}

/// A matrix: the rows of its parts, one after another. A row is what one output is made with.
#[derive(Debug)]
pub struct Weight<'a> {
    pub(super) parts: Vec<WeightRows<'a>>,
    rows: usize,
    columns: usize,
}

impl<'a> Weight<'a> {
    /// # Errors
    /// There is no part, or no column, or not as many in each part, or they are not whole blocks of a part's kind.
    pub fn new(parts: Vec<WeightRows<'a>>) -> Result<Self> {
        let wrong = |problem: String| Err(Error::invalid("parts", problem));
        let columns = parts.first().map_or(0, |part| part.columns);
        if columns == 0 {
            return wrong(format!(
                "got {} parts of {columns} columns, expected at least one of each",
                parts.len()
            ));
        }
        if let Some(part) = parts.iter().find(|part| part.columns != columns) {
            return wrong(format!(
                "got {} columns beside {columns}, expected as many",
                part.columns
            ));
        }
        if let Some(part) = parts.iter().find(|p| p.kind.row_bytes(columns).is_none()) {
            let kind = part.kind.name();
            return wrong(format!(
                "got {columns} columns of {kind}, expected a multiple of {BLOCK}"
            ));
        }
        let rows = parts.iter().map(|part| part.rows).sum();
        Ok(Self {
            parts,
            rows,
            columns,
        })
    }

    /// `[rows, columns]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Bytes from one row of a part to the next.
    pub(super) fn stride(&self, part: &WeightRows<'_>) -> usize {
        // `new` has seen that there is such a number.
        part.kind.row_bytes(self.columns).unwrap_or(0)
    }

    /// The part that row `index` is of, and where the row begins.
    ///
    /// # Panics
    /// There is no such row.
    pub(super) fn row(&self, mut index: usize) -> (&WeightRows<'a>, *const u8) {
        for part in &self.parts {
            if index < part.rows {
                return (part, part.base.wrapping_add(index * self.stride(part)));
            }
            index -= part.rows;
        }
        panic!("no such row");
    }

    /// The kind of each part.
    pub fn kinds(&self) -> impl Iterator<Item = WeightKind> {
        self.parts.iter().map(|part| part.kind)
    }
}
