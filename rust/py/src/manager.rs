//! `KVManager`. A call converts its arguments, takes the lock, and converts the result.
//!
//! Python is never called under the lock: it could run a finalizer that comes back to the same manager. Calls take
//! microseconds, so the GIL stays. On free-threaded Python the lock alone orders calls. Arrays to write to are looked
//! at last, see `array`.

use std::sync::Mutex;

use leafkv_core::running::Step;
use leafkv_core::{Admission, BlockId, Config, Error, KvManager, Result, SequenceId, TokenId};
use numpy::{PyArray1, PyArray2};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::answers::{Pin, Ready, Stats, WaitFor};
use crate::array::ints::ints;
use crate::array::new::{Fresh, block_ids, copy_pairs, id_to_i32};
use crate::array::out::Rows;
use crate::error::{invalid, to_py};
use crate::events::{Event, Snapshot};
use crate::int::{count, int, sequence_id};
use crate::running::RunningColumns;
use crate::scope::{Namespace, media as spans};

/// Block tables, block pool and radix-tree prefix cache of one KV memory.
///
/// Bookkeeping only: it names blocks and slots and never touches the KV itself. Every call is atomic: it
/// succeeds, or raises and changes nothing. Safe to call from many threads.
///
/// Args:
///     num_blocks: Size of the pool, in blocks, 1 to 2**31 - 1.
///     block_size: Tokens per block, >= 1.
///     enable_prefix_caching: False keeps nothing after a sequence ends, and shares nothing.
///     partial_hits: A prefix hit may end inside a block; the tokens that it shares are copied, see `begin`.
///     pin_budget: How many different blocks `pin` may hold, less than `num_blocks`. Prompts must fit in the others.
///     event_capacity: How many blocks the buffered `events` may name. 0: no events, at no cost.
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
    #[pyo3(signature = (num_blocks, block_size=None, *, enable_prefix_caching=true, partial_hits=false, pin_budget=None, event_capacity=None))]
    #[pyo3(
        text_signature = "(num_blocks, block_size=16, *, enable_prefix_caching=True, partial_hits=False, pin_budget=0, event_capacity=0)"
    )]
    fn new(
        num_blocks: &Bound<'_, PyAny>,
        block_size: Option<&Bound<'_, PyAny>>,
        enable_prefix_caching: bool,
        partial_hits: bool,
        pin_budget: Option<&Bound<'_, PyAny>>,
        event_capacity: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let num_blocks = count("num_blocks", num_blocks)?;
        let block_size = block_size.map_or(Ok(16), |size| count("block_size", size))?;
        let config = Config {
            prefix_caching: enable_prefix_caching,
            partial_hits,
            pin_budget: pin_budget.map_or(Ok(0), |budget| count("pin_budget", budget))?,
            event_capacity: event_capacity
                .map_or(Ok(0), |blocks| count("event_capacity", blocks))?,
            ..Config::new(num_blocks, block_size)
        };
        Ok(Self {
            core: Mutex::new(KvManager::new(config).map_err(to_py)?),
            num_blocks,
            block_size,
        })
    }

    /// Size of the pool.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Tokens per block.
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
    #[pyo3(signature = (tokens, namespace=Namespace(b""), media=None))]
    #[pyo3(text_signature = "($self, tokens, namespace=b'', media=())")]
    fn lookup(
        &self,
        tokens: &Bound<'_, PyAny>,
        namespace: Namespace<'_>,
        media: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (tokens, media) = (ints::<TokenId>("tokens", tokens)?, spans(media)?);
        self.with(|core| core.lookup(&tokens, namespace.with(&media)))
    }

    /// The blocks of the longest cached prefix, int32 [blocks]: all whole blocks, be they all of `tokens`.
    ///
    /// No side effects: nothing keeps the blocks from being evicted, so this is for looking, not for reading KV.
    #[pyo3(signature = (tokens, namespace=Namespace(b""), media=None))]
    #[pyo3(text_signature = "($self, tokens, namespace=b'', media=())")]
    fn match_prefix<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        namespace: Namespace<'_>,
        media: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let (tokens, media) = (ints::<TokenId>("tokens", tokens)?, spans(media)?);
        let blocks = self.with(|core| core.match_prefix(&tokens, namespace.with(&media)))?;
        Ok(block_ids(py, blocks.into_iter()))
    }

    /// Start a sequence; on `Ready` it holds its prefix hit (lookup and lock are one act).
    ///
    /// A hit leaves at least one token to compute. It is in whole blocks, unless the manager has partial hits: then
    /// it goes on into the next block, as far as a cached one begins with the same tokens. That block is shared until
    /// the first `grow`, which gives the sequence its own and owes the copy, see `copies`.
    ///
    /// Args:
    ///     seq_id: A name of the caller's choice, 0 to 2**64 - 1, that no live sequence has.
    ///     tokens: The prompt, at least one token.
    ///     namespace: What KV depends on besides the tokens (model, adapter, tenant): only equal ones share.
    ///     media: Spans `(start, length, digest)` of placeholder tokens, sorted, not overlapping. Two prompts are the
    ///         same at a position only if the spans that cover it are equal in all three.
    ///     read_cache: False computes all tokens: no hit, and no `WaitFor`. Others find its blocks as usual.
    ///
    /// Raises:
    ///     InvalidInputError: `seq_id` is live, `tokens` is empty, malformed or cannot fit the pool, `media` is wrong.
    #[pyo3(signature = (seq_id, tokens, namespace=Namespace(b""), media=None, *, read_cache=true))]
    #[pyo3(text_signature = "($self, seq_id, tokens, namespace=b'', media=(), *, read_cache=True)")]
    fn begin<'py>(
        &self,
        py: Python<'py>,
        seq_id: &Bound<'py, PyAny>,
        tokens: &Bound<'py, PyAny>,
        namespace: Namespace<'_>,
        media: Option<&Bound<'py, PyAny>>,
        read_cache: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let id = sequence_id("seq_id", seq_id)?;
        let (tokens, media) = (ints::<TokenId>("tokens", tokens)?, spans(media)?);
        if !read_cache {
            self.with(|core| core.begin_uncached(id, tokens, namespace.with(&media)))?;
            return Ready { cached_tokens: 0 }.into_bound_py_any(py);
        }
        match self.with(|core| core.begin(id, tokens, namespace.with(&media)))? {
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

    /// `grow` each sequence by `counts[i]` tokens, in this order, each all or nothing.
    ///
    /// `lacking`, int32 [len(seq_ids)], gets 0 for a sequence that has its slots, otherwise the blocks that it lacked:
    /// it is as before. Returns how many sequences lack blocks. Nothing changes if an id is unknown or named twice.
    fn grow_many(
        &self,
        seq_ids: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
        lacking: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let (ids, counts) = (sequence_ids(seq_ids)?, ints::<usize>("counts", counts)?);
        let mut out = Rows::<i32>::vector("lacking", lacking)?;
        expect_one_each("lacking", out.columns(), &ids)?;
        let mut lacking = Vec::with_capacity(ids.len());
        self.with(|core| core.grow_many(&ids, &counts, &mut lacking))?;
        out.write(0, 0, lacking.iter().copied().map(blocks_to_i32));
        Ok(lacking.iter().filter(|&&n| n > 0).count())
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
        let tokens = token_ids("new_tokens", new_tokens)?;
        self.with(|core| core.commit(id, n, &tokens))
    }

    /// `commit` the next `counts[i]` tokens of each sequence: relative to what it has committed, unlike there.
    ///
    /// `new_tokens` has those of all sequences, one after another: `new_counts[i]` each, by default none at all, or
    /// one each. Nothing changes if anything is wrong with one of them.
    #[pyo3(signature = (seq_ids, counts, new_tokens=None, new_counts=None))]
    #[pyo3(text_signature = "($self, seq_ids, counts, new_tokens=(), new_counts=None)")]
    fn commit_many(
        &self,
        seq_ids: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
        new_tokens: Option<&Bound<'_, PyAny>>,
        new_counts: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (ids, counts) = (sequence_ids(seq_ids)?, ints::<usize>("counts", counts)?);
        let tokens = token_ids("new_tokens", new_tokens)?;
        let new_counts = match new_counts {
            Some(new_counts) => ints("new_counts", new_counts)?,
            None if tokens.is_empty() => vec![0; ids.len()],
            None if tokens.len() == ids.len() => vec![1; ids.len()],
            None => {
                let (got, n) = (tokens.len(), ids.len());
                let problem = format!(
                    "got {got}, expected none, or one for each of the {n} sequences, or new_counts"
                );
                return Err(invalid("new_tokens", problem));
            }
        };
        self.with(|core| core.commit_many(&ids, &counts, &tokens, &new_counts))
    }

    /// Share a budget of tokens out among running sequences, in order, and `grow` each by what it gets.
    ///
    /// `columns` is int64 [columns, sequences]. Of each sequence: its id; the tokens of its prompt; its known tokens;
    /// those of them whose KV is written; the known tokens at which it ends; the last known token; whether it has
    /// begun; whether an end token ends it; whether each new token is looked at. Further columns are the caller's.
    ///
    /// A sequence gets its known tokens that are not written, or what `wishes`, int [sequences], says, as far as the
    /// budget lasts; nothing where it has not begun. Returns these counts, int64 [sequences]; the blocks that each
    /// sequence lacks for them, int32 [sequences], or None where all have their slots; whether every sequence has
    /// tokens; and whether any has some of its prompt. Nothing changes if an id is unknown or named twice.
    #[pyo3(signature = (columns, budget, wishes=None))]
    #[allow(clippy::type_complexity)]
    fn grow_running<'py>(
        &self,
        py: Python<'py>,
        columns: &Bound<'py, PyAny>,
        budget: &Bound<'py, PyAny>,
        wishes: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(
        Bound<'py, PyArray1<i64>>,
        Option<Bound<'py, PyArray1<i32>>>,
        bool,
        bool,
    )> {
        let budget = count("budget", budget)?;
        let wishes = wishes.map(|wishes| ints("wishes", wishes)).transpose()?;
        let columns = RunningColumns::new(columns)?;
        let (mut counts, mut lacking) = (Vec::new(), Vec::new());
        let shares = self.with(|core| {
            core.grow_running(
                &columns,
                budget,
                wishes.as_deref(),
                &mut counts,
                &mut lacking,
            )
        })?;
        let counts = PyArray1::from_iter(py, counts.into_iter().map(tokens_to_i64));
        let lacking = (shares.lacking > 0)
            .then(|| PyArray1::from_iter(py, lacking.into_iter().map(blocks_to_i32)));
        Ok((counts, lacking, shares.everybody, shares.prompts))
    }

    /// `commit_many` of running sequences, whose columns are brought up to date, see `grow_running`.
    ///
    /// `counts`, `new_tokens` and `new_counts` are of the sequences in `rows`, by default all of them. `ends` are the
    /// tokens that may end a sequence. Returns which items want a look, bool [items]: those that got new tokens and
    /// are watched, or got several, or their first after the prompt, or one that may be their last. Nothing changes if
    /// anything is wrong with one of them.
    #[pyo3(signature = (columns, rows, counts, new_tokens, new_counts, ends))]
    #[allow(clippy::too_many_arguments)] // Python's
    fn commit_running<'py>(
        &self,
        py: Python<'py>,
        columns: &Bound<'py, PyAny>,
        rows: Option<&Bound<'py, PyAny>>,
        counts: &Bound<'py, PyAny>,
        new_tokens: &Bound<'py, PyAny>,
        new_counts: &Bound<'py, PyAny>,
        ends: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let rows = rows.map(|rows| ints::<usize>("rows", rows)).transpose()?;
        let counts = ints::<usize>("counts", counts)?;
        let step = Step {
            rows: rows.as_deref(),
            counts: &counts,
            new_tokens: &ints("new_tokens", new_tokens)?,
            new_counts: &ints("new_counts", new_counts)?,
        };
        let ends = ints("ends", ends)?;
        let mut looks = Fresh::new(py, [counts.len()]);
        let items: &mut [bool] = looks.items();
        let mut columns = RunningColumns::new(columns)?;
        self.with(|core| {
            core.commit_running(&mut columns, step, &ends, |item| items[item] = true)
        })?;
        Ok(looks.into_any())
    }

    /// Start `child_id` with the committed tokens and blocks of `parent_id` (copy-on-write).
    fn fork(&self, parent_id: &Bound<'_, PyAny>, child_id: &Bound<'_, PyAny>) -> PyResult<()> {
        let parent = sequence_id("parent_id", parent_id)?;
        let child = sequence_id("child_id", child_id)?;
        self.with(|core| core.fork(parent, child))
    }

    /// Drop everything beyond the first `n` tokens: reserved slots, and committed tokens if any.
    ///
    /// A span of media is dropped as a whole: committed tokens cannot be made to end inside one.
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
        Ok(copy_pairs(py, &copies))
    }

    /// Write the block table of each sequence to a row of `out`, int32 [len(seq_ids), >= blocks of the longest].
    ///
    /// Entries past a sequence's blocks keep their value. Arrays that are kept from step to step are updated in place:
    /// `stamps`, uint64 [len(seq_ids)], tells what each row contains. 0: not known. A row whose stamp is the one
    /// given for this very sequence gets only the entries that changed since; any other row is written whole. A row
    /// that was written has a new stamp. Rows may be moved together with their stamps.
    #[pyo3(signature = (seq_ids, out, stamps=None))]
    fn tables(
        &self,
        seq_ids: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        stamps: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let ids = sequence_ids(seq_ids)?;
        let out = Rows::<i32>::matrix("out", out, "[sequences, blocks]")?;
        let stamps = stamps.map(|stamps| Rows::<u64>::vector("stamps", stamps));
        let mut rows = TableRows {
            out,
            stamps: stamps.transpose()?,
        };
        let columns = rows.out.columns();
        if rows.out.rows() != ids.len() {
            let (rows, n) = (rows.out.rows(), ids.len());
            let problem = format!("got {rows} rows, expected one for each of the {n} sequences");
            return Err(invalid("out", problem));
        }
        if let Some(stamps) = &rows.stamps {
            expect_one_each("stamps", stamps.columns(), &ids)?;
        }
        self.with(|core| core.update_rows(&ids, columns, &mut rows))
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
        let (ids, counts) = (sequence_ids(seq_ids)?, ints::<usize>("counts", counts)?);
        let mut out = Rows::<i64>::vector("out", out)?;
        let len = out.columns();
        self.with(|core| {
            core.slots_of(&ids, &counts, len, |at, first, run| match run {
                1 => out.put(0, at, first as i64),
                _ => out.write(0, at, (first..first + run).map(|slot| slot as i64)),
            })
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
        Ok(block_ids(py, table.into_iter()))
    }

    /// Committed tokens of a sequence.
    fn num_committed(&self, seq_id: &Bound<'_, PyAny>) -> PyResult<usize> {
        let id = sequence_id("seq_id", seq_id)?;
        self.with(|core| core.num_committed(id))
    }

    /// The known tokens of a sequence from `start` on, uint32 [n]: its prompt, and what `commit` added.
    #[pyo3(signature = (seq_id, start=None))]
    #[pyo3(text_signature = "($self, seq_id, start=0)")]
    fn tokens<'py>(
        &self,
        py: Python<'py>,
        seq_id: &Bound<'py, PyAny>,
        start: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<TokenId>>> {
        let id = sequence_id("seq_id", seq_id)?;
        let start = start.map_or(Ok(0), |start| count("start", start))?;
        let tokens = self.with(|core| {
            let tokens = core.tokens(id)?;
            Ok(tokens[start.min(tokens.len())..].to_vec())
        })?;
        Ok(PyArray1::from_vec(py, tokens))
    }

    /// Evict up to `n` cached blocks, least recently used first. Returns how many were evicted.
    fn evict(&self, n: &Bound<'_, PyAny>) -> PyResult<usize> {
        let n = count("n", n)?;
        self.with(|core| Ok(core.evict(n)))
    }

    /// Forget a namespace (all of them if None) and end its pins. Returns how many cached blocks became free.
    ///
    /// Live sequences of it go on privately and never re-enter the tree.
    #[pyo3(signature = (namespace=None))]
    fn clear(&self, namespace: Option<Namespace<'_>>) -> PyResult<usize> {
        self.with(|core| Ok(core.clear(namespace.map(|namespace| namespace.0))))
    }

    /// Keep the cached whole blocks of `tokens` from being evicted: as many as `pin_budget` allows, in order.
    ///
    /// Pinned blocks count as held. The pin ends by `unpin`, by `clear`, or when `ttl` ticks have passed, see `time`.
    /// A pin of nothing is none: its id is new, and `unpin` of it is False.
    ///
    /// Raises:
    ///     InvalidInputError: the manager has no `pin_budget`, `ttl` is 0, or an argument is malformed.
    #[pyo3(signature = (tokens, namespace=Namespace(b""), media=None, *, ttl=None))]
    #[pyo3(text_signature = "($self, tokens, namespace=b'', media=(), *, ttl=None)")]
    fn pin(
        &self,
        tokens: &Bound<'_, PyAny>,
        namespace: Namespace<'_>,
        media: Option<&Bound<'_, PyAny>>,
        ttl: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Pin> {
        let (tokens, media) = (ints::<TokenId>("tokens", tokens)?, spans(media)?);
        let ttl = ttl.map(|ttl| int::<u64>("ttl", ttl)).transpose()?;
        let pin = self.with(|core| core.pin(&tokens, namespace.with(&media), ttl))?;
        Ok(pin.into())
    }

    /// End a pin. False if it has ended already, or never was.
    fn unpin(&self, pin_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        let id = int("pin_id", pin_id)?;
        self.with(|core| Ok(core.unpin(id)))
    }

    /// Logical time, by which pins end: one tick per sequence that `begin` admits, or whatever `set_time` counts.
    #[getter]
    fn time(&self) -> PyResult<u64> {
        self.with(|core| Ok(core.time()))
    }

    /// Set the logical time, from now on the caller's to count (in milliseconds, say). Pins whose time has come end.
    ///
    /// Raises:
    ///     InvalidInputError: `now` is less than `time`.
    fn set_time(&self, now: &Bound<'_, PyAny>) -> PyResult<()> {
        let now = int("now", now)?;
        self.with(|core| core.set_time(now))
    }

    /// What changed in the prefix cache since the last call, oldest first. Each event is handed out once.
    ///
    /// The buffer drops the oldest events when it has to: a gap in the numbers says so, and `snapshot` repairs it.
    /// Empty for ever in a manager without `event_capacity`.
    fn events(&self) -> PyResult<Vec<Event>> {
        let events = self.with(|core| Ok(core.events()))?;
        Ok(events.into_iter().map(Event::from).collect())
    }

    /// All that is in the prefix cache, and the number of the next event, in one act.
    ///
    /// Raises:
    ///     InvalidInputError: the manager has no `event_capacity`.
    fn snapshot(&self) -> PyResult<Snapshot> {
        Ok(self.with(|core| core.snapshot())?.into())
    }

    /// All counters, read at once.
    fn stats(&self) -> PyResult<Stats> {
        Ok(self.with(|core| Ok(core.stats()))?.into())
    }

    /// Verify every internal invariant, at a cost linear in the pool and the tree.
    ///
    /// Raises:
    ///     InvariantError: one is broken.
    fn check_invariants(&self) -> PyResult<()> {
        self.with(|core| core.check_invariants())
    }

    fn __repr__(&self) -> PyResult<String> {
        let stats = self.stats()?;
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

/// The caller's rows of block tables, with the stamps that tell what is in them.
struct TableRows<'a> {
    out: Rows<'a, i32>,
    stamps: Option<Rows<'a, u64>>,
}

impl leafkv_core::Rows for TableRows<'_> {
    fn stamp(&self, row: usize) -> u64 {
        self.stamps.as_ref().map_or(0, |stamps| stamps.read(0, row))
    }

    fn write(&mut self, row: usize, column: usize, blocks: &[BlockId], stamp: u64) {
        let blocks = blocks.iter().copied().map(id_to_i32);
        self.out.write(row, column, blocks);
        if let Some(stamps) = &mut self.stamps {
            stamps.write(0, row, [stamp]);
        }
    }
}

fn blocks_to_i32(blocks: usize) -> i32 {
    i32::try_from(blocks).unwrap_or(i32::MAX)
}

fn tokens_to_i64(tokens: usize) -> i64 {
    i64::try_from(tokens).unwrap_or(i64::MAX)
}

fn sequence_ids(seq_ids: &Bound<'_, PyAny>) -> PyResult<Vec<SequenceId>> {
    ints("seq_ids", seq_ids)
}

fn token_ids(argument: &'static str, tokens: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<TokenId>> {
    tokens.map_or(Ok(Vec::new()), |tokens| ints(argument, tokens))
}

fn expect_one_each(argument: &'static str, got: usize, ids: &[SequenceId]) -> PyResult<()> {
    if got == ids.len() {
        return Ok(());
    }
    let n = ids.len();
    let problem = format!("got {got}, expected one for each of the {n} sequences");
    Err(invalid(argument, problem))
}
