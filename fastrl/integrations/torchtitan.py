"""The head as the loss of torchtitan's RL trainer (0.3.0, `torchtitan.experiments.rl`).

torchtitan's `ChunkedLossWrapper` is given hidden states and the module of the output layer, and
tears documents at the bounds of its chunks. `HeadLoss` stands in its place and owns both head and
loss: no logits, no chunks of the sequence, and any policy-gradient loss of fastrl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import CompileConfig

from fastrl.config.losses import LanguageModelHeadConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.integrations.layer_call import replaced_forward
from fastrl.layers.language_model_head import HeadOutput, LanguageModelHead


# A ChunkedLossWrapper by type alone: the trainer then leaves the output layer to it.
class HeadLoss(ChunkedLossWrapper):  # type: ignore[misc]
    """Losses of the head over torchtitan's packed rows [B, L].

        loss = sum over labels with a finite generator log-probability / global_valid_tokens

    The trainer does not say where a row's documents begin, nor how many there are. So a loss must
    be normalised by tokens, and one whose ratio or mask is a document's is refused unless
    `positions` come with the batch; then it is computed on whole documents.

    Args:
        config: see `Config`.
        compile_config: refused where it asks for a compiled loss.

    Raises:
        ValueError: a loss that needs what torchtitan's batches do not have.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):  # type: ignore[misc]
        """What the loss is of; torchtitan builds it from its own config."""

        losses: dict[str, Any] = field(default_factory=lambda: {"policy": {"type": "grpo"}})
        """The losses by name, as in `LanguageModelHeadConfig`; `normalisation` is `tokens`."""

        temperature: float = 1.0
        """Of the sampler, by which logits are divided."""

        options: dict[str, Any] = field(default_factory=dict)
        """Further fields of `LanguageModelHeadConfig`, such as `softcap`."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        if compile_config and compile_config.enable and "loss" in compile_config.components:
            raise ValueError(
                "`compile.components` must not have 'loss' with HeadLoss, whose kernels are"
                f" compiled already, got {compile_config.components}."
            )
        self.config = config
        self.lm_head: nn.Module | None = None
        self._head: LanguageModelHead | None = None

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """The output layer of the model, set by the trainer."""
        self.lm_head = lm_head
        self._head = self._build_head(lm_head)

    def __call__(
        self,
        pred: Tensor,  # [B, L, D]
        labels: Tensor,  # [B, L]
        global_valid_tokens: float | Tensor | None = None,
        *,
        generator_logprobs: Tensor,  # [B, L]
        advantages: Tensor,  # [B, L]
        loss_mask: Tensor,  # [B, L]
        positions: Tensor | None = None,  # [B, L]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, a sum over this rank's labels, and metrics that add up over ranks.

        Args:
            pred: hidden states after the final norm (the trainer sets `_skip_lm_head`).
            labels: int64, shifted.
            global_valid_tokens: labels of the optimizer step; default: those given here.
            generator_logprobs: of the sampler, the denominator of the ratio; a label without a
                finite one has no loss.
            advantages: one a token.
            loss_mask: True at labels to learn from.
            positions: inside the document, 0 at each document's first slot; for losses that are
                functions of whole documents.

        Raises:
            ValueError: no output layer is set, or a loss needs `positions`.
        """
        if self._head is None or self.lm_head is None:
            raise ValueError("HeadLoss must have an output layer; call `set_lm_head` first.")
        needing = [name for name, loss in self._head.losses.items() if loss.scope != "token"]
        if needing and positions is None:
            raise ValueError(
                f"the losses {needing} must be given `positions` [B, L]: they are functions of"
                " whole documents, and torchtitan's trainer does not say where those begin; pass"
                " them to the loss, or use a loss of token ratios such as 'grpo'."
            )
        batch = _packed_batch(
            torch.where(loss_mask & generator_logprobs.isfinite(), labels, -100),
            generator_logprobs,
            advantages,
            positions,
            self.config.temperature,
        )
        if global_valid_tokens is not None:
            count = global_valid_tokens
            batch = batch.replace(
                num_labels_in_batch=count if isinstance(count, Tensor) else int(count)
            )
        output = _run(self._head, self.lm_head, pred, batch)
        assert output.loss is not None
        return output.loss, _torchtitan_metrics(output.metrics)

    def _build_head(self, lm_head: nn.Module) -> LanguageModelHead:
        _check_layer(lm_head)
        weight: Any = lm_head.weight
        losses = {
            name: {"normalisation": "tokens"} | dict(options)
            for name, options in self.config.losses.items()
        }
        config = LanguageModelHeadConfig.model_validate(
            {
                "hidden_size": weight.shape[1],
                "vocab_size": weight.shape[0],
                "losses": losses,
                **self.config.options,
            }
        )
        for name, loss in config.losses.items():
            if loss.normalisation != "tokens":
                raise ValueError(
                    f"`normalisation` of the loss '{name}' must be 'tokens' in torchtitan, which"
                    f" counts the tokens of a step and not its documents, got"
                    f" {loss.normalisation!r}."
                )
            missing = loss.required_columns() - {"advantages", "old_logprobs"}
            if missing:
                raise ValueError(
                    f"the loss '{name}' must need no column but advantages and old_logprobs, got"
                    f" options that need {sorted(missing)}, which torchtitan's batches do not have."
                )
        return LanguageModelHead(config, groups=None, owns_weight=False)


