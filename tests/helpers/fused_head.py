"""The head's ops on operands of 16 bits, and how they are held to float64."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.functional.head.call import CallOptions, HeadOperands
from fastrl.functional.head.checks import check_inputs
from fastrl.functional.head.recompute import recompute_logprobs
from fastrl.functional.head.single_pass import single_pass
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels import linear
from fastrl.kernels.arguments import LogitTransform
from fastrl.parallel import ParallelGroups
from tests.helpers.head_cases import HeadTensors

# Tiles that cut these cases.
SMALL_BLOCKS = linear.Blocks(rows=16, columns=32, depth=16)


def weighted_sum(statistics: TokenStatistics, weights: list[Tensor]) -> Tensor:
    vectors = statistics.vectors()
    return torch.stack([(v * w).sum() for v, w in zip(vectors, weights, strict=True)]).sum()


def logprobs_and_gradients(
    tensors: HeadTensors,
    strategy: str,
    entropy: bool,
    groups: ParallelGroups | None = None,
    weight_rows: int | None = None,
) -> list[Tensor]:
    """Log-probabilities and gradients, with an upstream gradient that is not 1."""
    case = tensors.case
    call = check_inputs(
        HeadOperands(tensors.hidden_states, tensors.weight, tensors.bias), tensors.labels,
        transform=LogitTransform(tensors.temperature, case.softcap, case.logit_scale),
        vocab_size=case.vocab_size, weight_rows=weight_rows, groups=groups,
        rows=None, options=CallOptions(entropy, None, 2**20),
    )  # fmt: skip
    weights = tensors.upstream()
    weights = weights if entropy else [weights[0], weights[2]]
    if strategy == "recompute":
        statistics = recompute_logprobs(call)
        loss = weighted_sum(statistics, weights)
    else:
        count = len(call.rows)
        ends = [count] if count < 2 or strategy == "one_chunk" else [count // 2, count]
        compact = [w[call.rows] for w in weights]
        loss, found = single_pass(
            call,
            lambda part, start, stop: weighted_sum(part, [w[start:stop] for w in compact]),
            gradient_rows=call.rows, chunk_ends=ends,
        )  # fmt: skip
        assert found is not None
        statistics = found
    grads = torch.autograd.grad(-1.7 * loss, tensors.inputs)
    assert [grad.dtype for grad in grads] == [tensor.dtype for tensor in tensors.inputs]
    return [statistics.logprobs, *grads]


def assert_close_to_float64(results: list[Tensor], truths: list[Tensor]) -> None:
    """Log-probabilities as of fp32 logits, gradients as of operands that were rounded."""
    (logprobs, *grads), (expected, *true_grads) = results, truths
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=2e-5)
    for grad, true in zip(grads, true_grads, strict=True):
        assert (grad.double() - true).norm() < 1.2e-2 * true.norm()
