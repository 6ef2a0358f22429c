"""From the logits of a step to the tokens of its samples: whose rows are whose, and what goes wrong with whom.

Speculation is checked here. A draw depends on (logits, parameters, seed, position) alone, so drafts are right exactly
as far as they are what would have been drawn: the tokens are the same with and without them, sampled or greedy.

What is drawn from the model's logits as they are is drawn for all rows at once. Where nothing else is wanted of them,
that is all; otherwise there is a loop over the samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from leafkv._core import draw as core_draw
from leafkv.engine.logprobs import Decode, decode_tokens, prompt_logprobs, token_logprobs
from leafkv.engine.sampler import INVALID, greedy, pick
from leafkv.errors import LeafKVError

if TYPE_CHECKING:
    from collections.abc import Collection

    from leafkv.engine.logprobs import Logprob
    from leafkv.engine.request import Request, Sample
    from leafkv.engine.work import Work


@dataclass(slots=True)
class Drawn:
    """What a step gives its samples: ``new[i]`` of ``tokens`` [sum(new)] are those of item i of its work."""

    tokens: NDArray[np.int64]
    new: NDArray[np.int64]
    rejected: NDArray[np.int64]
    """How many drafts of each item are not what was drawn."""
    firsts: dict[Sample, int] = field(default_factory=dict)
    """First tokens of samples that share the prompt of one in the work."""
    logprobs: dict[Sample, list[dict[int, Logprob]]] = field(default_factory=dict)
    failed: dict[Request, Exception] = field(default_factory=dict)

    def only(self, items: NDArray[np.bool_]) -> Drawn:
        """What it gives these items."""
        tokens = self.tokens[items.repeat(self.new)]
        return Drawn(tokens, self.new[items], self.rejected[items], self.firsts, self.logprobs, self.failed)


def draw(
    logits: NDArray[np.float32],
    wanted: NDArray[np.int64],
    work: Work,
    *,
    forking: Collection[Request] = (),
    thorough: Collection[Request] = (),
    num_threads: int | None = None,
    decode: Decode | None = None,
) -> Drawn:
    """Draw the next tokens of those samples whose last known token the step has computed.

    Args:
        logits: [sum(wanted), vocabulary]: of the last ``wanted[i]`` tokens of each item of the work.
        wanted: as above.
        work: what the step has computed.
        forking: requests whose other samples begin when the first one has computed the prompt.
        thorough: requests whose prompt's logprobs are wanted.
        num_threads: threads to use; None for all.
        decode: the text of one token, for logprobs.
    """
    sampled = work.computed + work.counts >= work.known
    ahead = draw_ahead(logits, wanted, sampled, work, num_threads)
    drawn = Drawn(ahead, sampled.astype(np.int64), np.zeros(len(work), np.int64))
    if work.plain:
        for item in sampled.nonzero()[0][ahead == INVALID].tolist():
            drawn.failed[work.samples[item].request] = no_distribution(work.samples[item])
        return drawn

    tokens: list[int] = []
    ends = wanted.cumsum().tolist()
    for item, sample in enumerate(work.samples):
        request, end = sample.request, ends[item]
        drafts = work.drafts.get(sample, [])
        try:
            if request in thorough:
                first, n = int(work.computed[item]), int(work.counts[item])
                note_prompt(request, first, logits[end - n : end], decode)
            if not sampled[item]:
                continue
            start = end - 1 - len(drafts)
            rows, plain = logits[start:end], ahead[start:end].tolist()
            if request in forking and not sample.num_output_tokens:
                for other in request.live[1:]:
                    if not other.num_output_tokens:
                        drawn.firsts[other] = draw_one(rows[0], None, other, drawn, decode)
            drawn_tokens = follow(rows, plain, sample, drafts, drawn, decode)
        except Exception as error:
            drawn.failed[request] = error
            drawn_tokens = [0]  # in the place of a token that nobody gets
        tokens += drawn_tokens
        drawn.new[item] = len(drawn_tokens)
        drawn.rejected[item] = len(drafts) + 1 - len(drawn_tokens)
    drawn.tokens = np.array(tokens, np.int64)
    return drawn


def draw_ahead(
    logits: NDArray[np.float32],
    wanted: NDArray[np.int64],
    sampled: NDArray[np.bool_],
    work: Work,
    num_threads: int | None,
) -> NDArray[np.int64]:
    """What is drawn from each row as it is: -1 from what is no distribution."""
    if work.greedy:
        return greedy(logits, num_threads)
    rows: list[int] = []
    draws = []
    ends, known = wanted.cumsum().tolist(), work.known.tolist()
    for sample, end, tokens_known, is_sampled in zip(work.samples, ends, known, sampled.tolist(), strict=True):
        params = sample.params
        if is_sampled and params.unchanged and not params.greedy:
            # Of a draft that is right, the position is that of the token that it is.
            first = end - 1 - len(work.drafts.get(sample, ()))
            rows += range(first, end)
            draws += [params.draw(sample.seed, tokens_known + row - first) for row in range(first, end)]
    if len(rows) == len(logits):
        return core_draw(logits, draws, num_threads=num_threads)
    tokens = greedy(logits, num_threads)
    if rows:
        tokens[rows] = core_draw(logits[rows], draws, num_threads=num_threads)
    return tokens


def follow(
    rows: NDArray[np.float32], ahead: list[int], sample: Sample, drafts: list[int], drawn: Drawn, decode: Decode | None
) -> list[int]:
    """Draw from one row after another, as long as that gives the drafts."""
    known = len(sample.tokens)
    tokens: list[int] = []
    try:
        for row, plain, draft in zip(rows, ahead, [*drafts, None], strict=True):
            try:
                token = draw_one(row, plain, sample, drawn, decode)
            except Exception:
                if not tokens:
                    raise
                break  # perhaps the sample ends before that token; otherwise the next step says so
            tokens.append(token)
            if token != draft or token in sample.request.stop_ids:
                break
            sample.tokens.append(token)
    finally:
        del sample.tokens[known:]
    sample.request.metrics.num_draft_tokens += len(drafts)
    sample.request.metrics.num_accepted_tokens += len(tokens) - 1
    return tokens


def draw_one(row: NDArray[np.float32], plain: int | None, sample: Sample, drawn: Drawn, decode: Decode | None) -> int:
    """Draw the next token of a sample. ``plain`` is what comes of the row as it is, if that is known."""
    params = sample.params
    if plain is None or not params.unchanged:
        token, logprobs = pick(row, sample)
    else:
        token = plain
        wanted = params.logprobs is not None and token != INVALID
        logprobs = token_logprobs(row, token, params.logprobs or 0) if wanted else None
    if token == INVALID:
        raise no_distribution(sample) if plain is None or plain == INVALID else no_token(sample)
    if logprobs is not None:
        if decode is not None:
            decode_tokens(logprobs, decode)
        drawn.logprobs.setdefault(sample, []).append(logprobs)
    return token


def note_prompt(request: Request, first: int, logits: NDArray[np.float32], decode: Decode | None) -> None:
    """Add the logprobs of prompt tokens that come after those at ``first`` and on, whose logits these are."""
    noted, k = request.prompt_logprobs, request.params.prompt_logprobs
    if noted is None or k is None:
        return
    known = len(noted)
    prompt = request.samples[0].tokens[: request.num_prompt_tokens]
    following = prompt[known : first + 1 + len(logits)].tolist()
    start = known - 1 - first
    rows = logits[start : start + len(following)]
    noted += prompt_logprobs(rows, following, k, decode)


def no_distribution(sample: Sample) -> LeafKVError:
    """What is said where nothing can be drawn."""
    where = f"request {sample.request.request_id}: the logits after {len(sample.tokens)} tokens"
    return LeafKVError(f"{where} are not a distribution (NaN, infinite, or all -inf)")


def no_token(sample: Sample) -> LeafKVError:
    """What is said where the model has a next token, and the parameters allow none."""
    where = f"request {sample.request.request_id}, after {len(sample.tokens)} tokens"
    return LeafKVError(f"{where}: its parameters leave no token")
