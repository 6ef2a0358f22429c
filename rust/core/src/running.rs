//! The arithmetic of a step over all running sequences at once: what each may compute, and what became of it.
//!
//! What a scheduler knows of its running sequences is in columns of its own, a row a sequence, in order of service. Who
//! is in them and in which order is the scheduler's business; a step passes over them twice, in one pass each, so that
//! it costs the same few cache lines a sequence whatever else the caches were full of meanwhile.

use std::mem;

use crate::block::{SequenceId, TokenId};
use crate::error::{Error, Result};
use crate::manager::KvManager;

/// A column of the caller's, all of whole numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Column {
    /// The sequence id.
    Id,
    /// Tokens of the prompt.
    Prompt,
    /// Known tokens.
    Known,
    /// Those of them whose KV is written.
    Computed,
    /// Known tokens at which the sequence ends.
    Limit,
    /// The last known token.
    Last,
    /// 0: there is no such sequence yet, and nothing to compute for it.
    Born,
    /// Whether an end token ends it.
    Ends,
    /// Whether each of its new tokens is looked at.
    Watched,
}

impl Column {
    /// How many there are.
    pub const COUNT: usize = Self::Watched as usize + 1;
}

/// The columns, wherever they are.
pub trait Columns {
    /// How many rows they have.
    fn rows(&self) -> usize;

    /// One number.
    fn get(&self, column: Column, row: usize) -> usize;

    /// Sets one number.
    fn set(&mut self, column: Column, row: usize, value: usize);
}

/// How [`KvManager::grow_running`] went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shares {
    /// How many sequences lack blocks.
    pub lacking: usize,
    /// Whether every row has got tokens.
    pub everybody: bool,
    /// Whether any has got tokens of its prompt.
    pub prompts: bool,
}

/// What a step has brought: `counts[i]` tokens of the sequence in row `rows[i]` are computed, and the next
/// `new_counts[i]` of `new_tokens` continue it. Without `rows`, they are all, in order.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// Each at most once.
    pub rows: Option<&'a [usize]>,
    /// As above.
    pub counts: &'a [usize],
    /// As above.
    pub new_tokens: &'a [TokenId],
    /// As above.
    pub new_counts: &'a [usize],
}

impl KvManager {
    /// Shares a budget of tokens out, in order, and reserves a slot for each, as [`KvManager::grow_many`] does.
    ///
    /// A row wishes for all its known tokens that are not computed yet, unless there are `wishes`; it gets what the
    /// budget has left. `counts` gets its tokens, whether it has slots for them or not, `lacking` the blocks it lacks.
    pub fn grow_running(
        &mut self,
        columns: &impl Columns,
        budget: usize,
        wishes: Option<&[usize]>,
        counts: &mut Vec<usize>,
        lacking: &mut Vec<usize>,
    ) -> Result<Shares> {
        let rows = columns.rows();
        if let Some(wishes) = wishes
            && wishes.len() != rows
        {
            let problem = format!("got {}, expected one for each of {rows} rows", wishes.len());
            return Err(Error::invalid("wishes", problem));
        }
        let (mut left, mut prompts) = (budget, false);
        let mut ids = Vec::with_capacity(rows);
        counts.clear();
        for row in 0..rows {
            let computed = columns.get(Column::Computed, row);
            let wish = match wishes {
                Some(wishes) => wishes[row],
                None => columns.get(Column::Known, row).saturating_sub(computed),
            };
            let born = columns.get(Column::Born, row) != 0;
            let tokens = if born { wish.min(left) } else { 0 };
            left -= tokens;
            counts.push(tokens);
            if tokens > 0 {
                prompts |= computed < columns.get(Column::Prompt, row);
                ids.push(columns.get(Column::Id, row) as SequenceId);
            }
        }
        let everybody = ids.len() == rows;
        if everybody {
            self.grow_many(&ids, counts, lacking)?;
        } else {
            let given: Vec<_> = counts.iter().copied().filter(|&n| n > 0).collect();
            self.grow_many(&ids, &given, lacking)?;
            let mut of_given = mem::take(lacking).into_iter();
            let mut of_row = |&n: &usize| if n > 0 { of_given.next() } else { None };
            lacking.extend(counts.iter().map(|n| of_row(n).unwrap_or(0)));
        }
        Ok(Shares {
            lacking: lacking.iter().filter(|&&blocks| blocks > 0).count(),
            everybody,
            prompts,
        })
    }

    /// [`KvManager::commit_many`], and the columns are brought up to date.
    ///
    /// `look(i)` is called for the items whose new tokens want a look, in order: they are watched, or several; among
    /// them may be one of the `ends`, the last that the sequence may have, or its first. Nothing changes in an error.
    pub fn commit_running(
        &mut self,
        columns: &mut impl Columns,
        step: Step<'_>,
        ends: &[TokenId],
        mut look: impl FnMut(usize),
    ) -> Result<()> {
        let count = step.rows.map_or(columns.rows(), <[usize]>::len);
        let row = |item: usize| step.rows.map_or(item, |rows| rows[item]);
        if let Some(row) = (0..count).map(row).find(|&row| row >= columns.rows()) {
            let problem = format!("got row {row}, expected less than {}", columns.rows());
            return Err(Error::invalid("rows", problem));
        }
        let ids = (0..count).map(|item| columns.get(Column::Id, row(item)) as SequenceId);
        let ids: Vec<_> = ids.collect();
        self.commit_many(&ids, step.counts, step.new_tokens, step.new_counts)?;
        let mut start = 0;
        for item in 0..count {
            let (row, new) = (row(item), step.new_counts[item]);
            let computed = columns.get(Column::Computed, row);
            let computed = computed.saturating_add(step.counts[item]);
            columns.set(Column::Computed, row, computed);
            if new == 0 {
                continue;
            }
            start += new;
            let last = step.new_tokens[start - 1];
            let before = columns.get(Column::Known, row);
            let known = before.saturating_add(new);
            columns.set(Column::Known, row, known);
            columns.set(Column::Last, row, last as usize);
            if new > 1
                || columns.get(Column::Watched, row) != 0
                || known >= columns.get(Column::Limit, row)
                || before == columns.get(Column::Prompt, row)
                || (ends.contains(&last) && columns.get(Column::Ends, row) != 0)
            {
                look(item);
            }
        }
        Ok(())
    }
}
