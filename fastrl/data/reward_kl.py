"""The divergence from the reference policy as a part of the reward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import fsum

import torch

from fastrl.data.checks import check_document
from fastrl.data.documents import Document, DocumentError
from fastrl.data.rollout_rewards import rollout_keys, rollout_rewards
from fastrl.data.token_values import as_token_values, values_of_labels
from fastrl.functional.kl import kl_estimate


def with_kl_in_rewards(
    documents: Sequence[Document],
    coefficient: float,
    *,
    estimator: str = "k1",
    bound: float | None = None,
) -> list[Document]:
    """Documents whose reward pays for the divergence from the reference policy.

        R' = R - coefficient * sum_t k_t   over the tokens to be learned

    The k1 estimate, k_t = logprob_t - ref_logprob_t, of the document's KL(old, reference) as part
    of the reward has the KL's own gradient in the policy loss. Before advantages are computed;
    unscored documents stay unscored. The sum is over all documents of a rollout.

    Args:
        documents: with `logprobs` and `ref_logprobs`.
        coefficient: beta.
        estimator: of k, see `kl_estimate`.
        bound: k is clamped to +-`bound`.

    Raises:
        DocumentError: for a document of a scored rollout that lacks a column.

    References:
        Ouyang et al., arXiv:2203.02155, equation 2; Liu et al., arXiv:2510.01555.
    """
    return less_kl(documents, coefficient, kl_of_labels(documents, estimator, bound))


def less_kl(
    documents: Sequence[Document],
    coefficient: float,
    estimates: Sequence[Sequence[float] | None],
) -> list[Document]:
    """`with_kl_in_rewards` with the estimates of `kl_of_labels`."""
    totals: defaultdict[Hashable, list[float]] = defaultdict(list)
    for key, values in zip(rollout_keys(documents), estimates, strict=True):
        totals[key] += values or []
    result = []
    for key, document in zip(rollout_keys(documents), documents, strict=True):
        if document.is_scored:
            assert document.reward is not None
            reward = document.reward - coefficient * fsum(totals[key])
            document = replace(document, reward=reward)
        result.append(document)
    return result


def with_kl_to_go(
    documents: Sequence[Document],
    coefficient: float,
    *,
    estimator: str = "k1",
    bound: float | None = None,
) -> list[Document]:
    """Documents whose advantage pays, token by token, for the divergence that is to come.

        A'_t = A_t - coefficient * sum_{s >= t} k_s   over the tokens to be learned of the rollout

    That is the return of rewards -coefficient * k_s at each token, undiscounted, as REINFORCE++ has
    it. Documents without advantage stay as they are. For the arguments, and what it raises, see
    `with_kl_in_rewards`.

    References:
        REINFORCE++, arXiv:2501.03262.
    """
    return less_kl_to_go(documents, coefficient, kl_of_labels(documents, estimator, bound))


def less_kl_to_go(
    documents: Sequence[Document],
    coefficient: float,
    estimates: Sequence[Sequence[float] | None],
) -> list[Document]:
    """`with_kl_to_go` with the estimates of `kl_of_labels`."""
    to_come: defaultdict[Hashable, float] = defaultdict(float)
    result = list(documents)
    for number, key in reversed(list(enumerate(rollout_keys(documents)))):
        document, values = documents[number], estimates[number]
        if values is None or document.advantage is None:
            continue
        sums = list(accumulate(reversed(values), initial=to_come[key]))
        to_come[key] = sums[-1]
        advantages = values_of_labels(number, document, "advantage")
        paid = [a - coefficient * kl for a, kl in zip(advantages, reversed(sums[1:]), strict=True)]
        result[number] = replace(document, advantage=as_token_values(number, document, paid))
    return result


def kl_of_labels(
    documents: Sequence[Document], estimator: str, bound: float | None
) -> list[list[float] | None]:
    """The estimate of each label's KL(old, reference); None for documents of unscored rollouts.

    Raises:
        DocumentError: for a document of a scored rollout that lacks a column.
    """
    rewards = rollout_rewards(documents)
    result: list[list[float] | None] = []
    for number, (key, document) in enumerate(zip(rollout_keys(documents), documents, strict=True)):
        if rewards[key] is None:
            result.append(None)
            continue
        for field in ("logprobs", "ref_logprobs"):
            if getattr(document, field) is None and document.has_labels:
                raise DocumentError(number, field, "is required for a KL in the reward, got none")
        if not document.has_labels:
            result.append([])
            continue
        check_document(number, document)
        old, reference = (
            torch.tensor(values_of_labels(number, document, field), dtype=torch.float64)
            for field in ("logprobs", "ref_logprobs")
        )
        result.append(kl_estimate(old - reference, estimator, bound).tolist())
    return result
