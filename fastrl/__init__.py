"""The loss end of reinforcement-learning post-training.

The names below are the public interface; each is imported from its module on first use, so that
`import fastrl.config` loads no torch and `fastrl --help` answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastrl.config import LanguageModelHeadConfig, LlamaConfig
    from fastrl.data.batch import TokenBatch
    from fastrl.data.counts import BatchCounts
    from fastrl.data.documents import Document
    from fastrl.data.step import OptimizerStep
    from fastrl.environments import Environment, Problem
    from fastrl.functional.batch import BatchKwargs, RowSet
    from fastrl.functional.linear_logprobs import linear_logprobs
    from fastrl.functional.metrics import add_metrics, finish_metrics, reduce_metrics
    from fastrl.functional.statistics import TokenStatistics
    from fastrl.layers.draft_heads import DraftHeads
    from fastrl.layers.language_model_head import HeadOutput, LanguageModelHead
    from fastrl.layers.value_head import ValueHead
    from fastrl.models.llama import Llama
    from fastrl.parallel import ParallelGroups

__all__ = [
    "BatchCounts",
    "BatchKwargs",
    "Document",
    "DraftHeads",
    "Environment",
    "HeadOutput",
    "LanguageModelHead",
    "LanguageModelHeadConfig",
    "Llama",
    "LlamaConfig",
    "OptimizerStep",
    "ParallelGroups",
    "Problem",
    "RowSet",
    "TokenBatch",
    "TokenStatistics",
    "ValueHead",
    "add_metrics",
    "finish_metrics",
    "linear_logprobs",
    "reduce_metrics",
]

_MODULES = {
    "BatchCounts": "fastrl.data.counts",
    "BatchKwargs": "fastrl.functional.batch",
    "Document": "fastrl.data.documents",
    "DraftHeads": "fastrl.layers.draft_heads",
    "Environment": "fastrl.environments",
    "HeadOutput": "fastrl.layers.language_model_head",
    "LanguageModelHead": "fastrl.layers.language_model_head",
    "LanguageModelHeadConfig": "fastrl.config",
    "Llama": "fastrl.models.llama",
    "LlamaConfig": "fastrl.config",
    "OptimizerStep": "fastrl.data.step",
    "ParallelGroups": "fastrl.parallel",
    "Problem": "fastrl.environments",
    "RowSet": "fastrl.functional.batch",
    "TokenBatch": "fastrl.data.batch",
    "TokenStatistics": "fastrl.functional.statistics",
    "ValueHead": "fastrl.layers.value_head",
    "add_metrics": "fastrl.functional.metrics",
    "finish_metrics": "fastrl.functional.metrics",
    "linear_logprobs": "fastrl.functional.linear_logprobs",
    "reduce_metrics": "fastrl.functional.metrics",
}


def __getattr__(name: str) -> object:
    """The public object `name`, from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fastrl' has no attribute '{name}'")
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
