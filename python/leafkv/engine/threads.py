"""How many threads numpy's matrix products may take while the model runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


class BlasThreads:
    """Limits BLAS to ``num_threads`` where `threadpoolctl` is installed, and within :meth:`limited` only."""

    def __init__(self, num_threads: int | None) -> None:
        self._num_threads = num_threads
        self._controller: Any = None
        if num_threads is not None:
            try:
                from threadpoolctl import ThreadpoolController  # noqa: PLC0415 (optional)
            except ModuleNotFoundError:
                return
            self._controller = ThreadpoolController()

    def limited(self) -> AbstractContextManager[object]:
        """A context in which the limit holds."""
        if self._controller is None:
            return nullcontext()
        limit: AbstractContextManager[object] = self._controller.limit(limits=self._num_threads, user_api="blas")
        return limit
