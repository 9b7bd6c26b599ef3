"""The training of `sharded_training` in one process, and how another is held to it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.helpers.sharded_training import NUM_STEPS, VARIANTS, Training, Variant, train

FP32_TOLERANCE = 1e-5
# bf16 keeps 8 bits: a rounding of up to 0.2 %, about thirty times between the embedding and a
# gradient, so 1 to 3 % of the whole gradient, which three steps double; most where a parameter's
# own is a small difference of large terms (queries and keys). Ratios are not clipped in this
# variant: a token within rounding of an edge gets or loses its gradient.
BF16_LOSS_TOLERANCE = 2e-2
BF16_TOLERANCE = 6e-2
BF16_PARAMETER_TOLERANCE = 0.12


@cache
def train_in_one_process(config_name: str, like: Variant) -> Training:
    """The same training in one process."""
    training = train(config_name, like)
    assert training is not None
    return training


def in_one_process(variant: Variant) -> Variant:
    """The same model and data, and nothing else of a variant."""
    return replace(
        VARIANTS["simple"],
        tied=variant.tied,
        clips=variant.clips,
        head_dim=variant.head_dim,
        architecture=variant.architecture,
        num_documents=variant.num_documents,
    )


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-12))


def assert_close(
    what: str,
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float,
    parameter_tolerance: float | None = None,
) -> None:
    """Holds all tensors together to `tolerance`, relative, and each to its own."""
    assert actual.keys() == expected.keys()
    worst = max((relative(actual[name], expected[name]), name) for name in expected)
    assert worst[0] < (parameter_tolerance or tolerance), (what, worst)
    together = relative(flat(actual), flat(expected))
    assert together < tolerance, (what, together)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def assert_same_training(
    variant: Variant, actual: Training, expected: Training, fp32_tolerance: float = FP32_TOLERANCE
) -> None:
    """Holds losses, gradients of every step, weights and metrics to those of one process."""
    is_bf16 = variant.compute_dtype is not None
    tolerances = (BF16_TOLERANCE, BF16_PARAMETER_TOLERANCE) if is_bf16 else (fp32_tolerance,)
    loss_tolerance = BF16_LOSS_TOLERANCE if is_bf16 else fp32_tolerance
    assert actual.losses == pytest.approx(expected.losses, rel=loss_tolerance, abs=loss_tolerance)
    for step in range(NUM_STEPS):
        assert_close(f"gradient {step}", actual.grads[step], expected.grads[step], *tolerances)
    assert_close("weights", actual.weights, expected.weights, *tolerances)
    if not is_bf16:
        for mine, theirs in zip(actual.metrics, expected.metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=10 * fp32_tolerance, abs=fp32_tolerance)
