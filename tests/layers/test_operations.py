"""How many operations a call of the head makes: what the host costs, which no batch makes larger.

Kernels are replaced by launches that do nothing, so that operands of a few rows take the path of a
GPU. A budget is raised only with its reason in the commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases import SHAPES, make_batch
from fastrl import LanguageModelHead, LanguageModelHeadConfig, kernels
from fastrl.functional.batch import BatchKwargs
from fastrl.kernels import exponentials, linear, merge, row_scaling, row_statistics

HIDDEN_SIZE, VOCAB_SIZE = 8, 3072
KERNELS = (
    (linear, "linear_kernel"),
    (merge, "_merge_kernel"),
    (exponentials, "_finish_kernel"),
    (row_statistics, "_finish_kernel"),
    (row_scaling, "_rows_kernel"),
    (row_scaling, "_scale_kernel"),
)


class Operations(TorchDispatchMode):
    """Counts operations but for views and uninitialised memory, which launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [result.alias_info for result in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and "empty" not in func._schema.name:
            self.count += 1
        return func(*args, **(kwargs or {}))


class Launches:
    """Stands for kernels, and counts their launches."""

    arg_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: object) -> Any:
        def launch(**arguments: object) -> None:
            self.count += 1

        return launch


@dataclass
class Counts:
    """Of one call, forward and backward."""

    operations: int
    launches: int


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counted = Launches()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, counted)
    monkeypatch.setattr(kernels, "run_on_cpu", True)
    return counted


def batch_of_tokens() -> BatchKwargs:
    """90 labels, 66 of them with an advantage, all columns that metrics read."""
    batch = make_batch(SHAPES["tiny"])
    ones = torch.ones_like(batch.label_counts)
    return batch.replace(
        old_logprobs=-ones,
        ref_logprobs=-ones,
        rollout_logprobs=-ones,
        rewards=torch.ones(batch.num_documents),
        model_version=torch.zeros_like(batch.labels),
        current_version=1,
    )


def count(loss: str, strategy: str, metrics: bool, launches: Launches, slabs: int = 12) -> Counts:
    batch = batch_of_tokens()
    config = LanguageModelHeadConfig.model_validate(
        {
            "hidden_size": HIDDEN_SIZE,
            "vocab_size": VOCAB_SIZE,
            "losses": {"policy": {"type": loss}},
            "strategy": strategy,
            "metrics": metrics,
        }
        | ({"max_logits_bytes": 2 * 66 * VOCAB_SIZE // slabs} if strategy == "recompute" else {})
    )
    # The interpreter's operands: on a GPU these are bf16.
    head = LanguageModelHead(config, device="meta", dtype=torch.float16)
    head.weight = nn.Parameter(torch.ones(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.float16))
    hidden = torch.ones(batch.num_tokens, HIDDEN_SIZE, dtype=torch.float16, requires_grad=True)
    launches.count = 0
    with Operations() as operations:
        torch.autograd.grad(head(hidden, batch).loss, (hidden, head.weight))
    return Counts(operations.count, launches.count)


# (loss, strategy, metrics): operations, kernels. More than on a GPU: a product of fp16 on a CPU
# converts its operands, and the tests fill memory that is not initialised.
BUDGETS = {
    ("grpo", "single_pass", False): (43, 7),
    ("grpo", "single_pass", True): (158, 10),
    ("grpo", "recompute", False): (149, 16),
    ("grpo", "recompute", True): (223, 16),
    ("gspo", "single_pass", True): (206, 10),
    ("gspo", "recompute", True): (253, 16),
    ("cross_entropy", "single_pass", True): (43, 7),
}


@pytest.mark.parametrize(("loss", "strategy", "metrics"), BUDGETS)
def test_a_call_makes_no_more_operations_than_its_budget(
    loss: str, strategy: str, metrics: bool, launches: Launches
) -> None:
    found = count(loss, strategy, metrics, launches)
    most_operations, num_launches = BUDGETS[loss, strategy, metrics]
    assert found.launches == num_launches
    assert found.operations <= most_operations


def test_a_slab_of_recompute_is_a_kernel_and_two_products(launches: Launches) -> None:
    many, few = (count("grpo", "recompute", False, launches, slabs) for slabs in (12, 6))
    assert many.launches - few.launches == 6
    # Two products, five conversions of fp16, and the filling of the slab's memory.
    assert many.operations - few.operations == 6 * 8
