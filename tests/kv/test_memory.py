"""Sizing from free memory: the smallest limit wins, wherever it is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from leafkv.errors import InsufficientMemoryError, InvalidInputError
from leafkv.kv import KVCache, available_memory, memory, size_from_memory

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:  1048576 kB\nSwapFree: 1 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1024 * MIB),
        # cgroup v2: a limit two levels up; page cache that can be dropped counts as free.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": f"{10 * MIB}\n",
                "sys/fs/cgroup/a/memory.max": f"{300 * MIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{120 * MIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {20 * MIB}\n",
            },
            200 * MIB,
        ),
        # In a container the group is mounted as the root, and its path is not there.
        (
            {
                "proc/self/cgroup": "0::/docker/0123\n",
                "sys/fs/cgroup/memory.max": f"{64 * MIB}\n",
                "sys/fs/cgroup/memory.current": f"{4 * MIB}\n",
            },
            60 * MIB,
        ),
        # cgroup v1, whose "no limit" is a number near 2**63.
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n9:memory:/x\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{100 * MIB}\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{30 * MIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{500 * MIB}\n",
            },
            70 * MIB,
        ),
        # Over its limit: nothing is free, not a negative amount.
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "1000\n",
                "sys/fs/cgroup/memory.current": "2000\n",
            },
            0,
        ),
    ],
)
def test_the_smallest_limit_wins(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_memory(write(tmp_path, MEMINFO | files)) == expected


def test_available_memory_of_this_machine_is_plausible() -> None:
    assert 64 * MIB < available_memory() < 1 << 50


def test_size_is_bounded_by_memory_and_by_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 100 * MIB)
    assert size_from_memory(MIB, max_blocks=1000).num_blocks == 50
    assert size_from_memory(MIB, max_blocks=20).num_blocks == 20
    assert size_from_memory(MIB, max_blocks=1000, fraction=1.0).num_blocks == 100
    text = str(size_from_memory(MIB, max_blocks=20))
    assert "20 blocks of 1024.0 KiB" in text
    assert "0.10 GiB" in text
    with pytest.raises(InsufficientMemoryError, match="no KV block fits"):
        size_from_memory(51 * MIB, max_blocks=1)
    with pytest.raises(InvalidInputError, match="fraction"):
        size_from_memory(MIB, max_blocks=1, fraction=0.0)


def test_a_cache_that_cannot_fit_says_so_with_figures() -> None:
    blocks = 2 * available_memory() // KVCache.nbytes_of_block(30, 3, 64) + 1
    with pytest.raises(InsufficientMemoryError, match=rf"{blocks} blocks of 720.0 KiB .* GiB of memory is free"):
        KVCache(blocks, 30, 3, 64)
