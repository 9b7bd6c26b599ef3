"""Ratios of two policies, of tokens and of documents, that cannot overflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.config.loss_options import RatioLevel
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.documents import document_sums
from fastrl.functional.kl import saturated
from fastrl.layers.losses.policy_inputs import PolicyInputs


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of saturated log-ratios."""
    return saturated(log_ratio).exp()


def logprob_minus_detached(logprobs: Tensor) -> Tensor:
    """logprob - detach(logprob): 0 with gradient 1."""
    return logprobs - logprobs.detach()


def per_document(
    columns: Mapping[str, Tensor],  # [T] each, 0 where a token must not count
    batch: BatchKwargs,
    groups: Sequence[ProcessGroup | None],
) -> dict[str, Tensor]:  # [T] each
    """The document's sum of each column, at every token: one index-add and one all-reduce for all.

    Raises:
        ValueError: the batch is a micro-sequence that ends inside a document.
    """
    if not columns:
        return {}
    if batch.cut_by_pieces:
        raise ValueError(
            "`batch` must hold its documents whole for sums over them, got a micro-sequence that"
            " cuts one; run the loss once on all of them (`to_kwargs` with `join=True`)."
        )
    sums = document_sums(
        torch.stack(list(columns.values()), dim=1),
        batch.document_index,
        batch.num_documents,
        groups,
    )[batch.document_index]
    return {
        name: sums[:, column].to(values.dtype)
        for column, (name, values) in enumerate(columns.items())
    }


def per_document_mean(sums: Tensor, batch: BatchKwargs) -> Tensor:  # [T]
    """A document's mean over its labels, from its sum."""
    return sums / batch.label_counts.clamp(min=1)


def ratio_of_level(
    level: RatioLevel,
    inputs: PolicyInputs,
    sums: Tensor | None,  # [T]
) -> Tensor:  # [T]
    """The ratio of each token at a level, with l_t = logp_t - old_t and n_d labels in document d.

        token             r_t = exp(l_t)
        document          s_d = exp((1 / n_d) sum_t l_t), and the document's mean advantage
        document_token    the value of s_d with the gradient of r_t / detach(r_t)
        document_product  W_d = exp(sum_t l_t)
        none              1; `old_logprobs` are not needed

    Exponents saturate at `LOG_RATIO_BOUND`. `sums` are those of the document's log-ratios.
    """
    if level == "none":
        return torch.ones_like(inputs.logprobs)
    if level == "token":
        return bounded_exp(inputs.log_ratios)
    assert sums is not None
    if level == "document_product":
        return bounded_exp(sums)
    means = per_document_mean(sums, inputs.batch)
    if level == "document":
        return bounded_exp(means)
    return bounded_exp(means.detach() + logprob_minus_detached(inputs.logprobs))
