"""Media: prompts whose tokens are equal and whose images are not must never share KV."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from leafkv import InvalidInputError
from leafkv._core import KVManager, Ready, WaitFor, block_digests
from tests.kv.lives import Memory, begin, kv_of, run

if TYPE_CHECKING:
    from collections.abc import Callable

IMAGE = sha256(b"image").digest()
PROMPT = [1, 2, *[0] * 4, 3, 4, 5]
"""Blocks of 2: text, two blocks of placeholders, text."""


def changed(digest: bytes, *, keep_low: int) -> bytes:
    """A digest that differs in all but the low bits, whichever end those are at."""
    n = keep_low // 8
    return digest[:n] + bytes(byte ^ 0xFF for byte in digest[n:-n]) + digest[-n:]


@pytest.mark.parametrize("partial_hits", [False, True])
@pytest.mark.parametrize("keep_low", [16, 32, 64, 120])
def test_digests_that_are_equal_in_their_low_bits_are_different(keep_low: int, partial_hits: bool) -> None:
    manager = KVManager(32, 2, partial_hits=partial_hits)
    other = changed(IMAGE, keep_low=keep_low)
    assert other != IMAGE
    assert (other[:2], other[-2:]) == (IMAGE[:2], IMAGE[-2:])
    full = 8
    run(manager, 0, PROMPT, media=[(2, 4, IMAGE)])
    assert manager.lookup(PROMPT, media=[(2, 4, IMAGE)]) == full
    for one_bit in (other, *(bytes(b ^ (i == j) for j, b in enumerate(IMAGE)) for i in range(32))):
        assert manager.lookup(PROMPT, media=[(2, 4, one_bit)]) == 2
    assert run(manager, 0, PROMPT, media=[(2, 4, other)]) == 2
    assert block_digests(PROMPT, 2, b"", [(2, 4, IMAGE)])[0] == block_digests(PROMPT, 2, b"", [(2, 4, other)])[0]
    assert not {*block_digests(PROMPT, 2, b"", [(2, 4, IMAGE)])[1:]} & {*block_digests(PROMPT, 2, b"", [(2, 4, other)])}
    manager.check_invariants()


def test_a_span_counts_as_a_whole() -> None:
    spans: list[list[tuple[int, int, bytes]]] = [
        [],
        [(2, 4, IMAGE)],
        [(2, 3, IMAGE)],
        [(3, 3, IMAGE)],
        [(2, 2, IMAGE), (4, 2, IMAGE)],
        [(2, 4, bytes(32))],
        [(1, 5, IMAGE)],
    ]
    manager = KVManager(64, 2, partial_hits=True)
    memory = Memory(manager)
    # Position 0 is the same for all, position 1 for all but the last.
    for seq_id, media in enumerate(spans):
        expected = 0 if seq_id == 0 else 1 if media[0][0] == 1 else 3 if media[0][0] == 3 else 2
        assert manager.lookup(PROMPT, media=media) == expected
        hit = begin(manager, seq_id, PROMPT, media=media)
        assert hit == expected
        manager.grow(seq_id, len(PROMPT) - hit)
        memory.copy()
        memory.write(seq_id, kv_of(PROMPT, media=media)[hit:])
        manager.commit(seq_id, len(PROMPT))
        assert memory.read(seq_id) == kv_of(PROMPT, media=media)
    tables = {tuple(manager.match_prefix(PROMPT, media=media).tolist()) for media in spans}
    assert len(tables) == len(spans)
    for seq_id, media in enumerate(spans):
        manager.release(seq_id)
        assert manager.lookup(PROMPT, media=media) == 8
    manager.check_invariants()


def test_a_leader_is_one_that_computes_the_same_image() -> None:
    manager = KVManager(32, 2)
    begin(manager, 1, PROMPT, media=[(2, 4, IMAGE)])
    same, other = manager.begin(2, PROMPT, media=[(2, 4, IMAGE)]), manager.begin(2, PROMPT, media=[(2, 4, bytes(32))])
    assert isinstance(same, WaitFor)
    assert isinstance(other, WaitFor)
    assert (same.tokens, other.tokens) == (8, 2)
    assert isinstance(manager.begin(2, PROMPT, media=[(1, 5, IMAGE)]), Ready)


def test_a_span_is_never_cut() -> None:
    manager = KVManager(32, 2)
    begin(manager, 1, PROMPT, media=[(2, 4, IMAGE)])
    manager.grow(1, 9)
    manager.commit(1, 4)
    with pytest.raises(InvalidInputError, match=r"^parent_id: .*inside the media span of 2 to 6"):
        manager.fork(1, 2)
    manager.commit(1, 8)
    with pytest.raises(InvalidInputError, match=r"^n: .*inside the media span of 2 to 6"):
        manager.truncate(1, 5)
    manager.fork(1, 2)
    manager.truncate(2, 6)
    manager.truncate(1, 2)
    # What comes after the cut is text now.
    manager.grow(1, 4)
    manager.commit(1, 6, [0, 0, 0, 0])
    manager.check_invariants()
    assert manager.lookup(PROMPT) == 6
    assert manager.match_prefix(PROMPT).tolist() != manager.match_prefix(PROMPT, media=[(2, 4, IMAGE)]).tolist()


def test_any_bytes_are_a_namespace() -> None:
    manager = KVManager(200, 2)
    names = [
        b"",
        b"\0",
        b"\0\0",
        b"a",
        b"a\0",
        b"\xff\xfe",
        "ä".encode(),
        "ä".encode("utf-16"),
        b"x" * 10**5,
        b"x" * 99,
    ]
    for name in names:
        assert manager.lookup([1, 2, 3], name) == 0
        assert run(manager, 0, [1, 2, 3], name) == 0
    assert len({*map(tuple, (manager.match_prefix([1, 2, 3], name).tolist() for name in names))}) == len(names)
    assert len({block_digests([1, 2], 2, name)[0] for name in names}) == len(names)
    for name in names:
        assert run(manager, 0, [1, 2, 3], name) == 2
        assert manager.clear(name) == 1
        assert run(manager, 0, [1, 2, 3], name) == 0


@pytest.mark.parametrize(
    ("media", "problem"),
    [
        (5, r"got 5 \(int\), expected a sequence of \(start, length, digest\)"),
        ([IMAGE], "span 0 is .*, expected a tuple"),
        ([(0, 1, IMAGE), (1, 1)], "span 1 is .*, expected a tuple"),
        ([[0, 1, IMAGE]], "span 0 is .*, expected a tuple"),
        ([(0, 1, IMAGE), (-1, 1, IMAGE)], r"span 1 has start -1 \(int\), expected an int >= 0"),
        ([(0, 1.0, IMAGE)], r"span 0 has length 1\.0 \(float\)"),
        ([(0, 1, IMAGE[:31])], "span 0 has digest of 31 bytes, expected 32 bytes"),
        ([(0, 1, IMAGE + b"a")], "span 0 has digest of 33 bytes"),
        ([(0, 1, IMAGE.hex()[:32])], "span 0 has digest .*str.*, expected 32 bytes"),
        ([(0, 1, bytearray(IMAGE))], "span 0 has digest an object of type bytearray"),
        ([(0, 0, IMAGE)], "span 0 has start 0, length 0: expected a length of at least 1"),
        ([(8, 2, IMAGE)], "span 0 has start 8, length 2: expected to end within the 9 tokens"),
        ([(2**64 - 1, 2, IMAGE)], "span 0 has start 18446744073709551615, length 2"),
        ([(2, 2, IMAGE), (3, 1, IMAGE)], "span 1 .*expected to start at 4 or later"),
        ([(2, 2, IMAGE), (0, 1, IMAGE)], "span 1 .*expected to start at 4 or later"),
    ],
)
def test_malformed_media_are_refused_by_index(media: Any, problem: str) -> None:
    manager = KVManager(16, 2, pin_budget=1)
    calls: list[Callable[[], object]] = [
        lambda: manager.lookup(PROMPT, b"", media),
        lambda: manager.match_prefix(PROMPT, b"", media),
        lambda: manager.begin(0, PROMPT, b"", media),
        lambda: manager.pin(PROMPT, b"", media),
        lambda: block_digests(PROMPT, 2, b"", media),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match=f"^media: {problem}"):
            call()
    assert manager.stats().sequences == 0


def test_block_digests_are_of_whole_blocks_and_of_all_that_comes_before() -> None:
    digests = block_digests(range(11), 3)
    assert [len(digest) for digest in digests] == [32, 32, 32]
    assert block_digests(range(9), 3) == digests
    other = block_digests([0, 1, 2, 9, 4, 5, 6, 7, 8], 3)
    assert [a == b for a, b in zip(digests, other, strict=True)] == [True, False, False]
    assert block_digests([], 3) == block_digests([1, 2], 3) == []
    assert not {*digests} & {*block_digests(range(9), 1)}
    for bad in (0, -1, 2.0, None):
        with pytest.raises(InvalidInputError, match=r"^block_size: "):
            block_digests([1], bad)  # type: ignore[arg-type]
