//! Weights in numpy arrays, read in place for as long as they are kept.

use leafkv_core::ops::{WeightKind, WeightRows};
use pyo3::prelude::*;

use super::dtype::Dtype;
use super::view::View;

impl View<'_> {
    /// Rows of weights of a kind.
    ///
    /// # Safety
    /// The array outlives the rows, and nobody writes to it meanwhile.
    pub(crate) unsafe fn weights(&self, kind: WeightKind) -> PyResult<WeightRows<'static>> {
        let (dtypes, expected): (&[Dtype], _) = match kind {
            WeightKind::F32 => (&[Dtype::F32], "float32 of shape [rows, columns]"),
            WeightKind::F16 => (&[Dtype::F16], "float16 of shape [rows, columns]"),
            WeightKind::Bf16 => (
                &[Dtype::Bf16, Dtype::U16],
                "bfloat16, or uint16 with its bits, of shape [rows, columns]",
            ),
            _ => (&[Dtype::U8], "uint8 of shape [rows, bytes of a row]"),
        };
        self.expect(dtypes, 2, expected)?;
        self.expect_contiguous(0)?;
        let [rows, width] = [self.shape()[0], self.shape()[1]];
        let columns = match kind.is_quantized() {
            false => width,
            true => kind.columns(width).ok_or_else(|| {
                self.wrong(&format!(
                    "got rows of {width} bytes of {}, expected a multiple of {}",
                    kind.name(),
                    kind.block_bytes()
                ))
            })?,
        };
        // SAFETY: numpy vouches for shape and strides; the rest is the caller's promise.
        Ok(unsafe { WeightRows::from_raw_parts(self.data(), [rows, columns], kind) })
    }
}
