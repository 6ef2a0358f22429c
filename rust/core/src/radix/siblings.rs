//! The children of every node in the order of their first block: finds the one that shares most tokens with a
//! prompt, for partial hits.
//!
//! Blocks are ordered like words in a dictionary, a letter being a token together with the media span that covers
//! it. So what shares most with a prompt stands right before or right after it. O(block size · log nodes), kept only
//! where partial hits are on.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use crate::block::{Media, TokenId, common_media, common_prefix, touching};
use crate::slab::Key as NodeId;

/// A first block, or the beginning of one.
#[derive(Debug, PartialEq, Eq)]
struct Word {
    parent: NodeId,
    /// Position of its first token.
    position: usize,
    tokens: Box<[TokenId]>,
    /// The spans that touch it.
    media: Box<[Media]>,
}

impl Word {
    fn new(parent: NodeId, position: usize, tokens: &[TokenId], media: &[Media]) -> Self {
        Self {
            parent,
            position,
            tokens: tokens.into(),
            media: touching(media, position..position + tokens.len()).into(),
        }
    }

    /// How many tokens two children of one node share.
    fn common(&self, other: &Self) -> usize {
        let media = common_media(&self.media, &other.media, self.position) - self.position;
        common_prefix(&self.tokens, &other.tokens).min(media)
    }

    fn letter(&self, index: usize) -> Option<(TokenId, Option<&Media>)> {
        let position = self.position + index;
        let cover = touching(&self.media, position..position + 1).first();
        self.tokens.get(index).map(|&token| (token, cover))
    }
}

impl Ord for Word {
    fn cmp(&self, other: &Self) -> Ordering {
        self.parent.cmp(&other.parent).then_with(|| {
            let differ = self.common(other);
            self.letter(differ).cmp(&other.letter(differ))
        })
    }
}

impl PartialOrd for Word {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// All children of all nodes, in order.
#[derive(Debug, Default)]
pub(crate) struct Siblings(BTreeMap<Word, NodeId>);

impl Siblings {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Enters a child of `parent` by the tokens of its first block, at `position`.
    pub(crate) fn insert(
        &mut self,
        parent: NodeId,
        position: usize,
        tokens: &[TokenId],
        media: &[Media],
        child: NodeId,
    ) {
        let word = Word::new(parent, position, tokens, media);
        self.0.insert(word, child);
    }

    pub(crate) fn remove(
        &mut self,
        parent: NodeId,
        position: usize,
        tokens: &[TokenId],
        media: &[Media],
    ) {
        self.0.remove(&Word::new(parent, position, tokens, media));
    }

    /// The child of `parent` that shares most tokens with `tokens`, and how many; at least one.
    pub(crate) fn closest(
        &self,
        parent: NodeId,
        position: usize,
        tokens: &[TokenId],
        media: &[Media],
    ) -> Option<(NodeId, usize)> {
        let word = Word::new(parent, position, tokens, media);
        let neighbours = [
            self.0.range(..&word).next_back(),
            self.0.range(&word..).next(),
        ];
        let siblings = neighbours
            .into_iter()
            .flatten()
            .filter(|(other, _)| other.parent == parent);
        siblings
            .map(|(other, &child)| (child, word.common(other)))
            .filter(|&(_, common)| common > 0)
            .max_by_key(|&(_, common)| common)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: usize, length: usize, digest: u8) -> Media {
        Media {
            start,
            length,
            digest: [digest; 32],
        }
    }

    /// Every word of three letters over two tokens, bare and with media, against a search of all.
    #[test]
    fn the_closest_child_is_the_one_that_a_search_of_all_finds() {
        let (parent, position) = (NodeId::new(7), 3);
        let media: [&[Media]; 6] = [
            &[],
            &[span(3, 2, 1)],
            &[span(3, 2, 2)],
            &[span(4, 2, 1)],
            &[span(2, 2, 1), span(5, 4, 1)],
            &[span(0, 9, 1)],
        ];
        let mut words = Vec::new();
        for bits in 0..8 {
            for media in media {
                let tokens: Vec<TokenId> = (0..3).map(|bit| bits >> bit & 1).collect();
                words.push(Word::new(parent, position, &tokens, media));
            }
        }
        for skip in 1..5 {
            let mut siblings = Siblings::default();
            siblings.insert(
                NodeId::new(6),
                position,
                &[0, 0, 0],
                &[],
                NodeId::new(1_000),
            );
            siblings.insert(
                NodeId::new(8),
                position,
                &[0, 0, 0],
                &[],
                NodeId::new(1_001),
            );
            let known: Vec<_> = words.iter().zip(0..).step_by(skip).collect();
            for &(word, child) in &known {
                siblings.insert(
                    parent,
                    position,
                    &word.tokens,
                    &word.media,
                    NodeId::new(child),
                );
            }
            for wanted in &words {
                for len in 1..=3 {
                    let (tokens, media) = (&wanted.tokens[..len], &wanted.media);
                    let word = Word::new(parent, position, tokens, media);
                    let best = known.iter().map(|(other, _)| word.common(other)).max();
                    let found = siblings.closest(parent, position, tokens, media);
                    let shares = found.map_or(0, |(child, common)| {
                        assert_eq!(word.common(&words[child.number() as usize - 1]), common);
                        common
                    });
                    assert_eq!(Some(shares), best, "{word:?}");
                }
            }
        }
    }
}
