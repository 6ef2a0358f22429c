//! From an operation to a call: which sequence, and how many.

use leafkv_core::{SequenceId, TokenId};

use super::{Call, Model, Sequence};
use crate::model::op::{Op, Prompt, Who};
use crate::model::rows::ROWS;

impl Model {
    fn who(&self, who: Who) -> SequenceId {
        match who {
            Who::Named(id) => id,
            Who::Live(index) => {
                let live: Vec<SequenceId> = self.sequences.keys().copied().collect();
                live.get(index % live.len().max(1)).copied().unwrap_or(0)
            }
        }
    }

    /// What a step does with all live sequences.
    fn all<T>(&self, item: impl Fn(Who) -> T) -> Vec<T> {
        self.sequences
            .keys()
            .map(|&id| item(Who::Named(id)))
            .collect()
    }

    pub(super) fn pick(&self, op: &Op) -> Call {
        match op.clone() {
            Op::Begin { id, prompt } => Call::Begin { id, prompt },
            Op::Follow {
                who,
                id,
                keep,
                more,
            } => {
                let known = self.sequences.get(&self.who(who));
                let (namespace, known) =
                    known.map_or((0, &[][..]), |first| (first.namespace, &first.known[..]));
                let keep = &known[..keep.min(known.len())];
                let prompt = Prompt::of_filled(namespace, keep, 0, &more);
                Call::Begin { id, prompt }
            }
            Op::Ask(prompt) => Call::Ask(prompt),
            Op::Grow { who, n } => Call::Grow {
                id: self.who(who),
                n,
            },
            Op::Write { who, n, drafts } => self.pick_write(self.who(who), n, &drafts),
            Op::Commit { who, over, next } => self.pick_commit(self.who(who), over, next),
            Op::Continue { who, n, drafts } => {
                let id = self.who(who);
                match self.sequences.get(&id) {
                    Some(sequence) if sequence.written.len() > sequence.committed => {
                        self.pick_commit(id, 1, None)
                    }
                    Some(sequence) if sequence.reserved > sequence.committed => {
                        self.pick_write(id, n.max(1), &drafts)
                    }
                    Some(sequence) if n == 7 => Call::Grow {
                        id,
                        n: sequence.known.len().saturating_sub(sequence.reserved),
                    },
                    _ => Call::Grow { id, n },
                }
            }
            Op::Fork { parent, child } => Call::Fork {
                parent: self.who(parent),
                child,
            },
            Op::Truncate { who, over } => {
                let id = self.who(who);
                let reserved = self
                    .sequences
                    .get(&id)
                    .map_or(0, |sequence| sequence.reserved);
                let n = (reserved + 1).saturating_sub(over);
                Call::Truncate { id, n }
            }
            Op::Release(who) => Call::Release { id: self.who(who) },
            Op::GrowMany { mut items, sloppy } => {
                if items.is_empty() {
                    items = self.all(|who| (who, 1));
                }
                let (mut ids, mut counts) = (Vec::new(), Vec::new());
                for (who, n) in items {
                    let id = self.who(who);
                    if sloppy || !ids.contains(&id) {
                        ids.push(id);
                        counts.push(n);
                    }
                }
                counts.extend(sloppy.then_some(1));
                Call::GrowMany { ids, counts }
            }
            Op::CommitMany { mut items, sloppy } => {
                if items.is_empty() {
                    items = self.all(|who| (who, 1, None));
                }
                self.pick_commit_many(&items, sloppy)
            }
            Op::Rows {
                items,
                columns,
                spoil,
            } => {
                let mut items = items;
                if items.is_empty() {
                    items = self.all(|who| (who, 0));
                    (0..).zip(&mut items).for_each(|(row, item)| item.1 = row);
                }
                let mut distinct: Vec<(SequenceId, usize)> = Vec::new();
                for (who, row) in items {
                    let row = row % ROWS;
                    if distinct.iter().all(|&(_, other)| other != row) {
                        distinct.push((self.who(who), row));
                    }
                }
                Call::Rows {
                    items: distinct,
                    columns,
                    spoil,
                }
            }
            Op::Copies => Call::Copies,
            Op::Evict(n) => Call::Evict(n),
            Op::Clear(namespace) => Call::Clear(namespace),
            Op::Pin { prompt, ttl } => Call::Pin { prompt, ttl },
            Op::PinOf { who, ttl } => match self.sequences.get(&self.who(who)) {
                Some(sequence) => {
                    let prompt = Prompt::of(
                        sequence.namespace,
                        &sequence.known[..sequence.committed],
                        &[],
                    );
                    Call::Pin { prompt, ttl }
                }
                None => Call::Nothing,
            },
            Op::Unpin(index) => Call::Unpin(index % (self.pins_given + 1)),
            Op::SetTime(more) => Call::SetTime((self.now + more).saturating_sub(1)),
            Op::Events => Call::Events,
            Op::Listen => Call::Listen,
        }
    }

    /// Known tokens first, drafts then, as far as there are any.
    fn pick_write(&self, id: SequenceId, n: usize, drafts: &[TokenId]) -> Call {
        let Some(sequence) = self.sequences.get(&id) else {
            return Call::Nothing;
        };
        let known = sequence.known[sequence.committed..].iter().copied();
        let drafts = drafts.iter().map(|&token| (token, None));
        let cells = known
            .chain(drafts)
            .take(n.min(sequence.reserved - sequence.committed));
        Call::Write {
            id,
            cells: cells.collect(),
        }
    }

    /// Relative to what is written, and sometimes more than that, or less than is committed: both must fail.
    fn pick_commit(&self, id: SequenceId, over: usize, next: Option<TokenId>) -> Call {
        let Some(sequence) = self.sequences.get(&id) else {
            return Call::Commit {
                id,
                n: over,
                new_tokens: Vec::new(),
            };
        };
        let n = (sequence.written.len() + 1).saturating_sub(over);
        let new_tokens = new_tokens(sequence, n, next);
        if is_credulous(sequence, n, new_tokens.len()) {
            return Call::Nothing;
        }
        Call::Commit { id, n, new_tokens }
    }

    fn pick_commit_many(&self, items: &[(Who, usize, Option<TokenId>)], sloppy: bool) -> Call {
        let (mut ids, mut counts, mut all_new, mut new_counts) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for &(who, over, next) in items {
            let id = self.who(who);
            if !sloppy && ids.contains(&id) {
                continue;
            }
            let (mut count, mut new) = (over, Vec::new());
            if let Some(sequence) = self.sequences.get(&id) {
                let n = (sequence.written.len() + 1)
                    .saturating_sub(over)
                    .max(sequence.committed);
                new = new_tokens(sequence, n, next);
                if is_credulous(sequence, n, new.len()) {
                    continue;
                }
                count = n - sequence.committed;
            }
            ids.push(id);
            counts.push(count);
            new_counts.push(new.len());
            all_new.extend(new);
        }
        if sloppy {
            new_counts.push(0);
        }
        Call::CommitMany {
            ids,
            counts,
            new_tokens: all_new,
            new_counts,
        }
    }
}

fn new_tokens(sequence: &Sequence, n: usize, next: Option<TokenId>) -> Vec<TokenId> {
    let written = sequence
        .written
        .get(sequence.known.len()..n)
        .unwrap_or_default();
    written
        .iter()
        .map(|&(token, _)| token)
        .chain(next)
        .collect()
}

/// The manager believes what it is told about writing: that must be true.
fn is_credulous(sequence: &Sequence, n: usize, new_tokens: usize) -> bool {
    n > sequence.written.len() && n <= sequence.reserved && n <= sequence.known.len() + new_tokens
}
