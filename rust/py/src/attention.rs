//! Paged attention as Python sees it: arguments checked, the GIL released while it is worth it.

use leafkv_core::Isa;
use leafkv_core::attention::{
    Options, Plan, PlanShape, attend, copy_blocks as copy, write_kv as write,
};
use pyo3::prelude::*;

use crate::array::kv::Cache;
use crate::array::new::{Fresh, empty};
use crate::array::view::View;
use crate::error::{invalid, to_py};
use crate::gil::{BRIEF_ELEMENTS, maybe_detach};
use crate::int::{optional, positive};

/// Who computes what in one step of paged attention; made once, used by every layer.
#[pyclass(frozen, module = "leafkv._core")]
pub(crate) struct AttentionPlan(Plan);

#[pymethods]
impl AttentionPlan {
    #[new]
    #[pyo3(signature = (block_tables, query_starts, kv_lens, *, num_heads, num_kv_heads, head_dim, block_size, num_blocks, num_threads = None))]
    #[allow(clippy::too_many_arguments)] // Python's keyword arguments
    fn new(
        block_tables: &Bound<'_, PyAny>,
        query_starts: &Bound<'_, PyAny>,
        kv_lens: &Bound<'_, PyAny>,
        num_heads: &Bound<'_, PyAny>,
        num_kv_heads: &Bound<'_, PyAny>,
        head_dim: &Bound<'_, PyAny>,
        block_size: &Bound<'_, PyAny>,
        num_blocks: &Bound<'_, PyAny>,
        num_threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let num_threads = optional("num_threads", num_threads)?;
        let shape = PlanShape {
            num_heads: positive("num_heads", num_heads)?,
            num_kv_heads: positive("num_kv_heads", num_kv_heads)?,
            head_dim: positive("head_dim", head_dim)?,
            block_size: positive("block_size", block_size)?,
            num_blocks: positive("num_blocks", num_blocks)?,
        };
        plan(block_tables, query_starts, kv_lens, shape, num_threads).map(Self)
    }

    /// Attention of every query row over its sequence's KV, see `paged_attention`.
    #[pyo3(signature = (query, key_cache, value_cache, *, scale = None, causal = true, sliding_window = None, softcap = None, alibi_slopes = None, sinks = None, k_scale = None, v_scale = None, out = None, return_lse = false))]
    #[allow(clippy::too_many_arguments)] // Python's keyword arguments
    fn attend<'py>(
        &self,
        query: &Bound<'py, PyAny>,
        key_cache: &Bound<'py, PyAny>,
        value_cache: &Bound<'py, PyAny>,
        scale: Option<f64>,
        causal: bool,
        sliding_window: Option<&Bound<'py, PyAny>>,
        softcap: Option<f64>,
        alibi_slopes: Option<&Bound<'py, PyAny>>,
        sinks: Option<&Bound<'py, PyAny>>,
        k_scale: Option<&Bound<'py, PyAny>>,
        v_scale: Option<&Bound<'py, PyAny>>,
        out: Option<Bound<'py, PyAny>>,
        return_lse: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let window = optional("sliding_window", sliding_window)?;
        let heads = PerHead::new(alibi_slopes, sinks)?;
        let dim = self.0.shape().head_dim;
        let options = options(scale, causal, window, softcap, &heads, dim);
        let query = View::new("query", query)?;
        let cache = Cache::new(key_cache, value_cache, k_scale, v_scale)?;
        let py = key_cache.py();
        run(py, &self.0, &query, &cache, &options, out, return_lse)
    }
}

/// Attention over a paged KV cache (PagedAttention, Kwon et al. 2023). Bit-equal in any batch.
#[pyfunction]
#[pyo3(signature = (query, key_cache, value_cache, block_tables, query_starts, kv_lens, *, scale = None, causal = true, sliding_window = None, softcap = None, alibi_slopes = None, sinks = None, k_scale = None, v_scale = None, out = None, return_lse = false, num_threads = None))]
#[allow(clippy::too_many_arguments)] // Python's keyword arguments
pub(crate) fn paged_attention<'py>(
    query: &Bound<'py, PyAny>,
    key_cache: &Bound<'py, PyAny>,
    value_cache: &Bound<'py, PyAny>,
    block_tables: &Bound<'py, PyAny>,
    query_starts: &Bound<'py, PyAny>,
    kv_lens: &Bound<'py, PyAny>,
    scale: Option<f64>,
    causal: bool,
    sliding_window: Option<&Bound<'py, PyAny>>,
    softcap: Option<f64>,
    alibi_slopes: Option<&Bound<'py, PyAny>>,
    sinks: Option<&Bound<'py, PyAny>>,
    k_scale: Option<&Bound<'py, PyAny>>,
    v_scale: Option<&Bound<'py, PyAny>>,
    out: Option<Bound<'py, PyAny>>,
    return_lse: bool,
    num_threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    // Numbers first: an `__index__` is Python code, which may resize an array that was looked at before.
    let window = optional("sliding_window", sliding_window)?;
    let num_threads = optional("num_threads", num_threads)?;
    let heads = PerHead::new(alibi_slopes, sinks)?;
    let query = View::new("query", query)?;
    let cache = Cache::new(key_cache, value_cache, k_scale, v_scale)?;
    let [_, num_heads, head_dim] = query.vectors()?.shape();
    let spec = *cache.layer(head_dim)?.spec();
    let shape = PlanShape {
        num_heads,
        num_kv_heads: spec.num_kv_heads,
        head_dim,
        block_size: spec.block_size,
        num_blocks: spec.num_blocks,
    };
    let options = options(scale, causal, window, softcap, &heads, head_dim);
    let plan = plan(block_tables, query_starts, kv_lens, shape, num_threads)?;
    let py = key_cache.py();
    run(py, &plan, &query, &cache, &options, out, return_lse)
}

