"""Which weights a model has now: KV that was computed with others is never found.

A change is seen, not looked for in the numbers: parameters that are others, lie elsewhere, or were written to in place
(PyTorch counts that), and adapters that are switched, merged or taken away. Cost: some microseconds a parameter.
"""

from __future__ import annotations

from typing import Any

ADAPTER_STATE = ("active_adapters", "active_adapter", "merged_adapters", "disable_adapters")
"""Attributes of a layer that has adapters, in PEFT and in what is written like it."""


class WeightsWatch:
    """Tells apart the states of one model's weights."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters: list[Any] = []  # kept, so that no other one gets the identity of one that is gone
        self._state: tuple[Any, ...] = ()
        self._version = 0

    def version(self) -> int:
        """A number that no other state of the weights has had."""
        parameters = list(self._model.parameters())
        state = tuple((id(parameter), parameter.data_ptr(), _writes(parameter)) for parameter in parameters)
        if state != self._state:
            self._parameters, self._state = parameters, state
            self._version += 1
        return self._version

    def adapters(self) -> str:
        """What is applied to the weights: equal for equal states of all layers that have adapters."""
        states = [
            (name, *(str(getattr(module, attribute, None)) for attribute in ADAPTER_STATE))
            for name, module in self._model.named_modules()
            if hasattr(module, "active_adapters") or hasattr(module, "active_adapter")
        ]
        return repr(states) if states else ""


def _writes(parameter: Any) -> int:
    return 0 if parameter.is_inference() else int(parameter._version)
