//! Norms, rotations, activations and the best logits as Python sees them: arguments checked, the GIL released while it is
//! worth it.

use leafkv_core::ops::{self, Draw, HeadNorms, Projected, Rows};
use leafkv_core::{Error, Isa};
use pyo3::prelude::*;

use crate::array::kv::Cache;
use crate::array::new::{Fresh, empty};
use crate::array::view::View;
use crate::error::{invalid, to_py};
use crate::gil::{BRIEF_ELEMENTS, maybe_detach};
use crate::int::{optional, positive};

/// Root mean square normalisation of rows (Zhang and Sennrich 2019).
#[pyfunction]
#[pyo3(signature = (x, weight, eps, *, out = None, num_threads = None))]
pub(crate) fn rms_norm<'py>(
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    eps: f64,
    out: Option<Bound<'py, PyAny>>,
    num_threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, num_threads) = (x.py(), optional("num_threads", num_threads)?);
    let (x, weight) = (View::new("x", x)?, View::new("weight", weight)?);
    let (from, scale) = (x.rows()?, weight.row()?);
    let out = out.unwrap_or_else(|| empty(py, from.shape()));
    let to = View::new("out", &out)?;
    let read = [&weight, &x];
    // It may be `x` itself.
    let apart = if to.is_same(&x) { 1 } else { 2 };
    let mut to = to.rows_mut(read.into_iter().take(apart))?;
    run(py, from.shape(), |isa| {
        ops::rms_norm(isa, &from, &scale, eps as f32, &mut to, num_threads)
    })?;
    Ok(out)
}

/// silu(gate) * up of rows that hold gate and up side by side (SwiGLU, Shazeer 2020).
#[pyfunction]
#[pyo3(signature = (gate_up, *, out = None, num_threads = None))]
pub(crate) fn silu_mul<'py>(
    gate_up: &Bound<'py, PyAny>,
    out: Option<Bound<'py, PyAny>>,
    num_threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, num_threads) = (gate_up.py(), optional("num_threads", num_threads)?);
    let gate_up = View::new("gate_up", gate_up)?;
    let from = gate_up.rows()?;
    let [rows, columns] = from.shape();
    let out = out.unwrap_or_else(|| empty(py, [rows, columns / 2]));
    let mut to = View::new("out", &out)?.rows_mut([&gate_up])?;
    run(py, from.shape(), |isa| {
        ops::silu_mul(isa, &from, &mut to, num_threads)
    })?;
    Ok(out)
}

/// Rotate queries and keys by their positions (RoPE, Su et al. 2021), and store keys and values as `write_kv` does.
#[pyfunction]
#[pyo3(signature = (qkv, cos, sin, key_cache, value_cache, slots, *, num_heads, out = None, q_norm = None, k_norm = None, eps = None, k_scale = None, v_scale = None, num_threads = None))]
#[allow(clippy::too_many_arguments)] // Python's keyword arguments
pub(crate) fn rope_write_kv<'py>(
    qkv: &Bound<'py, PyAny>,
    cos: &Bound<'py, PyAny>,
    sin: &Bound<'py, PyAny>,
    key_cache: &Bound<'py, PyAny>,
    value_cache: &Bound<'py, PyAny>,
    slots: &Bound<'py, PyAny>,
    num_heads: &Bound<'py, PyAny>,
    out: Option<Bound<'py, PyAny>>,
    q_norm: Option<&Bound<'py, PyAny>>,
    k_norm: Option<&Bound<'py, PyAny>>,
    eps: Option<f64>,
    k_scale: Option<&Bound<'py, PyAny>>,
    v_scale: Option<&Bound<'py, PyAny>>,
    num_threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, num_threads) = (qkv.py(), optional("num_threads", num_threads)?);
    let num_heads = positive("num_heads", num_heads)?;
    let (qkv, cos, sin) = (
        View::new("qkv", qkv)?,
        View::new("cos", cos)?,
        View::new("sin", sin)?,
    );
    let weights = match (q_norm, k_norm, eps) {
        (None, None, None) => None,
        (Some(q), Some(k), Some(eps)) => {
            Some((View::new("q_norm", q)?, View::new("k_norm", k)?, eps))
        }
        _ => {
            let problem =
                "came without another one of q_norm, k_norm and eps, expected all or none";
            return Err(invalid("q_norm", problem));
        }
    };
    let cache = Cache::new(key_cache, value_cache, k_scale, v_scale)?;
    let from = qkv.rows()?;
    let [tokens, columns] = from.shape();
    let kv_heads = cache.num_kv_heads()?;
    let heads = num_heads.saturating_add(2 * kv_heads);
    if !columns.is_multiple_of(heads) {
        return Err(qkv.wrong(&format!(
            "got {columns} columns, expected a multiple of {heads}: {num_heads} heads of queries, {kv_heads} of keys and \
             as many of values"
        )));
    }
    let head_dim = columns / heads;
    let layer = cache.layer(head_dim)?;
    cache.expect_storable(&[&qkv, &cos, &sin])?;
    let projected = Projected {
        qkv: from,
        cos: angles(&cos)?,
        sin: angles(&sin)?,
        norms: match &weights {
            None => None,
            Some((query, key, eps)) => Some(HeadNorms {
                query: query.row()?,
                key: key.row()?,
                eps: *eps as f32,
            }),
        },
    };
    let slots = View::new("slots", slots)?.vector::<i64>()?;
    let out = out.unwrap_or_else(|| empty(py, [tokens, num_heads, head_dim]));
    let to = View::new("out", &out)?;
    let shape = [tokens, num_heads, head_dim];
    if to.shape() != shape {
        return Err(to.unlike(&format!("float32 of shape {shape:?}")));
    }
    let read = [&qkv, &cos, &sin].into_iter().chain(cache.views());
    let read = read.chain(weights.iter().flat_map(|(query, key, _)| [query, key]));
    let mut to = to.folded_mut(3, "float32 of shape [T, num_heads, head_dim]", read)?;
    run(py, from.shape(), |isa| {
        ops::rope_write_kv(isa, &projected, &layer, &slots, &mut to, num_threads)
    })?;
    Ok(out)
}

