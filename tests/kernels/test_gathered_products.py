"""Products of pairs and sums of segments: those of torch, and in an order of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastrl.functional.head import torch_entries, torch_segments
from fastrl.kernels import segment_sums
from fastrl.kernels.gathered_products import gathered_products
from fastrl.kernels.recorded_entries import entry_keys, split_keys

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def pairs(num_pairs: int, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Rows, one in five of them not there, and columns, of which one is hot."""
    rows = torch.randint(num_rows + num_rows // 4, (num_pairs,)).clamp(max=num_rows)
    columns = torch.randint(num_columns, (num_pairs,))
    return rows, torch.where(torch.rand(num_pairs) < 0.5, 3, columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_pairs", "depth"), [(0, 8), (1, 1), (37, 24), (20, 700)])
def test_products_are_those_of_torch(num_pairs: int, depth: int, dtype: torch.dtype) -> None:
    hidden = torch.randn(11, depth + 3, dtype=dtype)[:, 3:]
    weight = torch.randn(9, depth, dtype=dtype)
    rows, columns = pairs(num_pairs, 11, 9)
    products = gathered_products(hidden, weight, rows, columns)
    expected = torch_entries.gathered_products(hidden.double(), weight.double(), rows, columns)
    assert products.dtype == torch.float32
    torch.testing.assert_close(products, expected.float(), rtol=1e-5, atol=1e-5)
    # A product does not depend on its neighbours.
    alone = [
        gathered_products(hidden, weight, rows[i, None], columns[i, None])
        for i in range(min(num_pairs, 3))
    ]
    for number, product in enumerate(alone):
        assert torch.equal(product[0], products[number])


@pytest.mark.parametrize("first_column", [0, 4, 30])
def test_keys_are_those_of_torch(first_column: int) -> None:
    """With ids twice, of other columns, of slots that are no rows, and of no slot."""
    ids, slots = torch.randint(12, (70,)), torch.randint(-1, 9, (70,))
    labels, is_row = torch.randint(12, (9,)), torch.arange(9) % 4 != 2
    arguments = (ids, slots, labels, is_row, first_column, 12 - min(first_column, 12))
    keys = entry_keys(*arguments)
    assert torch.equal(keys, torch_entries.entry_keys(*arguments))
    width, ordered = max(arguments[-1], 1), keys.sort()[0]
    found = split_keys(ordered, 9, width, 20)
    expected = torch_entries.split_keys(ordered, 9, width, 20)
    for values, wanted in zip(found, expected, strict=True):
        assert torch.equal(values.long(), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_pairs", "depth"), [(0, 8), (1, 1), (70, 24), (20, 1100)])
@pytest.mark.parametrize("longest", [8, 512])
def test_segments_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, num_pairs: int, depth: int, longest: int, dtype: torch.dtype
) -> None:
    """Added to what is there, or to 0; long segments in pieces, one factor in three 0."""
    monkeypatch.setattr(segment_sums, "LONGEST", longest)
    source = torch.randn(11, depth, dtype=dtype)
    rows, columns = pairs(num_pairs, 11, 9)
    segments, order = columns.sort(stable=True)
    factors = torch.randn(num_pairs) * (torch.arange(num_pairs) % 3 > 0) * (rows < 11)
    before = torch.randn(8, depth, dtype=dtype)  # without the last segment
    output, expected = before.clone(), before.double()
    arguments = (segments, order, factors)
    segment_sums.add_segments(output, *arguments, source, rows, onto_zeros=False)
    torch_segments.add_segments(
        expected, segments, order, factors.double(), source.double(), rows, onto_zeros=False
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance * 4)
    unused = (expected == before).all(1)
    assert torch.equal(output[unused], before[unused])
    alone, unread = torch.zeros_like(before), torch.full_like(before, torch.nan)
    segment_sums.add_segments(alone, *arguments, source, rows, onto_zeros=False)
    segment_sums.add_segments(unread, *arguments, source, rows, onto_zeros=True)
    assert torch.equal(alone[~unused], unread[~unused])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at_slots", [False, True])
def test_rows_are_those_of_torch(at_slots: bool, dtype: torch.dtype) -> None:
    slots, counts = torch.tensor([4, 0, 3]), torch.tensor([20, 3, 1, 0, 9])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    source, columns = torch.randn(6, 1100, dtype=dtype), torch.randint(6, (33,))
    factors = torch.randn(33) * (torch.arange(33) % 3 > 0)
    output = torch.full((5 if at_slots else 3, 1100), 7.0, dtype=dtype)
    expected = output.double()
    where = (slots, offsets)
    segment_sums.write_rows(output, *where, factors, source, columns, at_slots=at_slots)
    torch_segments.write_rows(
        expected, *where, factors.double(), source.double(), columns, at_slots=at_slots
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance * 4)
