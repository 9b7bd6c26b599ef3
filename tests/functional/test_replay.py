"""`replay`: the statistics of recorded sets from their own logits, in torch and by kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import kernels
from fastrl.functional.head.call import CallOptions, HeadCall, HeadOperands
from fastrl.functional.head.checks import check_inputs
from fastrl.functional.head.replay import ReplayRows, replay_logprobs
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import LogitTransform

V, D, T = 100, 24, 10
CPU = torch.device("cpu")


class Case:
    """Ragged sets: of one entry, of many, with doubles, without the label; every fifth no label."""

    def __init__(
        self, dtype: torch.dtype = torch.float64, rank: int = 0, device: torch.device = CPU
    ) -> None:
        generator = torch.Generator().manual_seed(5)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            values = scale * torch.randn(*size, dtype=torch.float64, generator=generator)
            return values.to(device, dtype).requires_grad_()

        self.hidden, self.weight = normal(T, D + rank), normal(V, D, scale=0.5)
        self.bias = normal(V)
        self.low_rank = normal(V, rank, scale=0.5) if rank else None
        self.temperature = torch.rand(T, generator=generator, dtype=torch.float64).to(device) + 0.5
        labels = torch.randint(V - 3, (T,), generator=generator)
        self.labels = torch.where(torch.arange(T) % 5 == 4, -100, labels).to(device)
        counts = torch.tensor([1, 1, 3, 20, 8]).repeat(T // 5)
        ids = torch.randint(V, (int(counts.sum()),), generator=generator)
        # Most sets hold 0, an entry that is drawn often, and some the label.
        first = counts.cumsum(0) - counts
        ids[first] = torch.where(torch.arange(T) % 2 == 0, labels, 0)
        self.kept = KeptTokens.from_counts(ids, counts).map(lambda values: values.to(device))
        self.upstream = torch.randn(3, T, generator=generator, dtype=torch.float64).to(device)

    @property
    def inputs(self) -> list[Tensor]:
        every = (self.hidden, self.weight, self.bias, self.low_rank)
        return [each for each in every if each is not None]

    def call(self, rows: Tensor | None = None, **changes: Any) -> HeadCall:
        temperature = self.temperature.to(torch.promote_types(self.hidden.dtype, torch.float32))
        return check_inputs(
            HeadOperands(self.hidden, self.weight, self.bias, self.low_rank),
            self.labels,
            transform=LogitTransform(temperature, softcap=9.0, logit_scale=0.7),
            vocab_size=V - 3,
            weight_rows=V,
            groups=None,
            rows=rows,
            options=CallOptions(True, None, 2**20),
        )

    def statistics(self, rows: Tensor | None = None) -> TokenStatistics:
        call = self.call(rows)
        return replay_logprobs(call, self.kept, ReplayRows.all_recorded(call.rows))

    def results(self) -> list[Tensor]:
        """Statistics and gradients, with an upstream gradient that is not 1."""
        statistics = self.statistics()
        vectors = torch.stack(statistics.vectors())
        loss = (vectors * self.upstream.to(vectors.dtype)).sum()
        return [*vectors.detach(), *torch.autograd.grad(-1.7 * loss, self.inputs)]


def by_definition(case: Case) -> list[Tensor]:
    """One token after the other, in float64."""
    hidden, *others = inputs = [each.detach().double().requires_grad_() for each in case.inputs]
    weight, bias = others[0], others[1]
    joined = weight if len(others) == 2 else torch.cat([weight, others[2]], 1)
    columns: list[Tensor] = []
    for t, (label, kept) in enumerate(zip(case.labels.tolist(), case.kept.lists(), strict=True)):
        if label == -100:
            columns.append(hidden.new_zeros(3))
            continue
        entries = sorted({entry for entry in kept if entry < V - 3} | {label})
        x = (joined[entries] @ hidden[t] + bias[entries]) * 0.7
        z = 9.0 * torch.tanh(x / 9.0) / case.temperature[t]
        logsumexp = z.logsumexp(0)
        p = (z - logsumexp).exp()
        entropy = logsumexp - (p * z).sum()
        columns.append(torch.stack([z[entries.index(label)] - logsumexp, entropy, logsumexp]))
    vectors = torch.stack(columns, 1)
    loss = (vectors * case.upstream).sum()
    return [*vectors.detach(), *torch.autograd.grad(-1.7 * loss, inputs)]


@pytest.mark.parametrize("rank", [0, 4])
def test_statistics_and_gradients_are_the_definition(rank: int) -> None:
    case = Case(rank=rank)
    for result, expected in zip(case.results(), by_definition(case), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


@pytest.fixture(params=[False, True], ids=["torch", "kernels"])
def place(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> torch.device:
    """Of the operands: torch is tried on the CPU, kernels on a GPU or in the interpreter."""
    monkeypatch.setattr(kernels, "run_on_cpu", request.param)
    return device if request.param else CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_the_dtypes_of_models(dtype: torch.dtype, place: torch.device) -> None:
    case = Case(dtype, rank=4, device=place)
    results, expected = case.results(), by_definition(case)
    assert [grad.dtype for grad in results[3:]] == [dtype] * 4
    bound = 2e-6 if dtype == torch.float32 else 1e-3
    for number, (result, exact) in enumerate(zip(results, expected, strict=True)):
        # The statistics are those of fp32 whatever the operands are.
        most = 2e-6 if number < 3 else bound
        assert (result.double() - exact).norm() <= most * exact.norm()


def test_a_row_depends_on_itself_alone(place: torch.device) -> None:
    case = Case(torch.float32, device=place)
    whole = torch.stack(case.statistics().vectors())
    few = case.call().rows[2:6]
    part = torch.stack(case.statistics(few).vectors())
    assert torch.equal(part[:, few], whole[:, few])
    order = torch.randperm(len(case.kept.ids)).to(place)
    case.kept = case.kept.map(lambda values: values[order])
    assert torch.equal(whole, torch.stack(case.statistics().vectors()))


def test_gradients_of_other_rows_are_left_out() -> None:
    case = Case()
    rows = case.call().rows
    case.upstream[:, rows[::2]] = 0
    expected = case.results()[3:]
    statistics = replay_logprobs(case.call(), case.kept, ReplayRows.all_recorded(rows, rows[1::2]))
    loss = (torch.stack(statistics.vectors()) * case.upstream).sum()
    for grad, same in zip(torch.autograd.grad(-1.7 * loss, case.inputs), expected, strict=True):
        torch.testing.assert_close(grad, same, rtol=1e-12, atol=1e-12)


def test_a_set_of_one_entry_has_no_gradient(place: torch.device) -> None:
    """Its log-probability and entropy are exactly 0, and no row of the weight is touched."""
    case = Case(torch.float32, device=place)
    is_of_label = case.labels.clamp(min=0)
    case.kept = KeptTokens.from_padded(is_of_label[:, None])
    case.upstream[2] = 0  # the log-sum-exp is that of the label's logit
    statistics = case.statistics()
    assert statistics.entropy is not None
    assert not statistics.logprobs.any()
    assert not statistics.entropy.any()
    grads = case.results()[3:]
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("by_kernels", [False, True])
def test_a_logit_that_is_no_number_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, by_kernels: bool, device: torch.device
) -> None:
    """All statistics of the rows that recorded it are none either, and those of no others."""
    monkeypatch.setattr(kernels, "run_on_cpu", by_kernels)
    case = Case(torch.float32, device=device if by_kernels else CPU)
    labels, sets = case.labels.tolist(), case.kept.lists()
    entry = next(each for each in sets[3] if each < V - 3 and each not in (labels[3], 0))
    with torch.no_grad():
        case.weight[entry] = torch.nan
    has_entry = [
        label != -100 and (entry in kept or entry == label)
        for label, kept in zip(labels, sets, strict=True)
    ]
    for vector in case.statistics().vectors():
        assert vector.isnan().tolist() == has_entry
