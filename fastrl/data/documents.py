"""`Document`: a prompt with its completion in token alignment, as files have it.

Its fields stand in the table of `columns.py`; `checks.py` says which values they may have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Literal, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor

IGNORE_LABEL = -100

Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = Sequence[int] | Array | Tensor
Booleans: TypeAlias = Sequence[bool] | Sequence[int] | Array | Tensor
Floats: TypeAlias = Sequence[float] | Array | Tensor


class DocumentError(ValueError):
    """A document that cannot be used.

    Attributes:
        number: 0-based number of the document among those given.
        field: name of the offending field of `Document`.
        problem: what is required and what was given.
    """

    def __init__(self, number: int, field: str, problem: str) -> None:
        super().__init__(f"document {number}: `{field}` {problem}")
        self.number = number
        self.field = field
        self.problem = problem


@dataclass(frozen=True)
class Document:
    """One prompt with its completion (or a plain text), in token alignment.

    Value i of a field belongs to `tokens[i]`: `logprobs[i]` is the log-probability (nats) of
    `tokens[i]` given the tokens before it. Nothing predicts the first token, so `loss_mask[0]` has
    no effect. Fields may be sequences, numpy arrays or tensors. They are checked when a batch is
    made, which can then name the document.

    Log-probabilities, advantages, values, returns and weights are fp32 in a batch. Where one of
    them is a float64 array or tensor, all of the document's are float64, Python numbers too.

    Attributes:
        tokens: [n] token ids, n >= 1.
        prompt_length: the first so many tokens are context and get no label. Exactly one of
            `prompt_length` and `loss_mask` is given.
        loss_mask: [n] True (or 1) where the token is to be learned.
        logprobs: under the policy that the ratio is taken to (old). [n], or with `prompt_length`
            also [n - prompt_length]: the completion's alone.
        ref_logprobs: under the frozen reference, same lengths.
        rollout_logprobs: as the sampler reported them, same lengths.
        advantage: of the document, or per token (same lengths).
        rl_weight: at least 0, in the stream `rl` of losses: of the document, or per token (same
            lengths). A token with weight 0 is not in the stream.
        ce_weight: likewise in the stream `ce`.
        distill_weight: likewise in the stream `distill`.
        temperature: that the document was sampled at, and at which all log-probabilities are taken.
        model_version: of the weights that sampled the document.
        reward: of the document; None or NaN is unscored. A batch only carries it for metrics:
            advantages come from `fastrl.data.advantages`.
        group_id: documents with one id answer the same prompt.
        rollout_id: documents of a group with one id are parts of one rollout, such as turns with
            contexts of their own: they share its reward, which counts once in the group, and get
            the same advantage. Default: each document is a rollout.
        alignment: "label" says that the log-probabilities and per-token advantages have [n - 1]
            values, value i for `tokens[i + 1]`: what `logits[:-1]` and
            `TokenBatch.split_by_document` give. The completion's alone read the same both ways.
        logprobs_temperature: that the log-probabilities were taken at, where the producer says so.
            Values taken at another temperature than `temperature` are refused, as log-probabilities
            of single tokens cannot be converted.
        kept_tokens: for each token (same lengths as the log-probabilities) the ids that the sampler
            drew it from, such as its top-p set; the token itself counts as one of them. A label has
            at least one. A document without them was sampled from the whole vocabulary.
        rewards: several rewards of the document by name, whose weighted sum is `reward`.
        greedy_reward: of the most likely answer to the same prompt, the baseline of ReMax.
        sum_squares: of the probabilities of all tokens where each token was drawn, under the policy
            of `logprobs`; same lengths. For the optimal token baseline.
        values: of a value head, same lengths: `values[i]` is that of the state in which `tokens[i]`
            was drawn (`fastrl.data.value_advantages`).
        returns: what the value head is to predict there, same lengths.
        teacher_ids: for each token (same lengths) the most probable ids of a teacher, all different
            and any number for each; together with `teacher_logprobs`. A label has at least one.
        teacher_logprobs: the log-probabilities of `teacher_ids` under the teacher, at the
            document's temperature. What is missing to 1 is that of all other ids together.
    """

    tokens: Integers
    prompt_length: int | None = None
    loss_mask: Booleans | None = None
    logprobs: Floats | None = None
    ref_logprobs: Floats | None = None
    rollout_logprobs: Floats | None = None
    advantage: float | Floats | None = None
    temperature: float = 1.0
    model_version: int | None = None
    reward: float | None = None
    group_id: int | str | None = None
    alignment: Literal["token", "label"] = "token"
    logprobs_temperature: float | None = None
    kept_tokens: Sequence[Integers] | None = None
    rollout_id: int | str | None = None
    rewards: Mapping[str, float] | None = None
    greedy_reward: float | None = None
    sum_squares: Floats | None = None
    values: Floats | None = None
    returns: Floats | None = None
    teacher_ids: Sequence[Integers] | None = None
    teacher_logprobs: Sequence[Floats] | None = None
    rl_weight: float | Floats | None = None
    ce_weight: float | Floats | None = None
    distill_weight: float | Floats | None = None

    @property
    def num_labels(self) -> int:
        """Tokens to be learned; the first never is one."""
        if self.loss_mask is None:
            return max(len(self.tokens) - max(self.prompt_length or 0, 1), 0)
        return int(torch.as_tensor(self.loss_mask)[1:].count_nonzero())

    @property
    def has_labels(self) -> bool:
        """Whether any token is to be learned."""
        return self.num_labels > 0

    @property
    def is_scored(self) -> bool:
        """Whether there is a reward, neither None nor NaN."""
        return self.reward is not None and not isnan(self.reward)
