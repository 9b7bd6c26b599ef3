"""Parts of the vocabulary by the kernels: the same bits from each of them, merged by one tree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastrl import kernels
from fastrl.functional.head.merge_tree import MergeTree
from fastrl.kernels import linear
from fastrl.kernels.merge import merge_nodes, merge_partial_statistics
from tests.helpers.tile_cases import INTERPRETED, TILE_CASES, TileCase, new_running

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("_fused"),
]

DEPTH = 40
CASES = [replace(case, num_rows=7, num_columns=600) for case in TILE_CASES]
# References away from 0, and rows whose references differ from tile to tile.
CASES += [TileCase("large", 7, 600, spread=60.0, offset=150.0, row_temperature=True)]


@pytest.fixture(autouse=True)
def _few_rows_on_cpu(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(linear, "BLOCKS", linear.Blocks(rows=16, depth=64))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_are_those_of_exponentials_to_the_bit(case: TileCase) -> None:
    hidden = torch.randn(case.num_rows, DEPTH)
    weight = torch.randn(case.num_columns + case.padding, DEPTH) * (case.spread / DEPTH**0.5)
    hidden[:, 0], weight[:, 0] = 1.0, case.offset
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    operands = (hidden.to(dtype), weight.to(dtype), case.labels(), case.transform, case.tile())
    label_logits = torch.full((case.num_rows,), -torch.inf)
    parts = linear.linear_parts(label_logits, *operands, entropy=True)
    running = new_running(case.num_rows)
    columns = -(-len(weight) // 8) * 8
    output = torch.zeros(case.num_rows, columns, dtype=torch.bfloat16)[:, : len(weight)]
    expected = linear.linear_exponentials(running, output, *operands, entropy=True)
    assert torch.equal(parts, expected)
    assert torch.equal(label_logits, running[3])
    # Without the entropy another kernel is compiled.
    without = linear.linear_parts(label_logits, *operands, entropy=False)
    assert torch.equal(without[:, :2], expected[:, :2])


def some_parts(number: int, num_rows: int) -> Tensor:
    parts = torch.randn(number, 3, num_rows)
    parts[:, 0] *= 20
    parts[:, 1] = parts[:, 1].exp()
    parts[1 % number, :, 0] = torch.tensor([-torch.inf, 0.0, 0.0])
    return parts


@pytest.mark.parametrize("number", [1, 5, 64, 520])
@pytest.mark.parametrize("entropy", [False, True])
def test_any_number_of_ranks_makes_the_same_tree(
    number: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "run_on_cpu", True)
    parts, rows = some_parts(number, 5), slice(0, 3 if entropy else 2)
    running = new_running(5)
    merge_partial_statistics(running, parts, entropy=entropy)
    for size in (1, 3, 8):
        each = -(-number // size)
        tree = MergeTree(256 * each * size, size)
        missing = torch.tensor([-torch.inf, 0.0, 0.0])[:, None].expand(each * size - number, 3, 5)
        padded = torch.cat([parts, missing])
        roots = [
            tree.local_roots(padded[first : first + each], 256 * first, entropy)
            for first in range(0, each * size, each)
        ]
        assert torch.equal(tree.whole(torch.cat(roots), entropy)[rows], running[rows]), size


def test_absent_parts_change_no_bit() -> None:
    parts = some_parts(3, 5)
    slots = torch.tensor([[-1, 2, -1, -1], [0, -1, -1, 1]], dtype=torch.int32)
    nodes = merge_nodes(parts, slots, entropy=True)
    assert torch.equal(nodes[0], parts[2])
    running = new_running(5)
    merge_partial_statistics(running, parts[:2].contiguous(), entropy=True)
    assert torch.equal(nodes[1], running[:3])
