"""Log-probabilities over a sampler's keep-set, against the definition and transformers' filters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastrl import BatchKwargs, LanguageModelHead, TokenStatistics
from fastrl.functional.head.full_rows import LogitRows
from fastrl.functional.head.sampling_mask import KeepSet, kept_columns
from fastrl.functional.kept_tokens import KeptTokens
from fastrl.functional.reference import head as reference
from fastrl.kernels.arguments import VocabularyTile
from tests.helpers.keep_sets import KEEP, recorded_entries
from tests.helpers.loss_cases import BY_NAME
from tests.helpers.loss_documents import VOCAB_SIZE, pack, policy_documents, reference_tokens
from tests.helpers.loss_heads import (
    assert_equal_gradients,
    capped_head,
    close_to_policy,
    random_hidden,
)


def statistics_by_definition(
    head: LanguageModelHead, hidden: Tensor, batch: BatchKwargs
) -> TokenStatistics:
    keep = head.config.keep
    assert keep is not None
    z = reference.logits(
        hidden,
        head.weight,
        bias=head.bias,
        temperature=batch.temperature,
        softcap=head.config.softcap,
        vocab_size=VOCAB_SIZE,
    )
    columns = []
    for t, label in enumerate(batch.labels.tolist()):
        if label == -100:
            columns.append(torch.stack([z[t, 0] * 0] * 3))
            continue
        recorded = None
        if keep.recorded:
            assert isinstance(batch.kept_tokens, KeptTokens)
            recorded = batch.kept_tokens.lists()[t] or None
        entries = reference.kept_entries(
            z[t].detach(),
            label,
            top_k=keep.top_k,
            top_p=keep.top_p,
            min_p=keep.min_p,
            recorded=recorded,
        )
        columns.append(torch.stack(reference.kept_statistics(z[t], label, entries)))
    return TokenStatistics(*torch.stack(columns, 1).unbind())


@pytest.mark.parametrize("loss", ["grpo", "gspo_bonus", "cross_entropy"])
@pytest.mark.parametrize("keep", KEEP)
def test_losses_over_the_keep_set_are_the_definition(keep: str, loss: str) -> None:
    case = BY_NAME[loss]
    options = {"keep": KEEP[keep]}
    batch = pack(policy_documents()).replace(temperature=0.7)
    batch = batch.replace(kept_tokens=recorded_entries(keep, batch))
    hidden = random_hidden(batch).requires_grad_()
    for chunk_size in (1, 12):
        head = capped_head({"policy": dict(case.config)}, chunk_size=chunk_size, **options)
        near = close_to_policy(head, hidden, batch)
        output = head(hidden, near, return_logprobs=True)
        statistics = statistics_by_definition(head, hidden, near)
        expected = case.reference(reference_tokens(statistics, near))
        torch.testing.assert_close(output.logprobs, statistics.logprobs.detach())
        torch.testing.assert_close(output.entropy, statistics.entropy.detach())  # type: ignore[union-attr]
        assert_equal_gradients(head, hidden, output.loss, expected, 1e-10)


def test_an_impossible_entry_is_no_part_of_any_set() -> None:
    head = capped_head(
        {"policy": {"type": "reinforce", "entropy": {"bonus": 1.0}}}, keep=KEEP["all"]
    )
    batch = pack(policy_documents())
    free = [v for v in range(VOCAB_SIZE) if v not in batch.labels.tolist()]
    assert head.bias is not None
    with torch.no_grad():
        head.bias[free[:3]] = -torch.inf
    hidden = random_hidden(batch).requires_grad_()
    loss = head(hidden, batch).loss
    grads = torch.autograd.grad(loss, [hidden, *head.parameters()])
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_sets_as_transformers(dtype: torch.dtype) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    z = 2 * torch.randn(40, 50, dtype=dtype)
    filters = (
        (KeepSet(top_k=7), [process.TopKLogitsWarper(7)]),
        (KeepSet(top_p=0.6), [process.TopPLogitsWarper(0.6)]),
        (KeepSet(min_p=0.1), [process.MinPLogitsWarper(0.1)]),
        (
            KeepSet(top_k=20, top_p=0.8, min_p=0.03),
            [
                process.TopKLogitsWarper(20),
                process.TopPLogitsWarper(0.8),
                process.MinPLogitsWarper(0.03),
            ],
        ),
    )

    tokens = torch.arange(40)
    rows = LogitRows(z, tokens, tokens, VocabularyTile(0, 50, None), None)
    for keep, processors in filters:
        expected = z.clone()
        for processor in processors:
            expected = processor(None, expected)
        kept = kept_columns(rows, keep)
        assert torch.equal(kept, expected > -torch.inf)


def test_what_is_missing_is_named() -> None:
    batch = pack(policy_documents())
    hidden = random_hidden(batch)
    head = capped_head({"policy": {"type": "grpo"}}, keep={"recorded": True})
    with pytest.raises(ValueError, match="`kept_tokens` must be in the batch"):
        head(hidden, batch)
    head = capped_head({"policy": {"type": "grpo"}}, keep={"top_k": 3}, strategy="single_pass")
    with pytest.raises(ValueError, match="`strategy: single_pass` must"):
        head(hidden, batch)
