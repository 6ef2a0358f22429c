"""A progress bar on the terminal, where `tqdm` is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[], object]]:
    """Yield a function to call for each finished prompt."""
    try:
        tqdm: Any = import_module("tqdm").tqdm if shown else None
    except ModuleNotFoundError:
        tqdm = None
    if tqdm is None:
        yield lambda: None
        return
    # disable=None: no bar where standard error is no terminal.
    with tqdm(total=total, desc="prompts", unit="prompt", disable=None) as bar:
        yield bar.update
