"""Chat templates: the Jinja programs that models ship to turn messages into a prompt.

They are code from somebody else, so they run in Jinja's immutable sandbox, with the helpers that Hugging Face
gives them: ``raise_exception``, ``strftime_now``, a ``tojson`` that leaves HTML alone, loop controls, and the
``{% generation %}`` mark, which changes nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from leafkv._extras import require
from leafkv.errors import InvalidInputError

Message = Mapping[str, Any]
"""One message of a chat: ``{"role": ..., "content": ...}``."""


class ChatTemplate:
    """A template, compiled on first use.

    Args:
        source: the Jinja source.
        variables: what the template sees besides the messages, such as ``bos_token``.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self._variables = variables

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The prompt of a chat.

        Raises:
            InvalidInputError: messages are malformed, or the template refuses them.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise InvalidInputError(f"messages: expected a non-empty list of messages, got {messages!r}")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidInputError(f"messages: expected mappings with a 'role', got {message!r}")
        try:
            text: str = self._compiled.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._variables,
            )
        except Exception as error:  # a template can raise anything
            raise InvalidInputError(f"messages: the chat template refuses them: {error}") from error
        return text

    @cached_property
    def _compiled(self) -> Any:
        sandbox = require("jinja2.sandbox", "models")
        ext = require("jinja2.ext", "models")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _generation_mark()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        return environment.from_string(self.source)


def _generation_mark() -> Any:
    """A Jinja extension for ``{% generation %} … {% endgeneration %}``, which stands for what is inside."""
    ext = require("jinja2.ext", "models")

    class GenerationMark(ext.Extension):  # type: ignore[misc, name-defined]
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationMark


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise ValueError(message)
