"""Tiles of logits for kernels on the default device, and the truth about them in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.functional.head.running import finish_statistics, new_running_statistics
from fastrl.functional.head.torch_rows import row_gradient, update_row_statistics
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import LogitTransform, RowGradients, VocabularyTile

# Without a GPU, kernels run in Triton's interpreter.
INTERPRETED = not torch.cuda.is_available()
# Of products with epilogues; the interpreter multiplies bf16 as integers.
OPERAND_DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
# Relative error of one number in bf16: the interpreter cuts off where a GPU rounds to nearest.
BF16_ERROR = 8e-3 if INTERPRETED else 2**-8


@dataclass(frozen=True)
class TileCase:
    """A tile of the vocabulary under some rows."""

    name: str
    num_rows: int = 5
    num_columns: int = 140
    padding: int = 0
    first_column: int = 0
    bias: bool = False
    impossible: bool = False  # some logits are -inf
    row_temperature: bool = False
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    spread: float = 2.0
    offset: float = 0.0

    @property
    def size(self) -> float:
        """What the error of a product is proportional to."""
        return max(self.spread, abs(self.offset))

    @property
    def transform(self) -> LogitTransform:
        """How products become logits."""
        temperature: float | Tensor = self.temperature
        if self.row_temperature:
            temperature = torch.linspace(0.5, 1.5, self.num_rows)
        return LogitTransform(temperature, self.softcap, self.logit_scale)

    def tile(self) -> VocabularyTile:
        """Where the tile lies, with its bias."""
        bias = None
        if self.bias or self.impossible:
            bias = torch.randn(self.num_columns + self.padding)
            if self.impossible:
                bias[1 : self.num_columns : 3] = -torch.inf
        return VocabularyTile(self.first_column, self.num_columns, bias)

    def labels(self) -> Tensor:
        """[R]; among them one of no tile, one before and one behind this one, first and last."""
        last = self.first_column + self.num_columns
        labels = torch.randint(self.first_column, last, (self.num_rows,))
        special = [last - 1, self.first_column, -100, last, self.first_column - 1]
        labels[: len(special)] = torch.tensor(special)[: self.num_rows]
        if self.impossible:
            labels[0] = self.first_column
        return labels

    def products(self) -> Tensor:
        """[R, S] raw products; in the padding, values that would show."""
        shape = (self.num_rows, self.num_columns + self.padding)
        products = torch.randn(shape) * self.spread + self.offset
        products[:, self.num_columns :] = 1000.0
        return products

    def gradients(self, *, entropy: bool) -> RowGradients:
        """Upstream gradients; expanded and strided, as autograd hands them out."""
        logprobs = torch.randn(self.num_rows, 2)[:, 0]
        logsumexp = torch.tensor(0.3).expand(self.num_rows)
        return RowGradients(logprobs, torch.randn(self.num_rows) if entropy else None, logsumexp)


TILE_CASES = (
    TileCase("one column", num_columns=1),
    TileCase("off the block", num_columns=129),
    TileCase("padded", num_columns=131, padding=7),
    TileCase("a later tile", num_columns=128, first_column=1000),
    TileCase("bias", bias=True),
    TileCase("impossible", num_columns=127, impossible=True),
    TileCase("row temperature", row_temperature=True),
    TileCase("cold", temperature=0.25),
    TileCase("softcap", softcap=3.0, temperature=0.7),
    TileCase("scale", logit_scale=0.125, spread=20.0),
    TileCase("negative scale", logit_scale=-0.5, padding=3),
    TileCase("negative scale under a cap", logit_scale=-0.5, softcap=2.0, padding=3),
    TileCase("very negative", offset=-3000.0),
    TileCase("very peaked", spread=300.0),
    TileCase(
        "everything", bias=True, row_temperature=True, softcap=5.0, logit_scale=1.5, padding=2
    ),
)


def large_cases(*others: object) -> list[Any]:
    """Parameters of a test, on a GPU only: a case of several tiles, followed by `others`."""
    cases = [
        replace(case, num_rows=rows, num_columns=case.num_columns * 37)
        for case in TILE_CASES
        for rows in (5, 700)
    ]
    sizes = (1, 127, 128, 129, 1000, 32000, 129920)
    cases += [TileCase(f"V {size}", num_columns=size) for size in sizes]
    suffix = "".join(f" {other}" for other in others).replace("torch.", "")
    return [
        pytest.param(
            case,
            *others,
            marks=pytest.mark.gpu,
            id=f"{case.name} {case.num_rows}x{case.num_columns}{suffix}",
        )
        for case in cases
    ]


def true_statistics(
    running: Tensor,  # [4, R]
    products: Tensor,
    labels: Tensor,
    case: TileCase,
    tile: VocabularyTile,
) -> Tensor:
    """Running statistics in float64, merged into a copy of `running`."""
    statistics = running.double()
    update_row_statistics(
        statistics, products.double(), labels, case.transform, _double(tile), entropy=True
    )
    return statistics


def true_gradient(
    products: Tensor,
    labels: Tensor,
    statistics: TokenStatistics,
    gradients: RowGradients,
    case: TileCase,
    tile: VocabularyTile,
) -> Tensor:
    """Gradient of the products in float64."""
    doubled = RowGradients(
        gradients.logprobs.double(),
        None if gradients.entropy is None else gradients.entropy.double(),
        None if gradients.logsumexp is None else gradients.logsumexp.double(),
    )
    entropy = None if statistics.entropy is None else statistics.entropy.double()
    return row_gradient(
        products.double(),
        labels,
        statistics.logsumexp.double(),
        entropy,
        doubled,
        case.transform,
        _double(tile),
        operand_dtype=torch.float64,
    )


def finished(running: Tensor) -> TokenStatistics:
    """Statistics of rows whose whole vocabulary is the tile, in fp32."""
    statistics = finish_statistics(running, True)
    return statistics.map(lambda value: value.float())


def new_running(num_rows: int) -> Tensor:
    """Statistics of no columns, on the default device."""
    return new_running_statistics(num_rows, torch.float32, torch.get_default_device())


def tolerance(case: TileCase) -> float:
    """Absolute error of a case's statistics, in nats."""
    return (2e-6 if INTERPRETED else 4e-6) * case.size / min(case.temperature, 1.0)


def relative_error(result: Tensor, truth: Tensor) -> float:
    """||result - truth|| / ||truth||, NaN if anything is NaN."""
    result, truth = result.detach().double(), truth.detach().double()
    return float((result - truth).norm() / truth.norm().clamp_min(1e-30))


def _double(tile: VocabularyTile) -> VocabularyTile:
    return replace(tile, bias=None if tile.bias is None else tile.bias.double())
