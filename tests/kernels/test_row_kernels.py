"""Kernels over rows of logits against the torch operations in float64."""

import pytest
import torch
from torch import Tensor

from fastrl.functional.head.running import (
    LABEL,
    MAX,
    SUM_EXP,
    SUM_SHIFTED,
    finish_statistics,
)
from fastrl.kernels import row_gradient as gradient_module
from fastrl.kernels import row_statistics as statistics_module
from fastrl.kernels.arguments import VocabularyTile
from tests.helpers.tile_cases import (
    BF16_ERROR,
    INTERPRETED,
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

# numpy says what a GPU does silently: -inf - -inf, 0 * inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LONG = TileCase("several blocks", num_rows=3, num_columns=9000)
# A GPU's exponentials and logarithms are approximate.
RTOL = 3e-6 if INTERPRETED else 1e-5


def absolute_error(case: TileCase) -> float:
    return 1e-6 * case.size + 2e-6 if INTERPRETED else tolerance(case)


def update(
    running: Tensor,
    logits: Tensor,
    labels: Tensor,
    case: TileCase,
    tile: VocabularyTile,
    entropy: bool = True,
) -> None:
    statistics_module.update_row_statistics(
        running, logits, labels, case.transform, tile, entropy=entropy
    )


@pytest.mark.parametrize(
    ("case", "rows_to_fill"),
    [
        *(pytest.param(case, 1, id=case.name) for case in TILE_CASES),
        pytest.param(LONG, 1, id="several blocks"),
        pytest.param(LONG, 512, id="split rows"),
        *large_cases(512),
    ],
)
def test_statistics(case: TileCase, rows_to_fill: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_module, "ROWS_TO_FILL_A_DEVICE", rows_to_fill)
    products, labels, tile = case.products(), case.labels(), case.tile()
    running = new_running(case.num_rows)
    truth = true_statistics(running, products, labels, case, tile)
    update(running, products, labels, case, tile)
    for row in (MAX, LABEL):
        torch.testing.assert_close(running[row].double(), truth[row], rtol=RTOL / 3, atol=1e-6)
    for result, true in zip(finished(running).vectors(), finished(truth).vectors(), strict=True):
        torch.testing.assert_close(result, true, rtol=RTOL, atol=absolute_error(case))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 300])
@pytest.mark.parametrize("num_tokens", [None, 700])
def test_finished_statistics(num_rows: int, num_tokens: int | None, entropy: bool) -> None:
    statistics = torch.rand(4, num_rows) + torch.tensor([-3.0, 1.0, -4.0, -5.0])[:, None]
    statistics[0, 1:2] = statistics[3, 1:2] = -torch.inf  # a row without a finite logit
    statistics[1, 2:3], statistics[2, 2:3] = 1 + 2**-20, -(2**-15)  # one of a single large logit
    rows = None if num_tokens is None else torch.randperm(num_tokens)[:num_rows].sort().values
    result = statistics_module.finish_row_statistics(
        statistics, rows, num_rows if num_tokens is None else num_tokens, entropy=entropy
    )
    truth = finish_statistics(statistics.double(), entropy, rows, num_tokens)
    for found, true in zip(result, (truth.logprobs, truth.entropy, truth.logsumexp), strict=True):
        assert (found is None) == (true is None)
        if found is not None and true is not None:
            torch.testing.assert_close(found.double(), true, rtol=3e-6, atol=1e-9)


def assert_close(running: Tensor, truth: Tensor) -> None:
    rtol, atol = (2e-6, 1e-6) if INTERPRETED else (1e-5, 1e-5)
    torch.testing.assert_close(running.double(), truth, rtol=rtol, atol=atol)


def test_statistics_merge_tiles_whatever_their_order() -> None:
    case = TileCase("whole", num_columns=600, bias=True)
    products, labels, tile = case.products(), case.labels(), case.tile()
    truth = true_statistics(new_running(5), products, labels, case, tile)
    running = new_running(5)
    for first, last in ((400, 600), (0, 130), (130, 400)):
        assert tile.bias is not None
        part = VocabularyTile(first, last - first, tile.bias[first:last])
        update(running, products[:, first:last], labels, case, part)
    assert_close(running, truth)


