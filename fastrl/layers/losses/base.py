"""What every loss of the head shares: its rows, its normalisation, the form of its metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.config.loss_options import LossConfig
from fastrl.config.user_losses import ConfiguredLoss
from fastrl.functional.batch import SOURCES, BatchKwargs, RowSet
from fastrl.functional.statistics import TokenStatistics

ConfigT = TypeVar("ConfigT", bound=LossConfig)

Scope = Literal["token", "document", "group", "batch"]


class LanguageModelLoss(ConfiguredLoss, ABC, Generic[ConfigT]):
    """A loss that is a function of per-token statistics [T] and of what the batch says.

    It returns the sum over the tokens it is given divided by a count of the whole optimizer step,
    so that the losses (and gradients) of all chunks, micro-batches and ranks add up.

    Args:
        config: of this loss.
        token_groups: groups between whose ranks the tokens of a document may be split.
        data_group: between whose ranks different documents are spread.
    """

    def __init__(
        self,
        config: ConfigT,
        token_groups: Sequence[ProcessGroup | None] = (),
        data_group: ProcessGroup | None = None,
    ) -> None:
        self.config = config
        self.token_groups = token_groups
        self.data_group = data_group

    @property
    def scope(self) -> Scope:
        """What a token's loss needs: that token alone, or its whole document, group or batch."""
        return "token"

    @property
    def needs(self) -> frozenset[str]:
        """The optional fields of `TokenStatistics` that the loss itself is a function of."""
        return frozenset()

    @abstractmethod
    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        """The loss of the tokens of `statistics` and `batch` [T], a scalar.

        Slots without label must have no say, whatever their values.
        """

    @abstractmethod
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """Detached metrics of the tokens, in the form that `reduction.py` adds."""

    def with_metrics(
        self, statistics: TokenStatistics, batch: BatchKwargs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its metrics; a loss whose preparation is dear shares it between them."""
        return self(statistics, batch), self.metrics(statistics.map(Tensor.detach), batch)

    def gradient_rows(self, batch: BatchKwargs) -> RowSet:
        """Rows outside of which neither value nor gradient can be other than 0."""
        return batch.rows_with_labels

    def normalise(self, values: Tensor, batch: BatchKwargs) -> Tensor:  # [T]
        """The scalar loss of per-token values, 0 at slots without label."""
        config = self.config
        if config.normalisation == "tokens":
            return values.sum() / at_least_one(batch.num_labels_in_batch)
        if config.normalisation == "groups":
            counts = required(batch.group_label_counts, "group_label_counts", self)
            return (values / counts.clamp(min=1)).sum() / at_least_one(batch.num_groups_in_batch)
        documents = at_least_one(batch.num_documents_in_batch)
        if config.normalisation == "documents":
            return (values / batch.label_counts.clamp(min=1)).sum() / documents
        assert config.length is not None
        return values.sum() / (documents * config.length)


def at_least_one(count: int | Tensor) -> int | Tensor:
    """`count`, or 1 for a step without any label, whose sums are 0 as well."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def masked(values: Tensor, mask: Tensor) -> Tensor:  # [T], [T]
    """`values` where `mask`, and exactly 0 (also in the gradient) elsewhere, NaN or not."""
    return torch.where(mask, values, 0)


ValueT = TypeVar("ValueT")


def required(
    value: ValueT | None, name: str, loss: LanguageModelLoss[ConfigT], reason: str = ""
) -> ValueT:
    """A value that the batch must carry for `loss`.

    Raises:
        ValueError: it does not.
    """
    if value is None:
        source = SOURCES.get(name)
        remedy = f" give each Document `{source}`." if source else f" set `{name}` of the batch."
        name = f"`{name}` must be in the batch for the {type(loss).__name__}{reason}"
        raise ValueError(f"{name}, got None;{remedy}")
    return value