const ANGLES: &str = "float32 of shape [T, head_dim / 2] or [T, 1, head_dim / 2]";

/// Cosines or sines, float32 `[T, head_dim / 2]`, or `[T, 1, head_dim / 2]`.
fn angles<'a>(view: &View<'a>) -> PyResult<Rows<'a>> {
    match view.shape() {
        [_, 1, _] => view.folded(3, ANGLES),
        _ => view.folded(2, ANGLES),
    }
}

/// The index of each row's largest element, the lowest among equals.
#[pyfunction]
#[pyo3(signature = (logits, *, num_threads = None))]
pub(crate) fn argmax<'py>(
    logits: &Bound<'py, PyAny>,
    num_threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, num_threads) = (logits.py(), optional("num_threads", num_threads)?);
    let rows = View::new("logits", logits)?.rows()?;
    let mut ids = Fresh::new(py, [rows.shape()[0]]);
    let out = ids.items();
    run(py, rows.shape(), |isa| {
        ops::argmax(isa, &rows, out, num_threads)
    })?;
    Ok(ids.into_any())
}

/// The k largest elements of each row, in descending order, and their indices.
#[pyfunction]
#[pyo3(signature = (logits, k, *, num_threads = None))]
pub(crate) fn top_k<'py>(
    logits: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    num_threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let (py, num_threads) = (logits.py(), optional("num_threads", num_threads)?);
    let k = positive("k", k)?;
    let from = View::new("logits", logits)?.rows()?;
    let [rows, columns] = from.shape();
    // More than there are is refused below.
    let shape = [rows, k.min(columns)];
    let (mut values, mut ids) = (Fresh::new(py, shape), Fresh::new(py, shape));
    let (best, at) = (values.items(), ids.items());
    run(py, from.shape(), |isa| {
        ops::top_k(isa, &from, k, best, at, num_threads)
    })?;
    Ok((values.into_any(), ids.into_any()))
}

/// Runs an operation on rows, without the GIL if they are many.
fn run(
    py: Python<'_>,
    shape: [usize; 2],
    operation: impl FnOnce(Isa) -> Result<(), Error> + Send,
) -> PyResult<()> {
    let isa = Isa::current().map_err(to_py)?;
    let brief = shape.into_iter().product::<usize>() <= BRIEF_ELEMENTS;
    maybe_detach(py, brief, || operation(isa)).map_err(to_py)
}

/// Of a row: its seed, its position, temperature, top-k, top-p and min-p.
type DrawTuple = (u64, u64, f64, usize, f64, f64);

/// Tokens drawn from rows of logits.
#[pyfunction]
#[pyo3(signature = (logits, draws, *, num_threads = None))]
pub(crate) fn draw<'py>(
    logits: &Bound<'py, PyAny>,
    draws: &Bound<'py, PyAny>,
    num_threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, num_threads) = (logits.py(), optional("num_threads", num_threads)?);
    let from = View::new("logits", logits)?.rows()?;
    let expected = "expected (seed, position, temperature, top_k, top_p, min_p) for each row";
    let draws: Vec<DrawTuple> = draws
        .extract()
        .map_err(|error| invalid("draws", format!("{error}, {expected}")))?;
    let draws: Vec<Draw> = draws.into_iter().map(to_draw).collect();
    let mut tokens = Fresh::new(py, [from.shape()[0]]);
    let out = tokens.items();
    run(py, from.shape(), |isa| {
        ops::draw(isa, &from, &draws, out, num_threads)
    })?;
    Ok(tokens.into_any())
}

fn to_draw((seed, position, temperature, top_k, top_p, min_p): DrawTuple) -> Draw {
    Draw {
        seed,
        position,
        temperature,
        top_k,
        top_p,
        min_p,
    }
}
