"""Whether the head gives what the definition gives, to the rounding of the case's dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.parallel import ParallelGroups
from tests.fuzz.cases import FuzzCase, draw_case
from tests.fuzz.definition import Answer, definition
from tests.fuzz.fast import assemble, run_part, run_seed
from tests.helpers.ranks import RankPool


@dataclass(frozen=True)
class Precision:
    """What rounding may do.

    Attributes:
        terms: of a gradient's term, relative: operands of products are rounded to the dtype.
        logits: of a logit, relative to the largest of its row; a statistic's error follows.
        smallest: absolute, of a gradient's term: numbers below are 0.
    """

    terms: float
    logits: float
    smallest: float = 0.0


PRECISIONS = {
    torch.float64: Precision(1e-10, 1e-12),
    torch.float32: Precision(1e-5, 3e-6),
    torch.bfloat16: Precision(2e-2, 3e-6),
    torch.float16: Precision(3e-3, 3e-6, 2e-6),
}
# Draws of logits that are off by their rounding. Where these change the definition's answer, such
# as at the edge of a clip or a keep-set, the case has no one answer.
NUM_PERTURBATIONS = 12


def check(
    seed: int, pool: RankPool | None = None, device: torch.device | None = None
) -> str | None:
    """What is wrong with the case of a seed; None if nothing is, `edge` if it cannot be told."""
    case = draw_case(seed)
    if case.layout.world_size == 1:
        parts = [run_part(case, ParallelGroups(), device or torch.device("cpu"))]
    else:
        assert pool is not None
        parts = pool(run_seed, case.layout.world_size, seed)
    precision = PRECISIONS[case.product_dtype]
    actual, expected = assemble(case, parts), definition(case)
    problems = differences(case, actual, expected)
    if not problems:
        return None
    others = [definition(case, precision.logits, each) for each in range(NUM_PERTURBATIONS)]
    if case.dtype != torch.float64:
        # The same formulas in fp32 lose digits too, as a difference of large terms.
        others.append(definition(case, dtype=torch.float32))
    if not differences(case, actual, expected, others):
        return "edge"
    return "\n".join([str(case), *problems])


def differences(
    case: FuzzCase, actual: Answer, expected: Answer, others: list[Answer] | None = None
) -> list[str]:
    """What differs by more than rounding, and than the spread of other answers that are as good."""
    precision = PRECISIONS[case.product_dtype]
    wanted = {name for name, is_needed in zip(
        ("hidden_states", "weight"), case.needs_gradient, strict=True) if is_needed}  # fmt: skip
    if case.bias is not None and case.needs_gradient[1]:
        wanted.add("bias")
    problems = []
    if set(actual.gradients) != wanted:
        problems.append(f"gradients of {sorted(actual.gradients)}, not {sorted(wanted)}")
    if set(actual.metrics) != set(expected.metrics):
        odd = sorted(set(actual.metrics) ^ set(expected.metrics))
        problems.append(f"metrics on one side alone: {odd}")
    for name, value in _values(actual).items():
        if name not in _values(expected):
            continue
        true = _values(expected)[name]
        bound = _bound(case, name, expected, precision)
        for other in others or []:
            bound = torch.maximum(bound, 3 * (_values(other)[name] - true).abs())
        error = (value - true).abs()
        is_off = ~(error <= bound)
        if name in expected.gradients:  # what the dtype cannot hold may be infinite
            is_off &= expected.sizes[name] < torch.finfo(case.product_dtype).max
        if bool(is_off.any()):
            worst = int(torch.where(is_off, error - bound, -1).nan_to_num(torch.inf).argmax())
            place = f"{error.flatten()[worst]:.3g} where {bound.flatten()[worst]:.3g} is rounding"
            numbers = f"{value.flatten()[worst]:.12g} for {true.flatten()[worst]:.12g}"
            count = f"{int(is_off.sum())} of {is_off.numel()} values"
            problems.append(f"  {name}: {numbers}, off by {place}; {count}")
    return problems


def _values(answer: Answer) -> dict[str, Tensor]:
    vectors = {"loss": answer.loss, "logprobs": answer.logprobs, "entropy": answer.entropy}
    return vectors | answer.gradients | answer.metrics


def _bound(case: FuzzCase, name: str, expected: Answer, precision: Precision) -> Tensor:
    true = _values(expected)[name]
    if name in expected.gradients:
        terms = precision.terms * expected.sizes[name]
        doubt = precision.logits * expected.doubts[name]
        tiny = precision.smallest * _smallest_terms(case, name)
        if case.head["strategy"] != "recompute":
            # Rounded before it is known what the loss is multiplied by.
            tiny *= max(abs(case.upstream), 1.0)
        return terms + doubt + tiny + 1e-14
    z = _largest_logit(case)
    absolute = precision.logits * (1 + z)
    if name in ("logprobs", "entropy"):
        return absolute + precision.logits * true.abs()
    if name == "loss":
        doubt = expected.doubts["bias"].sum() / abs(case.upstream)
        return precision.logits * (1 + doubt + 10 * true.abs())
    return 10 * absolute * (1 + true.abs()) * _second_moment(name, expected)


def _smallest_terms(case: FuzzCase, name: str) -> float:
    """The sum of the factors of a gradient's terms."""
    if name == "hidden_states":
        return float(case.weight.abs().sum(0).max())
    hidden = torch.cat([text.hidden for text in case.texts])
    return float(len(hidden) if name == "bias" else hidden.abs().sum(0).max())


def _largest_logit(case: FuzzCase) -> float:
    hidden = torch.cat([text.hidden for text in case.texts])
    z = (hidden @ case.weight.T).abs().max() * abs(case.head["logit_scale"])
    scale = max(config.logits_scale for config in case.configs.values())
    coldest = min(text.temperature for text in case.texts)
    return float(z) * float(max(scale, 1.0)) / coldest


def _second_moment(name: str, expected: Answer) -> float:
    """A variance is a difference of moments, and rounded like these."""
    base, _, kind = name.rpartition("_")
    mean = float(expected.metrics[base]) if kind == "variance" else 0.0
    return 1 + mean * mean
