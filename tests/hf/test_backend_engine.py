"""A third of the engine's tests over the backend for transformers: what the engine promises holds whoever computes.

They are the engine's own, collected here again, with the toy model computed through transformers' attention interface:
its arithmetic is exact, so every token is what it was. Those of the logits' bits with a real model are not among them:
the products of PyTorch give a row other bits in another batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ..engine.test_async_engine import *  # noqa: F403
from ..engine.test_engine import *  # noqa: F403
from ..engine.test_policies import *  # noqa: F403
from ..engine.test_samples import *  # noqa: F403
from ..engine.test_scheduler import *  # noqa: F403
from ..engine.test_speculation import *  # noqa: F403
from ..engine.test_workloads import *  # noqa: F403
from .toy_model import put_in_place_of_the_toy

del test_a_real_model_repeats_itself_in_fewer_steps  # noqa: F821 (it takes our own code)


@pytest.fixture(autouse=True)
def _over_transformers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        put_in_place_of_the_toy(patch)
        yield
