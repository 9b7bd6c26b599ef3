"""Products with epilogues against dense float64 products."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.functional.head.running import (
    LABEL,
    MAX,
    SUM_EXP,
    SUM_SHIFTED,
    merge_running_statistics,
)
from fastrl.functional.head.torch_rows import transformed
from fastrl.kernels import linear
from fastrl.kernels.arguments import LogitTransform, RowGradients, VocabularyTile
from fastrl.kernels.exponentials import finish_exponentials
from fastrl.kernels.merge import merge_partial_statistics
from tests.helpers.tile_cases import (
    BF16_ERROR,
    INTERPRETED,
    OPERAND_DTYPE,
    TILE_CASES,
    TileCase,
    finished,
    large_cases,
    new_running,
    relative_error,
    tolerance,
    true_gradient,
    true_statistics,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("_fused"),
]

DEPTH = 40 if INTERPRETED else 200  # 8 n, off the block
CASES = [replace(case, num_rows=19) for case in TILE_CASES]
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
# A GPU's exponentials and logarithms are approximate.
RTOL = 3e-6 if INTERPRETED else 1e-5
# Of elements that are rounded twice, the second time all of a row alike.
EXPONENTIALS_ERROR = 2 * BF16_ERROR if INTERPRETED else 4e-3


@pytest.fixture(autouse=True)
def _small_tiles_on_cpu(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(linear, "BLOCKS", linear.Blocks(rows=16, columns=64, depth=32))
        monkeypatch.setattr(linear, "GROUP_BYTES", 2 * 16 * DEPTH)  # one row tile a group


def small_cases(cases: Iterable[TileCase], *others: object) -> list[Any]:
    return [pytest.param(case, *others, id=case.name) for case in cases]


def operands(case: TileCase, dtype: torch.dtype = OPERAND_DTYPE) -> tuple[Tensor, Tensor]:
    """Hidden states and weight whose products have the case's spread and offset."""
    columns = case.num_columns + case.padding
    hidden = torch.randn(case.num_rows, DEPTH)
    weight = torch.randn(columns, DEPTH) * (case.spread / DEPTH**0.5)
    hidden[:, 0] = 1.0
    weight[:, 0] = case.offset
    weight[case.num_columns :] = 100.0
    return hidden.to(dtype), weight.to(dtype)


