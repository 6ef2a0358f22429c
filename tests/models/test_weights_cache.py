"""The cache of converted weights: whole or not there, bounded, and never in the way of a load."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv.errors import InvalidInputError
from leafkv.models import load_model, loader
from leafkv.models.parameters import Weights
from leafkv.models.weights_cache import WeightsCache

from .paged import run
from .tiny import CONFIGS, sequences, write_gguf

HEADER = {"tokens": ["a", "\u0120b"], "eps": float(np.float32(1e-5)), "factors": None}


def weights(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    random = np.random.RandomState(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in (("a", (5, 5)), ("b", (7,)))}


def same(found: tuple[Any, Weights] | None, expected: Weights) -> bool:
    if found is None or found[0] != HEADER or list(found[1]) != list(expected):
        return False
    return all(np.array_equal(found[1][name], expected[name]) for name in expected)


def entries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_round_trip(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "made" / "on" / "demand")
    assert cache.load("key") is None
    assert cache.store("key", HEADER, weights())
    found = cache.load("key")
    assert same(found, weights())
    assert found is not None
    a, b = found[1]["a"], found[1]["b"]
    assert not a.flags.writeable
    assert a.ctypes.data % 64 == b.ctypes.data % 64 == 0
    assert cache.load("another key") is None


def test_every_damage_is_noticed_and_repaired(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path)
    assert cache.store("key", HEADER, weights())
    (path,) = entries(tmp_path)
    whole = path.read_bytes()

    def load(data: bytes) -> tuple[Any, Weights] | None:
        path.write_bytes(data)
        found = cache.load("key")
        assert found is None or same(found, weights())
        assert (found is None) == (entries(tmp_path) == [])
        return found

    for size in range(0, len(whole), 7):
        assert load(whole[:size]) is None
    assert load(whole + b"\0") is None
    # What follows an array up to a multiple of 64 bytes says nothing.
    arrays = [(whole.index(array.tobytes()), array.nbytes) for array in weights().values()]
    padding = {at for start, size in arrays for at in range(start + size, start + size + -size % 64)}
    for at in {*range(0, len(whole), 3), *range(24)}:
        flipped = bytearray(whole)
        flipped[at] ^= 0x10
        assert (load(bytes(flipped)) is None) == (at not in padding)
    assert cache.store("key", HEADER, weights())
    assert same(cache.load("key"), weights())


def test_bounded_least_recently_used_first(tmp_path: Path) -> None:
    assert WeightsCache(tmp_path).store("size", HEADER, weights())
    size = entries(tmp_path)[0].stat().st_size
    entries(tmp_path)[0].unlink()
    cache = WeightsCache(tmp_path, max_bytes=3 * size)
    for seed, key in enumerate("abc"):
        assert cache.store(key, HEADER, weights(seed))
        os.utime(entries(tmp_path)[-1], (seed, seed))
    mapped = cache.load("a")  # used now: b is the oldest
    assert cache.store("d", HEADER, weights(3))
    assert [path.name[0] for path in entries(tmp_path)] == ["a", "c", "d"]
    assert WeightsCache(tmp_path, max_bytes=size).store("e", HEADER, weights(4))
    assert [path.name[0] for path in entries(tmp_path)] == ["e"]
    assert same(mapped, weights(0))  # evicted, and still whole for those who have it
    assert not WeightsCache(tmp_path, max_bytes=size - 1).store("f", HEADER, weights(5))
    assert [path.name[0] for path in entries(tmp_path)] == ["e"]  # nothing evicted for what cannot fit


def test_leftovers_of_crashed_writers_go(tmp_path: Path) -> None:
    old, new = tmp_path / "old.tmp", tmp_path / "new.tmp"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    assert WeightsCache(tmp_path).store("key", HEADER, weights())
    assert not old.exists()
    assert new.exists()  # perhaps being written


def test_a_disk_that_fails_costs_the_entry_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WeightsCache(tmp_path / "weights")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not cache.store("key", HEADER, weights())
    assert entries(tmp_path) == []  # no leftover
    (tmp_path / "file").write_bytes(b"")
    assert not WeightsCache(tmp_path / "file" / "weights").store("key", HEADER, weights())
    assert WeightsCache(tmp_path / "file" / "weights").load("key") is None


def test_a_read_only_directory_serves_its_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WeightsCache(tmp_path)
    assert cache.store("key", HEADER, weights())

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(30, "Read-only file system")

    # Permission bits would not stop root, who runs tests in containers.
    for module, name in ((os, "utime"), (tempfile, "mkstemp"), (os, "unlink")):
        monkeypatch.setattr(module, name, refused)
    assert same(cache.load("key"), weights())
    assert not cache.store("other", HEADER, weights())


def test_models_load_the_same_with_without_and_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divisors = np.array([1, 1.1, 2.3, 7], np.float32)
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"], more={"rope_freqs.weight": divisors})
    home = tmp_path / "cache"
    monkeypatch.setenv("LEAFKV_CACHE_DIR", str(home))
    monkeypatch.setenv("LEAFKV_CACHE_MAX_BYTES", "0")
    uncached = load_model(path)
    expected = run(uncached.model, sequences(), [64])
    assert not home.exists()
    monkeypatch.delenv("LEAFKV_CACHE_MAX_BYTES")

    def check() -> None:
        loaded = load_model(path)
        assert loaded.config == uncached.config
        assert loaded.tokenizer.encode("ABBA") == uncached.tokenizer.encode("ABBA")
        found = run(loaded.model, sequences(), [64])
        assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))

    check()
    (entry,) = entries(home)
    assert entry.name.startswith(hashlib.sha256(path.read_bytes()).hexdigest())
    with monkeypatch.context() as patch:
        patch.setattr(loader, "GGUFFile", None)  # neither header nor weights are read any more
        check()
    entry.write_bytes(entry.read_bytes()[:-200])
    check()
    assert len(entries(home)) == 1
    # A changed file has a digest, hence an entry, of its own.
    path.write_bytes(path.read_bytes() + bytes(32))
    check()
    assert len(entries(home)) == 2


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LEAFKV_CACHE_DIR", raising=False)
    monkeypatch.delenv("LEAFKV_CACHE_MAX_BYTES", raising=False)
    cache = WeightsCache.from_environment()
    assert (cache.directory, cache.max_bytes) == (tmp_path / "leafkv" / "weights", 4 << 30)
    monkeypatch.setenv("LEAFKV_CACHE_MAX_BYTES", "12GB")
    with pytest.raises(InvalidInputError, match="LEAFKV_CACHE_MAX_BYTES: expected a number of bytes, got '12GB'"):
        WeightsCache.from_environment()