/// Store new keys and values, [T, num_kv_heads, head_dim], at `slots` [T]; slot -1 is skipped.
#[pyfunction]
#[pyo3(signature = (key, value, key_cache, value_cache, slots, *, k_scale = None, v_scale = None))]
pub(crate) fn write_kv(
    key: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
    key_cache: &Bound<'_, PyAny>,
    value_cache: &Bound<'_, PyAny>,
    slots: &Bound<'_, PyAny>,
    k_scale: Option<&Bound<'_, PyAny>>,
    v_scale: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let py = key.py();
    let (key, value) = (View::new("key", key)?, View::new("value", value)?);
    let cache = Cache::new(key_cache, value_cache, k_scale, v_scale)?;
    let (keys, values) = (key.vectors()?, value.vectors()?);
    let layer = cache.layer(keys.shape()[2])?;
    cache.expect_storable(&[&key, &value])?;
    let slots = View::new("slots", slots)?.vector::<i64>()?;
    let brief = keys.shape().iter().product::<usize>() <= BRIEF_ELEMENTS;
    let isa = Isa::current().map_err(to_py)?;
    maybe_detach(py, brief, || write(isa, &layer, &keys, &values, &slots)).map_err(to_py)
}

/// Copy whole blocks of `cache` (first axis: blocks, each contiguous) by `(source, destination)` rows.
#[pyfunction]
pub(crate) fn copy_blocks(cache: &Bound<'_, PyAny>, pairs: &Bound<'_, PyAny>) -> PyResult<()> {
    let blocks = View::new("cache", cache)?.blocks()?;
    let pairs = View::new("pairs", pairs)?.pairs()?;
    copy(&blocks, &pairs).map_err(to_py)
}

/// The instruction set in use: "avx512-bf16", "avx512", "avx2", "neon" or "scalar".
#[pyfunction]
pub(crate) fn instruction_set() -> PyResult<String> {
    Ok(Isa::current().map_err(to_py)?.to_string())
}

fn plan(
    block_tables: &Bound<'_, PyAny>,
    query_starts: &Bound<'_, PyAny>,
    kv_lens: &Bound<'_, PyAny>,
    shape: PlanShape,
    num_threads: Option<usize>,
) -> PyResult<Plan> {
    let tables = View::new("block_tables", block_tables)?;
    let id = tables.int32_matrix()?;
    let starts = View::new("query_starts", query_starts)?.vector::<i32>()?;
    let lens = View::new("kv_lens", kv_lens)?.vector::<i32>()?;
    if tables.shape()[0] != lens.len() {
        let problem = format!(
            "got {} rows, expected one a sequence, {}",
            tables.shape()[0],
            lens.len()
        );
        return Err(invalid("block_tables", problem));
    }
    Plan::new(shape, tables.shape()[1], id, &starts, &lens, num_threads).map_err(to_py)
}

/// What a call gives for each query head, copied.
struct PerHead {
    alibi_slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
}

impl PerHead {
    fn new(
        alibi_slopes: Option<&Bound<'_, PyAny>>,
        sinks: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let copied = |argument, array: Option<&Bound<'_, PyAny>>| {
            array
                .map(|array| View::new(argument, array)?.vector())
                .transpose()
        };
        Ok(Self {
            alibi_slopes: copied("alibi_slopes", alibi_slopes)?,
            sinks: copied("sinks", sinks)?,
        })
    }
}

fn options(
    scale: Option<f64>,
    causal: bool,
    sliding_window: Option<usize>,
    softcap: Option<f64>,
    heads: &PerHead,
    head_dim: usize,
) -> Options<'_> {
    Options {
        scale: scale.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt()) as f32,
        causal,
        sliding_window,
        softcap: softcap.map(|cap| cap as f32),
        alibi_slopes: heads.alibi_slopes.as_deref(),
        sinks: heads.sinks.as_deref(),
    }
}

fn run<'py>(
    py: Python<'py>,
    plan: &Plan,
    query: &View<'_>,
    cache: &Cache<'_>,
    options: &Options<'_>,
    out: Option<Bound<'py, PyAny>>,
    return_lse: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let vectors = query.vectors()?;
    let [tokens, heads, head_dim] = vectors.shape();
    let layer = cache.layer(plan.shape().head_dim)?;
    let out = out.unwrap_or_else(|| empty(py, [tokens, heads, head_dim]));
    let read = cache.views().chain([query]);
    let mut rows = View::new("out", &out)?.vectors_mut(read)?;
    let mut lse = return_lse.then(|| Fresh::new(py, [tokens, heads]));
    let sums = lse.as_mut().map(Fresh::items);
    let isa = Isa::current().map_err(to_py)?;
    let brief = plan.is_brief(options).map_err(to_py)?;
    maybe_detach(py, brief, || {
        attend(plan, isa, &vectors, &layer, &mut rows, sums, options)
    })
    .map_err(to_py)?;
    match lse {
        Some(lse) => Ok((out, lse.into_any()).into_pyobject(py)?.into_any()),
        None => Ok(out),
    }
}
