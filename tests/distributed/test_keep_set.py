"""Keep-sets and statistics on request, with the vocabulary spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import LanguageModelHead
from fastrl.config import LanguageModelHeadConfig
from fastrl.parallel import group_rank, group_size, vocab_shard
from tests.helpers.keep_sets import KEEP, recorded_entries
from tests.helpers.layouts import Ranks
from tests.helpers.loss_documents import pack, policy_documents
from tests.helpers.loss_heads import capped_head, close_to_policy, random_hidden
from tests.helpers.ranks import RankPool

LOSSES: dict[str, Any] = {"policy": {"type": "gspo", "entropy": {"bonus": 0.2}}}
STATISTICS = ("mean_logit", "sum_squares", "is_argmax")


def run(keep: str, layout: Ranks | None) -> list[Tensor]:
    """Loss, log-probabilities, statistics and gradients, weights gathered by hand."""
    whole = capped_head(LOSSES, keep=KEEP[keep])
    batch = pack(policy_documents())
    hidden = random_hidden(batch)
    batch = close_to_policy(whole, hidden, batch.replace(kept_tokens=recorded_entries(keep, batch)))
    head, rows = whole, slice(None)
    if layout is not None:
        groups = layout.groups()
        config = LanguageModelHeadConfig.model_validate(whole.config.model_dump())
        head = LanguageModelHead(config, groups, dtype=torch.float64)
        rows = slice(*vocab_shard(head.weight_rows, group_rank(groups.tp), group_size(groups.tp)))
        assert head.bias is not None
        assert whole.bias is not None
        with torch.no_grad():
            head.weight.copy_(whole.weight[rows])
            head.bias.copy_(whole.bias[rows])
    hidden = hidden.requires_grad_()
    output = head(hidden, batch, return_logprobs=True, statistics=STATISTICS)
    assert output.loss is not None
    assert head.bias is not None
    gradients = torch.autograd.grad(output.loss * 0.7, [hidden, head.weight, head.bias])
    statistics = [output.statistics[name].double() for name in STATISTICS]
    assert output.logprobs is not None
    return [output.loss.detach(), output.logprobs, *statistics, *gradients]


def run_all(layout: Ranks) -> list[list[Tensor]]:
    return [run(keep, layout) for keep in KEEP]


@pytest.mark.parametrize("tensor", [2, 4])
def test_keep_sets_over_vocabulary_ranks(ranks: RankPool, tensor: int) -> None:
    answers = ranks(run_all, tensor, Ranks(tensor=tensor))
    for keep, results in zip(KEEP, zip(*answers, strict=True), strict=True):
        expected = run(keep, None)
        for name, *parts in zip(range(len(expected)), *results, strict=True):
            is_sharded = name >= len(expected) - 2
            actual = torch.cat(parts) if is_sharded else parts[0]
            torch.testing.assert_close(
                actual, expected[name], atol=1e-10, rtol=1e-10, msg=f"{keep} {name}"
            )
