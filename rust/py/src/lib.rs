//! `leafkv._core`: the thin face of `leafkv-core` towards Python. It converts, and decides nothing.

mod array;
mod attention;
mod error;
mod int;
mod manager;

/// The extension module `leafkv._core`.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::manager::{KVManager, Ready, Stats, WaitFor};

    #[pymodule_export]
    use super::attention::{
        AttentionPlan, copy_blocks, instruction_set, paged_attention, write_kv,
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
