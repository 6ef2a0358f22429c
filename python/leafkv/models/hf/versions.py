"""Which versions of transformers this package works with: from 5.8 on, below 6.

What is used of transformers, and may change, is in few places: the call of an attention function and of a mask function
(`leafkv.models.hf.attention`), the call of a cache's layer (`leafkv.integrations.transformers`), and the names in
`leafkv.models.hf.features`. The tests run on 5.8, 5.15 and 5.24.
"""

from __future__ import annotations

import re
from typing import Any

from leafkv._extras import require
from leafkv.errors import InvalidInputError

OLDEST = (5, 8)
BELOW = (6, 0)


def transformers() -> Any:
    """The transformers library, if it is one that LeafKV works with.

    Raises:
        MissingExtraError: it is not installed.
        InvalidInputError: it is of another version.
    """
    library = require("transformers", "torch")
    check_version(library.__version__)
    return library


def check_version(version: str) -> None:
    """Refuse a version of transformers that is none of those supported, by name."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not OLDEST <= tuple(map(int, numbers.groups())) < BELOW:
        oldest, below = (".".join(map(str, bound)) for bound in (OLDEST, BELOW))
        raise InvalidInputError(f"transformers: expected version {oldest} or newer, below {below}, got {version}")
