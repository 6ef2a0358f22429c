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
