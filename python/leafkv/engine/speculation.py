"""Speculation without a second model: what followed the last words when they came before may follow them again.

Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding): the longest end of the text, of at
most ``max_ngram`` tokens, that is found earlier in it; the drafts are what came after it there. Of several places the
last one. Cost: a few numpy passes over the tokens of a sample, only as long as there are places left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from leafkv._checks import check_integer
from leafkv.errors import InvalidInputError

if TYPE_CHECKING:
    from leafkv.engine.request import Sample


class PromptLookup:
    """Proposes what followed the last tokens before.

    Args:
        num_speculative_tokens: drafts at most.
        max_ngram: tokens to be found again, at most.
        min_ngram: and at least.
    """

    def __init__(self, num_speculative_tokens: int, *, max_ngram: int = 5, min_ngram: int = 2) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def propose(self, sample: Sample, most: int) -> list[int]:
        """At most ``most`` tokens that may come next."""
        if sample.guide is not None:  # its form goes on with tokens that count, and with no others
            return []
        tokens = np.array(sample.tokens, np.int32)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        found = 1
        while found < self.max_ngram and len(ends):
            longer = ends[ends >= found]
            longer = longer[tokens[longer - found] == tokens[-1 - found]] if found < len(tokens) else longer[:0]
            if not len(longer):
                break
            ends, found = longer, found + 1
        if found < self.min_ngram or not len(ends):
            return []
        start = int(ends[-1]) + 1
        drafts: list[int] = tokens[start : start + min(most, self.num_speculative_tokens)].tolist()
        return drafts


def proposer_of(config: Mapping[str, Any] | None) -> PromptLookup | None:
    """What vLLM's ``speculative_config`` asks for; None for no speculation.

    Raises:
        InvalidInputError: it is malformed, or asks for a method that is not there.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"speculative_config: expected a dict or None, got {config!r}")
    options = dict(config)
    method = options.pop("method", "ngram")
    if method != "ngram":
        raise InvalidInputError(f"speculative_config: expected the method 'ngram', got {method!r}")
    count = check_integer("num_speculative_tokens", options.pop("num_speculative_tokens", 5), 1)
    longest = check_integer("prompt_lookup_max", options.pop("prompt_lookup_max", 5), 1)
    shortest = check_integer("prompt_lookup_min", options.pop("prompt_lookup_min", min(2, longest)), 1, longest)
    if options:
        raise InvalidInputError(f"speculative_config: unknown keys {', '.join(map(repr, sorted(options)))}")
    return PromptLookup(count, max_ngram=longest, min_ngram=shortest)
