//! Names of things and the little arithmetic of blocks that everything shares.

/// A block of the pool: `block_size` consecutive token positions of KV. Ids run from 0 without gaps.
pub type BlockId = u32;

/// A token of the model's vocabulary.
pub type TokenId = u32;

/// A sequence, by the name its owner gave it.
pub type SequenceId = u64;

/// One block to be copied onto another, all layers, K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block to read.
    pub source: BlockId,
    /// The block to write.
    pub destination: BlockId,
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
}
