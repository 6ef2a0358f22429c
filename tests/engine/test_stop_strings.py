"""Stop strings in text that comes in pieces, against a search of the whole text."""

from __future__ import annotations

import random

from leafkv.engine.stop_strings import StopStrings


class Counted(str):
    """Counts how often one of its characters is looked at."""

    __slots__ = ()
    looks = 0

    def __getitem__(self, index: object) -> str:
        Counted.looks += 1
        return super().__getitem__(index)  # type: ignore[index]


def found(text: str, stops: tuple[str, ...]) -> tuple[str, int] | None:
    """The stop string that is complete first, the longest of several, and where it ends."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return max(complete, key=len), end
    return None


def may_become_a_stop(text: str, stops: tuple[str, ...]) -> int:
    return max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))


def test_pieces_do_not_matter() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(4000):
        alphabet = rng.choice(["ab", "abc", "a日👩"])
        stops = tuple("".join(rng.choices(alphabet, k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 5)))
        text = "".join(rng.choices(alphabet, k=rng.randrange(40)))
        automaton, state, done, came = StopStrings(stops), 0, 0, None
        while done < len(text) and came is None:
            size = rng.randrange(4)
            state, stop, end = automaton.scan(state, "..." + text[done : done + size], 3)
            if stop is not None:
                came = stop, done + end - 3
            else:
                done = min(done + size, len(text))
                assert automaton.depth[state] == may_become_a_stop(text[:done], stops)
        assert came == found(text, stops)
        hits += came is not None
    assert 1000 < hits < 3900


def test_each_character_is_looked_at_once() -> None:
    """Also with many stop strings, in text that begins one of them again and again."""
    stops = tuple("a" * n + "b" for n in range(1, 200))
    automaton, state, Counted.looks = StopStrings(stops), 0, 0
    pieces = [Counted("a" * 7) for _ in range(1000)]
    for piece in pieces:
        state, stop, _ = automaton.scan(state, piece)
        assert stop is None
    assert Counted.looks == 7000
    assert automaton.depth[state] == 199
    assert automaton.scan(state, "b").stop == stops[-1]
