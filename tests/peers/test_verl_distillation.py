"""On-policy distillation, against verl's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.layers.losses import build_loss
from tests.helpers.loss_cases import LossCase
from tests.helpers.loss_documents import pack, policy_documents, random_statistics
from tests.helpers.peer_packages import peer_module

distillation = peer_module("verl.trainer.distillation.losses")
config = peer_module("verl.workers.config.distillation")

BOUND = 0.3
COEFFICIENT = 0.7


def verl_loss(logprobs: Tensor, old: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """`distillation_loss` of rows [1, n], policy gradient of k1 with the clip of PPO."""
    options = config.DistillationLossConfig(
        loss_mode="k1",
        topk=None,
        loss_max_clamp=BOUND,
        use_policy_gradient=True,
        clip_ratio=0.2,
        clip_ratio_low=0.15,
        clip_ratio_high=0.25,
    )
    actor: Any = SimpleNamespace(
        loss_agg_mode="token-mean", global_batch_info={}, loss_scale_factor=None
    )
    data = {
        "response_mask": mask,
        "old_log_probs": old,
        "teacher_logprobs": teacher[..., None],
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": 1,
    }
    loss: Tensor = distillation.distillation_loss(
        actor, SimpleNamespace(distillation_loss=options), {"log_probs": logprobs}, data
    )[0]
    return loss


def test_the_same_numbers_as_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its tensors are padded rows already.
    monkeypatch.setattr(distillation, "no_padding_2_padding", lambda values, data: values)
    batch = pack([x for x in policy_documents() if not isinstance(x.advantage, list)][:5])
    statistics = random_statistics(batch)
    mask = batch.labels != -100
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    columns = (statistics.logprobs, batch.old_logprobs, batch.ref_logprobs, mask)
    logprobs, old, teacher, rows = (values[mask][None] for values in columns)
    theirs = COEFFICIENT * verl_loss(logprobs, old, teacher, rows)
    case = LossCase(
        "verl",
        {
            "type": "grpo",
            "epsilon_low": 0.15,
            "epsilon_high": 0.25,
            "delta": 3.0,
            "on_policy_distillation": {"rewards": False, "bound": BOUND},
        },
    )
    bare = batch.replace(advantages=None, active_rows=None, active_document_rows=None)
    ours = COEFFICIENT * build_loss(case.parsed)(statistics, bare)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    got, wanted = (torch.autograd.grad(x, statistics.logprobs)[0] for x in (ours, theirs))
    assert 0 < got.count_nonzero() < mask.sum()  # some are clipped
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
