"""Lazy imports of optional dependencies: the base wheel needs numpy alone."""

from __future__ import annotations

import importlib
from typing import Any

from leafkv.errors import MissingExtraError


def require(module: str, extra: str) -> Any:
    """Import ``module``, or raise :class:`MissingExtraError` naming the extra that brings it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A package that is there but lacks a dependency of its own says so itself.
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingExtraError(package, extra) from error
