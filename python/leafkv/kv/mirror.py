"""What another process's KV manager has cached, followed from its events.

A router that sends each prompt to the worker which has most of it cached keeps one :class:`CacheMirror` per worker. It
starts with a snapshot, or with the manager; then it replays the events, in order. Events are numbered without gaps: a
missing one is noticed, and a new snapshot repairs it.

A mirror keeps the digest of each block, its parent and a counter: about 250 bytes a block, however many tokens it has.
Digests mean the same in every process, so what is looked up is tokens, and no block id ever leaves the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING, Protocol

from leafkv._checks import check_integer
from leafkv._core import block_digests
from leafkv.errors import EventGapError, InvalidInputError

if TYPE_CHECKING:
    from leafkv._core import _Media, _TokenIds


KINDS = ("stored", "reused", "removed", "cleared")
"""The kinds of events."""


class CacheEvent(Protocol):
    """What a mirror reads of an event: `leafkv.Event`, or the same fields after a way over the network."""

    @property
    def number(self) -> int:
        """Counts the events of a manager from 0."""

    @property
    def kind(self) -> str:
        """What happened to the blocks, one of `KINDS`."""

    @property
    def namespace(self) -> bytes | None:
        """None: all namespaces, of "cleared" alone."""

    @property
    def blocks(self) -> Sequence[bytes]:
        """Their digests, each of 32 bytes; of "stored" each is the parent of the next."""

    @property
    def parent(self) -> bytes | None:
        """Of "stored": the digest of the block before the first one, None at the start of a prompt."""

    @property
    def tokens(self) -> Sized:
        """Of "stored": those of the blocks. The mirror looks at their number alone."""


class CacheSnapshot(Protocol):
    """What a mirror reads of a snapshot: `leafkv.Snapshot`, or the same fields after a way over the network."""

    @property
    def number(self) -> int:
        """Of the first event after the snapshot."""

    @property
    def stored(self) -> Sequence[CacheEvent]:
        """All cached blocks, as events of the kind "stored", parents first."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A cached prefix and how often it was reused."""

    namespace: bytes
    blocks: tuple[bytes, ...]
    """The digests of its blocks, from the start of the prompt on."""
    reuses: int
    """Prompts that found all of it cached, as far as the mirror has seen."""


class _Block:
    """A cached block. That of its parent is named by the object: 8 bytes instead of a second digest."""

    __slots__ = ("digest", "parent", "reuses")

    def __init__(self, digest: bytes, parent: _Block | None) -> None:
        self.digest = digest
        self.parent = parent
        self.reuses = 0


_Blocks = dict[bytes, dict[bytes, _Block]]
"""By namespace and digest."""


