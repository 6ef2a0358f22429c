"""The cache of converted weights: whole or not there, bounded, and never in the way of a load."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from leafkv.errors import InvalidInputError
from leafkv.models import load_model, loader
from leafkv.models.parameters import Parameter, Weights
from leafkv.models.weights_cache import WeightsCache

from .paged import run
from .tiny import CONFIGS, sequences, write_gguf

PARAMETERS = [Parameter("a", (("x", (3, 5)), ("y", (2, 5)))), Parameter("b", (("z", (7,)),))]


def weights(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    random = np.random.RandomState(seed)
    return {p.name: random.standard_normal(p.shape).astype(np.float32) for p in PARAMETERS}


def same(found: Weights | None, expected: Weights) -> bool:
    return found is not None and all(np.array_equal(found[name], expected[name]) for name in expected)


def entries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_round_trip(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "made" / "on" / "demand")
    assert cache.load("key", PARAMETERS) is None
    assert cache.store("key", weights())
    found = cache.load("key", PARAMETERS)
    assert same(found, weights())
    assert found is not None
    assert not found["a"].flags.writeable
    assert found["a"].ctypes.data % 64 == found["b"].ctypes.data % 64 == 0
    assert cache.load("another key", PARAMETERS) is None
    assert cache.load("key", PARAMETERS[:1]) is None  # of another model than it should be


def test_every_damage_is_noticed_and_repaired(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path)
    assert cache.store("key", weights())
    (path,) = entries(tmp_path)
    whole = path.read_bytes()

    def load(data: bytes) -> Weights | None:
        path.write_bytes(data)
        found = cache.load("key", PARAMETERS)
        assert found is None or same(found, weights())
        assert (found is None) == (entries(tmp_path) == [])
        return found

    for size in range(0, len(whole), 7):
        assert load(whole[:size]) is None
    assert load(whole + b"\0") is None
    data = whole.index(weights()["a"].tobytes())
    for at in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[at] ^= 0x10
        found = load(bytes(flipped))
        assert found is None or not data <= at < data + weights()["a"].nbytes
    assert cache.store("key", weights())
    assert same(cache.load("key", PARAMETERS), weights())


def test_bounded_least_recently_used_first(tmp_path: Path) -> None:
    assert WeightsCache(tmp_path).store("size", weights())
    size = entries(tmp_path)[0].stat().st_size
    entries(tmp_path)[0].unlink()
    cache = WeightsCache(tmp_path, max_bytes=3 * size)
    for seed, key in enumerate("abc"):
        assert cache.store(key, weights(seed))
        os.utime(entries(tmp_path)[-1], (seed, seed))
    mapped = cache.load("a", PARAMETERS)  # used now: b is the oldest
    assert cache.store("d", weights(3))
    assert [path.name[0] for path in entries(tmp_path)] == ["a", "c", "d"]
    assert WeightsCache(tmp_path, max_bytes=size).store("e", weights(4))
    assert [path.name[0] for path in entries(tmp_path)] == ["e"]
    assert same(mapped, weights(0))  # evicted, and still whole for those who have it
    assert not WeightsCache(tmp_path, max_bytes=size - 1).store("f", weights(5))
    assert [path.name[0] for path in entries(tmp_path)] == ["e"]  # nothing evicted for what cannot fit


def test_leftovers_of_crashed_writers_go(tmp_path: Path) -> None:
    old, new = tmp_path / "old.tmp", tmp_path / "new.tmp"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    assert WeightsCache(tmp_path).store("key", weights())
    assert not old.exists()
    assert new.exists()  # perhaps being written


def test_a_disk_that_fails_costs_the_entry_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WeightsCache(tmp_path / "weights")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not cache.store("key", weights())
    assert entries(tmp_path) == []  # no leftover
    (tmp_path / "file").write_bytes(b"")
    assert not WeightsCache(tmp_path / "file" / "weights").store("key", weights())
    assert WeightsCache(tmp_path / "file" / "weights").load("key", PARAMETERS) is None


def test_a_read_only_directory_serves_its_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WeightsCache(tmp_path)
    assert cache.store("key", weights())

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(30, "Read-only file system")

    # Permission bits would not stop root, who runs tests in containers.
    for module, name in ((os, "utime"), (tempfile, "mkstemp"), (os, "unlink")):
        monkeypatch.setattr(module, name, refused)
    assert same(cache.load("key", PARAMETERS), weights())
    assert not cache.store("other", weights())


def test_models_load_the_same_with_without_and_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"])
    home = tmp_path / "cache"
    monkeypatch.setenv("LEAFKV_CACHE_DIR", str(home))
    monkeypatch.setenv("LEAFKV_CACHE_MAX_BYTES", "0")
    expected = run(load_model(path).model, sequences(), [64])
    assert not home.exists()
    monkeypatch.delenv("LEAFKV_CACHE_MAX_BYTES")

    def check() -> None:
        found = run(load_model(path).model, sequences(), [64])
        assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))

    check()
    (entry,) = entries(home)
    assert entry.name.startswith(hashlib.sha256(path.read_bytes()).hexdigest())
    with monkeypatch.context() as patch:
        patch.setattr(loader, "read_weights", None)  # not needed any more
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
