//! `KVManager` and its answers. A call converts its arguments, takes the lock, and converts the result.
//!
//! Python is never called under the lock: it could run a finalizer that comes back to the same manager. Calls take
//! microseconds, so the GIL stays. On free-threaded Python the lock alone orders calls; a thread that waits for it holds
//! up a garbage collection at most, and only that long.

use std::sync::Mutex;

use leafkv_core::{Admission, BlockId, Error, KvManager, Result};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::array::out::Rows;
use crate::array::tokens::token_ids;
use crate::error::{invalid, to_py};
use crate::int::{count, each, sequence_id, show};

/// `KVManager.begin` admitted the sequence; it now holds the blocks of its prefix hit.
#[pyclass(frozen, get_all, module = "leafkv._core")]
pub(crate) struct Ready {
    /// Tokens whose KV is found in the prefix cache: a multiple of the block size, less than the prompt.
    cached_tokens: usize,
}

#[pymethods]
impl Ready {
    fn __repr__(&self) -> String {
        format!("Ready(cached_tokens={})", self.cached_tokens)
    }
}

/// `KVManager.begin` did not admit the sequence: a running one is computing a prefix they share.
///
/// Nothing was recorded. Call `begin` again once `leader` has committed `tokens` tokens, or has ended.
#[pyclass(frozen, get_all, module = "leafkv._core")]
pub(crate) struct WaitFor {
    /// The id of the running sequence.
    leader: u64,
    /// How many tokens the leader must have committed: whole blocks, shared with this prompt.
    tokens: usize,
}

#[pymethods]
impl WaitFor {
    fn __repr__(&self) -> String {
        format!("WaitFor(leader={}, tokens={})", self.leader, self.tokens)
    }
}

/// Counters of a `KVManager`, read at once. Counters only ever rise; blocks are as of now.
#[pyclass(frozen, module = "leafkv._core")]
pub(crate) struct Stats(leafkv_core::Stats);

#[pymethods]
impl Stats {
    #[getter]
    fn num_blocks(&self) -> usize {
        self.0.num_blocks
    }

    #[getter]
    fn free_blocks(&self) -> usize {
        self.0.free_blocks
    }

    #[getter]
    fn cached_blocks(&self) -> usize {
        self.0.cached_blocks
    }

    #[getter]
    fn held_blocks(&self) -> usize {
        self.0.held_blocks
    }

    /// High-water mark of `held_blocks`.
    #[getter]
    fn max_held_blocks(&self) -> usize {
        self.0.max_held_blocks
    }

    #[getter]
    fn sequences(&self) -> usize {
        self.0.sequences
    }

    /// Tokens of all prompts that were begun and then given slots.
    #[getter]
    fn query_tokens(&self) -> u64 {
        self.0.query_tokens
    }

    /// Those of `query_tokens` that were found in the prefix cache.
    #[getter]
    fn hit_tokens(&self) -> u64 {
        self.0.hit_tokens
    }

    #[getter]
    fn evicted_blocks(&self) -> u64 {
        self.0.evicted_blocks
    }

    fn __repr__(&self) -> String {
        let stats = format!("{:?}", self.0).replace(": ", "=");
        stats.replace(" { ", "(").replace(" }", ")")
    }
}

/// Block tables, block pool and radix-tree prefix cache of one KV memory.
///
/// Bookkeeping only: it names blocks and slots and never touches the KV itself. Every call is atomic: it
/// succeeds, or raises and changes nothing. Safe to call from many threads.
///
/// Args:
///     num_blocks: Size of the pool, in blocks, 1 to 2**31 - 1.
///     block_size: Tokens per block, >= 1.
///     enable_prefix_caching: False keeps nothing after a sequence ends, and shares nothing.
#[pyclass(frozen, module = "leafkv._core")]
pub(crate) struct KVManager {
    core: Mutex<KvManager>,
    num_blocks: usize,
    block_size: usize,
}

impl KVManager {
    fn with<T>(&self, call: impl FnOnce(&mut KvManager) -> Result<T>) -> PyResult<T> {
        let broken = |_| Error::Invariant("an earlier call to this manager panicked".to_owned());
        // A statement of its own: the lock is gone before an exception is made.
        let result = self
            .core
            .lock()
            .map_err(broken)
            .and_then(|mut core| call(&mut core));
        result.map_err(to_py)
    }
}

#[pymethods]
impl KVManager {
    #[new]
    #[pyo3(signature = (num_blocks, block_size=None, *, enable_prefix_caching=true))]
    #[pyo3(text_signature = "(num_blocks, block_size=16, *, enable_prefix_caching=True)")]
    fn new(
        num_blocks: &Bound<'_, PyAny>,
        block_size: Option<&Bound<'_, PyAny>>,
        enable_prefix_caching: bool,
    ) -> PyResult<Self> {
        let num_blocks = count("num_blocks", num_blocks)?;
        let block_size = block_size.map_or(Ok(16), |size| count("block_size", size))?;
        let core = KvManager::new(num_blocks, block_size, enable_prefix_caching).map_err(to_py)?;
        Ok(Self {
            core: Mutex::new(core),
            num_blocks,
            block_size,
        })
    }

