"""A cache of converted weights on disk: the header and the float32 arrays of model files, mapped on the next start.

Where:  ``LEAFKV_CACHE_DIR``, else ``$XDG_CACHE_HOME/leafkv``, else ``~/.cache/leafkv``; in it, ``weights/``.
Limit:  ``LEAFKV_CACHE_MAX_BYTES``, 4 GiB by default, for all entries together. The least recently used go first;
        an entry larger than the limit is not stored; 0 disables the cache.
Key:    the SHA-256 of the model file, and the version of the conversion: a changed file never meets old weights.
Entry:  a magic word, the table's length and CRC-32, the table in JSON (the model file's header; name, shape, place
        and CRC-32 of each array), and the arrays at multiples of 64 bytes. It is written to a temporary file,
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

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from leafkv.models.parameters import Progress, Weights

CONVERSION = 2
"""Version of what an entry holds: change it with the header, or the names, stacking or dequantization of parameters."""

DEFAULT_MAX_BYTES = 4 << 30
_MAGIC = b"LEAFKVW1"
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

    def load(self, key: str, progress: Progress | None = None) -> tuple[Any, Weights] | None:
        """The header and the arrays, mapped read-only, of an entry; None if there is no whole, undamaged one."""
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

    def store(self, key: str, header: Any, weights: Weights) -> bool:
        """Write an entry, and make room for it. False if it did not work, whatever the reason.

        ``header`` is anything that JSON has room for.
        """
        if not self.fits(sum(array.nbytes for array in weights.values())):
            return False
        temporary = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            table, size = _table(header, weights)
            if not self._make_room(size):
                return False
            handle, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
            temporary = Path(name)
            with os.fdopen(handle, "wb") as file:
                _write(file, table, weights)
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


def _table(header: Any, weights: Weights) -> tuple[bytes, int]:
    """What an entry begins with, padded so that the arrays begin aligned, and the size of the whole entry."""
    arrays, end = [], 0
    for name, array in weights.items():
        # Offsets count from the first array, as the table's own length is not known yet.
        place = {"offset": end, "nbytes": array.nbytes, "crc32": _crc32(array)}
        arrays.append({"name": name, "shape": array.shape, **place})
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    text = json.dumps({"header": header, "arrays": arrays, "nbytes": end}).encode()
    text += b" " * (-(_PREFIX.size + len(text)) % _ALIGNMENT)
    return _PREFIX.pack(_MAGIC, len(text), zlib.crc32(text)) + text, _PREFIX.size + len(text) + end


def _write(file: BinaryIO, table: bytes, weights: Weights) -> None:
    file.write(table)
    for array in weights.values():
        file.write(_bytes(array))
        file.write(bytes(-array.nbytes % _ALIGNMENT))
    file.flush()
    os.fsync(file.fileno())


def _map(path: Path, progress: Progress | None) -> tuple[Any, Weights]:
    """The header and the arrays of an entry.

    Raises:
        ValueError, struct.error: the entry is cut or damaged.
    """
    data = np.memmap(path, dtype=np.uint8, mode="r")
    magic, length, crc32 = _PREFIX.unpack(bytes(data[: _PREFIX.size]))
    start = _PREFIX.size + length
    text = bytes(data[_PREFIX.size : start])
    if magic != _MAGIC or zlib.crc32(text) != crc32:
        raise ValueError("the table is damaged")
    table = json.loads(text)
    if len(data) != start + table["nbytes"]:
        raise ValueError("wrong size")
    weights: dict[str, NDArray[np.float32]] = {}
    total, done = sum(entry["nbytes"] for entry in table["arrays"]), 0
    for entry in table["arrays"]:
        at = start + entry["offset"]
        # A plain ndarray: np.memmap would run Python code for every view that a forward pass takes.
        array = np.asarray(data[at : at + entry["nbytes"]]).view(np.ndarray)
        if _crc32(array) != entry["crc32"]:
            raise ValueError(f"{entry['name']} is damaged")
        weights[entry["name"]] = array.view(np.float32).reshape(entry["shape"])
        done += entry["nbytes"]
        if progress is not None:
            progress(done, total, "mapping weights")
    return table["header"], weights


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _crc32(array: NDArray[Any]) -> int:
    return zlib.crc32(_bytes(array))
