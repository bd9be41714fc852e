"""The serving engine. Page: docs/engine.md; for users: docs/serving.md."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_quartz.engine.async_llm import AsyncLLM
    from torch_quartz.engine.config import EngineConfig
    from torch_quartz.engine.llm import LLM
    from torch_quartz.engine.llm_engine import LLMEngine
    from torch_quartz.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from torch_quartz.engine.sampling_params import OutputKind, SamplingParams
    from torch_quartz.engine.structured_output import StructuredOutputsParams

# Loaded when asked for: parameters and outputs need neither torch nor the compiled library.
_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "LLMEngine": "llm_engine",
    "Logprob": "outputs",
    "OutputKind": "sampling_params",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "structured_output",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "Logprob",
    "OutputKind",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
