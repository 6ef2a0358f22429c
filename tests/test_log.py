"""The log: visible by default, the application's own when it has one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from leafkv import log
from leafkv.errors import InvalidInputError


@pytest.fixture(autouse=True)
def _untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # pytest's own handlers on the root logger would count as an application's.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(log.logger, "handlers", [])
    level = log.logger.level
    yield
    log.logger.setLevel(level)


def test_shown_once_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    log.show()
    log.show()
    log.logger.info("4 blocks")
    assert capsys.readouterr() == ("", "leafkv: 4 blocks\n")


def test_the_level_is_the_environments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LEAFKV_LOG", "warning")
    log.show()
    log.logger.info("figures")
    log.logger.warning("trouble")
    assert capsys.readouterr().err == "leafkv: trouble\n"
    monkeypatch.setattr(log.logger, "handlers", [])
    monkeypatch.setenv("LEAFKV_LOG", "loud")
    with pytest.raises(InvalidInputError, match="LEAFKV_LOG: expected debug, .* got 'loud'"):
        log.show()


def test_an_application_that_logs_itself_decides(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().addHandler(logging.NullHandler())
    log.show()
    log.logger.warning("trouble")
    assert not log.logger.handlers
    assert capsys.readouterr().err == ""