    #[getter]
    fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    /// Free plus evictable blocks: what admission may count on. O(1).
    #[getter]
    fn allocatable_blocks(&self) -> PyResult<usize> {
        self.with(|core| Ok(core.allocatable_blocks()))
    }

    /// Tokens that `begin` would find cached now. No side effects.
    #[pyo3(signature = (tokens, namespace=Namespace(b"")))]
    #[pyo3(text_signature = "($self, tokens, namespace=b'')")]
    fn lookup(&self, tokens: &Bound<'_, PyAny>, namespace: Namespace<'_>) -> PyResult<usize> {
        let tokens = token_ids("tokens", tokens)?;
        self.with(|core| Ok(core.lookup(&tokens, namespace.0)))
    }

    /// Start a sequence; on `Ready` it holds its prefix hit (lookup and lock are one act).
    ///
    /// A hit is in whole blocks and leaves at least one token to compute.
    ///
    /// Raises:
    ///     InvalidInputError: `seq_id` is live, `tokens` is empty, malformed or cannot fit the pool.
    #[pyo3(signature = (seq_id, tokens, namespace=Namespace(b"")))]
    #[pyo3(text_signature = "($self, seq_id, tokens, namespace=b'')")]
    fn begin<'py>(
        &self,
        py: Python<'py>,
        seq_id: &Bound<'py, PyAny>,
        tokens: &Bound<'py, PyAny>,
        namespace: Namespace<'_>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let id = sequence_id("seq_id", seq_id)?;
        let tokens = token_ids("tokens", tokens)?;
        match self.with(|core| core.begin(id, tokens, namespace.0))? {
            Admission::Ready { cached_tokens } => Ready { cached_tokens }.into_bound_py_any(py),
            Admission::WaitFor { leader, tokens } => {
                WaitFor { leader, tokens }.into_bound_py_any(py)
            }
        }
    }

    /// Reserve slots for `n` more tokens, all or nothing. May owe block copies, see `copies`.
    ///
    /// Raises:
    ///     OutOfBlocksError: not enough blocks, even after eviction.
    fn grow(&self, seq_id: &Bound<'_, PyAny>, n: &Bound<'_, PyAny>) -> PyResult<()> {
        let (id, n) = (sequence_id("seq_id", seq_id)?, count("n", n)?);
        self.with(|core| core.grow(id, n))
    }

    /// Declare that the KV of the first `n` tokens is written.
    ///
    /// `new_tokens` appends ids beyond those known so far (the prompt, then earlier `new_tokens`). Full blocks
    /// become findable; where another sequence committed the same block first, this block table is re-pointed to it.
    #[pyo3(signature = (seq_id, n, new_tokens=None))]
    #[pyo3(text_signature = "($self, seq_id, n, new_tokens=())")]
    fn commit(
        &self,
        seq_id: &Bound<'_, PyAny>,
        n: &Bound<'_, PyAny>,
        new_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (id, n) = (sequence_id("seq_id", seq_id)?, count("n", n)?);
        let tokens = new_tokens.map_or(Ok(Vec::new()), |tokens| token_ids("new_tokens", tokens))?;
        self.with(|core| core.commit(id, n, &tokens))
    }

    /// Start `child_id` with the committed tokens and blocks of `parent_id` (copy-on-write).
    fn fork(&self, parent_id: &Bound<'_, PyAny>, child_id: &Bound<'_, PyAny>) -> PyResult<()> {
        let parent = sequence_id("parent_id", parent_id)?;
        let child = sequence_id("child_id", child_id)?;
        self.with(|core| core.fork(parent, child))
    }

    /// Drop everything beyond the first `n` tokens: reserved slots, and committed tokens if any.
    fn truncate(&self, seq_id: &Bound<'_, PyAny>, n: &Bound<'_, PyAny>) -> PyResult<()> {
        let (id, n) = (sequence_id("seq_id", seq_id)?, count("n", n)?);
        self.with(|core| core.truncate(id, n))
    }

    /// End a sequence: finish, abort and preempt are this one act. Its full committed blocks stay cached.
    fn release(&self, seq_id: &Bound<'_, PyAny>) -> PyResult<()> {
        let id = sequence_id("seq_id", seq_id)?;
        self.with(|core| core.release(id))
    }

    /// Block copies owed, as int32 `(source, destination)` rows, shape [N, 2]; each is handed out once.
    ///
    /// Copy them, all sources read before any destination is written, before any other write of the step.
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let copies = self.with(|core| Ok(core.copies()))?;
        let pairs = copies
            .iter()
            .flat_map(|copy| [copy.source, copy.destination])
            .map(id_to_i32);
        PyArray1::from_iter(py, pairs).reshape([copies.len(), 2])
    }

    /// Write the block table of each sequence to a row of `out`, int32 [len(seq_ids), >= blocks of the longest].
    ///
    /// Entries past a sequence's blocks keep their value.
    fn tables(&self, seq_ids: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = each("seq_ids", seq_ids, sequence_id)?;
        let mut out = Rows::<i32>::new("out", out, 2)?;
        self.with(|core| {
            let tables = ids
                .iter()
                .map(|&id| core.block_table(id))
                .collect::<Result<Vec<_>>>()?;
            let longest = tables.iter().map(|table| table.len()).max().unwrap_or(0);
            if out.rows() != ids.len() || out.columns() < longest {
                let (rows, columns) = (out.rows(), out.columns());
                let problem = format!(
                    "got shape [{rows}, {columns}], expected [{}, >= {longest}]",
                    ids.len()
                );
                return Err(Error::invalid("out", problem));
            }
            for (row, table) in tables.iter().enumerate() {
                out.write(row, 0, table.iter().copied().map(id_to_i32));
            }
            Ok(())
        })
    }

    /// Write the slots of the next `counts[i]` uncommitted tokens of each sequence, one after another.
    ///
    /// `out` is int64 [sum(counts)]; the tokens must have been reserved by `grow`.
    fn slots(
        &self,
        seq_ids: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let ids = each("seq_ids", seq_ids, sequence_id)?;
        let counts = each("counts", counts, count)?;
        if ids.len() != counts.len() {
            let problem = format!(
                "got {}, expected one for each of the {} sequences",
                counts.len(),
                ids.len()
            );
            return Err(invalid("counts", problem));
        }
        let mut out = Rows::<i64>::new("out", out, 1)?;
        self.with(|core| {
            let pairs = ids.iter().zip(&counts);
            let runs = pairs
                .map(|(&id, &n)| core.slots(id, n))
                .collect::<Result<Vec<_>>>()?;
            let total: usize = counts.iter().sum();
            if out.columns() != total {
                return Err(Error::invalid(
                    "out",
                    format!("got shape [{}], expected [{total}]", out.columns()),
                ));
            }
            let mut at = 0;
            for (first, length) in runs.into_iter().flatten() {
                out.write(0, at, (first..first + length).map(|slot| slot as i64));
                at += length;
            }
            Ok(())
        })
    }

    /// A copy of one sequence's block table, int32 [blocks].
    fn block_table<'py>(
        &self,
        py: Python<'py>,
        seq_id: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let id = sequence_id("seq_id", seq_id)?;
        let table = self.with(|core| core.block_table(id).map(<[BlockId]>::to_vec))?;
        Ok(PyArray1::from_iter(py, table.into_iter().map(id_to_i32)))
    }

    /// Committed tokens of a sequence.
    fn num_committed(&self, seq_id: &Bound<'_, PyAny>) -> PyResult<usize> {
        let id = sequence_id("seq_id", seq_id)?;
        self.with(|core| core.num_committed(id))
    }

    /// Evict up to `n` cached blocks, least recently used first. Returns how many were evicted.
    fn evict(&self, n: &Bound<'_, PyAny>) -> PyResult<usize> {
        let n = count("n", n)?;
        self.with(|core| Ok(core.evict(n)))
    }

    /// Forget a namespace (all of them if None). Returns how many cached blocks became free.
    ///
    /// Live sequences of it go on privately and never re-enter the tree.
    #[pyo3(signature = (namespace=None))]
    fn clear(&self, namespace: Option<Namespace<'_>>) -> PyResult<usize> {
        self.with(|core| Ok(core.clear(namespace.map(|namespace| namespace.0))))
    }

    /// All counters, read at once.
    fn stats(&self) -> PyResult<Stats> {
        self.with(|core| Ok(Stats(core.stats())))
    }

    /// Verify every internal invariant, at a cost linear in the pool and the tree.
    ///
    /// Raises:
    ///     InvariantError: one is broken.
    fn check_invariants(&self) -> PyResult<()> {
        self.with(|core| core.check_invariants())
    }

    fn __repr__(&self) -> PyResult<String> {
        let stats = self.stats()?.0;
        Ok(format!(
            "KVManager(num_blocks={}, block_size={}: {} free, {} cached, {} held by {} sequences)",
            self.num_blocks,
            self.block_size,
            stats.free_blocks,
            stats.cached_blocks,
            stats.held_blocks,
            stats.sequences,
        ))
    }
}

/// An argument named `namespace`: bytes.
struct Namespace<'a>(&'a [u8]);

impl<'a, 'py> FromPyObject<'a, 'py> for Namespace<'a> {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match value.extract() {
            Ok(bytes) => Ok(Self(bytes)),
            Err(_) => Err(invalid(
                "namespace",
                format!("got {}, expected bytes", show(&value)),
            )),
        }
    }
}

/// Block ids are below 2³¹.
fn id_to_i32(block: BlockId) -> i32 {
    block as i32
}
