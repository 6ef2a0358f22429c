"""Namespaces: no two sets of fields are the same bytes, and tenants do not see each other's prompts."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations
from typing import Any

import pytest

import leafkv
from leafkv import InvalidInputError, KVManager, Ready, namespace

FIELDS: dict[str, Any] = {
    "model": "org/model",
    "revision": "main",
    "adapter": "lora-1",
    "dtype": "bfloat16",
    "weights_version": 3,
    "salt": "secret of tenant a",
    "rope_theta": 1e6,
}


def hit(manager: KVManager, tokens: list[int], scope: bytes) -> int:
    """Compute a prompt, as far as it is not cached; the tokens found."""
    answer = manager.begin(0, tokens, scope)
    assert isinstance(answer, Ready)
    manager.grow(0, len(tokens) - answer.cached_tokens)
    manager.commit(0, len(tokens))
    manager.release(0)
    return answer.cached_tokens


@pytest.mark.parametrize(
    "change",
    [
        {"model": "org/Model"},
        {"revision": "main2"},
        {"revision": ""},
        {"adapter": "lora-2"},
        {"adapter": ""},
        {"dtype": "float32"},
        {"weights_version": 4},
        {"weights_version": "3"},
        {"salt": "secret of tenant b"},
        {"salt": b"secret of tenant a"},
        {"salt": None},
        {"rope_theta": 1e4},
        {"rope_theta": 1000000},
        {"sliding_window": ""},
        # The same characters, in other fields.
        {"revision": "mainl", "adapter": "ora-1"},
        {"model": "org/modelmain", "revision": ""},
        {"revision": "lora-1", "adapter": "main"},
    ],
    ids=str,
)
def test_a_change_of_any_field_misses(change: dict[str, Any]) -> None:
    manager = KVManager(16, 2)
    prompt = list(range(9))
    assert hit(manager, prompt, namespace(**FIELDS)) == 0
    assert hit(manager, prompt, namespace(**FIELDS)) == 8
    assert hit(manager, prompt, namespace(**FIELDS | change)) == 0
    removed = {name: value for name, value in FIELDS.items() if name != "rope_theta"}
    assert namespace(**removed) != namespace(**FIELDS)


def test_the_encoding_is_unambiguous_and_the_same_everywhere() -> None:
    values = ["", "a", "aa", "1", b"", b"a", b"1", 0, 1, -1, True, False, 0.0, 1.0, "1:a,", "a,1:", "\udcff", 2**70]
    fields: list[dict[str, Any]] = [{}, *({"x": a} for a in values), *({"y": a} for a in values)]
    fields += [{"x": a, "y": b} for a in values for b in values]
    fields += [{"x": a, "xx": b} for a in values for b in values]
    encoded = [namespace("m", **field) for field in fields]
    assert len(set(encoded)) == len(encoded)
    assert namespace("m", x=1, y=2) == namespace("m", y=2, x=1)

    # In another process, with another hash seed; and it stays so, for it is written to disk.
    code = "import sys, leafkv; sys.stdout.write(leafkv.namespace('m', x=1, salt='s').hex())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert bytes.fromhex(done.stdout) == namespace("m", x=1, salt="s")
    assert namespace("m", rope_theta=0.5) == (
        b"leafkv namespace 1,7:adapter,3:str,0:,5:dtype,3:str,0:,5:model,3:str,1:m,8:revision,3:str,0:,"
        b"10:rope_theta,5:float,3:0.5,15:weights_version,3:int,1:0,"
    )


def test_tenants_do_not_see_each_other() -> None:
    manager = KVManager(32, 4)
    prompt = list(range(21))
    a, b = (namespace("m", salt=salt) for salt in ("key of a", "key of b"))
    assert hit(manager, prompt, a) == 0
    assert hit(manager, prompt, a) == 20
    assert manager.lookup(prompt, b) == manager.lookup(prompt, namespace("m")) == 0
    assert hit(manager, prompt, b) == 0
    # Neither waits for the other's prompt to be computed: that too would tell.
    manager.clear()
    assert isinstance(manager.begin(1, prompt, a), Ready)
    assert isinstance(manager.begin(2, prompt, b), Ready)
    # A namespace that is seen by others does not give the salt away.
    assert b"key of a" not in a


def test_new_weights_are_a_new_namespace_and_the_old_one_can_be_cleared() -> None:
    manager = KVManager(16, 4)
    prompt = list(range(17))
    old, new = (namespace("m", weights_version=version) for version in (1, 2))
    assert hit(manager, prompt, old) == 0
    assert hit(manager, prompt, new) == 0
    assert manager.clear(old) == 4
    assert (manager.lookup(prompt, old), manager.lookup(prompt, new)) == (0, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"salt": ""}, "salt: .*isolates nobody"),
        ({"salt": b""}, "salt: .*isolates nobody"),
        ({"salt": 1}, "salt: expected a str, bytes or None"),
        ({"model": ""}, "model: expected a name"),
        ({"adapter": None}, "adapter: expected .* got None"),
        ({"x": ["a"]}, r"x: expected .* got \['a'\]"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        namespace(**{"model": "m"} | arguments)


def test_it_is_where_users_look_for_it() -> None:
    assert leafkv.kv.namespace is namespace
    named = [namespace("a"), namespace("b"), namespace("a", revision="b"), namespace("a", adapter="b")]
    assert all(x != y for x, y in combinations(named, 2))
