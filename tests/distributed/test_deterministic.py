"""Statistics to the bit on gloo ranks: shards of the vocabulary, of tokens and of documents."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastrl import LanguageModelHead, LanguageModelHeadConfig, ParallelGroups, TokenBatch
from fastrl.parallel import group_rank, vocab_shard
from tests.helpers.bit_layouts import GRPO, Layout, Problem, statistics_of
from tests.helpers.ranks import RankPool

PADDED = 2048  # whole blocks on 2 and on 4 ranks


def problem() -> Problem:
    return Problem.draw(5, 9, 24, 1300, dtype=torch.float32, device="cpu")


def in_layouts() -> list[Tensor]:
    """Statistics of random layouts, the shards of which are on the ranks."""
    case, draws = replace(problem(), group=dist.group.WORLD), random.Random(4)
    layouts = [Layout.draw(case, draws) for _ in range(6)]
    shards = [replace(layout, path=layout.config["strategy"]) for layout in layouts]
    return [statistics_of(case, layout) for layout in shards]


def in_head(axes: list[str], strategy: str) -> list[Tensor]:
    """Log-probabilities and entropies [slots] of a head, of this rank's slots under `sdp`."""
    case = problem()
    groups = ParallelGroups(**dict.fromkeys(axes, dist.group.WORLD))
    size, rank = dist.get_world_size(), dist.get_rank()
    packed = TokenBatch.from_documents(case.documents, pad_to_multiple=size)
    (batch,) = packed.to_kwargs(replace(groups, tp=None, sp=None))
    hidden = torch.cat(case.hidden_states)
    hidden = nn.functional.pad(hidden, (0, 0, 0, packed.num_tokens - len(hidden)))
    if "sp" in axes or "sdp" in axes:
        hidden = hidden.chunk(size)[rank]
    config = LanguageModelHeadConfig.model_validate({
        "hidden_size": 24, "vocab_size": 1300, "padded_vocab_size": PADDED,
        "losses": {"policy": GRPO}, "strategy": strategy, "deterministic": True,
    })  # fmt: skip
    head = LanguageModelHead(config, groups, device="meta", dtype=torch.float32)
    rows = slice(*vocab_shard(PADDED, group_rank(groups.tp), size if groups.tp else 1))
    head.weight = nn.Parameter(case.padded_weight(PADDED)[rows])
    output = head(hidden.requires_grad_(), batch, return_logprobs=True)
    (1.7 * output.loss).backward()
    return [output.logprobs, output.entropy]


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_the_vocabulary(ranks: RankPool, size: int) -> None:
    case = problem()
    layout = Layout.draw(case, random.Random(0))
    order = list(range(len(case.documents)))
    expected = statistics_of(case, replace(layout, order=order, cuts=[], path="op"))
    for of_rank in ranks(in_layouts, size):
        for found in of_rank:
            present = ~found.isnan()
            assert present.any()
            assert torch.equal(found[present], expected[present])


@pytest.mark.parametrize("axes", [["tp"], ["tp", "sp"], ["sp"], ["sdp"]], ids=" ".join)
@pytest.mark.parametrize("strategy", ["single_pass", "recompute"])
def test_heads(ranks: RankPool, axes: list[str], strategy: str) -> None:
    (alone,) = ranks(in_head, 1, [], strategy)
    several = ranks(in_head, 2, axes, strategy)
    for index, expected in enumerate(alone):
        found = [of_rank[index] for of_rank in several]
        whole = torch.cat(found) if axes == ["sdp"] else found[0]
        assert torch.equal(whole[: len(expected)], expected)
