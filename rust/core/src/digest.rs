//! Names of blocks that mean the same in every process, on every machine and in every version from here on.
//!
//! A digest names a whole block together with all that its KV depends on: the tokens up to its end, the media among them,
//! the namespace and the block size. Events and block files carry it, so the format is fixed. All numbers are little-endian:
//!
//! ```text
//! root  = BLAKE3 derive_key(context "leafkv 2026 block digest v1", block size: u64 ‖ namespace)
//! block = BLAKE3 hash(digest of the block before it, or root ‖ each token: u32
//!                     ‖ for each span of media that touches the block: start: u64 ‖ length: u64 ‖ its digest)
//! ```
//!
//! `start` is the position in the whole prompt. A span that reaches over several blocks is part of each of them.

use crate::block::{Media, Scope, TokenId, check_media, touching};
use crate::error::{Error, Result};

const CONTEXT: &str = "leafkv 2026 block digest v1";

/// The name of a block. See the module for the format.
pub type Digest = [u8; 32];

/// What the first block of a prompt has for a parent.
pub(crate) fn root(block_size: usize, namespace: &[u8]) -> Digest {
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    hasher.update(&(block_size as u64).to_le_bytes());
    hasher.update(namespace);
    *hasher.finalize().as_bytes()
}

/// The digest of the block of `tokens` after the block `parent`; `media` are the spans that touch it.
pub(crate) fn block(parent: &Digest, tokens: &[TokenId], media: &[Media]) -> Digest {
    /// Tokens that are handed to the hash at once.
    const CHUNK: usize = 64;
    let mut hasher = blake3::Hasher::new();
    hasher.update(parent);
    let mut bytes = [0; CHUNK * size_of::<TokenId>()];
    for tokens in tokens.chunks(CHUNK) {
        let (words, _) = bytes.as_chunks_mut();
        for (word, token) in words.iter_mut().zip(tokens) {
            *word = token.to_le_bytes();
        }
        hasher.update(&bytes[..size_of_val(tokens)]);
    }
    for span in media {
        hasher.update(&(span.start as u64).to_le_bytes());
        hasher.update(&(span.length as u64).to_le_bytes());
        hasher.update(&span.digest);
    }
    *hasher.finalize().as_bytes()
}

/// The digests of the whole blocks of `tokens`, in order.
///
/// # Errors
/// A `block_size` of zero, or malformed media.
pub fn block_digests(
    block_size: usize,
    tokens: &[TokenId],
    scope: Scope<'_>,
) -> Result<Vec<Digest>> {
    if block_size == 0 {
        return Err(Error::invalid("block_size", "got 0, expected at least 1"));
    }
    check_media(scope.media, tokens.len())?;
    let mut parent = root(block_size, scope.namespace);
    let whole = tokens.chunks_exact(block_size).enumerate();
    Ok(whole
        .map(|(index, tokens)| {
            let start = index * block_size;
            let media = touching(scope.media, start..start + block_size);
            parent = block(&parent, tokens, media);
            parent
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(digests: &[Digest]) -> Vec<String> {
        let hex = |digest: &Digest| digest.iter().map(|byte| format!("{byte:02x}")).collect();
        digests.iter().map(hex).collect()
    }

    /// The expected digests are computed by another implementation of the format: Python's `struct` and `blake3`.
    #[test]
    fn digests_are_the_ones_of_the_documented_format() {
        let tokens = [1, 2, 3, 4, 5, u32::MAX, 7, 8, 9, 10, 11, 12, 13];
        let text = block_digests(4, &tokens, b"model".into()).unwrap();
        assert_eq!(
            hex(&text),
            [
                "41a8020e1a7241e3bcea08f3ed910d3fc73fc8b3c1094c57f31020492f4c29ab",
                "fe04cba1568e72a6d2c7709e26e72bc2575fd8127945c64996879ae74a26dd0c",
                "173547003980b4e4d7c9a82c3f812500c32f4113cd9c01abeec627f4dd4773c9",
            ]
        );
        let media = [
            Media {
                start: 3,
                length: 3,
                digest: [7; 32],
            },
            Media {
                start: 9,
                length: 2,
                digest: std::array::from_fn(|index| index as u8),
            },
        ];
        let namespace = b"model";
        let scope = Scope {
            namespace,
            media: &media,
        };
        assert_eq!(
            hex(&block_digests(4, &tokens, scope).unwrap()),
            [
                "c26ef4183d7a62c24dca6a04f26fd8f6d0e97ada038dca2bc026d98be9821d46",
                "ce1df17fa18a9c1486ed0bdc3f6131356c8ec7cbf2b137b34124b493db17d433",
                "e97fd2ebea7e6e531446244f6bdd92e99de22fd75e5c256fba1a91c792085dad",
            ]
        );
        let tokens: Vec<TokenId> = (0..250).collect();
        assert_eq!(
            hex(&block_digests(100, &tokens, Scope::default()).unwrap()),
            [
                "b53f7736a5b1bef08f899e554df089de16e99e3a26d169173776066d78134354",
                "3a7a6aa1d460f066222e5818b6523bd8c295932a91bbb36348e70111cb9c1e63",
            ]
        );
        assert_eq!(
            hex(&[root(4, b"model")]),
            ["b3290e9e6fe44474dcaf76c8f804942b5320e3b59dd118268603a3fa7088d861"]
        );
    }

    #[test]
    fn malformed_input_is_refused() {
        assert!(block_digests(0, &[1], Scope::default()).is_err());
        let span = Media {
            start: 0,
            length: 2,
            digest: [0; 32],
        };
        let scope = Scope {
            namespace: b"",
            media: &[span],
        };
        assert!(block_digests(1, &[1], scope).is_err());
    }
}
