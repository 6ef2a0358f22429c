//! Weights, and products with them, as Python sees them.

use std::ops::Range;

use leafkv_core::Isa;
use leafkv_core::ops::{self, Input, LinearOptions, Precision, WeightKind};
use pyo3::prelude::*;
use pyo3::types::{PySequence, PyTuple};

use crate::array::ints::ints;
use crate::array::new::empty;
use crate::array::view::View;
use crate::error::{invalid, to_py};
use crate::gil::{BRIEF_ELEMENTS, maybe_detach};
use crate::int::{optional, unlike};

/// Products that are over before another Python thread would have noticed a released GIL.
const BRIEF_PRODUCTS: usize = 1 << 20;

/// A matrix of weights in numpy arrays, read in place.
#[pyclass(frozen, module = "leafkv._core")]
pub(crate) struct Weight {
    weight: ops::Weight<'static>,
    /// Where each part lies.
    memory: Vec<Range<usize>>,
    /// What the weights lie in.
    _arrays: Vec<Py<PyAny>>,
}

#[pymethods]
impl Weight {
    #[new]
    fn new(parts: &Bound<'_, PyAny>) -> PyResult<Self> {
        const EXPECTED: &str = "a non-empty sequence of (kind, array)";
        let Ok(sequence) = parts.cast::<PySequence>() else {
            return Err(unlike("parts", parts, EXPECTED));
        };
        let (mut rows, mut arrays, mut memory) = (Vec::new(), Vec::new(), Vec::new());
        for part in sequence.try_iter()? {
            let part = part?;
            let Ok((kind, array)) = part.extract::<(String, Bound<'_, PyAny>)>() else {
                return Err(unlike("parts", &part, "a tuple (kind, array)"));
            };
            let view = View::new("parts", &array)?;
            // SAFETY: the array is kept with the rows, and documented as not to be written to.
            rows.push(unsafe { view.weights(parse_kind(&kind)?)? });
            memory.push(view.extent());
            arrays.push(array.unbind());
        }
        if rows.is_empty() {
            return Err(unlike("parts", parts, EXPECTED));
        }
        Ok(Self {
            weight: ops::Weight::new(rows).map_err(to_py)?,
            memory,
            _arrays: arrays,
        })
    }

    /// (rows, columns).
    #[getter]
    fn shape(&self) -> (usize, usize) {
        let [rows, columns] = self.weight.shape();
        (rows, columns)
    }

    /// The kind of each part.
    #[getter]
    fn kinds<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(
            py,
            self.weight
                .kinds()
                .map(WeightKind::name)
                .collect::<Vec<_>>(),
        )
    }

    /// Bytes of all parts.
    #[getter]
    fn nbytes(&self) -> usize {
        self.memory.iter().map(Range::len).sum()
    }

    fn __repr__(&self) -> String {
        let ([rows, columns], mut kinds) = (self.weight.shape(), Vec::new());
        for kind in self.weight.kinds() {
            if kinds.last() != Some(&kind.name()) {
                kinds.push(kind.name());
            }
        }
        format!("Weight({rows} x {columns}, {})", kinds.join(" + "))
    }
}

impl Weight {
    /// Refuses to write to where weights are read.
    fn expect_apart(&self, out: &View<'_>) -> PyResult<()> {
        let mut parts = self.memory.iter();
        parts.try_for_each(|part| out.expect_apart_from(part, "weight"))
    }
}

fn parse_kind(name: &str) -> PyResult<WeightKind> {
    let known = WeightKind::ALL;
    known
        .into_iter()
        .find(|kind| kind.name() == name)
        .ok_or_else(|| {
            let names = known.map(WeightKind::name).join(", ");
            invalid(
                "parts",
                format!("got the kind {name:?}, expected one of {names}"),
            )
        })
}

