"""A cache on disk of what loading a model file has computed: its header, and the tensors that had to be converted.

Tensors that are mapped as the model file has them are not in it; if all are, an entry is the header alone.

Where:  ``LEAFKV_CACHE_DIR``, else ``$XDG_CACHE_HOME/leafkv``, else ``~/.cache/leafkv``; in it, ``weights/``.
Limit:  ``LEAFKV_CACHE_MAX_BYTES``, 4 GiB by default, for all entries together. The least recently used go first;
        an entry larger than the limit is not stored; 0 disables the cache.
Key:    the SHA-256 of the model file, what weights are converted to, and the version of the conversion: a changed
        file never meets old weights, nor those of another dtype or quantization.
Entry:  a magic word, the table's length and CRC-32, the table in JSON (the model file's header; name, kind, shape,
        place and CRC-32 of each tensor), and their bytes at multiples of 64. It is written to a temporary file,
        synced and renamed: whole, or not there. Every checksum is verified; a cut or damaged entry is made anew.

The cache is never needed: whatever goes wrong with the disk costs the entry, not the load. Deleting the directory
is safe at any time. Processes share an entry's memory, as they map the same file.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from leafkv.errors import InvalidInputError
from leafkv.models.mapped import map_file
from leafkv.models.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from leafkv.models.parameters import Progress

CONVERSION = 3
"""Version of what an entry holds: change it with the header, or the names, order or conversion of tensors."""

DEFAULT_MAX_BYTES = 4 << 30
_MAGIC = b"LEAFKVW2"
_PREFIX = struct.Struct("<8sQQ")
_ALIGNMENT = 64
_SUFFIX = ".weights"
_STALE_SECONDS = 3600


class WeightsCache:
    """The entries of one directory.

    Args:
        directory: where entries lie; made when the first one is stored.
        max_bytes: what they may take together; 0 disables the cache.
    """

    def __init__(self, directory: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.directory = directory
        self.max_bytes = max_bytes

    @classmethod
    def from_environment(cls) -> WeightsCache:
        """The cache that the environment variables describe."""
        limit = os.environ.get("LEAFKV_CACHE_MAX_BYTES", "").strip() or str(DEFAULT_MAX_BYTES)
        if not (limit.isascii() and limit.isdigit()):
            raise InvalidInputError(f"LEAFKV_CACHE_MAX_BYTES: expected a number of bytes, got {limit!r}")
        if given := os.environ.get("LEAFKV_CACHE_DIR"):
            base = Path(given)
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "leafkv"
        return cls(base / "weights", int(limit))

    def fits(self, nbytes: int) -> bool:
        """Whether an entry may be as large as this at all."""
        return nbytes <= self.max_bytes

    def load(self, key: str, progress: Progress | None = None) -> tuple[Any, dict[str, Tensor]] | None:
        """The header and the tensors, mapped read-only, of an entry; None if there is no whole, undamaged one."""
        path = self._path(key)
        try:
            found = _map(path, progress)
        except (FileNotFoundError, PermissionError):
            return None
        except (OSError, ValueError, struct.error):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # a read-only directory serves as well, without an order of use
            os.utime(path)
        return found

    def store(self, key: str, header: Any, tensors: Mapping[str, Tensor]) -> bool:
        """Write an entry, and make room for it. False if it did not work, whatever the reason.

        ``header`` is anything that JSON has room for.
        """
        if not self.fits(sum(tensor.nbytes for tensor in tensors.values())):
            return False
        temporary = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            table, size = _table(header, tensors)
            if not self._make_room(size):
                return False
            handle, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
            temporary = Path(name)
            with os.fdopen(handle, "wb") as file:
                _write(file, table, tensors)
            temporary.replace(self._path(key))
        except OSError:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink()
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}-{CONVERSION}{_SUFFIX}"

    def _make_room(self, size: int) -> bool:
        """Delete least recently used entries until ``size`` more bytes fit, and what crashed writers left."""
        now = time.time()
        for leftover in self.directory.glob("*.tmp"):
            with contextlib.suppress(OSError):
                if now - leftover.stat().st_mtime > _STALE_SECONDS:
                    leftover.unlink()
        if not self.fits(size):
            return False
        entries = []
        for path in self.directory.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        used = sum(entry[1] for entry in entries)
        for _, nbytes, path in sorted(entries):
            if used + size <= self.max_bytes:
                break
            path.unlink(missing_ok=True)  # those who have it mapped keep it until they end
            used -= nbytes
        return True


def _table(header: Any, tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """What an entry begins with, padded so that the tensors begin aligned, and the size of the whole entry."""
    entries, end = [], 0
    for name, tensor in tensors.items():
        # Offsets count from the first tensor, as the table's own length is not known yet.
        place = {"offset": end, "nbytes": tensor.nbytes, "crc32": zlib.crc32(_bytes(tensor))}
        entries.append({"name": name, "kind": tensor.kind, "shape": tensor.shape, **place})
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    text = json.dumps({"header": header, "tensors": entries, "nbytes": end}).encode()
    text += b" " * (-(_PREFIX.size + len(text)) % _ALIGNMENT)
    return _PREFIX.pack(_MAGIC, len(text), zlib.crc32(text)) + text, _PREFIX.size + len(text) + end


def _write(file: BinaryIO, table: bytes, tensors: Mapping[str, Tensor]) -> None:
    file.write(table)
    for tensor in tensors.values():
        file.write(_bytes(tensor))
        file.write(bytes(-tensor.nbytes % _ALIGNMENT))
    file.flush()
    os.fsync(file.fileno())


def _map(path: Path, progress: Progress | None) -> tuple[Any, dict[str, Tensor]]:
    """The header and the tensors of an entry.

    Raises:
        ValueError, struct.error: the entry is cut or damaged.
    """
    data = map_file(path)
    magic, length, crc32 = _PREFIX.unpack(bytes(data[: _PREFIX.size]))
    start = _PREFIX.size + length
    text = bytes(data[_PREFIX.size : start])
    if magic != _MAGIC or zlib.crc32(text) != crc32:
        raise ValueError("the table is damaged")
    table = json.loads(text)
    if len(data) != start + table["nbytes"]:
        raise ValueError("wrong size")
    tensors: dict[str, Tensor] = {}
    total, done = sum(entry["nbytes"] for entry in table["tensors"]), 0
    for entry in table["tensors"]:
        at = start + entry["offset"]
        raw = data[at : at + entry["nbytes"]]
        if zlib.crc32(raw.data) != entry["crc32"]:
            raise ValueError(f"{entry['name']} is damaged")
        tensors[entry["name"]] = Tensor.of_bytes(entry["kind"], tuple(entry["shape"]), raw)
        done += entry["nbytes"]
        if progress is not None:
            progress(done, total, "mapping weights")
    return table["header"], tensors


def _bytes(tensor: Tensor) -> memoryview:
    """The data's bytes, as `Tensor.of_bytes` takes them."""
    data = np.ascontiguousarray(tensor.data)
    return data.astype(data.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data
