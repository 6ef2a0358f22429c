//! One call for all sequences of a step.
//!
//! Each is checked before anything changes; a sequence that only lacks blocks keeps nobody else from growing.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::{BlockId, SequenceId, TokenId};
use crate::error::{Error, Result};
use crate::manager::KvManager;

/// Where block tables are written: a row a sequence, kept from step to step by the caller.
pub trait Rows {
    /// The stamp of the last writing to this row, as [`Rows::write`] got it; 0: not known what is in it.
    fn stamp(&self, row: usize) -> u64;

    /// Writes the entries from `column` on, and notes the stamp.
    fn write(&mut self, row: usize, column: usize, blocks: &[BlockId], stamp: u64);
}

impl KvManager {
    /// Reserves slots for `counts[i]` more tokens of each sequence, in the given order, each all or nothing.
    ///
    /// `lacking` gets the blocks that each lacked: 0 where it grew, otherwise that sequence is as before.
    pub fn grow_many(
        &mut self,
        ids: &[SequenceId],
        counts: &[usize],
        lacking: &mut Vec<usize>,
    ) -> Result<()> {
        expect_one_each("counts", counts.len(), ids)?;
        self.sequences.select(ids)?;
        lacking.clear();
        for (index, &n) in counts.iter().enumerate() {
            let key = self.sequences.batch_key(index);
            lacking.push(match self.grow_one(key, n) {
                Err(Error::OutOfBlocks {
                    needed,
                    allocatable,
                }) => needed - allocatable,
                other => other.map(|()| 0)?,
            });
        }
        Ok(())
    }

    /// The KV of the next `counts[i]` tokens of each sequence is written; `new_counts[i]` of `new_tokens`, which
    /// follow each other, continue its known tokens. See [`KvManager::commit`].
    pub fn commit_many(
        &mut self,
        ids: &[SequenceId],
        counts: &[usize],
        new_tokens: &[TokenId],
        new_counts: &[usize],
    ) -> Result<()> {
        expect_one_each("counts", counts.len(), ids)?;
        expect_one_each("new_counts", new_counts.len(), ids)?;
        let given = new_counts
            .iter()
            .fold(0, |sum: usize, &n| sum.saturating_add(n));
        if given != new_tokens.len() {
            let problem = format!(
                "they sum to {given}, expected the {} new tokens",
                new_tokens.len()
            );
            return Err(Error::invalid("new_counts", problem));
        }
        self.sequences.select(ids)?;
        for index in 0..ids.len() {
            let key = self.sequences.batch_key(index);
            let total = self.sequences[key].committed.saturating_add(counts[index]);
            let checked = self.check_commit(key, total, new_counts[index]);
            checked.map_err(|(argument, problem)| {
                let argument = match argument {
                    Some("seq_id") => "seq_ids",
                    Some(other) => other,
                    None => "counts",
                };
                let id = ids[index];
                Error::invalid(argument, format!("item {index}, sequence {id}: {problem}"))
            })?;
        }
        let mut new_tokens = new_tokens;
        for (index, &id) in ids.iter().enumerate() {
            let key = self.sequences.batch_key(index);
            let total = self.sequences[key].committed + counts[index];
            let (mine, others) = new_tokens.split_at(new_counts[index]);
            self.commit_one(id, key, total, mine);
            new_tokens = others;
        }
        Ok(())
    }

    /// Brings rows of `columns` entries up to date with the block tables: row `i` with that of `ids[i]`.
    ///
    /// A row that was last written with this very table gets only the entries that changed since; any other row is
    /// written whole. Entries past a table are left alone.
    pub fn update_rows(
        &mut self,
        ids: &[SequenceId],
        columns: usize,
        rows: &mut impl Rows,
    ) -> Result<()> {
        let keys = self.sequences.keys(ids)?.into_owned();
        let lengths = keys.iter().map(|&key| self.sequences[key].table.len());
        let longest = lengths.max().unwrap_or(0);
        if longest > columns {
            let problem = format!("got {columns} columns, expected at least {longest}");
            return Err(Error::invalid("out", problem));
        }
        let mut stamp = new_stamps(ids.len());
        for (row, key) in keys.into_iter().enumerate() {
            let sequence = &mut self.sequences[key];
            let current = sequence.stamp != 0 && rows.stamp(row) == sequence.stamp;
            let from = if current { sequence.unchanged } else { 0 };
            if current && from == sequence.table.len() {
                continue;
            }
            stamp += 1;
            self.last_stamp = stamp;
            sequence.stamp = stamp;
            sequence.unchanged = sequence.table.len();
            rows.write(row, from, &sequence.table[from..], sequence.stamp);
        }
        Ok(())
    }

    /// The slots of the next `counts[i]` uncommitted tokens of each sequence, one after another, `len` in all, as
    /// runs of following slots: `write(index of the first, its slot, how many)`.
    pub fn slots_of(
        &self,
        ids: &[SequenceId],
        counts: &[usize],
        len: usize,
        mut write: impl FnMut(usize, usize, usize),
    ) -> Result<()> {
        expect_one_each("counts", counts.len(), ids)?;
        let mut total = 0_usize;
        let keys = self.sequences.keys(ids)?;
        for ((&id, &key), &n) in ids.iter().zip(&*keys).zip(counts) {
            self.sequences[key].check_slots(id, n)?;
            total = total.saturating_add(n);
        }
        if total != len {
            return Err(Error::invalid(
                "out",
                format!("got shape [{len}], expected [{total}]"),
            ));
        }
        let mut at = 0;
        for (&key, &n) in keys.iter().zip(counts) {
            let sequence = &self.sequences[key];
            if let Some(slot) = sequence.slots_in_one_block(n, self.block_size) {
                write(at, slot, n);
                at += n;
                continue;
            }
            for (slot, run) in sequence.slots(n, self.block_size) {
                write(at, slot, run);
                at += run;
            }
        }
        Ok(())
    }
}

/// Reserves `n` stamps, those after the answer. They are unique in the process, not in a manager only: rows outlive
/// managers, and one manager must not take another's stamp for its own.
fn new_stamps(n: usize) -> u64 {
    static RESERVED: AtomicU64 = AtomicU64::new(0);
    RESERVED.fetch_add(n as u64, Ordering::Relaxed)
}

fn expect_one_each(argument: &'static str, got: usize, ids: &[SequenceId]) -> Result<()> {
    if got == ids.len() {
        return Ok(());
    }
    let problem = format!(
        "got {got}, expected one for each of the {} sequences",
        ids.len()
    );
    Err(Error::invalid(argument, problem))
}
