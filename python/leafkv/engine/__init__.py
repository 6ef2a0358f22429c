"""The engine: prompts in, text out.

:class:`LLM` is its face. Behind it, in the order of a request's life: `router` (checks, tokenizes), `scheduler`
(who computes how many tokens in this step), `engine` (one step), `sampler`, `detokenizer`, `outputs`.
"""

from __future__ import annotations

from leafkv.engine.engine import Engine, EngineStats
from leafkv.engine.llm import LLM
from leafkv.engine.outputs import CompletionOutput, RequestOutput
from leafkv.engine.request import RequestMetrics
from leafkv.engine.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineStats",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]
