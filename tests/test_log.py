"""The log: visible by default, the application's own when it has one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from leafkv import log
from leafkv.errors import InvalidInputError


@contextmanager
def no_handlers() -> Iterator[None]:
    """An application that has not set up logging: pytest's own handlers on the root logger would count as one."""
    loggers = (logging.getLogger(), log.logger)
    before = [(logger, logger.handlers, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    try:
        yield
    finally:
        for logger, handlers, level in before:
            logger.handlers = handlers
            logger.setLevel(level)


@no_handlers()
def test_shown_once_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    log.show()
    log.show()
    log.logger.info("4 blocks")
    assert capsys.readouterr() == ("", "leafkv: 4 blocks\n")


@no_handlers()
def test_the_level_is_the_environments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LEAFKV_LOG", "warning")
    log.show()
    log.logger.info("figures")
    log.logger.warning("trouble")
    assert capsys.readouterr().err == "leafkv: trouble\n"
    log.logger.handlers = []
    monkeypatch.setenv("LEAFKV_LOG", "loud")
    with pytest.raises(InvalidInputError, match=r"LEAFKV_LOG: expected debug, .* got 'loud'"):
        log.show()


@no_handlers()
def test_an_application_that_logs_itself_decides(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().addHandler(logging.NullHandler())
    log.show()
    log.logger.warning("trouble")
    assert not log.logger.handlers
    assert capsys.readouterr().err == ""
