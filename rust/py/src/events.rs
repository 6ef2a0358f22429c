//! What a `KVManager` tells of its prefix cache.

use std::sync::Arc;

use leafkv_core::{Change, Digest, Media};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::array::ints::ints;
use crate::error::{invalid, to_py};
use crate::int::{int, positive, unlike};
use crate::scope::{Namespace, media as spans, to_digest};

/// One change of the prefix cache. Blocks are named by their digests, see `block_digests`.
///
/// * `"stored"`: `blocks`, each the parent of the next, can be found from now on.
/// * `"reused"`: a prompt was served from `blocks`, its first ones.
/// * `"removed"`: `blocks` cannot be found any more; children before their parents.
/// * `"cleared"`: nothing of `namespace` (of any, if it is None) can be found any more.
///
/// Every access makes a new object, so keep what is needed more than once. Events compare by value, and can be pickled.
#[pyclass(frozen, eq, module = "leafkv._core")]
#[derive(PartialEq, Eq)]
pub(crate) struct Event(leafkv_core::Event);

impl From<leafkv_core::Event> for Event {
    fn from(event: leafkv_core::Event) -> Self {
        Self(event)
    }
}

impl Event {
    fn namespace_bytes(&self) -> Option<&[u8]> {
        match &self.0.change {
            Change::Stored { namespace, .. }
            | Change::Reused { namespace, .. }
            | Change::Removed { namespace, .. } => Some(namespace),
            Change::Cleared { namespace } => namespace.as_deref(),
        }
    }

    fn digests(&self) -> &[Digest] {
        match &self.0.change {
            Change::Stored { blocks, .. }
            | Change::Reused { blocks, .. }
            | Change::Removed { blocks, .. } => blocks,
            Change::Cleared { .. } => &[],
        }
    }
}

#[pymethods]
impl Event {
    #[new]
    #[pyo3(signature = (number, kind, namespace=None, blocks=None, parent=None, tokens=None, media=None))]
    #[pyo3(
        text_signature = "(number, kind, namespace=None, blocks=(), parent=None, tokens=(), media=())"
    )]
    fn new(
        number: &Bound<'_, PyAny>,
        kind: &Bound<'_, PyAny>,
        namespace: Option<Namespace<'_>>,
        blocks: Option<&Bound<'_, PyAny>>,
        parent: Option<&Bound<'_, PyAny>>,
        tokens: Option<&Bound<'_, PyAny>>,
        media: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let number = int("number", number)?;
        let named = namespace.map(|namespace| Arc::<[u8]>::from(namespace.0));
        let namespace = || {
            let problem = "got None, expected bytes: only \"cleared\" is of all namespaces";
            named.clone().ok_or_else(|| invalid("namespace", problem))
        };
        let blocks = || digests(blocks);
        let change = match kind.extract::<String>().as_deref() {
            Ok("stored") => Change::Stored {
                namespace: namespace()?,
                parent: parent
                    .map(|parent| {
                        to_digest(parent).map_err(|got| invalid("parent", format!("got {got}")))
                    })
                    .transpose()?,
                blocks: blocks()?,
                tokens: tokens.map_or(Ok(Vec::new()), |tokens| ints("tokens", tokens))?,
                media: spans(media)?,
            },
            Ok("reused") => Change::Reused {
                namespace: namespace()?,
                blocks: blocks()?,
            },
            Ok("removed") => Change::Removed {
                namespace: namespace()?,
                blocks: blocks()?,
            },
            Ok("cleared") => Change::Cleared {
                namespace: named.clone(),
            },
            _ => return Err(unlike("kind", kind, "stored, reused, removed or cleared")),
        };
        Ok(Self(leafkv_core::Event { number, change }))
    }

    /// Events can be pickled: a router may be another process.
    fn __getnewargs__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let parts = (
            self.number(),
            self.kind(),
            self.namespace(py),
            self.blocks(py)?,
            self.parent(py),
            self.tokens(py),
            self.media(py),
        );
        parts.into_pyobject(py)
    }

    /// 0, 1, 2, …: a number that is missing is an event that was dropped. In a snapshot: the snapshot's.
    #[getter]
    fn number(&self) -> u64 {
        self.0.number
    }

    /// What happened: "stored", "reused", "removed" or "cleared".
    #[getter]
    fn kind(&self) -> &'static str {
        match self.0.change {
            Change::Stored { .. } => "stored",
            Change::Reused { .. } => "reused",
            Change::Removed { .. } => "removed",
            Change::Cleared { .. } => "cleared",
        }
    }

    /// The namespace of the blocks. None: all namespaces were cleared.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.namespace_bytes().map(|bytes| PyBytes::new(py, bytes))
    }

    /// The digests of the blocks, 32 bytes each.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        digest_list(py, self.digests())
    }

    /// Of `"stored"`: the digest of the block before the first one. None at the start of a prompt.
    #[getter]
    fn parent<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        match &self.0.change {
            Change::Stored { parent, .. } => parent.map(|digest| PyBytes::new(py, &digest)),
            _ => None,
        }
    }

    /// Of `"stored"`: the tokens of the blocks, uint32 [len(blocks) * block_size]. Otherwise empty.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        match &self.0.change {
            Change::Stored { tokens, .. } => PyArray1::from_slice(py, tokens),
            _ => PyArray1::from_slice(py, &[]),
        }
    }

    /// Of `"stored"`: the media spans that touch the blocks, at their positions in the prompt. Otherwise empty.
    #[getter]
    fn media<'py>(&self, py: Python<'py>) -> Vec<(usize, usize, Bound<'py, PyBytes>)> {
        match &self.0.change {
            Change::Stored { media, .. } => media.iter().map(|span| triple(py, span)).collect(),
            _ => Vec::new(),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let namespace = self.namespace(py).into_pyobject(py)?.repr()?;
        let (number, kind, blocks) = (self.0.number, self.kind(), self.digests().len());
        Ok(format!(
            "Event(number={number}, kind='{kind}', namespace={namespace}, {blocks} blocks)"
        ))
    }
}

