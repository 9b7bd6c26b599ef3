"""Draft heads: tokens further on, predicted on the weight of the language-model head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.config.heads import DraftConfig
from fastrl.config.losses import DistillationLossConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.head.distillation import Teacher
from fastrl.layers.call_operands import local_tensor
from fastrl.layers.language_model_head import HeadOutput, LanguageModelHead
from fastrl.parallel import gather_first_dim, group_rank, group_size


class DraftHeads(nn.Module):
    """A language-model head, and K draft heads on its weight.

    The draft head of depth k predicts from its hidden states h^k_t the label that is k places
    further on. Its loss is the cross-entropy to it, or the divergence from the head's own
    distribution of that token, which has no gradient; with w the weight of `config.loss`:

        loss = loss of the head + w / K sum_k (sum of the losses of depth k / labels of depth k)

    or another normalisation, by the counts of the depth over the whole step. What makes h^k is the
    model's: a module of multi-token prediction, or an autoregressive draft model. All heads use the
    weight in one call, so FSDP2 around this module gathers it once. The head's own loss,
    log-probabilities and metrics are those of a call without draft heads.

    Args:
        head: with or without parameters of its own, and with its final groups.
        config: of the draft heads, which take its transform of the logits, bounds and strategy.
            Their distributions are over the whole vocabulary, also under `keep`.

    References:
        DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 24 and 25; there each depth is divided
        by the tokens of the sequence.
    """

    def __init__(self, head: LanguageModelHead, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.head = head
        names = [f"draft_{depth}" for depth in range(1, config.depth + 1)]
        if taken := sorted(set(names) & set(head.losses)):
            raise ValueError(f"`losses` must not be named like draft heads, got {taken}")
        loss = config.loss.model_copy(update={"weight": config.loss.weight / config.depth})
        options = {"losses": {"draft": loss}, "bias": False, "keep": None}
        shared = head.config.model_copy(update=options)
        self.draft_head = LanguageModelHead(shared, head.groups, owns_weight=False)

    def forward(
        self,
        hidden_states: Tensor,  # [T, D]
        batch: BatchKwargs,
        drafts: Sequence[tuple[Tensor, BatchKwargs]] = (),  # [T, D] each
        *,
        weight: Tensor | None = None,  # [V, D]
        bias: Tensor | None = None,  # [V]
        compute_dtype: torch.dtype | None = None,
        compute_loss: bool | None = None,
        **options: Any,
    ) -> HeadOutput:
        """The head's output, with the draft heads' losses in its loss; metrics `draft_<k>/<name>`.

        Args:
            hidden_states: as for the head.
            batch: of the head.
            drafts: for each depth from 1 its hidden states, sharded as those of the head, and its
                batch (`OptimizerStep.draft`); none where no loss is computed.
            weight: a tensor.
            bias: beside it.
            compute_dtype: of all products.
            compute_loss: default: in training mode.
            options: other arguments of the head.

        Raises:
            ValueError: not a draft for each depth, drafts without a loss, a batch that is none of a
                draft head, and what the head refuses.
            TypeError: `weight` is a module.
        """
        computes = self.training if compute_loss is None else compute_loss
        self._check(drafts, computes, weight)
        output: HeadOutput = self.head(
            hidden_states,
            batch,
            weight=weight,
            bias=bias,
            compute_dtype=compute_dtype,
            compute_loss=compute_loss,
            **options,
        )
        if not computes:
            return output
        operands = self._operands(weight, bias)
        losses = [] if output.loss is None else [output.loss]
        metrics = dict(output.metrics)
        for depth, (states, draft) in enumerate(drafts, 1):
            found: HeadOutput = self.draft_head(
                states,
                draft,
                **operands,
                compute_dtype=compute_dtype,
                compute_loss=True,
                teacher=self._teacher(hidden_states, draft, operands, compute_dtype),
            )
            assert found.loss is not None
            losses.append(found.loss)
            for name, value in found.metrics.items():
                metrics[f"draft_{depth}/{name.partition('/')[2]}"] = value
        return replace(output, loss=torch.stack(losses).sum(), metrics=metrics)

    def _operands(self, weight: Tensor | None, bias: Tensor | None) -> dict[str, Tensor]:
        """Weight and bias of the draft heads, by name."""
        if self.head.owns_weight:
            weight, bias = self.head.weight, self.head.bias
        named = {"weight": weight, "bias": bias}
        tp = self.head.groups.tp
        given = {
            name: local_tensor(tensor, tp) for name, tensor in named.items() if tensor is not None
        }
        if not self.config.detach_weight:
            return given
        return {name: tensor.detach() for name, tensor in given.items()}

    def _teacher(
        self,
        hidden_states: Tensor,
        draft: BatchKwargs,
        operands: dict[str, Tensor],
        dtype: torch.dtype | None,
    ) -> Teacher | None:
        """The head itself at the slots whose labels the draft head predicts."""
        if not isinstance(self.config.loss, DistillationLossConfig):
            return None
        dtype = dtype or hidden_states.dtype
        return Teacher(
            self._at_targets(hidden_states, draft).to(dtype),
            operands["weight"].detach().to(dtype),
            operands.get("bias"),
            softcap=self.head.config.softcap,
            logit_scale=self.head.config.logit_scale,
        )

    def _at_targets(self, hidden_states: Tensor, draft: BatchKwargs) -> Tensor:
        """The head's hidden states at the targets of this rank's slots, sharded as they are."""
        if draft.cut_by_pieces:
            raise ValueError(
                "`drafts` of `distillation` must have whole documents in a micro-sequence, got one"
                " that continues in another, where its target is; run the head once with"
                " `to_kwargs(join=True)`."
            )
        assert draft.target_rows is not None
        sp, sdp = self.head.groups.sp, self.head.groups.sdp
        states = hidden_states.detach()
        states = states.flatten(0, -2) if states.ndim > 2 else states
        for group in (sp, sdp):
            states = states if group is None else gather_first_dim(states, group)
        rows = draft.target_rows.chunk(group_size(sp))[group_rank(sp)]
        return states[rows]

    def _check(
        self, drafts: Sequence[tuple[Tensor, BatchKwargs]], computes: bool, weight: object
    ) -> None:
        if len(drafts) != (self.config.depth if computes else 0):
            expected = f"{self.config.depth}, one a depth" if computes else "none without a loss"
            raise ValueError(f"`drafts` must be {expected}, got {len(drafts)}.")
        if any(batch.target_rows is None for _, batch in drafts):
            raise ValueError(
                "`drafts` must have batches of draft heads, got one of the head itself; see"
                " `OptimizerStep.draft`."
            )
        if isinstance(weight, nn.Module):
            raise TypeError(
                f"`weight` must be a tensor with draft heads, got a {type(weight).__name__}; pass"
                " its weight, and its bias as `bias`."
            )
