"""The cache of headers and converted tensors: whole or not there, bounded, and never in the way of a load."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leafkv.errors import InvalidInputError, ModelLoadError
from leafkv.models import gguf, gguf_types, load_model, loader
from leafkv.models import tensors as tensors_module
from leafkv.models.conversion import QUANTIZATIONS
from leafkv.models.tensors import Tensor, is_mapped
from leafkv.models.weights_cache import WeightsCache

from .paged import run
from .tiny import CONFIGS, sequences, write_gguf

HEADER = {"tokens": ["a", "\u0120b"], "eps": float(np.float32(1e-5)), "factors": None}


Tensors = dict[str, Tensor]


def tensors(seed: int = 0) -> Tensors:
    random = np.random.RandomState(seed)
    return {
        "a": Tensor("float32", (5, 5), random.standard_normal((5, 5)).astype(np.float32)),
        "b": Tensor("bfloat16", (7,), random.randint(0, 1 << 16, 7).astype(np.uint16)),
        "c": Tensor("q4_1", (2, 32), random.randint(0, 256, (2, 20)).astype(np.uint8)),
    }


def same(found: tuple[Any, Tensors] | None, expected: Tensors) -> bool:
    if found is None or found[0] != HEADER or list(found[1]) != list(expected):
        return False
    return all(
        (found[1][name].kind, found[1][name].shape) == (tensor.kind, tensor.shape)
        and found[1][name].data.dtype == tensor.data.dtype
        and np.array_equal(found[1][name].data, tensor.data)
        for name, tensor in expected.items()
    )


def entries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_round_trip(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "made" / "on" / "demand")
    assert cache.load("key") is None
    assert cache.store("key", HEADER, tensors())
    found = cache.load("key")
    assert same(found, tensors())
    assert found is not None
    for tensor in found[1].values():
        assert is_mapped(tensor.data)
        assert type(tensor.data) is np.ndarray
        assert not tensor.data.flags.writeable
        assert tensor.data.ctypes.data % 64 == 0
    assert cache.load("another key") is None
    assert cache.store("header alone", HEADER, {})
    assert cache.load("header alone") == (HEADER, {})


def test_every_damage_is_noticed_and_repaired(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path)
    assert cache.store("key", HEADER, tensors())
    (path,) = entries(tmp_path)
    whole = path.read_bytes()

    def load(data: bytes) -> tuple[Any, Tensors] | None:
        path.write_bytes(data)
        found = cache.load("key")
        assert found is None or same(found, tensors())
        assert (found is None) == (entries(tmp_path) == [])
        return found

    for size in range(0, len(whole), 7):
        assert load(whole[:size]) is None
    assert load(whole + b"\0") is None
    # What follows a tensor up to a multiple of 64 bytes says nothing.
    arrays = [(whole.index(tensor.data.tobytes()), tensor.nbytes) for tensor in tensors().values()]
    padding = {at for start, size in arrays for at in range(start + size, start + size + -size % 64)}
    for at in {*range(0, len(whole), 3), *range(24)}:
        flipped = bytearray(whole)
        flipped[at] ^= 0x10
        assert (load(bytes(flipped)) is None) == (at not in padding)
    assert cache.store("key", HEADER, tensors())
    assert same(cache.load("key"), tensors())


def test_bounded_least_recently_used_first(tmp_path: Path) -> None:
    assert WeightsCache(tmp_path).store("size", HEADER, tensors())
    size = entries(tmp_path)[0].stat().st_size
    entries(tmp_path)[0].unlink()
    cache = WeightsCache(tmp_path, max_bytes=3 * size)
    for seed, key in enumerate("abc"):
        assert cache.store(key, HEADER, tensors(seed))
        os.utime(entries(tmp_path)[-1], (seed, seed))
    mapped = cache.load("a")  # used now: b is the oldest
    assert cache.store("d", HEADER, tensors(3))
    assert [path.name[0] for path in entries(tmp_path)] == ["a", "c", "d"]
    assert WeightsCache(tmp_path, max_bytes=size).store("e", HEADER, tensors(4))
    assert [path.name[0] for path in entries(tmp_path)] == ["e"]
    assert same(mapped, tensors(0))  # evicted, and still whole for those who have it
    assert not WeightsCache(tmp_path, max_bytes=size - 1).store("f", HEADER, tensors(5))
    assert [path.name[0] for path in entries(tmp_path)] == ["e"]  # nothing evicted for what cannot fit


def test_leftovers_of_crashed_writers_go(tmp_path: Path) -> None:
    old, new = tmp_path / "old.tmp", tmp_path / "new.tmp"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    assert WeightsCache(tmp_path).store("key", HEADER, tensors())
    assert not old.exists()
    assert new.exists()  # perhaps being written


def test_a_disk_that_fails_costs_the_entry_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WeightsCache(tmp_path / "weights")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not cache.store("key", HEADER, tensors())
    assert entries(tmp_path) == []  # no leftover
    (tmp_path / "file").write_bytes(b"")
    assert not WeightsCache(tmp_path / "file" / "weights").store("key", HEADER, tensors())
    assert WeightsCache(tmp_path / "file" / "weights").load("key") is None


def test_a_read_only_directory_serves_its_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WeightsCache(tmp_path)
    assert cache.store("key", HEADER, tensors())

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(30, "Read-only file system")

    # Permission bits would not stop root, who runs tests in containers.
    for module, name in ((os, "utime"), (tempfile, "mkstemp"), (os, "unlink")):
        monkeypatch.setattr(module, name, refused)
    assert same(cache.load("key"), tensors())
    assert not cache.store("other", HEADER, tensors())


WHOLE_BLOCKS = CONFIGS["llama"] | {"intermediate_size": 64}
MATRICES = 2 * 7 + 2


@pytest.mark.parametrize(
    ("stored", "options", "converted"),
    [
        ("F32", {}, 0),
        ("BF16", {}, 0),
        ("Q8_0", {}, 0),
        ("Q5_0", {}, MATRICES),
        ("Q5_0", {"dtype": "bfloat16"}, MATRICES),
        ("BF16", {"dtype": "bfloat16"}, 0),
        ("F32", {"dtype": "bfloat16"}, MATRICES),
        ("F16", {"quantization": "q4_1"}, MATRICES),
        ("Q4_0", {"quantization": "q4_0"}, 0),
        ("Q5_0", {"quantization": "q8_0"}, MATRICES),
    ],
)
def test_models_load_the_same_with_without_and_from_the_cache(
    stored: str, options: dict[str, Any], converted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divisors = np.array([1, 1.1, 2.3, 7], np.float32)
    path = write_gguf(tmp_path / "model.gguf", WHOLE_BLOCKS, matrices=stored, more={"rope_freqs.weight": divisors})
    home = tmp_path / "cache"
    monkeypatch.setenv("LEAFKV_CACHE_DIR", str(home))
    monkeypatch.setenv("LEAFKV_CACHE_MAX_BYTES", "0")
    uncached = load_model(path, **options)
    expected = run(uncached.model, sequences(), [64])
    assert not home.exists()
    monkeypatch.delenv("LEAFKV_CACHE_MAX_BYTES")

    def check() -> None:
        loaded = load_model(path, **options)
        assert loaded.config == uncached.config
        assert loaded.tokenizer.encode("ABBA") == uncached.tokenizer.encode("ABBA")
        found = run(loaded.model, sequences(), [64])
        assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))

    check()
    (entry,) = entries(home)
    assert entry.name.startswith(hashlib.sha256(path.read_bytes()).hexdigest())
    held = WeightsCache(home / "weights").load(entry.name.rpartition("-")[0])
    assert held is not None
    assert len(held[1]) == converted
    with monkeypatch.context() as patch:
        # The header is not parsed any more, nothing is converted, and what is not mapped is not even looked at.
        patch.setattr(gguf, "read_header", None)
        patch.setattr(gguf_types, "require", None)
        patch.setattr(tensors_module, "_encode", None)
        check()
    entry.write_bytes(entry.read_bytes()[:-1])
    check()
    assert len(entries(home)) == 1
    # A changed file has a digest, hence an entry, of its own.
    path.write_bytes(path.read_bytes() + bytes(32))
    check()
    assert len(entries(home)) == 2


def test_what_is_converted_otherwise_is_never_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAFKV_CACHE_DIR", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "model.gguf", WHOLE_BLOCKS)
    wanted: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, *({"quantization": kind} for kind in QUANTIZATIONS)]
    kinds = ["float32", "bfloat16", *QUANTIZATIONS]
    for _ in range(2):  # made, then met
        for options, kind in zip(wanted, kinds, strict=True):
            assert load_model(path, **options).weights.split(",")[0] == kind
        assert load_model(path, dtype="float32").weights.startswith("float32")
        assert len(entries(tmp_path)) == 1 + len(wanted)


def test_an_entry_whose_header_does_not_fit_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAFKV_CACHE_DIR", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "model.gguf", WHOLE_BLOCKS)
    load_model(path)
    (entry,) = entries(tmp_path / "cache")
    key, cache = entry.name.rpartition("-")[0], WeightsCache(entry.parent)
    found = cache.load(key)
    assert found is not None
    found[0]["places"]["output.weight"][2] += 4096
    assert cache.store(key, *found)
    load_model(path)
    assert cache.load(key) != found
    # Cut between the two: what is said is what the file says.
    with monkeypatch.context() as patch:
        patch.setattr(loader, "digest", lambda _: key.partition("-")[0])
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ModelLoadError, match="cut or damaged file"):
            load_model(path)


def test_a_file_larger_than_the_cache_is_not_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", WHOLE_BLOCKS)
    monkeypatch.setenv("LEAFKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LEAFKV_CACHE_MAX_BYTES", str(path.stat().st_size - 1))
    monkeypatch.setattr(loader, "digest", None)
    load_model(path)
    assert not (tmp_path / "cache").exists()


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LEAFKV_CACHE_DIR", raising=False)
    monkeypatch.delenv("LEAFKV_CACHE_MAX_BYTES", raising=False)
    cache = WeightsCache.from_environment()
    assert (cache.directory, cache.max_bytes) == (tmp_path / "leafkv" / "weights", 4 << 30)
    monkeypatch.setenv("LEAFKV_CACHE_MAX_BYTES", "12GB")
    with pytest.raises(InvalidInputError, match="LEAFKV_CACHE_MAX_BYTES: expected a number of bytes, got '12GB'"):
        WeightsCache.from_environment()
