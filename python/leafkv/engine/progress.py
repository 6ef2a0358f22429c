"""A progress bar on the terminal, where `tqdm` is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[], object]]:
    """Yield a function to call for each finished prompt."""
    try:
        from tqdm import tqdm  # noqa: PLC0415 (optional)
    except ModuleNotFoundError:
        shown = False
    if not shown:
        yield lambda: None
        return
    # disable=None: no bar where standard error is no terminal.
    with tqdm(total=total, desc="prompts", unit="prompt", disable=None) as bar:
        yield bar.update
