"""The products with epilogues on ranks that share the vocabulary, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastrl import kernels
from fastrl.functional.head.tile_ops import chunk_itemsize
from fastrl.kernels import linear
from fastrl.parallel import ParallelGroups, group_rank, vocab_shard
from tests.helpers.fused_head import SMALL_BLOCKS, assert_close_to_float64, logprobs_and_gradients
from tests.helpers.head_cases import HeadCase
from tests.helpers.layouts import Ranks
from tests.helpers.ranks import RankPool

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs without a GPU"),
]
CASE = HeadCase("shared", num_tokens=14, hidden_size=16, spread=0.3)


def run_on_rank(strategy: str, sequence_parallel: bool) -> list[Tensor]:
    """Log-probabilities, and the gradients of this rank's hidden states and vocabulary rows."""
    groups = Ranks(1, 1, 2, sequence_parallel=sequence_parallel).groups()
    rank, whole = group_rank(groups.tp), CASE.tensors(torch.float16)
    rows = slice(*vocab_shard(CASE.vocab_size, rank, 2))
    tokens = slice(rank * 7, rank * 7 + 7) if sequence_parallel else slice(None)
    tensors = replace(
        whole,
        hidden_states=whole.hidden_states.detach()[tokens].requires_grad_(),
        weight=whole.weight.detach()[rows].requires_grad_(),
    )
    blocks, kernels.run_on_cpu, linear.BLOCKS = linear.BLOCKS, True, SMALL_BLOCKS
    try:
        assert chunk_itemsize(tensors.hidden_states, tensors.weight) == 2
        return logprobs_and_gradients(
            tensors, strategy, True, ParallelGroups(tp=groups.tp, sp=groups.sp), 37
        )
    finally:
        kernels.run_on_cpu, linear.BLOCKS = False, blocks


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
@pytest.mark.parametrize("strategy", ["recompute", "two_chunks"])
def test_ranks_that_share_the_vocabulary(
    ranks: RankPool, strategy: str, sequence_parallel: bool
) -> None:
    first, second = ranks(run_on_rank, 2, strategy, sequence_parallel)
    grad_hidden = torch.cat([first[1], second[1]]) if sequence_parallel else first[1]
    if not sequence_parallel:
        assert torch.equal(first[1], second[1])
    results = [first[0], grad_hidden, torch.cat([first[2], second[2]])]
    assert_close_to_float64(
        results, logprobs_and_gradients(CASE.tensors(torch.float16).in_float64(), strategy, True)
    )
