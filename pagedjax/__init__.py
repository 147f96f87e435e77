"""PagedJAX: a language-model serving engine written as pure functions in JAX.

    from pagedjax import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    for output in llm.generate(["Hello, my name is"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)

Names are imported when they are first used, so `import pagedjax` costs nothing and touches no
device.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "pagedjax.llm",
    "SamplingParams": "pagedjax.sampling_params",
    "BeamSearchParams": "pagedjax.beam_search",
    "BeamSearchOutput": "pagedjax.beam_search",
    "BeamSearchSequence": "pagedjax.beam_search",
    "EngineConfig": "pagedjax.config",
    "Engine": "pagedjax.engine",
    "AsyncEngine": "pagedjax.engine",
    "QueueFullError": "pagedjax.engine",
    "EngineDeadError": "pagedjax.engine",
    "RequestOutput": "pagedjax.outputs",
    "CompletionOutput": "pagedjax.outputs",
    "Logprob": "pagedjax.outputs",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "Logprob",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

if TYPE_CHECKING:
    from pagedjax.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from pagedjax.config import EngineConfig
    from pagedjax.engine import AsyncEngine, Engine, EngineDeadError, QueueFullError
    from pagedjax.llm import LLM
    from pagedjax.outputs import CompletionOutput, Logprob, RequestOutput
    from pagedjax.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pagedjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
