"""Which weights a model has now: KV that was computed with others is never found.

A change is seen, not looked for in the numbers: tensors that are others, lie elsewhere, or were written to in place
(PyTorch counts that), and adapters that are switched, merged or taken away. That is one walk over the modules a
forward: half a millisecond for 32 layers, which take tens of them.
"""

from __future__ import annotations

import threading
from typing import Any

ADAPTER_STATE = ("active_adapters", "active_adapter", "merged_adapters", "disable_adapters")
"""Attributes of a layer that has adapters, in PEFT and in what is written like it."""


class WeightsWatch:
    """Tells apart the states of one model's weights."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tensors: list[Any] = []  # kept, so that no other one gets the identity of one that is gone
        self._state: list[tuple[int, int, int]] = []
        self._version = 0
        self._has_adapters: dict[type, bool] = {}
        self._lock = threading.Lock()

    def look(self) -> tuple[int, str]:
        """A number that no other state of the weights has had, and what is applied to them: "" for nothing."""
        tensors: list[Any] = []
        adapters: list[list[str]] = []
        with self._lock:
            modules = [self._model]
            while modules:
                module = modules.pop()
                modules += [child for child in module._modules.values() if child is not None]
                for group in (module._parameters, module._buffers):
                    if group:
                        tensors += [tensor for tensor in group.values() if tensor is not None]
                kind = type(module)
                if kind not in self._has_adapters:
                    # Models of transformers have methods by these names, layers with adapters have properties.
                    self._has_adapters[kind] = any(
                        isinstance(getattr(kind, name, None), property) for name in ADAPTER_STATE
                    )
                if self._has_adapters[kind]:
                    adapters.append([repr(getattr(module, name, None)) for name in ADAPTER_STATE])
            state = [(id(tensor), tensor.data_ptr(), _writes(tensor)) for tensor in tensors]
            if state != self._state:
                self._tensors, self._state = tensors, state
                self._version += 1
            return self._version, repr(adapters) if adapters else ""


def _writes(tensor: Any) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)
