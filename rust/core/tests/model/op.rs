//! What may be done to a manager. Small numbers pick among what there is, so that any operation makes sense anywhere.

use leafkv_core::{Media, SequenceId, TokenId};

/// What a manager is made of, and who listens.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub num_blocks: usize,
    pub block_size: usize,
    pub prefix_caching: bool,
    pub partial_hits: bool,
    /// Clipped to less than the blocks.
    pub pin_budget: usize,
    pub event_capacity: usize,
    /// Whether all blocks have one hash.
    pub collide: bool,
    /// Whether events are taken after every call, or only now and then.
    pub attentive: bool,
}

/// Placeholders of one input. Equal in all bits of the digest but the last ones, whatever `content` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    pub start: usize,
    pub length: usize,
    pub content: u8,
}

impl Span {
    pub fn end(&self) -> usize {
        self.start + self.length
    }

    pub fn media(&self) -> Media {
        let mut digest = [7; 32];
        digest[31] = self.content;
        Media {
            start: self.start,
            length: self.length,
            digest,
        }
    }
}

/// What KV of a position depends on, besides the positions before it and the namespace.
pub type Cell = (TokenId, Option<Span>);

/// Tokens with spans that may be malformed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    pub namespace: u8,
    pub tokens: Vec<TokenId>,
    pub media: Vec<Span>,
    /// Whether it may hit and wait; otherwise it computes all of its tokens.
    pub reads_cache: bool,
}

impl Prompt {
    /// Spans come as the gap before them (-1: they overlap), their length (0: malformed) and their content.
    pub fn new(namespace: u8, tokens: Vec<TokenId>, spans: &[(i8, u8, u8)]) -> Self {
        let mut end = 0_usize;
        let spans = spans.iter().map(|&(gap, length, content)| {
            let start = end.saturating_add_signed(isize::from(gap));
            end = start + usize::from(length);
            Span {
                start,
                length: usize::from(length),
                content,
            }
        });
        let media = spans.collect();
        Self {
            namespace,
            tokens,
            media,
            reads_cache: true,
        }
    }

    pub fn reading_cache(self, reads_cache: bool) -> Self {
        Self {
            reads_cache,
            ..self
        }
    }

    /// A few ways to put spans into a prompt, so that prompts have the same ones.
    pub fn usual_spans(which: u8) -> Vec<(i8, u8, u8)> {
        let content = u8::from(which.is_multiple_of(7));
        match which % 5 {
            0 => vec![(0, 2, content)],
            1 => vec![(1, 3, content)],
            2 => vec![(0, 1, 0), (0, 3, content)],
            3 => vec![(2, 4, content)],
            _ => vec![(1, 1, content), (1, 2, 0)],
        }
    }

    /// A prompt that begins with these cells and goes on as far as the spans in them need, and by `more` tokens.
    /// With these placeholders no cached block goes on.
    pub fn of(namespace: u8, cells: &[Cell], more: &[TokenId]) -> Self {
        const FILL: TokenId = 9;
        Self::of_filled(namespace, cells, FILL, more)
    }

    /// Like [`Prompt::of`], with these placeholders.
    pub fn of_filled(namespace: u8, cells: &[Cell], fill: TokenId, more: &[TokenId]) -> Self {
        let media = spans(cells);
        let mut tokens: Vec<TokenId> = cells.iter().map(|&(token, _)| token).collect();
        let end = media.last().map_or(0, Span::end);
        while tokens.len() < end {
            tokens.push(fill);
        }
        tokens.extend(more);
        Self {
            namespace,
            tokens,
            media,
            reads_cache: true,
        }
    }

    pub fn is_well_formed(&self) -> bool {
        let mut before = 0;
        self.media.iter().all(|span| {
            let good = span.length > 0 && span.start >= before && span.end() <= self.tokens.len();
            before = span.end();
            good
        })
    }

    pub fn cells(&self) -> Vec<Cell> {
        let cover = |position: usize| {
            let mut spans = self.media.iter().copied();
            spans.find(|span| (span.start..span.end()).contains(&position))
        };
        let tokens = self.tokens.iter().enumerate();
        tokens
            .map(|(position, &token)| (token, cover(position)))
            .collect()
    }
}

/// The spans that cover cells, in order.
pub fn spans(cells: &[Cell]) -> Vec<Span> {
    let mut spans: Vec<Span> = cells.iter().filter_map(|&(_, span)| span).collect();
    spans.dedup();
    spans
}

/// A sequence by its own name, or the n-th of the live ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    Named(SequenceId),
    Live(usize),
}

/// One operation. `over` counts back from one too many. No items: all live sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    Begin {
        id: SequenceId,
        prompt: Prompt,
    },
    /// Begins with the first tokens of another sequence.
    Follow {
        who: Who,
        id: SequenceId,
        keep: usize,
        more: Vec<TokenId>,
    },
    /// Looks without touching.
    Ask(Prompt),
    Grow {
        who: Who,
        n: usize,
    },
    /// Not a call: copies are made and KV is written, of known tokens and then of drafts.
    Write {
        who: Who,
        n: usize,
        drafts: Vec<TokenId>,
    },
    Commit {
        who: Who,
        over: usize,
        next: Option<TokenId>,
    },
    /// What an engine does next with a sequence: it grows, is written, is committed. 7: its whole prompt.
    Continue {
        who: Who,
        n: usize,
        drafts: Vec<TokenId>,
    },
    Fork {
        parent: Who,
        child: SequenceId,
    },
    Truncate {
        who: Who,
        over: usize,
    },
    Release(Who),
    GrowMany {
        items: Vec<(Who, usize)>,
        /// Names a sequence twice, maybe, and gives a number too many.
        sloppy: bool,
    },
    CommitMany {
        items: Vec<(Who, usize, Option<TokenId>)>,
        /// Names a sequence twice, maybe, and gives a number too many.
        sloppy: bool,
    },
    /// Brings rows up to date: each sequence's in the row named, after something was done to the rows.
    Rows {
        items: Vec<(Who, usize)>,
        columns: usize,
        spoil: u8,
    },
    Copies,
    Evict(usize),
    Clear(Option<u8>),
    Pin {
        prompt: Prompt,
        ttl: Option<u64>,
    },
    /// Pins what a live sequence has computed.
    PinOf {
        who: Who,
        ttl: Option<u64>,
    },
    /// The n-th pin that was ever given.
    Unpin(usize),
    /// To one less than now and later.
    SetTime(u64),
    Events,
    /// A second listener starts here.
    Listen,
}
