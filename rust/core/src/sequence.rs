//! The record of a live sequence, and what is whole blocks of it.

use crate::block::{BlockId, BlockSize, Media, Scope, SequenceId, TokenId, touching};
use crate::error::{Error, Result};

/// A live sequence.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// `None`: private.
    pub(crate) namespace: Option<Box<[u8]>>,
    /// The media spans of its prompt.
    pub(crate) media: Box<[Media]>,
    pub(crate) known: Vec<TokenId>,
    /// How many of the known tokens are the prompt's.
    pub(crate) prompt: usize,
    pub(crate) committed: usize,
    pub(crate) reserved: usize,
    pub(crate) table: Vec<BlockId>,
    /// Tokens of its prompt and of its prefix hit, until the statistics have them.
    pub(crate) uncounted: Option<(usize, usize)>,
    /// Names the last writing of the table to a row; 0 before the first one. See `KvManager::update_rows`.
    pub(crate) stamp: u64,
    /// Entries of the table that are as they were written then.
    pub(crate) unchanged: usize,
    /// The last selection that it was in, see `Sequences::select`.
    pub(crate) last_call: u64,
}

impl Sequence {
    /// A sequence that shares the blocks of `table` and was not written to any row.
    pub(crate) fn new(
        namespace: Option<Box<[u8]>>,
        media: Box<[Media]>,
        known: Vec<TokenId>,
        prompt: usize,
        committed: usize,
        table: Vec<BlockId>,
    ) -> Self {
        Self {
            namespace,
            media,
            known,
            prompt,
            committed,
            reserved: committed,
            table,
            uncounted: None,
            stamp: 0,
            unchanged: 0,
            last_call: 0,
        }
    }

    /// The namespace and the media, unless it is private.
    pub(crate) fn scope(&self) -> Option<Scope<'_>> {
        let namespace = self.namespace.as_deref()?;
        let media = &self.media;
        Some(Scope { namespace, media })
    }

    /// The media span that has tokens before and after position `n`.
    pub(crate) fn span_across(&self, n: usize) -> Option<&Media> {
        let around = touching(&self.media, n..n + 1).first();
        around.filter(|span| span.start < n)
    }

    /// Refuses slots that are not reserved.
    pub(crate) fn check_slots(&self, id: SequenceId, n: usize) -> Result<()> {
        let most = self.reserved - self.committed;
        if n > most {
            let problem =
                format!("got {n} for sequence {id}, expected at most {most}, as reserved");
            return Err(Error::invalid("counts", problem));
        }
        Ok(())
    }

    /// The first slot of the next `n` uncommitted tokens, if they are in one block.
    pub(crate) fn slots_in_one_block(&self, n: usize, size: BlockSize) -> Option<usize> {
        let (index, offset) = size.divide(self.committed);
        let block = *self.table.get(index)?;
        (n <= size.tokens() - offset).then(|| block as usize * size.tokens() + offset)
    }

    /// The slots of the next `n` uncommitted tokens, as `(first slot, length)` of one run a block.
    pub(crate) fn slots(&self, n: usize, size: BlockSize) -> impl Iterator<Item = (usize, usize)> {
        let mut left = n;
        let (mut index, mut offset) = size.divide(self.committed);
        std::iter::from_fn(move || {
            let run = (size.tokens() - offset).min(left);
            let block = *self.table.get(index).filter(|_| run > 0)?;
            let slot = block as usize * size.tokens() + offset;
            (left, index, offset) = (left - run, index + 1, 0);
            Some((slot, run))
        })
    }

    /// The table's entries from `index` on are not what was written to a row.
    pub(crate) fn changed(&mut self, index: usize) {
        self.unchanged = self.unchanged.min(index);
    }

    /// Whether it is about to commit whole blocks that other prompts may share.
    pub(crate) fn leads(&self, size: BlockSize) -> bool {
        self.namespace.is_some() && self.committed < size.whole_tokens(self.prompt)
    }

    /// Index of the block that is written next, if it has committed tokens already.
    pub(crate) fn partial_block(&self, size: BlockSize) -> Option<usize> {
        let (index, offset) = size.divide(self.committed);
        (offset > 0).then_some(index)
    }
}

/// The part of a prompt that may come from the cache: one token is left to compute.
pub(crate) fn cacheable(tokens: &[TokenId]) -> &[TokenId] {
    &tokens[..tokens.len().saturating_sub(1)]
}