/// `x` times `weight` transposed: what a linear layer computes.
#[pyfunction]
#[pyo3(signature = (x, weight, *, norm = None, eps = None, gated = false, bias = None, out = None, add = false, precision = "float32", num_threads = None))]
#[allow(clippy::too_many_arguments)] // Python's keyword arguments
pub(crate) fn linear<'py>(
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, Weight>,
    norm: Option<&Bound<'py, PyAny>>,
    eps: Option<f64>,
    gated: bool,
    bias: Option<&Bound<'py, PyAny>>,
    out: Option<Bound<'py, PyAny>>,
    add: bool,
    precision: &str,
    num_threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, num_threads) = (x.py(), optional("num_threads", num_threads)?);
    let precision = match precision {
        "float32" => Precision::Float32,
        "bfloat16" => Precision::Bfloat16,
        _ => {
            let problem = format!("got {precision:?}, expected 'float32' or 'bfloat16'");
            return Err(invalid("precision", problem));
        }
    };
    let weight = weight.get();
    let x = View::new("x", x)?;
    let bias = bias.map(|bias| View::new("bias", bias)).transpose()?;
    let norm = norm.map(|norm| View::new("norm", norm)).transpose()?;
    let input = match (&norm, eps, gated) {
        (None, None, false) => Input::Plain,
        (None, None, true) => Input::Gated,
        (Some(norm), Some(eps), false) => Input::Normed {
            weight: norm.row()?,
            eps: eps as f32,
        },
        (Some(_), Some(_), true) => {
            return Err(invalid(
                "gated",
                "got True and a norm, expected one of them",
            ));
        }
        (Some(_), None, _) => {
            return Err(invalid("eps", "got None and a norm, expected a number"));
        }
        (None, Some(eps), _) => {
            let problem = format!("got {eps:?} and no norm, expected both or neither");
            return Err(invalid("eps", problem));
        }
    };
    let from = x.rows()?;
    let ([rows, _], [outputs, inputs]) = (from.shape(), weight.weight.shape());
    if out.is_none() && add {
        return Err(invalid("add", "got True and no out to add to"));
    }
    let out = out.unwrap_or_else(|| empty(py, [rows, outputs]));
    let read = bias.iter().chain(&norm).chain([&x]);
    let to = View::new("out", &out)?;
    weight.expect_apart(&to)?;
    let mut to = to.rows_mut(read)?;
    let options = LinearOptions {
        input,
        bias: bias.as_ref().map(View::row).transpose()?,
        add,
        precision,
        num_threads,
    };
    let isa = Isa::current().map_err(to_py)?;
    let brief = rows.saturating_mul(outputs).saturating_mul(inputs) <= BRIEF_PRODUCTS;
    maybe_detach(py, brief, || {
        ops::linear(isa, &from, &weight.weight, &mut to, &options)
    })
    .map_err(to_py)?;
    Ok(out)
}

/// Rows of `weight` as float32.
#[pyfunction]
#[pyo3(signature = (weight, token_ids, *, out = None, num_threads = None))]
pub(crate) fn embed<'py>(
    weight: &Bound<'py, Weight>,
    token_ids: &Bound<'py, PyAny>,
    out: Option<Bound<'py, PyAny>>,
    num_threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, num_threads) = (weight.py(), optional("num_threads", num_threads)?);
    let ids = ints::<u32>("token_ids", token_ids)?;
    let weight = weight.get();
    let columns = weight.weight.shape()[1];
    let out = out.unwrap_or_else(|| empty(py, [ids.len(), columns]));
    let to = View::new("out", &out)?;
    weight.expect_apart(&to)?;
    let mut to = to.rows_mut([])?;
    let isa = Isa::current().map_err(to_py)?;
    let brief = ids.len() * columns <= BRIEF_ELEMENTS;
    maybe_detach(py, brief, || {
        ops::embed(isa, &weight.weight, &ids, &mut to, num_threads)
    })
    .map_err(to_py)?;
    Ok(out)
}