def _check_layer(layer: nn.Module) -> None:
    """Refuses an output layer that does something else than h W^T + b, or does it in parts."""
    forward = type(layer).forward
    casts = any(each.__name__ == "CastLinear" for each in type(layer).__mro__)
    # CastLinear's fp32 products of rounded operands are what the head's sums in fp32 are.
    if forward is not nn.Linear.forward and not (casts and layer.compute_dtype == torch.float32):
        raise ValueError(
            f"`lm_head` must be torchtitan's Linear or a CastLinear to float32, got a"
            f" {type(layer).__name__}; leave the output layer out of the converter."
        )
    weight: Any = layer.weight
    names = weight.device_mesh.mesh_dim_names if isinstance(weight, DTensor) else ()
    if "tp" in (names or ()):
        raise ValueError(
            "`lm_head` must not be sharded over the tensor axis with HeadLoss, got a weight with"
            f" the placements {weight.placements}; set `tensor_parallel_degree: 1`."
        )


def _run(
    head: LanguageModelHead, layer: nn.Module, hidden_states: Tensor, batch: BatchKwargs
) -> HeadOutput:
    """The head inside the module call of the output layer, where FSDP has gathered the weight."""
    found: list[HeadOutput] = []

    def forward(hidden: Tensor) -> Tensor:
        weight: Any = layer.weight
        bias: Any = layer.bias
        output: HeadOutput = head(hidden, batch, weight=weight, bias=bias, compute_loss=True)
        found.append(output)
        assert output.loss is not None
        return output.loss

    with replaced_forward(layer, forward, otherwise="train with torchtitan's own loss"):
        loss = layer(hidden_states)
    return HeadOutput(loss, found[0].metrics, None, None, found[0].strategy)


def _packed_batch(
    labels: Tensor,  # [B, L]
    generator_logprobs: Tensor,  # [B, L]
    advantages: Tensor,  # [B, L]
    positions: Tensor | None,  # [B, L]
    temperature: float,
) -> BatchKwargs:
    """The rows as one packed sequence; without positions each row is a document."""
    rows, width = labels.shape
    flat = labels.flatten()
    if positions is None:
        first = torch.zeros_like(labels, dtype=torch.bool)
        positions = torch.arange(width, device=flat.device).repeat(rows, 1)
    else:
        first = positions == 0
    first[:, 0] = True
    documents = first.flatten().cumsum(0) - 1
    # Room for a document a slot: how many there are is known on the device alone.
    counts = torch.zeros(flat.shape, dtype=advantages.dtype, device=flat.device)
    counts = counts.index_add_(0, documents, (flat != -100).to(counts.dtype))
    return BatchKwargs(
        tokens=torch.zeros_like(flat),
        positions=positions.flatten(),
        labels=flat,
        document_index=documents,
        label_counts=counts[documents],
        num_documents=flat.shape[0],
        num_labels_in_batch=(flat != -100).sum(),
        num_documents_in_batch=(counts > 0).sum(),
        advantages=advantages.flatten(),
        old_logprobs=generator_logprobs.nan_to_num().flatten(),
        temperature=temperature,
    )


def _torchtitan_metrics(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the names by which torchtitan combines: `*/max` by maximum, all others by sum."""
    found: dict[str, Tensor] = {}
    for name, value in metrics.items():
        if name.endswith("_max"):
            found[f"loss/{name.removesuffix('_max')}/max"] = value
        elif not name.endswith(("_min", "_squared", "/documents")):
            found[f"loss/{name}"] = value
    return found
