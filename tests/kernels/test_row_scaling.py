"""Small passes over rows and columns."""

import pytest
import torch

from fastrl.kernels import row_scaling
from fastrl.kernels.row_scaling import (
    column_sums,
    scale_in_place,
    scale_rows,
    scatter_scaled_rows,
)


def test_scale_rows() -> None:
    values, factors = torch.randn(3, 37), torch.randn(3)
    assert torch.equal(scale_rows(values, factors, torch.float32), values * factors[:, None])
    strided = torch.randn(3, 80)[:, 5:42]
    assert torch.equal(scale_rows(strided, factors, torch.float32), strided * factors[:, None])


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "depth", "dtype"),
    [
        pytest.param(3, 6, 37, torch.float32, id="small"),
        pytest.param(300, 1000, 4100, torch.bfloat16, marks=pytest.mark.gpu, id="large"),
    ],
)
def test_scatter_scaled_rows(
    num_rows: int, num_tokens: int, depth: int, dtype: torch.dtype
) -> None:
    values, factors = torch.randn(num_rows, depth), torch.randn(num_rows)
    order = torch.randperm(num_tokens)
    rows, others = order[:num_rows], order[num_rows:]
    output = torch.zeros(num_tokens, depth, dtype=dtype)
    scatter_scaled_rows(output, values, None, rows)
    assert torch.equal(output[rows], values.to(dtype))
    scatter_scaled_rows(output, values, factors, rows)
    assert torch.equal(output[rows], (values * factors[:, None]).to(dtype))
    assert (output[others] == 0).all()


@pytest.mark.parametrize(
    ("shape", "factor"),
    [
        ((5, 1000), 1.0),
        ((5, 1000), -0.25),
        ((5, 1000), 0.0),
        pytest.param((50_000_001,), 0.5, marks=pytest.mark.gpu),
    ],
)
def test_scale_in_place(shape: tuple[int, ...], factor: float) -> None:
    tensor = torch.randn(shape)
    expected = tensor * factor
    scale_in_place([tensor], torch.tensor(factor))
    assert torch.equal(tensor, expected)


def test_scale_in_place_covers_what_the_grid_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scaling, "MAX_PROGRAMS", 2)
    tensor = torch.randn(5 * 4096 + 3)
    expected = tensor * 3
    scale_in_place([tensor], torch.tensor(3.0))
    assert torch.equal(tensor, expected)


def test_scale_in_place_of_several_tensors() -> None:
    sizes, dtypes = (3, 0, 5000, 7), (torch.float32, torch.float32, torch.float16, torch.float32)
    tensors = [torch.randn(size).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    for factor in (1.0, 3.0):
        expected = [tensor * factor for tensor in tensors]
        scale_in_place(tensors, torch.tensor(factor))
        assert all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "tolerance"),
    [(70, 131, 1e-5), pytest.param(300, 4100, 1e-4, marks=pytest.mark.gpu)],
)
def test_column_sums(num_rows: int, num_columns: int, tolerance: float) -> None:
    matrix, factors = torch.randn(num_rows, num_columns), torch.randn(num_rows)
    weighted = (matrix * factors[:, None]).sum(0)
    for result, expected in (
        (column_sums(matrix, None), matrix.sum(0)),
        (column_sums(matrix, factors), weighted),
    ):
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(column_sums(matrix[:0], None), torch.zeros(num_columns))
