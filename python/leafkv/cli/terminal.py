"""What the commands and the demo share: a progress bar while weights load, and streamed text with timings."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from leafkv.models.backend import LoadOptions

if TYPE_CHECKING:
    from rich.console import Console

    from leafkv import LLM, SamplingParams
    from leafkv.engine.outputs import RequestOutput
    from leafkv.engine.router import Prompt
    from leafkv.models.backend import Loaded


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds to the first token, and to the last; tokens in all."""

    first_token: float
    total: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Rate of decoding: the tokens after the first, over the time they took."""
        decoding = self.total - self.first_token
        return (self.tokens - 1) / decoding if decoding > 0 else 0.0


def load_with_progress(model: str | None, console: Console, options: LoadOptions | None = None) -> Loaded:
    """Load a model (None: the embedded one) behind a progress bar."""
    options = options or LoadOptions()
    if options.by_transformers:  # which shows its own
        return options.load(model)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        return options.load(
            model, lambda done, total, label: bar.update(task, completed=done, total=total, description=label)
        )


def stream_text(llm: LLM, prompt: Prompt, params: SamplingParams) -> tuple[RequestOutput, Timings]:
    """Write the answer to standard output as it comes; return the whole of it, and how long it took."""
    start = time.perf_counter()
    first = shown = 0.0
    written = 0
    result = None
    for result in llm.stream(prompt, params):
        shown = time.perf_counter()
        first = first or shown
        text = result.outputs[0].text
        sys.stdout.write(text[written:])
        sys.stdout.flush()
        written = len(text)
    sys.stdout.write("\n")
    assert result is not None  # a stream ends with its finished result
    return result, Timings(first - start, shown - start, len(result.outputs[0].token_ids))
