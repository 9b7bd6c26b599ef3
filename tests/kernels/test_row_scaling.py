"""Small passes over rows and columns."""

import pytest
import torch

from fastrl.kernels.row_scaling import (
    column_sums,
    scale_in_place,
    scale_rows,
    scatter_scaled_rows,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu runs kernels on the GPU"
)


def test_scale_rows() -> None:
    values, factors = torch.randn(3, 37), torch.randn(3)
    assert torch.equal(scale_rows(values, factors, torch.float32), values * factors[:, None])
    strided = torch.randn(3, 80)[:, 5:42]
    assert torch.equal(scale_rows(strided, factors, torch.float32), strided * factors[:, None])


def test_scatter_scaled_rows() -> None:
    values, rows = torch.randn(3, 37), torch.tensor([4, 0, 2])
    output = torch.zeros(6, 37)
    scatter_scaled_rows(output, values, None, rows)
    assert torch.equal(output[rows], values)
    assert (output[[1, 3, 5]] == 0).all()
    factors = torch.randn(3)
    scatter_scaled_rows(output, values, factors, rows)
    assert torch.equal(output[rows], values * factors[:, None])


@pytest.mark.parametrize("factor", [1.0, -0.25, 0.0])
def test_scale_in_place(factor: float) -> None:
    tensor = torch.randn(5, 1000)
    expected = tensor * factor
    scale_in_place(tensor, torch.tensor(factor))
    assert torch.equal(tensor, expected)


def test_scale_in_place_covers_what_the_grid_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastrl.kernels import row_scaling

    monkeypatch.setattr(row_scaling, "MAX_PROGRAMS", 2)
    tensor = torch.randn(5 * 4096 + 3)
    expected = tensor * 3
    scale_in_place(tensor, torch.tensor(3.0))
    assert torch.equal(tensor, expected)


def test_column_sums() -> None:
    matrix, factors = torch.randn(70, 131), torch.randn(70)
    torch.testing.assert_close(column_sums(matrix, None), matrix.sum(0), rtol=1e-5, atol=1e-5)
    weighted = (matrix * factors[:, None]).sum(0)
    torch.testing.assert_close(column_sums(matrix, factors), weighted, rtol=1e-5, atol=1e-5)
    assert torch.equal(column_sums(matrix[:0], None), torch.zeros(131))
