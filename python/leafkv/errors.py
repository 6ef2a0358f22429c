"""LeafKV's exceptions: one small hierarchy under :class:`LeafKVError`.

Each also derives from the builtin that a caller would expect, so ``except ValueError`` works for bad input.
"""

from __future__ import annotations


class LeafKVError(Exception):
    """Base of every exception that LeafKV raises on purpose."""


class InvalidInputError(LeafKVError, ValueError):
    """An argument is malformed. The message names the argument, what came and what was expected."""


class OutOfBlocksError(LeafKVError, MemoryError):
    """The block pool cannot serve the request, even after evicting everything evictable. Nothing changed."""


class InsufficientMemoryError(LeafKVError, MemoryError):
    """The KV memory asked for does not fit in the machine's free memory."""


class UnknownSequenceError(LeafKVError, LookupError):
    """No live sequence has this id."""


class EventGapError(LeafKVError, RuntimeError):
    """Events of a KV manager are missing: what follows them is not known until a snapshot is loaded.

    Attributes:
        expected: number of the event that had to come.
        got: number of the event that came.
    """

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(f"expected event {expected}, got {got}: events are missing, load a snapshot")
        self.expected = expected
        self.got = got


class EngineDeadError(LeafKVError, RuntimeError):
    """The engine was shut down, or has died of a bug, which is the cause then. It takes no requests any more."""


class InvariantError(LeafKVError, AssertionError):
    """LeafKV contradicts itself: a bug in LeafKV, please report it."""


class ModelLoadError(LeafKVError, ValueError):
    """A model file is missing, cut or of a kind that LeafKV does not read."""


class MissingExtraError(LeafKVError, ImportError):
    """An optional dependency is not installed. The message gives the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this feature needs the package {package!r}, which is not installed: pip install 'leafkv[{extra}]'"
        )
        self.package = package
        self.extra = extra
