//! `leafkv._core`: the thin face of `leafkv-core` towards Python. It converts, and decides nothing.

mod answers;
mod array;
mod attention;
mod error;
mod events;
mod gil;
mod int;
mod linear;
mod manager;
mod ops;
mod running;
mod scope;

/// The extension module `leafkv._core`.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::manager::KVManager;

    #[pymodule_export]
    use super::answers::{Pin, Ready, Stats, WaitFor};

    #[pymodule_export]
    use super::events::{Event, Snapshot, block_digests};

    #[pymodule_export]
    use super::attention::{
        AttentionPlan, copy_blocks, instruction_set, paged_attention, write_kv,
    };

    #[pymodule_export]
    use super::linear::{Weight, embed, linear};

    #[pymodule_export]
    use super::ops::{argmax, draw, rms_norm, rope_write_kv, silu_mul, top_k};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
