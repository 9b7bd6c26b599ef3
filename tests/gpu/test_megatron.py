"""The head in Megatron-core's place on one GPU: bf16 weights, fp32 `main_grad`, memory and time.

It needs the wheel of megatron-core 0.16.1 alone (`pip install --no-deps megatron-core==0.16.1`),
not Transformer Engine and not Apex. `pytest tests/gpu/test_megatron.py -s` shows what was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.megatron_models import (
    MegatronCase,
    make_megatron,
    megatron_gradients,
    megatron_inputs,
    megatron_labels,
)
from tests.helpers.peer_packages import peer_module

# Megatron-core calls itself without what it will require of its callers.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"),
]

CASE = MegatronCase(main_grad=True, dtype=torch.bfloat16, width=512, vocabulary=65536, length=2048)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The adapter, with Megatron's groups over one rank of NCCL."""
    state = peer_module("megatron.core.parallel_state")
    module = peer_module("fastrl.integrations.megatron")
    torch.cuda.set_device(0)
    folder = tmp_path_factory.mktemp("rendezvous")
    dist.init_process_group("nccl", rank=0, world_size=1, init_method=f"file://{folder}/store")
    yield module
    state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_bf16_with_main_grad_is_at_least_as_exact_as_megatron(tied: bool, adapter: Any) -> None:
    case = MegatronCase(
        tied=tied, main_grad=True, dtype=torch.bfloat16, width=64, vocabulary=512, length=64
    )
    exact_case = MegatronCase(
        tied=tied, main_grad=True, dtype=torch.float32, width=64, vocabulary=512, length=64
    )
    model, exact = make_megatron(case), make_megatron(exact_case)
    exact.load_state_dict(model.state_dict())
    exact.module.float()
    expected = _own_logprobs(exact, exact_case)
    wanted = megatron_gradients(exact, expected.sum())
    own = _own_logprobs(model, case)
    own_grads = megatron_gradients(model, own.sum())
    found = adapter.token_statistics(model, megatron_labels(case), **megatron_inputs(case)).logprobs
    grads = megatron_gradients(model, found.sum())
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    assert _distance(found, expected) <= 1.1 * _distance(own, expected)
    for name, want in wanted.items():
        floor = 1e-6 * float(want.norm())
        assert _distance(grads[name], want) <= 2 * _distance(own_grads[name], want) + floor, name


def test_time_and_memory_beside_megatrons_logits(adapter: Any) -> None:
    model, inputs, labels = make_megatron(CASE), megatron_inputs(CASE), megatron_labels(CASE)

    def own() -> None:
        _backward(model, _own_logprobs(model, CASE).sum())

    def ours() -> None:
        _backward(model, adapter.token_statistics(model, labels, **inputs).logprobs.sum())

    own_time, own_peak = _measured(own)
    time, peak = _measured(ours)
    sys.stdout.write(
        f"\nMegatron-core output layer, {labels.numel()} tokens, D {CASE.width}, V"
        f" {CASE.vocabulary}, bf16, {torch.cuda.get_device_name()}: own logits {own_time:.1f} ms,"
        f" {own_peak / 2**30:.2f} GiB; head {time:.1f} ms, {peak / 2**30:.2f} GiB\n"
    )
    # One [B, S, V] of fp32 logits is 1 GiB here; the head has none.
    assert peak < own_peak - labels.numel() * CASE.vocabulary * 4


def _own_logprobs(model: Any, case: MegatronCase) -> Tensor:
    logits = model(**megatron_inputs(case)).float()
    labels = megatron_labels(case)
    logprobs: Tensor = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return logprobs.where(labels != -100, 0)


def _backward(model: Any, loss: Tensor) -> None:
    model.zero_grad_buffer()
    loss.backward()


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach().double()).norm())


def _measured(step: Callable[[], None]) -> tuple[float, int]:
    """Milliseconds, the least of five, and the peak of memory in bytes."""
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times), torch.cuda.max_memory_allocated()
