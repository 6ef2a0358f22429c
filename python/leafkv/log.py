"""What LeafKV says while it works: the logger ``leafkv``, shown on standard error.

An application that has set up logging of its own decides alone. The level is ``LEAFKV_LOG``: a name such as
``warning`` or ``debug``, ``info`` by default.
"""

from __future__ import annotations

import logging
import os

from leafkv.errors import InvalidInputError

logger = logging.getLogger("leafkv")


def show() -> None:
    """Make the log visible, unless somebody has already decided where it goes."""
    if logger.hasHandlers():
        return
    name = os.environ.get("LEAFKV_LOG", "").strip() or "info"
    level = logging.getLevelName(name.upper())
    if not isinstance(level, int):
        raise InvalidInputError(f"LEAFKV_LOG: expected debug, info, warning, error or critical, got {name!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("leafkv: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
