"""The language-model head: hidden states in; loss, metrics and log-probabilities out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fastrl.config.losses import AnyLossConfig, LanguageModelHeadConfig
from fastrl.functional.batch import BatchKwargs, RowSet
from fastrl.functional.linear_logprobs import linear_logprobs
from fastrl.functional.linear_loss import linear_loss
from fastrl.functional.problem import check_inputs
from fastrl.functional.row_ops import LogitTransform
from fastrl.functional.statistics import TokenStatistics
from fastrl.functional.tiling import SINGLE_PASS_MIN_ROWS, chunk_rows, single_pass_rows
from fastrl.layers.losses import LanguageModelLoss, build_loss
from fastrl.parallel import ParallelGroups, group_rank, group_size, vocab_shard


@dataclass(frozen=True)
class HeadOutput:
    """What the head returns.

    Attributes:
        loss: scalar fp32: this rank's part of the global loss, a sum over its own tokens divided by
            counts of the whole step; None without losses.
        metrics: detached scalars `<loss name>/<metric>`, to be added over micro-batches and ranks.
        logprobs: [T] fp32 nats of the labels, detached, where asked for; 0 without label.
        entropy: [T] fp32 nats, like `logprobs`.
        strategy: `recompute` or `single_pass`, the one that was taken; None without losses.
    """

    loss: Tensor | None
    metrics: dict[str, Tensor]
    logprobs: Tensor | None  # [T]
    entropy: Tensor | None  # [T]
    strategy: str | None


class LanguageModelHead(nn.Module):
    """The head's weight, its named losses and its process groups.

    Args:
        config: sizes, losses and bounds.
        groups: process groups; under `groups.tp` the weight holds this rank's vocabulary rows
            (`vocab_shard`) unless `config.vocabulary_parallel` is off.
        device: of the parameters.
        dtype: of the parameters, and so of the hidden states.

    Attributes:
        weight: [V, D], [V_local, D] under vocabulary parallelism. Normal, std 0.02, at first.
        bias: [V] or [V_local], zeros at first; None without `config.bias`.
        losses: the losses by name.
    """

    def __init__(
        self,
        config: LanguageModelHeadConfig,
        groups: ParallelGroups | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        groups = groups or ParallelGroups()
        # Of the op: with a replicated weight the tensor axis shards nothing in the head.
        tp = groups.tp if config.vocabulary_parallel else None
        self.groups = ParallelGroups(tp=tp, sp=groups.sp, sdp=groups.sdp, dp=groups.dp)
        start, stop = vocab_shard(self.weight_rows, group_rank(tp), group_size(tp))
        self.weight = nn.Parameter(
            torch.empty(stop - start, config.hidden_size, device=device, dtype=dtype)
        )
        self.bias: nn.Parameter | None = None
        if config.bias:
            self.bias = nn.Parameter(torch.empty(stop - start, device=device, dtype=dtype))
        self.reset_parameters()
        self.losses: dict[str, LanguageModelLoss[Any]] = {}
        self.set_losses(config.losses)

    @property
    def weight_rows(self) -> int:
        """Rows of the whole weight, padding included."""
        return self.config.padded_vocab_size or self.config.vocab_size

    @property
    def splits_tokens(self) -> bool:
        """Whether the ranks of `sp` hold different tokens, also in the head."""
        return self.groups.sp is not None and self.groups.tp is None

    @property
    def loss_groups(self) -> tuple[ProcessGroup | None, ...]:
        """Groups over whose ranks losses and metrics add up to those of the step."""
        return (self.groups.dp, self.groups.sdp, self.groups.sp if self.splits_tokens else None)

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, 0.02^2) and zeroes the bias."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def set_losses(self, losses: Mapping[str, AnyLossConfig]) -> None:
        """Replaces the named losses, as between the phases of a training run."""
        token_groups = (self.groups.sdp, self.groups.sp if self.splits_tokens else None)
        self.losses = {
            name: build_loss(config, token_groups, self.groups.dp)
            for name, config in losses.items()
        }

    def forward(
        self,
        hidden_states: Tensor,  # [T, D]
        batch: BatchKwargs,
        *,
        return_logprobs: bool = False,
    ) -> HeadOutput:
        """Loss and metrics of the batch; in evaluation mode its log-probabilities instead.

        Under `torch.no_grad()` in training mode the loss is computed and nothing of a backward. In
        evaluation mode there is no loss: `logprobs` and `entropy` are those of an old or a
        reference policy.

        Args:
            hidden_states: after the final norm, in the weight's dtype; under sequence parallelism
                this rank's slice of the tokens.
            batch: of all T tokens of this rank's (micro-)sequence.
            return_logprobs: also return `logprobs` and `entropy`, detached, from the same pass.

        Raises:
            ValueError: the batch lacks what a loss needs, a shape does not fit, or the strategy
                `single_pass` is not possible for the batch.
        """
        if self.splits_tokens:
            batch = self._sequence_slice(batch)
        if not self.training or not self.losses:
            rows = self._labelled_rows(batch).index
            statistics = self._statistics(hidden_states, batch, True, rows, None)
            statistics = statistics.map(Tensor.detach)
            return HeadOutput(None, {}, statistics.logprobs, statistics.entropy, None)
        gradient_rows = self._gradient_rows(batch)
        wants_all = self.config.metrics or return_logprobs
        statistics_rows = (self._labelled_rows(batch) if wants_all else gradient_rows).index
        entropy = wants_all or any("entropy" in loss.needs for loss in self.losses.values())
        chunk_ends = self._single_pass_chunks(hidden_states, batch, gradient_rows)
        if chunk_ends is not None and self._needs_gradient(hidden_states):
            loss, statistics = self._single_pass(
                hidden_states, batch, entropy, statistics_rows, gradient_rows, chunk_ends
            )
        else:
            statistics = self._statistics(
                hidden_states, batch, entropy, statistics_rows, gradient_rows.index
            )
            loss = self._loss(statistics, batch)
        statistics = statistics.map(Tensor.detach)
        return HeadOutput(
            loss,
            self._metrics(statistics, batch) if self.config.metrics else {},
            statistics.logprobs if return_logprobs else None,
            statistics.entropy if return_logprobs else None,
            "recompute" if chunk_ends is None else "single_pass",
        )

    def _needs_gradient(self, hidden_states: Tensor) -> bool:
        tensors = (hidden_states, self.weight, self.bias)
        return torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in tensors
        )

    def _sequence_slice(self, batch: BatchKwargs) -> BatchKwargs:
        """This rank's tokens under sequence parallelism with a replicated weight."""
        size, rank = group_size(self.groups.sp), group_rank(self.groups.sp)
        step, remainder = divmod(batch.num_tokens, size)
        if remainder:
            raise ValueError(
                f"`batch` must have a multiple of {size} tokens under sequence parallelism, got"
                f" {batch.num_tokens}; pack with `pad_to_multiple`."
            )
        start, stop = rank * step, (rank + 1) * step
        sets = {
            name: rows.within(start, stop)
            for name in ("labelled_rows", "active_rows", "active_document_rows")
            if isinstance(rows := getattr(batch, name), RowSet)
        }
        return batch.select(slice(start, stop)).replace(**sets)

    def _labelled_rows(self, batch: BatchKwargs) -> RowSet:
        """Rows with a label; found on the device, which waits for it, in hand-made batches."""
        if batch.labelled_rows is not None:
            return batch.labelled_rows
        rows = RowSet.from_mask((batch.labels != -100).cpu(), batch.document_index.cpu())
        return rows.to(batch.labels.device)

    def _gradient_rows(self, batch: BatchKwargs) -> RowSet:
        """Rows that some loss has a value or gradient at: the largest of nested sets."""
        sets = [loss.gradient_rows(batch) for loss in self.losses.values()]
        known = [rows for rows in sets if rows is not None]
        if len(known) < len(sets):
            return self._labelled_rows(batch)
        return max(known, key=len)

    def _single_pass_chunks(
        self, hidden_states: Tensor, batch: BatchKwargs, rows: RowSet
    ) -> list[int] | None:
        """Ends of the chunks of `single_pass`, or None for `recompute`.

        Decided by facts that all ranks share which take part in the head's collectives.
        """
        config = self.config
        if config.strategy == "recompute":
            return None
        columns = vocab_shard(self.weight_rows, 0, group_size(self.groups.tp))[1]
        bounds = (columns, hidden_states.dtype, config.chunk_size, config.max_logits_bytes)
        by_document = any(loss.level == "document" for loss in self.losses.values())
        reason = None
        chunk_ends: list[int] | None = None
        if not by_document:
            chunk_ends = chunk_rows(len(rows), *bounds)
        elif self.groups.sdp is not None or self.splits_tokens or not batch.whole_documents:
            reason = "documents are split over ranks or micro-sequences"
        else:
            chunk_ends = chunk_rows(len(rows), *bounds, rows.document_ends)
            reason = "a document has more rows than `chunk_size` or `max_logits_bytes` admit"
        if chunk_ends is None and config.strategy == "single_pass":
            raise ValueError(
                f"`strategy: single_pass` must have whole documents in a chunk for the losses"
                f" {list(self.losses)}, but {reason}; use `strategy: auto` or `recompute`."
            )
        if config.strategy == "auto" and single_pass_rows(*bounds) < min(
            batch.num_tokens, SINGLE_PASS_MIN_ROWS
        ):
            return None
        return chunk_ends

    def _loss(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        """The weighted sum of the losses."""
        terms = [loss.config.weight * loss(statistics, batch) for loss in self.losses.values()]
        return torch.stack(terms).sum()

    def _metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        return {
            f"{name}/{metric}": value
            for name, loss in self.losses.items()
            for metric, value in loss.metrics(statistics, batch).items()
        }

    def _statistics(
        self,
        hidden_states: Tensor,
        batch: BatchKwargs,
        entropy: bool,
        rows: Tensor,
        gradient_rows: Tensor | None,
    ) -> TokenStatistics:
        return linear_logprobs(
            hidden_states,
            self.weight,
            batch.labels,
            bias=self.bias,
            temperature=batch.temperature,
            softcap=self.config.softcap,
            logit_scale=self.config.logit_scale,
            vocab_size=self.config.vocab_size,
            entropy=entropy,
            groups=self.groups,
            weight_rows=self.weight_rows,
            rows=rows,
            gradient_rows=gradient_rows,
            chunk_size=self.config.chunk_size,
            max_logits_bytes=self.config.max_logits_bytes,
        )

    def _single_pass(
        self,
        hidden_states: Tensor,
        batch: BatchKwargs,
        entropy: bool,
        rows: Tensor,
        gradient_rows: RowSet,
        chunk_ends: list[int],
    ) -> tuple[Tensor, TokenStatistics]:
        compact = batch.select(gradient_rows.index)
        problem = check_inputs(
            hidden_states,
            self.weight,
            batch.labels,
            bias=self.bias,
            transform=LogitTransform(
                batch.temperature, self.config.softcap, self.config.logit_scale
            ),
            vocab_size=self.config.vocab_size,
            weight_rows=self.weight_rows,
            groups=self.groups,
            chunk_size=self.config.chunk_size,
            max_logits_bytes=self.config.max_logits_bytes,
            entropy=entropy,
            rows=rows,
        )
        return linear_loss(
            hidden_states,
            self.weight,
            self.bias,
            problem,
            lambda statistics, start, stop: self._loss(
                statistics, compact.select(slice(start, stop))
            ),
            gradient_rows=gradient_rows.index,
            chunk_ends=chunk_ends,
        )