def test_rows_of_minus_infinity_are_not_nan() -> None:
    case = TileCase("dead rows", num_columns=300)
    products, labels, tile = case.products(), case.labels(), case.tile()
    products[1] = -torch.inf
    products[2, :200] = -torch.inf
    running = new_running(5)
    truth = true_statistics(running, products, labels, case, tile)
    update(running, products, labels, case, tile)
    assert not running.isnan().any()
    assert_close(running, truth)
    alive = finished(running)
    statistics = alive.map(lambda value: torch.nan_to_num(value, nan=0.0, neginf=-torch.inf))
    gradients = case.gradients(entropy=True)
    truth = true_gradient(products, labels, statistics, gradients, case, tile)
    result = gradient_module.row_gradient(
        products.clone(), labels, statistics.logsumexp, statistics.entropy, gradients,
        case.transform, tile, operand_dtype=torch.float32,
    )  # fmt: skip
    assert relative_error(result, truth) < (2e-6 if INTERPRETED else 1e-5)


@pytest.mark.parametrize(
    ("case", "rows_to_fill", "dtype", "entropy"),
    [
        *(pytest.param(case, 1, torch.float32, True, id=case.name) for case in TILE_CASES),
        pytest.param(TILE_CASES[2], 1, torch.bfloat16, True, id="bf16"),
        pytest.param(LONG, 1, torch.bfloat16, True, id="bf16 in several blocks"),
        pytest.param(LONG, 512, torch.bfloat16, True, id="bf16 of split rows"),
        pytest.param(LONG, 512, torch.float32, True, id="split rows"),
        *large_cases(512, torch.bfloat16, False),
        *large_cases(512, torch.float32, True),
        *large_cases(512, torch.float16, True),
    ],
)
def test_gradient(
    case: TileCase,
    rows_to_fill: int,
    dtype: torch.dtype,
    entropy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics_module, "ROWS_TO_FILL_A_DEVICE", rows_to_fill)
    products, labels, tile = case.products(), case.labels(), case.tile()
    statistics = finished(true_statistics(new_running(case.num_rows), products, labels, case, tile))
    gradients = case.gradients(entropy=entropy)
    truth = true_gradient(products, labels, statistics, gradients, case, tile)
    logits = products.clone()
    result = gradient_module.row_gradient(
        logits, labels, statistics.logsumexp, statistics.entropy, gradients,
        case.transform, tile, operand_dtype=dtype,
    )  # fmt: skip
    assert result.dtype == dtype
    assert relative_error(result, truth) < gradient_error(case, dtype)
    assert (result[:, case.num_columns :] == 0).all()
    shares = result.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    assert shares == (case.num_rows >= rows_to_fill or logits.shape[1] <= 4096)


def gradient_error(case: TileCase, dtype: torch.dtype) -> float:
    if INTERPRETED:
        return BF16_ERROR if dtype == torch.bfloat16 else 1e-6 * case.size + 2e-6
    # A row of few columns can be one element and its rounding.
    return 10 * tolerance(case) if dtype == torch.float32 else BF16_ERROR + tolerance(case)


def test_strided_logits() -> None:
    case = TileCase("strided", num_columns=100)
    products, labels, tile = case.products(), case.labels(), case.tile()
    wide = torch.full((5, 140), 1e6)
    wide[:, 20:120] = products
    dense, strided = new_running(5), new_running(5)
    update(dense, products, labels, case, tile)
    update(strided, wide[:, 20:120], labels, case, tile)
    assert torch.equal(dense, strided)
    repeated = torch.stack([labels, labels], 1)[:, 0]
    update(again := new_running(5), products, repeated, case, tile)
    assert torch.equal(dense, again)


def test_entropy_is_not_computed_unless_asked_for() -> None:
    case = TileCase("plain")
    running = new_running(5)
    update(running, case.products(), case.labels(), case, case.tile(), entropy=False)
    assert (running[SUM_SHIFTED] == 0).all()
    assert (running[SUM_EXP] > 0).all()
