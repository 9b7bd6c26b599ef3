"""Kernels on a GPU against float64: the cases of tests/kernels at larger sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastrl.functional.head.running import LABEL
from fastrl.kernels import can_run_fused
from fastrl.kernels.arguments import RowGradients, VocabularyTile
from fastrl.kernels.exponentials import finish_exponentials
from fastrl.kernels.linear import linear_exponentials, linear_gradient, linear_statistics
from fastrl.kernels.row_gradient import row_gradient
from fastrl.kernels.row_scaling import column_sums, scale_in_place, scatter_scaled_rows
from fastrl.kernels.row_statistics import update_row_statistics
from tests.helpers.tile_cases import (
    TILE_CASES,
    TileCase,
    finished,
    new_running,
    relative_error,
    true_gradient,
    true_statistics,
)

pytestmark = pytest.mark.gpu

DEPTH = 200
# Half the distance of two bf16 numbers: a tile of few rows can be one element and its rounding.
ROUNDING = 2**-8
CASES = [
    replace(case, num_rows=rows, num_columns=case.num_columns * 37)
    for case in TILE_CASES
    for rows in (5, 700)
]
SIZES = [
    TileCase(f"V {size}", num_columns=size) for size in (1, 127, 128, 129, 1000, 32000, 129920)
]


@pytest.fixture(autouse=True)
def _cuda_by_default(device: torch.device) -> Iterator[None]:
    with device:
        yield


def on_gpu(tile: VocabularyTile) -> VocabularyTile:
    return replace(tile, bias=None if tile.bias is None else tile.bias.cuda())


def running_of(case: TileCase) -> Tensor:
    return new_running(case.num_rows).cuda()


def operands(case: TileCase, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(case.num_rows, DEPTH)
    weight = torch.randn(case.num_columns + case.padding, DEPTH) * (case.spread / DEPTH**0.5)
    hidden[:, 0] = 1.0
    weight[:, 0] = case.offset
    weight[case.num_columns :] = 100.0
    return hidden.to(dtype), weight.to(dtype)


def tolerance(case: TileCase) -> float:
    return 4e-6 * max(case.spread, abs(case.offset), 1.0) / min(case.temperature, 1.0)


def check(running: Tensor, truth: Tensor, case: TileCase) -> None:
    pairs = zip(finished(running).vectors(), finished(truth).vectors(), strict=True)
    for result, true in pairs:
        torch.testing.assert_close(result, true, rtol=1e-5, atol=tolerance(case))


def id_of(case: TileCase) -> str:
    return f"{case.name} {case.num_rows}x{case.num_columns}"


@pytest.mark.parametrize("case", CASES + SIZES, ids=id_of)
def test_row_kernels(case: TileCase) -> None:
    products, labels, tile = case.products(), case.labels(), on_gpu(case.tile())
    running = running_of(case)
    truth = true_statistics(running, products, labels, case, tile)
    update_row_statistics(running, products, labels, case.transform, tile, entropy=True)
    check(running, truth, case)
    statistics = finished(truth)
    for entropy, dtype in ((False, torch.bfloat16), (True, torch.float32), (True, torch.float16)):
        gradients = case.gradients(entropy=entropy)
        expected = true_gradient(products, labels, statistics, gradients, case, tile)
        result = row_gradient(
            products.clone(), labels, statistics.logsumexp, statistics.entropy,
            gradients, case.transform, tile, operand_dtype=dtype,
        )  # fmt: skip
        assert relative_error(result, expected) < ROUNDING + tolerance(case)
        assert (result[:, case.num_columns :] == 0).all()


@pytest.mark.parametrize("case", CASES + SIZES, ids=id_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_products_with_epilogues(case: TileCase, dtype: torch.dtype) -> None:
    (hidden, weight), labels, tile = operands(case, dtype), case.labels(), on_gpu(case.tile())
    if not can_run_fused(hidden, weight):
        pytest.skip("not on this GPU")
    products = hidden.double() @ weight.double().t()
    running = running_of(case)
    truth = true_statistics(running, products, labels, case, tile)
    linear_statistics(running, hidden, weight, labels, case.transform, tile, entropy=True)
    check(running, truth, case)
    statistics = finished(truth)
    columns = products.shape[1]
    memory = torch.zeros(case.num_rows, -(-columns // 8) * 8, dtype=dtype)
    for entropy in (False, True):
        gradients = case.gradients(entropy=entropy)
        output = memory.fill_(torch.nan)[:, :columns]
        linear_gradient(
            output, hidden, weight, labels, statistics.logsumexp, statistics.entropy,
            gradients, case.transform, tile,
        )  # fmt: skip
        expected = true_gradient(products, labels, statistics, gradients, case, tile)
        assert relative_error(output, expected) < ROUNDING + tolerance(case)
        assert (output[:, case.num_columns :] == 0).all()
        if dtype == torch.bfloat16 and not (entropy and case.softcap is not None):
            result = exponentials(
                memory.fill_(torch.nan)[:, :columns], hidden, weight, labels, case, tile,
                truth, gradients,
            )  # fmt: skip
            assert relative_error(result, expected) < 4e-3 + tolerance(case)
            assert (result[:, case.num_columns :] == 0).all()


def exponentials(
    output: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    case: TileCase,
    tile: VocabularyTile,
    truth: Tensor,
    gradients: RowGradients,
) -> Tensor:
    """The gradient of the products by way of exponentials, multiplied out."""
    running = running_of(case)
    partials = linear_exponentials(
        running, output, hidden, weight, labels, case.transform, tile, entropy=True
    )
    check(running, truth, case)
    statistics = finished(truth)
    factors = finish_exponentials(
        output, partials, running[LABEL], labels, statistics.logsumexp, statistics.entropy,
        gradients, case.transform, tile,
    )  # fmt: skip
    return output.double() * factors.double()[:, None]


def test_two_logits_on_either_side_of_where_the_reference_changes() -> None:
    """64 log 2 = 44.36: the larger logit's reference is 2^128, the smaller one's 1."""
    hidden = torch.zeros(128, 64, dtype=torch.bfloat16)
    hidden[:, 0] = 1.0
    weight = torch.zeros(1024, 64, dtype=torch.bfloat16)
    weight[3, 0], weight[700, 0] = 44.25, 44.5
    case = TileCase("edge", num_rows=128, num_columns=1024, spread=44.0)
    if not can_run_fused(hidden, weight):
        pytest.skip("not on this GPU")
    labels, tile = torch.full((128,), 3), case.tile()
    products = hidden.double() @ weight.double().t()
    truth = true_statistics(running_of(case), products, labels, case, tile)
    gradients = RowGradients(torch.ones(128), None, None)
    output = torch.full((128, 1024), torch.nan, dtype=torch.bfloat16)
    result = exponentials(output, hidden, weight, labels, case, tile, truth, gradients)
    expected = true_gradient(products, labels, finished(truth), gradients, case, tile)
    assert relative_error(result, expected) < 4e-3


def test_small_passes() -> None:
    values, factors = torch.randn(300, 4100), torch.randn(300)
    rows = torch.randperm(1000)[:300]
    output = torch.zeros(1000, 4100, dtype=torch.bfloat16)
    scatter_scaled_rows(output, values, factors, rows)
    assert torch.equal(output[rows], (values * factors[:, None]).bfloat16())
    assert output.count_nonzero(1).count_nonzero() <= 300
    torch.testing.assert_close(column_sums(values, factors), factors @ values, rtol=1e-4, atol=1e-3)
    large = torch.randn(50_000_001)
    expected = large * 0.5
    scale_in_place(large, torch.tensor(0.5))
    assert torch.equal(large, expected)


def test_the_same_call_gives_the_same_bits() -> None:
    case = TileCase("repeat", num_rows=300, num_columns=5000)
    (hidden, weight), labels, tile = operands(case, torch.bfloat16), case.labels(), case.tile()
    first, second = running_of(case), running_of(case)
    for running in (first, second):
        linear_statistics(running, hidden, weight, labels, case.transform, tile, entropy=True)
    assert torch.equal(first, second)
