//! Names of things and the little arithmetic of blocks that everything shares.

use std::ops::Range;

use crate::error::{Error, Result};

/// A block of the pool: `block_size` consecutive token positions of KV. Ids run from 0 without gaps.
pub type BlockId = u32;

/// A token of the model's vocabulary.
pub type TokenId = u32;

/// A sequence, by the name its owner gave it.
pub type SequenceId = u64;

/// Tokens of a block, at least one: a divisor that shifts where it can.
///
/// Nearly every block size is a power of two, and a division takes longer than all else a decoding token costs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockSize {
    tokens: usize,
    /// `None`: not a power of two.
    shift: Option<u32>,
}

impl BlockSize {
    pub(crate) fn new(tokens: usize) -> Self {
        let shift = tokens.is_power_of_two().then(|| tokens.trailing_zeros());
        Self { tokens, shift }
    }

    pub(crate) fn tokens(self) -> usize {
        self.tokens
    }

    /// Whole blocks in so many tokens, and the tokens that remain.
    pub(crate) fn divide(self, tokens: usize) -> (usize, usize) {
        let blocks = self.whole_blocks(tokens);
        (blocks, tokens - blocks * self.tokens)
    }

    /// Whole blocks in so many tokens.
    pub(crate) fn whole_blocks(self, tokens: usize) -> usize {
        match self.shift {
            Some(shift) => tokens >> shift,
            None => tokens / self.tokens,
        }
    }

    /// The tokens that fill whole blocks.
    pub(crate) fn whole_tokens(self, tokens: usize) -> usize {
        self.whole_blocks(tokens) * self.tokens
    }

    /// Blocks that so many tokens need.
    pub(crate) fn blocks_for(self, tokens: usize) -> usize {
        let (whole, rest) = self.divide(tokens);
        whole + usize::from(rest > 0)
    }
}

/// One block to be copied onto another, all layers, K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block to read.
    pub source: BlockId,
    /// The block to write.
    pub destination: BlockId,
}

/// A span of placeholder tokens that stand for one image, sound or other input, named by a digest of its content.
///
/// KV of these positions depends on the content, not on the placeholders. A span counts as a whole: two prompts
/// are the same at a position if the spans that cover it are equal in start, length and digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Media {
    /// Position of the first placeholder.
    pub start: usize,
    /// Placeholders, at least one.
    pub length: usize,
    /// What names the content, in practice a cryptographic hash of it.
    pub digest: [u8; 32],
}

impl Media {
    /// Position behind the last placeholder.
    pub fn end(&self) -> usize {
        self.start + self.length
    }
}

/// What KV depends on besides the tokens: [`Media`] within them, and a namespace for all else (model, adapter, tenant …).
#[derive(Debug, Clone, Copy, Default)]
pub struct Scope<'a> {
    /// Only prompts of equal namespaces share blocks.
    pub namespace: &'a [u8],
    /// Sorted by start, not overlapping, within the tokens.
    pub media: &'a [Media],
}

impl<'a> From<&'a [u8]> for Scope<'a> {
    fn from(namespace: &'a [u8]) -> Self {
        Self {
            namespace,
            media: &[],
        }
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Scope<'a> {
    fn from(namespace: &'a [u8; N]) -> Self {
        namespace.as_slice().into()
    }
}

/// Refuses media that are empty, out of order, overlapping or not within `tokens` tokens.
pub(crate) fn check_media(media: &[Media], tokens: usize) -> Result<()> {
    let mut before = 0;
    for (index, &Media { start, length, .. }) in media.iter().enumerate() {
        let end = start.checked_add(length).filter(|&end| end <= tokens);
        let problem = if length == 0 {
            "expected a length of at least 1".to_owned()
        } else if end.is_none() {
            format!("expected to end within the {tokens} tokens")
        } else if start < before {
            format!("expected to start at {before} or later, where the span before it ends")
        } else {
            before = end.unwrap_or_default();
            continue;
        };
        let problem = format!("span {index} has start {start}, length {length}: {problem}");
        return Err(Error::invalid("media", problem));
    }
    Ok(())
}

/// The spans that cover a position of `range`; of an empty range, the one that it cuts in two.
pub(crate) fn touching(media: &[Media], range: Range<usize>) -> &[Media] {
    let first = media.partition_point(|span| span.end() <= range.start);
    let count = media[first..].partition_point(|span| span.start < range.end);
    &media[first..first + count]
}

