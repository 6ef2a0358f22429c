//! Calls on many sequences: the single calls one after another, once nothing is wrong.

use std::collections::BTreeSet;

use leafkv_core::{SequenceId, TokenId};

use super::{Answer, Model, UNKNOWN};
use crate::model::rows::COLUMNS;

impl Model {
    fn wrong_ids(&self, ids: &[SequenceId]) -> BTreeSet<&'static str> {
        let mut wrong = BTreeSet::new();
        if ids.iter().any(|id| !self.sequences.contains_key(id)) {
            wrong.insert(UNKNOWN);
        }
        if ids.iter().collect::<BTreeSet<_>>().len() < ids.len() {
            wrong.insert("seq_ids");
        }
        wrong
    }

    pub(super) fn grow_many(&mut self, ids: &[SequenceId], counts: &[usize]) -> Answer {
        let mut wrong = self.wrong_ids(ids);
        if ids.len() != counts.len() {
            wrong.insert("counts");
        }
        if !wrong.is_empty() {
            self.see("refused grow_many");
            return Answer::Refused(wrong);
        }
        let lacking = ids
            .iter()
            .zip(counts)
            .map(|(&id, &n)| match self.grow(id, n) {
                Answer::OutOfBlocks {
                    needed,
                    allocatable,
                } => needed - allocatable,
                _ => 0,
            });
        let lacking: Vec<usize> = lacking.collect();
        if lacking.iter().any(|&lacking| lacking > 0) {
            self.see("lacking in grow_many");
        }
        if lacking
            .iter()
            .skip_while(|&&lacking| lacking == 0)
            .any(|&lacking| lacking == 0)
        {
            self.see("grow after one that lacks");
        }
        Answer::Lacking(lacking)
    }

    pub(super) fn commit_many(
        &mut self,
        ids: &[SequenceId],
        counts: &[usize],
        new_tokens: &[TokenId],
        new_counts: &[usize],
    ) -> Answer {
        let mut wrong = self.wrong_ids(ids);
        if ids.len() != new_counts.len() {
            wrong.insert("new_counts");
        }
        let items = ids.iter().zip(counts).zip(new_counts);
        let items: Vec<_> = items
            .map(|((&id, &count), &new)| (id, count, new))
            .collect();
        for &(id, count, new) in &items {
            let committed = self
                .sequences
                .get(&id)
                .map_or(0, |sequence| sequence.committed);
            let single = self
                .wrong_commit(id, committed + count, new)
                .unwrap_or_default();
            wrong.extend(single.into_iter().map(|argument| match argument {
                "n" => "counts",
                "seq_id" => "seq_ids",
                other => other,
            }));
        }
        if !wrong.is_empty() {
            self.see("refused commit_many");
            return Answer::Refused(wrong);
        }
        let mut rest = new_tokens;
        for (id, count, new) in items {
            let (mine, others) = rest.split_at(new);
            rest = others;
            self.commit(id, self.sequences[&id].committed + count, mine);
        }
        if ids.len() > 1 {
            self.see("commit_many");
        }
        Answer::Done
    }

    pub(super) fn rows(&self, items: &[(SequenceId, usize)], columns: usize) -> Answer {
        let mut wrong = BTreeSet::new();
        for (id, _) in items {
            match self.sequences.get(id) {
                None => wrong.insert(UNKNOWN),
                Some(sequence) if sequence.table.len() > columns.min(COLUMNS) => {
                    wrong.insert("out")
                }
                Some(_) => false,
            };
        }
        match wrong.is_empty() {
            true => Answer::Done,
            false => Answer::Refused(wrong),
        }
    }
}
