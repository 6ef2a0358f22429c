"""Stop strings found in text that comes in pieces, however it is cut (Aho and Corasick's automaton).

A state is a node of the tree of all stop strings: the longest end of the text that begins one of them. That is also
all that has to be held back. The stop that is complete first wins: nothing that follows can change it, so nobody waits
for what might make another one. Of those complete with the same character it is the longest, which began first.

Cost: each character is looked at once, whatever the number of stop strings; building it, their characters.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple


class Scan(NamedTuple):
    """What came of a piece: the state after it, or the stop string that is complete and where in the piece it ends."""

    state: int
    stop: str | None = None
    end: int = 0


class StopStrings:
    """Finds the first of some strings. Immutable, so samples share one; the state is theirs, 0 at the beginning.

    Args:
        stops: not empty, none of them.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        """The state for the next longest end of the text that begins a stop string."""
        self.depth = [0]
        """Characters at the end of the text that may still become a stop string, by state."""
        self._found: list[str | None] = [None]
        for stop in stops:
            node = 0
            for char in stop:
                node = self._next[node].setdefault(char, len(self._next))
                if node == len(self._next):
                    self._next.append({})
                    self._fallback.append(0)
                    self.depth.append(0)
                    self._found.append(None)
            self._found[node] = stop
        self._link()

    def _link(self) -> None:
        """Shorter states come first, so what a state falls back to is known."""
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                self.depth[child] = self.depth[node] + 1
                if node:
                    self._fallback[child] = self._step(self._fallback[node], char)
                    self._found[child] = self._found[child] or self._found[self._fallback[child]]
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def scan(self, state: int, text: str, start: int = 0) -> Scan:
        """Go on from ``state`` with ``text[start:]``, to the first stop string that is complete."""
        for i in range(start, len(text)):
            state = self._step(state, text[i])
            stop = self._found[state]
            if stop is not None:
                return Scan(state, stop, i + 1)
        return Scan(state)


@lru_cache(maxsize=64)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """`StopStrings`, made once for requests that have the same."""
    return StopStrings(stops)
