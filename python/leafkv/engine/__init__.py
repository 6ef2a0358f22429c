"""The engine: prompts in, text out.

:class:`LLM` is its face, :class:`AsyncEngine` the one for `asyncio`; `build` makes what is behind either. In the
order of a request's life that is: `router` (checks, tokenizes), `scheduler` (who computes how many tokens in this
step), `engine` (one step), `sampler`, `detokenizer`, `outputs`. Under `AsyncEngine` it all runs in an `engine_thread`,
which leaves outputs in an `output_collector` for each consumer.
"""

from __future__ import annotations

from leafkv.engine.async_engine import AsyncEngine
from leafkv.engine.beam_search import BeamSearchOutput, BeamSearchSequence
from leafkv.engine.engine import Engine, EngineStats
from leafkv.engine.llm import LLM
from leafkv.engine.logprobs import Logprob
from leafkv.engine.outputs import CompletionOutput, RequestOutput
from leafkv.engine.request import RequestMetrics
from leafkv.engine.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Engine",
    "EngineStats",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