/// All that the prefix cache had at one moment. Snapshots compare by value, and can be pickled.
#[pyclass(frozen, eq, module = "leafkv._core")]
#[derive(PartialEq, Eq)]
pub(crate) struct Snapshot(leafkv_core::Snapshot);

impl From<leafkv_core::Snapshot> for Snapshot {
    fn from(snapshot: leafkv_core::Snapshot) -> Self {
        Self(snapshot)
    }
}

#[pymethods]
impl Snapshot {
    #[new]
    #[pyo3(signature = (number, stored=None))]
    #[pyo3(text_signature = "(number, stored=())")]
    fn new(number: &Bound<'_, PyAny>, stored: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let number = int("number", number)?;
        let change = |event: PyResult<Bound<'_, PyAny>>| {
            let event = event?;
            match event.cast::<Event>().map(|event| &event.get().0.change) {
                Ok(change @ Change::Stored { .. }) => Ok(change.clone()),
                _ => Err(unlike("stored", &event, "events of kind stored")),
            }
        };
        let stored = stored.map(|events| events.try_iter()?.map(change).collect());
        Ok(Self(leafkv_core::Snapshot {
            number,
            stored: stored.transpose()?.unwrap_or_default(),
        }))
    }

    fn __getnewargs__(&self) -> (u64, Vec<Event>) {
        (self.number(), self.stored())
    }

    /// The number of the first event after it.
    #[getter]
    fn number(&self) -> u64 {
        self.0.number
    }

    /// All blocks, as events of kind `"stored"`: parents before their children.
    #[getter]
    fn stored(&self) -> Vec<Event> {
        let event = |change: &Change| leafkv_core::Event {
            number: self.0.number,
            change: change.clone(),
        };
        self.0.stored.iter().map(event).map(Event).collect()
    }

    fn __repr__(&self) -> String {
        let blocks = |change: &Change| match change {
            Change::Stored { blocks, .. } => blocks.len(),
            _ => 0,
        };
        let blocks: usize = self.0.stored.iter().map(blocks).sum();
        format!("Snapshot(number={}, {blocks} blocks)", self.0.number)
    }
}

/// The argument `blocks`: a sequence of digests.
fn digests(blocks: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<Digest>> {
    let Some(blocks) = blocks else {
        return Ok(Vec::new());
    };
    let digest = |(index, block): (usize, PyResult<Bound<'_, PyAny>>)| {
        let problem = |got| invalid("blocks", format!("item {index} is {got}"));
        to_digest(&block?).map_err(problem)
    };
    blocks.try_iter()?.enumerate().map(digest).collect()
}

/// The digests of the whole blocks of `tokens`, 32 bytes each: names of blocks that every process agrees on.
///
/// A digest stands for the tokens up to the end of its block, the media among them, `namespace` and `block_size`. The
/// format is fixed: BLAKE3 over the digest of the block before it, the tokens, and the spans that touch the block.
#[pyfunction]
#[pyo3(signature = (tokens, block_size, namespace=Namespace(b""), media=None))]
#[pyo3(text_signature = "(tokens, block_size, namespace=b'', media=())")]
pub(crate) fn block_digests<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    block_size: &Bound<'py, PyAny>,
    namespace: Namespace<'_>,
    media: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    let tokens = ints("tokens", tokens)?;
    let block_size = positive("block_size", block_size)?;
    let media = spans(media)?;
    let digests = leafkv_core::block_digests(block_size, &tokens, namespace.with(&media));
    digest_list(py, &digests.map_err(to_py)?)
}

fn digest_list<'py>(py: Python<'py>, digests: &[Digest]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, digests.iter().map(|digest| PyBytes::new(py, digest)))
}

fn triple<'py>(py: Python<'py>, span: &Media) -> (usize, usize, Bound<'py, PyBytes>) {
    (span.start, span.length, PyBytes::new(py, &span.digest))
}
