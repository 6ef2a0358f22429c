"""The embedded model, loaded once for all tests that need a real one."""

from __future__ import annotations

import pytest

from leafkv.models import LoadedModel, load_model


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return load_model()
