"""The command `leafkv`. This file only checks that the extra is there; the commands are in :mod:`leafkv.cli.app`."""

from __future__ import annotations

import sys

from leafkv._extras import require
from leafkv.errors import MissingExtraError


def main() -> None:
    """Entry point of the `leafkv` command."""
    try:
        for module in ("typer", "rich"):
            require(module, "cli")
    except MissingExtraError as error:
        sys.exit(f"leafkv: {error}")
    from leafkv.cli.app import run  # noqa: PLC0415 (needs the extra)

    run()
