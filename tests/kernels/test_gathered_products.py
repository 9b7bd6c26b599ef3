"""Products of pairs and sums of segments: those of torch, and in an order of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastrl.kernels.gathered_products import add_segments, gathered_products

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def pairs(num_pairs: int, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Rows, one in five of them not there, and columns, of which one is hot."""
    rows = torch.randint(num_rows + num_rows // 4, (num_pairs,)).clamp(max=num_rows)
    columns = torch.randint(num_columns, (num_pairs,))
    return rows, torch.where(torch.rand(num_pairs) < 0.5, 3, columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_pairs", "depth"), [(0, 8), (1, 1), (37, 24), (50, 700)])
def test_products_are_those_of_torch(num_pairs: int, depth: int, dtype: torch.dtype) -> None:
    hidden = torch.randn(11, depth + 3, dtype=dtype)[:, 3:]
    weight = torch.randn(9, depth, dtype=dtype)
    rows, columns = pairs(num_pairs, 11, 9)
    products = gathered_products(hidden, weight, rows, columns)
    wide = torch.cat([hidden.double(), torch.zeros(1, depth, dtype=torch.double)])
    expected = (wide[rows] * weight.double()[columns]).sum(1)
    assert products.dtype == torch.float32
    torch.testing.assert_close(products, expected.float(), rtol=1e-5, atol=1e-5)
    # A product does not depend on its neighbours.
    alone = [
        gathered_products(hidden, weight, rows[i, None], columns[i, None])
        for i in range(min(num_pairs, 5))
    ]
    for number, product in enumerate(alone):
        assert torch.equal(product[0], products[number])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_pairs", "depth"), [(0, 8), (1, 1), (60, 24), (50, 1100)])
@pytest.mark.parametrize(("first", "num_segments"), [(0, 9), (3, 4)])
def test_segments_are_those_of_torch(
    num_pairs: int, depth: int, first: int, num_segments: int, dtype: torch.dtype
) -> None:
    source = torch.randn(11, depth, dtype=dtype)
    rows = torch.randint(11, (num_pairs,))
    segments = pairs(num_pairs, 11, 9)[1].sort()[0]
    factors = torch.randn(num_pairs)
    output = torch.full((num_segments, depth), 7.0, dtype=dtype)
    add_segments(output, segments, factors, source, rows, first)
    for number in range(num_segments):
        own = segments == first + number
        if not own.any():
            assert (output[number] == 7).all()
            continue
        expected = (factors[own, None].double() * source[rows[own]].double()).sum(0)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            output[number].double(), expected, rtol=tolerance, atol=tolerance * 4
        )