/// The first position, `from` or later, that is covered by different spans; `usize::MAX` if there is none.
pub(crate) fn common_media(a: &[Media], b: &[Media], from: usize) -> usize {
    let [a, b] = [a, b].map(|media| &media[media.partition_point(|span| span.end() <= from)..]);
    let same = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    let starts = [a, b].into_iter().filter_map(|media| media.get(same));
    starts
        .map(|span| span.start.max(from))
        .min()
        .unwrap_or(usize::MAX)
}

/// Length of the longest common prefix, in tokens.
pub(crate) fn common_prefix(a: &[TokenId], b: &[TokenId]) -> usize {
    /// Long enough for `memcmp` to run at full speed, short enough to search for the difference.
    const CHUNK: usize = 128;
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    if a == b {
        return len;
    }
    let chunks = a.chunks_exact(CHUNK).zip(b.chunks_exact(CHUNK));
    let equal = CHUNK * chunks.take_while(|(x, y)| x == y).count();
    let rest = a[equal..].iter().zip(&b[equal..]);
    equal + rest.take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_prefix_ends_at_the_first_difference() {
        let a: Vec<TokenId> = (0..300).collect();
        for different in 0..300 {
            let mut b = a.clone();
            b[different] = 1_000;
            assert_eq!(common_prefix(&a, &b), different);
            assert_eq!(common_prefix(&a[..different], &a), different);
        }
        assert_eq!(common_prefix(&a, &a), 300);
    }

    #[test]
    fn block_sizes_divide() {
        for size in 1..=33 {
            let blocks = BlockSize::new(size);
            for tokens in (0..100).chain(usize::MAX - 40..=usize::MAX) {
                assert_eq!(blocks.divide(tokens), (tokens / size, tokens % size));
                assert_eq!(blocks.whole_tokens(tokens), tokens / size * size);
                assert_eq!(blocks.blocks_for(tokens), tokens.div_ceil(size));
            }
        }
    }

    fn span(start: usize, length: usize, content: u8) -> Media {
        Media {
            start,
            length,
            digest: [content; 32],
        }
    }

    /// All ways to put spans of up to three placeholders, of two contents, into positions `from..to`.
    fn all_media(from: usize, to: usize) -> Vec<Vec<Media>> {
        let mut all = vec![vec![]];
        for start in from..to {
            for length in 1..=(to - start).min(3) {
                for content in 0..2 {
                    for mut rest in all_media(start + length, to) {
                        rest.insert(0, span(start, length, content));
                        all.push(rest);
                    }
                }
            }
        }
        all
    }

    fn covering(media: &[Media], position: usize) -> Option<&Media> {
        let covers = |span: &&Media| (span.start..span.end()).contains(&position);
        media.iter().find(covers)
    }

    #[test]
    fn media_differ_at_the_first_position_with_different_covering_spans() {
        let all = all_media(0, 4);
        for a in &all {
            for b in &all {
                for from in 0..=5 {
                    let differs = |&p: &usize| covering(a, p) != covering(b, p);
                    let expected = (from..5).find(differs).unwrap_or(usize::MAX);
                    assert_eq!(common_media(a, b, from), expected, "{a:?} {b:?} {from}");
                }
            }
        }
    }

    #[test]
    fn spans_touch_a_range_that_they_cover_a_part_of() {
        for media in all_media(0, 5) {
            assert!(check_media(&media, 5).is_ok());
            for start in 0..=5 {
                let cut = |s: &&Media| s.start < start && start < s.end();
                let expected: Vec<Media> = media.iter().filter(cut).copied().collect();
                assert_eq!(touching(&media, start..start), expected);
                for end in start + 1..=6 {
                    let covers = |s: &&Media| (start..end).any(|p| (s.start..s.end()).contains(&p));
                    let expected: Vec<Media> = media.iter().filter(covers).copied().collect();
                    assert_eq!(touching(&media, start..end), expected);
                }
            }
        }
    }

    #[test]
    fn malformed_media_are_refused_by_index() {
        let good = span(1, 2, 0);
        let bad = [
            (span(3, 0, 0), "at least 1"),
            (span(4, 5, 0), "within the 8 tokens"),
            (span(usize::MAX, 2, 0), "within the 8 tokens"),
            (span(2, 1, 0), "start at 3 or later"),
            (span(0, 1, 0), "start at 3 or later"),
        ];
        for (bad, expected) in bad {
            let error = check_media(&[good, bad], 8).unwrap_err().to_string();
            assert!(
                error.contains("media") && error.contains("span 1"),
                "{error}"
            );
            assert!(error.contains(expected), "{error}");
        }
        assert!(check_media(&[good, span(3, 5, 0)], 8).is_ok());
    }
}
