//! Operations out of bytes. Any string of bytes means something, and what is left out is zero.

use leafkv_core::TokenId;

use super::op::{Op, Prompt, Setup, Who};
use super::world::{self, Seen};

/// Operations that one string of bytes may lead to.
const MAX_OPS: usize = 200;

/// Does what the bytes say to a manager and to the model. Panics where they differ.
pub fn run(bytes: &[u8]) -> Seen {
    let (setup, ops) = decode(bytes);
    world::run(setup, &ops)
}

pub fn decode(bytes: &[u8]) -> (Setup, Vec<Op>) {
    let mut bytes = Bytes(bytes);
    let setup = bytes.setup();
    let mut ops = Vec::new();
    while !bytes.0.is_empty() && ops.len() < MAX_OPS {
        ops.push(bytes.op());
    }
    (setup, ops)
}

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        match self.0 {
            [first, rest @ ..] => {
                self.0 = rest;
                *first
            }
            [] => 0,
        }
    }

    fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    fn setup(&mut self) -> Setup {
        let num_blocks = 1 + self.below(16);
        let block_size = 1 + self.below(4);
        let flags = self.byte();
        Setup {
            num_blocks,
            block_size,
            prefix_caching: flags & 0x70 != 0x70,
            partial_hits: flags & 1 == 0,
            collide: flags & 2 != 0,
            attentive: flags & 4 != 0,
            pin_budget: self.below(4),
            event_capacity: self.below(9),
        }
    }

    /// A bit a token.
    fn tokens(&mut self, max: usize) -> Vec<TokenId> {
        let len = self.below(max + 1);
        let bits = u32::from(self.byte()) | u32::from(self.byte()) << 8;
        (0..len).map(|index| bits >> index & 1).collect()
    }

    fn prompt(&mut self) -> Prompt {
        let first = self.byte();
        let (namespace, reads_cache) = (first % 3, first < 230);
        let tokens = self.tokens(16);
        let spans = match self.byte() {
            0..150 => Vec::new(),
            150..250 => Prompt::usual_spans(self.byte()),
            _ => self.items(|bytes| (bytes.below(5) as i8 - 1, bytes.byte() & 3, bytes.byte() & 1)),
        };
        Prompt::new(namespace, tokens, &spans).reading_cache(reads_cache)
    }

    fn who(&mut self) -> Who {
        match self.byte() {
            255 => Who::Named(0),
            byte => Who::Live(usize::from(byte)),
        }
    }

    fn next(&mut self) -> Option<TokenId> {
        match self.byte() {
            byte @ 0..2 => Some(TokenId::from(byte)),
            _ => None,
        }
    }

    fn ttl(&mut self) -> Option<u64> {
        match self.byte() % 16 {
            0 => None,
            15 => Some(u64::MAX),
            ttl => Some(u64::from(ttl) - 1),
        }
    }

    fn items<T>(&mut self, mut item: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.below(5)).map(|_| item(self)).collect()
    }

    fn op(&mut self) -> Op {
        match self.byte() % 44 {
            0..=5 => Op::Begin {
                id: self.below(8) as u64,
                prompt: self.prompt(),
            },
            6..=7 => Op::Ask(self.prompt()),
            8 => Op::Grow {
                who: self.who(),
                n: self.below(5),
            },
            9 => Op::Write {
                who: self.who(),
                n: self.below(9),
                drafts: self.tokens(9),
            },
            10..=11 => Op::Commit {
                who: self.who(),
                over: self.below(5),
                next: self.next(),
            },
            12..=20 => Op::Continue {
                who: self.who(),
                n: self.below(8),
                drafts: self.tokens(7),
            },
            21..=23 => Op::Fork {
                parent: self.who(),
                child: self.below(8) as u64,
            },
            24..=25 => Op::Truncate {
                who: self.who(),
                over: self.below(9),
            },
            26..=28 => Op::Release(self.who()),
            29 => Op::GrowMany {
                items: self.items(|bytes| (bytes.who(), bytes.below(5))),
                sloppy: self.byte() == 255,
            },
            30 => Op::CommitMany {
                items: self.items(|bytes| (bytes.who(), bytes.below(3), bytes.next())),
                sloppy: self.byte() == 255,
            },
            31..=32 => Op::Rows {
                items: self.items(|bytes| (bytes.who(), bytes.below(256))),
                columns: 20 - self.byte().saturating_sub(235) as usize,
                spoil: self.byte(),
            },
            33 => Op::Copies,
            34 => Op::Evict(self.below(5)),
            35 => Op::Clear(match self.below(4) as u8 {
                3 => None,
                namespace => Some(namespace),
            }),
            36 => match self.byte() {
                255 => Op::Pin {
                    prompt: self.prompt(),
                    ttl: self.ttl(),
                },
                _ => Op::PinOf {
                    who: self.who(),
                    ttl: self.ttl(),
                },
            },
            37 => Op::Unpin(self.below(256)),
            38 => Op::SetTime(self.below(6) as u64),
            39..=42 => Op::Follow {
                who: self.who(),
                id: self.below(8) as u64,
                keep: self.below(16),
                more: self.tokens(6),
            },
            _ => match self.byte() {
                0..200 => Op::Events,
                _ => Op::Listen,
            },
        }
    }
}
