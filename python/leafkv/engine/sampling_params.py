"""How the tokens of a request are picked, and when it ends. Names and defaults are vLLM's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from leafkv._checks import check_integer, check_number
from leafkv.errors import InvalidInputError

GREEDY_BELOW = 1e-5
"""Temperatures below this one pick the likeliest token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request; checked when made, and never changed.

    Args:
        n: answers per prompt; only 1 for now.
        temperature: divides the logits; 0 is greedy, the likeliest token.
        top_p: keep the likeliest tokens whose probabilities add up to this much, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop the tokens less likely than this share of the likeliest one's probability, in [0, 1].
        seed: makes sampling repeatable, whatever else runs; None draws one. 0 to 2**64 - 1.
        stop_token_ids: end at any of these tokens, which then is the last of ``token_ids`` but not in ``text``.
        ignore_eos: go on after the model's end-of-sequence tokens.
        max_tokens: tokens to generate at most, >= 1; None is all that the model's context and the KV cache hold.
        detokenize: False leaves ``text`` empty.
        skip_special_tokens: leave special tokens out of ``text``.

    Raises:
        InvalidInputError: a value is out of its range or of another type.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: Collection[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # Of numpy's numbers, fractions and the like only the value is kept; of a list, which may change, a copy.
        values: dict[str, object] = {
            "n": check_integer("n", self.n, 1),
            "temperature": check_number("temperature", self.temperature, "a finite number >= 0", lambda x: x >= 0),
            "top_p": check_number("top_p", self.top_p, "a number in (0, 1]", lambda x: 0 < x <= 1),
            "min_p": check_number("min_p", self.min_p, "a number in [0, 1]", lambda x: 0 <= x <= 1),
            "top_k": check_integer("top_k", self.top_k, -1),
        }
        if self.n != 1:
            raise InvalidInputError(f"n: only 1 answer per prompt is supported for now, got {self.n}")
        if self.seed is not None:
            values["seed"] = check_integer("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            values["max_tokens"] = check_integer("max_tokens", self.max_tokens, 1)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        stops = self.stop_token_ids
        if stops is not None and (isinstance(stops, (str, bytes)) or not isinstance(stops, Collection)):
            raise InvalidInputError(f"stop_token_ids: expected token ids, got {stops!r}")
        stops = () if stops is None else stops
        values["stop_token_ids"] = tuple(check_integer("stop_token_ids", token, 0) for token in stops)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW
