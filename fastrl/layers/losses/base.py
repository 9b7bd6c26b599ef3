"""The base of the losses of the head: rows, normalisation, form of the metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.config.loss_options import LossConfig
from fastrl.config.user_losses import ConfiguredLoss
from fastrl.functional.batch import SOURCES, BatchKwargs, RowSet
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses.normalisation import normalised

ConfigT = TypeVar("ConfigT", bound=LossConfig)
ValueT = TypeVar("ValueT")
Scope = Literal["token", "document", "group", "batch"]


class LanguageModelLoss(ConfiguredLoss, ABC, Generic[ConfigT]):
    """A loss that is a function of per-token statistics [T] and of the batch.

    Its value is a sum over the given tokens divided by a count of the whole optimizer step, so that
    the losses (and gradients) of all chunks, micro-batches and ranks add up.

    Args:
        config: of this loss.
        token_groups: process groups over which the tokens of a document may be split.
        data_group: process group over which whole documents are distributed.
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
        """What a token's loss depends on: that token alone, or its document, group or batch."""
        return "token"

    @property
    def needs(self) -> frozenset[str]:
        """The optional fields of `TokenStatistics` that the loss itself is a function of."""
        return frozenset()

    @abstractmethod
    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        """The loss of the tokens of `statistics` and `batch` [T], a scalar.

        Slots without label must not influence the loss, whatever their values.
        """

    @abstractmethod
    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        """Detached metrics of the tokens, in the form that `add_metrics` adds up."""

    def with_metrics(
        self, statistics: TokenStatistics, batch: BatchKwargs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its metrics; override it when preparing the terms is expensive."""
        return self(statistics, batch), self.metrics(statistics.map(Tensor.detach), batch)

    def gradient_rows(self, batch: BatchKwargs) -> RowSet:
        """Rows outside which value and gradient are 0."""
        return batch.rows_with_labels

    def normalise(self, values: Tensor, batch: BatchKwargs) -> Tensor:  # [T]
        """The scalar loss of per-token values, 0 at slots without label."""
        if self.config.normalisation == "groups":
            required(batch.group_label_counts, "group_label_counts", self)
        return normalised(values, batch, self.config)


def required(value: ValueT | None, name: str, loss: object, reason: str = "") -> ValueT:
    """`value`, a field of the batch that `loss` needs.

    Raises:
        ValueError: it is None.
    """
    if value is None:
        source = SOURCES.get(name)
        remedy = f" give each Document `{source}`." if source else f" set `{name}` of the batch."
        name = f"`{name}` must be in the batch for the {type(loss).__name__}{reason}"
        raise ValueError(f"{name}, got None;{remedy}")
    return value