class CacheMirror:
    """Which blocks a KV manager has in its prefix cache, known from its events alone.

    A new mirror is that of a new manager, whose first event has number 0. For a manager that has been running, or
    after an :class:`EventGapError`, :meth:`load` a snapshot. A manager that starts anew counts from 0 again: give it a
    new mirror. Safe to use from several threads; the events must come in order, so one thread applies them.

    Args:
        block_size: of the manager, in tokens.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = check_integer("block_size", block_size, 1)
        self._blocks: _Blocks = {}
        self._loaded = 0
        """Number of the first event after the snapshot."""
        self._next = 0
        """Number of the next event to apply."""
        self._gap: EventGapError | None = None
        self._lock = threading.Lock()

    @property
    def stale(self) -> bool:
        """Whether events are missing: nothing can be looked up or applied until a snapshot is loaded."""
        return self._gap is not None

    def load(self, snapshot: CacheSnapshot) -> None:
        """Start from a snapshot. Events that it includes are ignored when they arrive; counters of reuse start at 0.

        Raises:
            InvalidInputError: it is of a manager with another block size. Nothing changes.
        """
        self._check(snapshot.stored)
        blocks: _Blocks = {}
        for event in snapshot.stored:
            _replay(blocks, event)
        with self._lock:
            self._blocks = blocks
            self._loaded = self._next = snapshot.number
            self._gap = None

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Replay events, as `KVManager.events` gave them, in order and without leaving any out.

        Raises:
            EventGapError: one is missing, in these or before. Those before it are applied; the mirror is stale.
            InvalidInputError: they are of a manager with another block size. Nothing changes.
        """
        events = tuple(events)
        self._check(events)
        with self._lock:
            self._check_gap()
            for event in events:
                # Taken from the manager before the snapshot was, applied after it was loaded.
                if event.number < self._loaded == self._next:
                    continue
                if event.number != self._next:
                    self._gap = EventGapError(self._next, event.number)
                    self._check_gap()
                _replay(self._blocks, event)
                self._next += 1

    def lookup(self, tokens: _TokenIds, namespace: bytes = b"", media: Sequence[_Media] = ()) -> int:
        """How many of ``tokens``, from the first on, are in cached blocks: what `match_prefix` would find over there.

        Raises:
            EventGapError: the mirror is stale.
            InvalidInputError: malformed tokens or media.
        """
        return self.block_size * self.match(block_digests(tokens, self.block_size, namespace, media), namespace)

    def match(self, digests: Sequence[bytes], namespace: bytes = b"") -> int:
        """How many of the `block_digests` of a prompt, from the first on, are cached: for asking many mirrors at once.

        Raises:
            EventGapError: the mirror is stale.
        """
        with self._lock:
            self._check_gap()
            blocks = self._blocks.get(namespace, {})
            return next((i for i, digest in enumerate(digests) if digest not in blocks), len(digests))

    @property
    def blocks(self) -> dict[bytes, dict[bytes, bytes | None]]:
        """A copy of all there is: by namespace, the digest of each block and that of its parent."""
        with self._lock:
            return {
                namespace: {digest: block.parent.digest if block.parent else None for digest, block in blocks.items()}
                for namespace, blocks in self._blocks.items()
            }

    def hot_prefixes(self, n: int) -> list[HotPrefix]:
        """The ``n`` cached prefixes that were reused most, the most reused first.

        Of prefixes of one another with equal counts the longest alone is listed. Cost: linear in the blocks.
        """
        with self._lock:
            blocks = [(name, block) for name, blocks in self._blocks.items() for block in blocks.values()]
            # A prompt that reuses a block reuses its parent: counts never rise along a prefix.
            inside = {id(block.parent) for _, block in blocks if block.parent and block.parent.reuses == block.reuses}
            ends = (item for item in blocks if item[1].reuses and id(item[1]) not in inside)
            hottest = nlargest(check_integer("n", n, 0), ends, key=lambda item: item[1].reuses)
            return [HotPrefix(namespace, _path(block), block.reuses) for namespace, block in hottest]

    def __len__(self) -> int:
        """Cached blocks, of all namespaces."""
        with self._lock:
            return sum(map(len, self._blocks.values()))

    def __bool__(self) -> bool:
        """Always true: an empty mirror is a mirror."""
        return True

    def __repr__(self) -> str:
        state = "stale" if self.stale else f"next event {self._next}"
        return f"CacheMirror(block_size={self.block_size}: {len(self)} blocks, {state})"

    def _check(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            if event.kind not in KINDS or (event.namespace is None and event.kind != "cleared"):
                raise InvalidInputError(
                    f"events: number {event.number} is of kind {event.kind!r} with namespace {event.namespace!r}, "
                    f"expected one of {', '.join(KINDS)}, and a namespace of all but the last"
                )
            if event.kind == "stored" and len(event.tokens) != self.block_size * len(event.blocks):
                raise InvalidInputError(
                    f"events: number {event.number} stores {len(event.blocks)} blocks with {len(event.tokens)} tokens, "
                    f"expected {self.block_size} each, the mirror's block_size"
                )

    def _check_gap(self) -> None:
        if self._gap is not None:
            raise EventGapError(self._gap.expected, self._gap.got)


def _replay(everything: _Blocks, event: CacheEvent) -> None:
    namespace = event.namespace
    if namespace is None:
        everything.clear()
        return
    blocks = everything.setdefault(namespace, {})
    match event.kind:
        case "stored":
            above = event.parent
            parent = None if above is None else blocks.get(above)
            for digest in event.blocks:
                parent = blocks[digest] = _Block(digest, parent)
        case "reused":
            for digest in event.blocks:
                if digest in blocks:
                    blocks[digest].reuses += 1
        case "removed":
            for digest in event.blocks:
                blocks.pop(digest, None)
        case "cleared":
            blocks.clear()
    if not blocks:
        del everything[namespace]


def _path(block: _Block | None) -> tuple[bytes, ...]:
    path = []
    while block is not None:
        path.append(block.digest)
        block = block.parent
    return tuple(reversed(path))
