"""Token ids and other integers as Python has them: arrays of any integer dtype, buffers, sequences of ints."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from leafkv import InvalidInputError
from leafkv._core import KVManager
from tests.kv.lives import begin, run

GOOD_TOKENS = [1, 2, 3, 4, 5, 2**31 - 1, 7]


@pytest.mark.parametrize(
    "tokens",
    [
        GOOD_TOKENS,
        tuple(GOOD_TOKENS),
        [np.int64(token) for token in GOOD_TOKENS],
        array("i", GOOD_TOKENS),
        array("q", GOOD_TOKENS),
        array("L", GOOD_TOKENS),
        memoryview(array("I", GOOD_TOKENS)),
        *(np.array(GOOD_TOKENS, dtype) for dtype in (np.int32, np.int64, np.uint32, np.uint64)),
        np.repeat(np.array(GOOD_TOKENS, np.int64), 2)[::2],
        np.array(GOOD_TOKENS[::-1], np.int32)[::-1],
        np.array([(0, token) for token in GOOD_TOKENS], np.dtype([("a", "i1"), ("b", "i8")]))["b"],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_token_ids_come_in_many_forms(tokens: Any) -> None:
    manager = KVManager(16, 2)
    run(manager, 0, GOOD_TOKENS)
    assert manager.lookup(tokens) == 6
    assert begin(manager, 1, tokens) == 6
    manager.grow(1, 8)
    manager.commit(1, 14, tokens)
    assert manager.lookup([*GOOD_TOKENS, *GOOD_TOKENS, 0]) == 14


def test_small_integer_types_and_the_largest_id() -> None:
    manager = KVManager(16, 2)
    run(manager, 0, [1, 2, 3, 2**32 - 1, 5])
    for dtype in (np.uint8, np.int8, np.uint16, np.int16):
        small: Any = np.array([1, 2, 3], dtype)
        assert manager.lookup(small) == 2
    assert manager.lookup(np.array([1, 2, 3, 2**32 - 1, 0], np.uint32)) == 4
    assert manager.lookup(np.empty(0, np.int64)) == manager.lookup([]) == 0


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([], "got none"),
        ([1, -1], "item 1 is -1"),
        ([1, 2**32], "item 1 is 4294967296"),
        ([1, 2.0], r"item 1 is 2\.0"),
        ([True], "item 0 is True"),
        (["a"], "item 0 is 'a'"),
        ([[1]], r"item 0 is \[1\]"),
        (np.array([3, 1, -5], np.int64), "item 2 is -5"),
        (np.array([3, -1], np.int32)[::-1], "item 0 is -1"),
        (np.array([2**32]), "item 0 is 4294967296"),
        (np.array([2**64 - 1], np.uint64), "item 0 is 18446744073709551615"),
        (array("h", [1, -2]), "item 1 is -2"),
        (np.array([1.0]), "got float64"),
        (np.array([True]), "got bool"),
        (np.array([1], ">i4"), "got >i4"),
        (np.array([1], object), "got object"),
        (np.array([1], "m8[s]"), "got timedelta64"),
        (np.ones((2, 3), int), r"shape \[2, 3\]"),
        (np.array(1), r"shape \[\]"),
        (array("d", [1.0]), "got float64"),
        ("text", "got 'text'"),
        (b"text", "got b'text'"),
        (bytearray(b"text"), r"got bytearray\(b'text'\)"),
        ({1, 2}, r"got \{1, 2\}"),
        (None, "got None"),
        (1, "got 1"),
        (range(100), "need 50 blocks"),
    ],
)
def test_bad_token_ids_are_refused_by_name_and_position(tokens: Any, problem: str) -> None:
    manager = KVManager(16, 2)
    with pytest.raises(InvalidInputError, match=f"^tokens: .*{problem}"):
        manager.begin(0, tokens)
    assert manager.stats().sequences == 0
    begin(manager, 0, [1])
    manager.grow(0, 2)
    if problem not in ("got none", "got None", "need 50 blocks"):  # Right for `commit`, or its default.
        with pytest.raises(InvalidInputError, match=f"^new_tokens: .*{problem}"):
            manager.commit(0, 2, tokens)
    assert manager.num_committed(0) == 0


def test_the_length_that_a_sequence_claims_costs_nothing() -> None:
    class Boaster(Sequence[int]):
        def __len__(self) -> int:
            return 2**62

        def __getitem__(self, index: Any) -> Any:
            return [3, 4][index]

    manager = KVManager(16, 2)
    begin(manager, 0, Boaster())
    manager.grow(0, 2)
    manager.commit(0, 2)
    assert manager.lookup([3, 4, 5]) == 2