def as_products(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.double() @ weight.double().t()


def new_operand(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """NaN, with rows at multiples of 16 bytes."""
    num_rows, num_columns = shape
    memory = torch.full((num_rows, -(-num_columns // 8) * 8), torch.nan, dtype=dtype)
    return memory[:, :num_columns]


@pytest.mark.parametrize("case", small_cases(CASES) + large_cases())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics(case: TileCase, dtype: torch.dtype) -> None:
    (hidden, weight), labels, tile = operands(case, dtype), case.labels(), case.tile()
    running = new_running(case.num_rows)
    truth = true_statistics(running, as_products(hidden, weight), labels, case, tile)
    linear.linear_statistics(running, hidden, weight, labels, case.transform, tile, entropy=True)
    for result, true in zip(finished(running).vectors(), finished(truth).vectors(), strict=True):
        torch.testing.assert_close(result, true, rtol=RTOL, atol=tolerance(case))
    # One product's error; in the sums over columns above they average out.
    atol = tolerance(case) * (1 if INTERPRETED else 4)
    torch.testing.assert_close(running[LABEL], truth[LABEL].float(), rtol=RTOL, atol=atol)


@pytest.mark.parametrize("case", small_cases(CASES) + large_cases())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_logit_is_the_maximum_to_the_bit(case: TileCase, dtype: torch.dtype) -> None:
    """`is_argmax` compares the two."""
    (hidden, weight), tile = operands(case, dtype), case.tile()
    z, _ = transformed(as_products(hidden, weight), case.transform, tile)
    labels, running = z.argmax(1) + tile.first_column, new_running(case.num_rows)
    linear.linear_statistics(running, hidden, weight, labels, case.transform, tile, entropy=True)
    # In fp32 the second of two nearly equal logits may be the largest.
    best = z.topk(min(2, z.shape[1])).values
    clear = best[:, 0] - best[:, -1] > 8 * tolerance(case)
    assert torch.equal(running[LABEL][clear], running[MAX][clear])


def test_statistics_of_many_rows_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows = linear.BLOCKS.rows + 3
    case = replace(CASES[3], first_column=0, num_columns=140, num_rows=num_rows)
    (hidden, weight), labels, tile = operands(case), case.labels(), case.tile()
    whole, chunked = new_running(num_rows), new_running(num_rows)
    linear.linear_statistics(whole, hidden, weight, labels, case.transform, tile, entropy=True)
    monkeypatch.setattr(linear, "MAX_PARTIAL_BYTES", 1)  # a tile of rows at least
    linear.linear_statistics(chunked, hidden, weight, labels, case.transform, tile, entropy=True)
    torch.testing.assert_close(whole, chunked, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "entropy"),
    [
        *(pytest.param(case, case.name != "padded", id=case.name) for case in CASES),
        *large_cases(False),
        *large_cases(True),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient(case: TileCase, entropy: bool, dtype: torch.dtype) -> None:
    (hidden, weight), labels, tile = operands(case, dtype), case.labels(), case.tile()
    products = as_products(hidden, weight)
    statistics = finished(true_statistics(new_running(case.num_rows), products, labels, case, tile))
    gradients = case.gradients(entropy=entropy)
    output = new_operand(products.shape, torch.bfloat16 if INTERPRETED else dtype)
    linear.linear_gradient(
        output, hidden, weight, labels, statistics.logsumexp, statistics.entropy,
        gradients, case.transform, tile,
    )  # fmt: skip
    truth = true_gradient(products, labels, statistics, gradients, case, tile)
    assert relative_error(output, truth) < BF16_ERROR + tolerance(case)
    assert (output[:, case.num_columns :] == 0).all()


def exponentials(
    case: TileCase,
    entropy: bool,
    gradients: RowGradients | None = None,
    tensors: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The gradient that the two halves give, the truth, the labels, the number of references."""
    hidden, weight, labels = tensors or (*operands(case), case.labels())
    tile, products = case.tile(), as_products(hidden, weight)
    running, output = new_running(case.num_rows), new_operand(products.shape, torch.bfloat16)
    partials = linear.linear_exponentials(
        running, output, hidden, weight, labels, case.transform, tile, entropy=True
    )
    true = true_statistics(new_running(case.num_rows), products, labels, case, tile)
    statistics, truth = finished(running), finished(true)
    atol = 4 * tolerance(case) + 2e-5 if INTERPRETED else tolerance(case)
    for result, expected in zip(statistics.vectors(), truth.vectors(), strict=True):
        torch.testing.assert_close(result, expected, rtol=RTOL, atol=atol)
    gradients = gradients or case.gradients(entropy=entropy)
    factors = finish_exponentials(
        output, partials, running[LABEL], labels, truth.logsumexp, truth.entropy,
        gradients, case.transform, tile,
    )  # fmt: skip
    result = output.double() * factors.double()[:, None]
    expected = true_gradient(products, labels, truth, gradients, case, tile)
    return result, expected, labels, len(partials[:, 0].unique())


@pytest.mark.parametrize(
    ("case", "entropy"),
    [
        *small_cases(CASES, False),
        *(
            pytest.param(case, True, id=f"{case.name} with a gradient of the entropy")
            for case in (CASES[1], CASES[5], CASES[6])
        ),
        *large_cases(False),
        # Behind a cap there is no way back from exponentials to the entropy's gradient.
        *(param for param in large_cases(True) if param.values[0].softcap is None),
    ],
)
def test_exponentials(case: TileCase, entropy: bool) -> None:
    result, truth, labels, _ = exponentials(case, entropy)
    assert relative_error(result, truth) < EXPONENTIALS_ERROR + tolerance(case)
    assert (result[:, case.num_columns :] == 0).all()
    # The label's element is exact: its rounding is in the row's factor.
    column = labels - case.first_column
    inside = (column >= 0) & (column < case.num_columns)
    rows = inside.nonzero()[:, 0]
    picked, true = result[rows, column[rows]], truth[rows, column[rows]]
    atol = 1e-6 if INTERPRETED else tolerance(case)
    torch.testing.assert_close(picked, true, rtol=1e-5 + 30 * tolerance(case), atol=atol)


def test_exponentials_of_rows_with_several_references() -> None:
    num_columns = 6 * linear.BLOCKS.columns + 16
    case = TileCase("hot", num_rows=8, num_columns=num_columns, spread=120.0)
    result, truth, _, num_references = exponentials(case, False)
    assert num_references > 2
    assert relative_error(result, truth) < 2 * BF16_ERROR


def test_exponentials_of_two_logits_on_either_side_of_where_the_reference_changes() -> None:
    """64 log 2 = 44.36: the larger logit's reference is 2^128, the smaller one's 1."""
    num_rows, num_columns = linear.BLOCKS.rows, 4 * linear.BLOCKS.columns
    hidden = torch.zeros(num_rows, 64, dtype=OPERAND_DTYPE)
    hidden[:, 0] = 1.0
    weight = torch.zeros(num_columns, 64, dtype=OPERAND_DTYPE)
    weight[3, 0], weight[3 * linear.BLOCKS.columns - 1, 0] = 44.25, 44.5
    case = TileCase("edge", num_rows=num_rows, num_columns=num_columns, spread=44.0)
    gradients = RowGradients(torch.ones(num_rows), None, None)
    tensors = (hidden, weight, torch.full((num_rows,), 3))
    result, truth, _, num_references = exponentials(case, False, gradients, tensors)
    assert num_references > 1
    assert relative_error(result, truth) < EXPONENTIALS_ERROR


def test_exponentials_of_a_gradient_without_p() -> None:
    """g_logsumexp = g_logprob is the gradient of the label's logit alone; 0 is that of nothing."""
    case = TileCase("label only", num_rows=6, num_columns=200)
    ones = torch.tensor([1.0, 1.0, 1.0, -2.0, 0.0, 0.0])
    result, truth, _, _ = exponentials(case, False, RowGradients(ones, None, ones.clone()))
    assert relative_error(result, truth) < 1e-5
    assert (result[4:] == 0).all()


def test_a_part_with_a_far_lower_reference_can_hold_the_larger_logits() -> None:
    """The scale between the references, 2^-192, is no fp32 number."""
    step = 192 * math.log(2)
    parts = torch.tensor([[0.0, 2.0**120, 2.0**118], [step, 2.0**-66, 2.0**-64]])[:, :, None]
    running = new_running(1)
    merge_partial_statistics(running, parts.contiguous(), entropy=True)
    truth = merge_running_statistics(
        torch.cat([parts, parts.new_full((2, 1, 1), -torch.inf)], 1).double()
    )
    expected = finished(truth).logsumexp
    assert expected.item() == pytest.approx(math.log(2.0**126 + 2.0**120))
    torch.testing.assert_close(finished(running).logsumexp, expected.float(), rtol=0, atol=2e-5)
    for row in (SUM_EXP, SUM_SHIFTED):
        torch.testing.assert_close(running[row], truth[row].float(), rtol=1e-5, atol=0)


def finish_by_hand(
    exponentials: Tensor,  # [1, 2 tiles]
    references: list[float],  # in units of log 2
    label: int,
    logsumexp: float,
) -> Tensor:
    """The gradient [1, S] of one label's log-probability."""
    partials = torch.zeros(len(references), 3, 1)
    partials[:, 0, 0] = torch.tensor(references) * math.log(2)
    value = (
        exponentials[0, label].double().log2().item() + references[label // linear.BLOCKS.columns]
    )
    factors = finish_exponentials(
        exponentials, partials, torch.tensor([value * math.log(2)]), torch.tensor([label]),
        torch.tensor([logsumexp * math.log(2)]), None, RowGradients(torch.ones(1), None, None),
        LogitTransform(), VocabularyTile(0, exponentials.shape[1], None),
    )  # fmt: skip
    return exponentials.double() * factors.double()[:, None]


def test_exponentials_of_a_far_lower_reference_can_be_the_larger() -> None:
    exponentials = torch.zeros(1, 2 * linear.BLOCKS.columns, dtype=torch.bfloat16)
    exponentials[0, 1], exponentials[0, 2], exponentials[0, -1] = 2.0**120, 2.0**119, 2.0**-66
    gradient = finish_by_hand(exponentials, [0.0, 192.0], label=2, logsumexp=127.0)
    expected = torch.zeros_like(gradient)
    expected[0, 1], expected[0, 2], expected[0, -1] = -(2.0**-7), 1 - 2.0**-8, -0.5
    assert relative_error(gradient, expected) < BF16_ERROR
    torch.testing.assert_close(gradient[0, 1], expected[0, 1], rtol=BF16_ERROR, atol=0)


@pytest.mark.parametrize("above", [10.0, 90.0, 600.0])
def test_exponentials_of_a_shard_far_below_the_largest_logit(above: float) -> None:
    """Another rank's logits are so much larger that e^(lse - reference) of this one overflows."""
    exponentials = torch.full((1, 2 * linear.BLOCKS.columns), 0.5, dtype=torch.bfloat16)
    gradient = finish_by_hand(exponentials, [0.0, 0.0], label=3, logsumexp=above)
    expected = torch.full_like(gradient, -(2.0 ** (-1 - above)))
    expected[0, 3] += 1
    assert relative_error(gradient, expected) < BF16_ERROR


def test_misaligned_operands_are_copied() -> None:
    case = TileCase("aligned", num_rows=20, num_columns=100)
    (hidden, weight), labels, tile = operands(case), case.labels(), case.tile()
    memory = torch.zeros(weight.numel() + 1, dtype=weight.dtype)
    shifted = memory[1:].view(weight.shape).copy_(weight)
    aligned, misaligned = new_running(20), new_running(20)
    linear.linear_statistics(aligned, hidden, weight, labels, case.transform, tile, entropy=True)
    linear.linear_statistics(
        misaligned, hidden, shifted, labels, case.transform, tile, entropy=True
    )
    assert torch.equal(aligned, misaligned)


@pytest.mark.gpu
def test_the_same_call_gives_the_same_bits() -> None:
    case = TileCase("repeat", num_rows=300, num_columns=5000)
    (hidden, weight), labels, tile = operands(case), case.labels(), case.tile()
    first, second = new_running(300), new_running(300)
    for running in (first, second):
        linear.linear_statistics(
            running, hidden, weight, labels, case.transform, tile, entropy=True
        )
    assert torch.equal(first, second)
