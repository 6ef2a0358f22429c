"""A cache of converted weights on disk: the float32 arrays of model files, mapped on the next start.

Where:  ``LEAFKV_CACHE_DIR``, else ``$XDG_CACHE_HOME/leafkv``, else ``~/.cache/leafkv``; in it, ``weights/``.
Limit:  ``LEAFKV_CACHE_MAX_BYTES``, 4 GiB by default, for all entries together. The least recently used go first;
        an entry larger than the limit is not stored; 0 disables the cache.
Key:    the SHA-256 of the model file, and the version of the conversion: a changed file never meets old weights.
Entry:  a magic word, the header's length, a JSON header (name, shape, offset and CRC-32 of each array), and the
        arrays at multiples of 64 bytes. It is written to a temporary file, synced and renamed: whole, or not
        there. Every array's checksum is verified when it is mapped; a cut or damaged entry is made anew.

The cache is never needed: whatever goes wrong with the disk costs the entry, not the load. Deleting the directory
is safe at any time. Processes share an entry's memory, as they map the same file.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from leafkv.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from leafkv.models.parameters import Parameter, Progress, Weights

CONVERSION = 1
"""Version of what an entry holds: change it with the names, stacking or dequantization of parameters."""

DEFAULT_MAX_BYTES = 4 << 30
_MAGIC = b"LEAFKVW1"
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

    def fits(self, parameters: Sequence[Parameter]) -> bool:
        """Whether a model of these parameters may be stored at all."""
        return sum(parameter.nbytes for parameter in parameters) <= self.max_bytes

    def load(self, key: str, parameters: Sequence[Parameter], progress: Progress | None = None) -> Weights | None:
        """The arrays of an entry, mapped read-only; None if there is no whole, undamaged one."""
        path = self._path(key)
        try:
            weights = _map(path, parameters, progress)
        except (FileNotFoundError, PermissionError):
            return None
        except (OSError, ValueError, KeyError, TypeError):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # a read-only directory serves as well, without an order of use
            os.utime(path)
        return weights

    def store(self, key: str, weights: Weights) -> bool:
        """Write an entry, and make room for it. False if it did not work, whatever the reason."""
        temporary = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            header, size = _header(weights)
            if not self._make_room(size):
                return False
            handle, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
            temporary = Path(name)
            with os.fdopen(handle, "wb") as file:
                _write(file, header, weights)
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
        if size > self.max_bytes:
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


def _header(weights: Weights) -> tuple[bytes, int]:
    """An entry's header, padded so that the arrays begin aligned, and the size of the whole entry."""
    arrays, end = [], 0
    for name, array in weights.items():
        # Offsets count from the first array, as the header's own length is not known yet.
        arrays.append({"name": name, "shape": array.shape, "offset": end, "crc32": _crc32(array)})
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    text = json.dumps({"arrays": arrays, "nbytes": end}).encode()
    start = len(_MAGIC) + 8
    text += b" " * (-(start + len(text)) % _ALIGNMENT)
    return _MAGIC + len(text).to_bytes(8, "little") + text, start + len(text) + end


def _write(file: BinaryIO, header: bytes, weights: Weights) -> None:
    file.write(header)
    for array in weights.values():
        file.write(_bytes(array))
        file.write(bytes(-array.nbytes % _ALIGNMENT))
    file.flush()
    os.fsync(file.fileno())


def _map(path: Path, parameters: Sequence[Parameter], progress: Progress | None) -> Weights:
    """The arrays of an entry.

    Raises:
        ValueError, KeyError, TypeError: the entry is cut, damaged, or of other parameters than these.
    """
    data = np.memmap(path, dtype=np.uint8, mode="r")
    start = len(_MAGIC) + 8
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise ValueError("wrong magic")
    length = int.from_bytes(bytes(data[len(_MAGIC) : start]), "little")
    header = json.loads(bytes(data[start : start + length]))
    start += length
    if len(data) != start + header["nbytes"]:
        raise ValueError("wrong size")
    if [(entry["name"], tuple(entry["shape"])) for entry in header["arrays"]] != [
        (parameter.name, parameter.shape) for parameter in parameters
    ]:
        raise ValueError("other parameters")
    weights: dict[str, NDArray[np.float32]] = {}
    total, done = sum(parameter.nbytes for parameter in parameters), 0
    for entry, parameter in zip(header["arrays"], parameters, strict=True):
        at = start + entry["offset"]
        # A plain ndarray: np.memmap would run Python code for every view that a forward pass takes.
        array = np.asarray(data[at : at + parameter.nbytes]).view(np.ndarray)
        if _crc32(array) != entry["crc32"]:
            raise ValueError(f"{parameter.name} is damaged")
        weights[parameter.name] = array.view(np.float32).reshape(parameter.shape)
        done += parameter.nbytes
        if progress is not None:
            progress(done, total, "mapping weights")
    return weights


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _crc32(array: NDArray[Any]) -> int:
    return zlib.crc32(_bytes(array))
