"""The head over two GPUs: a sharded vocabulary gives what one GPU gives, with and without `sp`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from fastrl import LanguageModelHead, LanguageModelHeadConfig
from fastrl.parallel import ParallelGroups, vocab_shard
from tests.helpers.bf16_heads import grpo_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),  # NCCL's and multiprocessing's own
]

HIDDEN, VOCABULARY = 256, 5003


def test_a_sharded_vocabulary_equals_a_whole_one(tmp_path: Path) -> None:
    spawn(run_rank, args=(str(tmp_path / "rendezvous"),), nprocs=2)


def run_rank(rank: int, rendezvous: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        for loss in ("grpo", "gspo"):
            for strategy in ("single_pass", "recompute"):
                whole = run(rank, ParallelGroups(), loss, strategy)
                for sp in (None, dist.group.WORLD):
                    groups = ParallelGroups(tp=dist.group.WORLD, sp=sp)
                    compare(rank, whole, run(rank, groups, loss, strategy), sp is not None)
    finally:
        dist.destroy_process_group()


def run(rank: int, groups: ParallelGroups, loss: str, strategy: str) -> tuple[Tensor, ...]:
    """Loss, log-probabilities and gradients of this rank's hidden states and weight."""
    batch = grpo_batch(6, 90, VOCABULARY)
    config = LanguageModelHeadConfig.model_validate(
        {
            "hidden_size": HIDDEN,
            "vocab_size": VOCABULARY,
            # Hardly anything is clipped.
            "losses": {"policy": {"type": loss, "epsilon_low": 0.99, "epsilon_high": 99.0}},
            "strategy": strategy,
        }
    )
    head = LanguageModelHead(config, groups, device="cuda", dtype=torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(3)
    hidden = torch.randn(batch.num_tokens, HIDDEN, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, device="cuda").bfloat16() * 0.1
    size = 1 if groups.tp is None else 2
    start, stop = vocab_shard(VOCABULARY, rank if size == 2 else 0, size)
    with torch.no_grad():
        head.weight.copy_(weight[start:stop])
    if groups.sp is not None:
        hidden = hidden.chunk(2)[rank].contiguous()
    hidden.requires_grad_()
    output = head(hidden, batch, return_logprobs=True)
    assert output.loss is not None
    assert output.logprobs is not None
    grads = torch.autograd.grad(output.loss, (hidden, head.weight))
    return (output.loss.detach(), output.logprobs, *grads)


def compare(rank: int, whole: tuple[Tensor, ...], part: tuple[Tensor, ...], splits: bool) -> None:
    """Holds a rank's part against the whole."""
    loss, logprobs, grad_hidden, grad_weight = whole
    start, stop = vocab_shard(VOCABULARY, rank, 2)
    torch.testing.assert_close(part[0], loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(part[1], logprobs, rtol=1e-6, atol=2e-5)
    expected = grad_hidden.chunk(2)[rank] if splits else grad_hidden
    for result, truth in ((part[2], expected), (part[3], grad_weight[start:stop])):
        error = (result.float() - truth.float()).norm() / truth.float().norm()
        assert error < 5e-3
