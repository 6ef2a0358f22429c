"""How much memory a KV cache may take: free RAM, within the limits of the process's control groups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from leafkv.errors import InsufficientMemoryError, InvalidInputError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheSize:
    """A KV cache size, and the figures it was derived from (bytes)."""

    num_blocks: int
    block_nbytes: int
    available: int

    @property
    def nbytes(self) -> int:
        """Memory of the whole cache, in bytes."""
        return self.num_blocks * self.block_nbytes

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks of {self.block_nbytes / 1024:.1f} KiB = {self.nbytes / GIB:.2f} GiB "
            f"(free memory: {self.available / GIB:.2f} GiB)"
        )


def size_from_memory(
    block_nbytes: int, *, max_blocks: int, fraction: float = 0.5, available: int | None = None
) -> CacheSize:
    """Size a cache from free memory: at most ``fraction`` of it, and never more than ``max_blocks``.

    Args:
        block_nbytes: bytes of one block, see :attr:`KVCache.block_nbytes`.
        max_blocks: what the caller can use at most.
        fraction: the share of free memory to take, above 0 and at most 1.
        available: bytes that are free; None asks the machine how much of its RAM is.

    Raises:
        InsufficientMemoryError: not even one block fits.
    """
    if not 0 < fraction <= 1:
        raise InvalidInputError(f"fraction: {fraction} is not in (0, 1]")
    if block_nbytes < 1 or max_blocks < 1:
        raise InvalidInputError(f"block_nbytes and max_blocks must be at least 1, not {block_nbytes} and {max_blocks}")
    if available is None:
        available = available_memory()
    fit = int(available * fraction) // block_nbytes
    if fit < 1:
        raise InsufficientMemoryError(
            f"no KV block fits: one takes {block_nbytes / GIB:.3f} GiB, and {fraction:.0%} of "
            f"{available / GIB:.3f} GiB of free memory is offered"
        )
    return CacheSize(min(fit, max_blocks), block_nbytes, available)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take without swapping or meeting a control group's limit.

    ``root`` is where ``proc`` and ``sys`` are mounted: another one serves tests.
    """
    free = _free_of_system(root)
    return max(0, min([free, *_free_of_cgroups(root)]))


def _free_of_system(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_of_cgroups(root: Path) -> list[int]:
    """What is left under each limit, from the process's own group up to the root group (v2 and v1)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, used, reclaimable = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, used, reclaimable = (
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        group = Path(path.lstrip("/"))
        # In a container the path may name a group that is mounted as the root: missing folders are skipped.
        for folder in (root / mount / g for g in (group, *group.parents)):
            bound = _read_int(folder / limit)
            usage = _read_int(folder / used)
            if bound is not None and usage is not None:
                left.append(bound - usage + _read_stat(folder / "memory.stat", reclaimable))
    return left


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
