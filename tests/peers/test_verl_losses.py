"""fastrl's losses under verl's names: against the head's on the same documents, and verl's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import (
    BatchKwargs,
    HeadOutput,
    LanguageModelHead,
    LanguageModelHeadConfig,
    ParallelGroups,
    linear_logprobs,
)
from tests.helpers.peer_packages import peer_module

core_algos = peer_module("verl.trainer.ppo.core_algos")
actor = peer_module("verl.workers.config.actor")
adapter = peer_module("fastrl.integrations.verl")

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 6, 5, 17
LENGTHS = (6, 1, 4, 0)  # a whole row, one token, a truncated one, none
INFO = {"dp_size": 2, "batch_num_tokens": 23, "global_batch_size": 7, "loss_scale_factor": None}
NORMALISATIONS: dict[str, dict[str, Any]] = {
    "token-mean": {"normalisation": "tokens"},
    "seq-mean-token-mean": {"normalisation": "documents"},
    "seq-mean-token-sum": {"normalisation": "constant", "length": 1},
    "seq-mean-token-sum-norm": {"normalisation": "constant", "length": LENGTH},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fastrl_grpo": {"type": "grpo", "delta": 3.0},
    "fastrl_gspo": {"type": "gspo"},
    "fastrl_cispo": {"type": "cispo"},
}


@dataclass
class Rows:
    """verl's tensors, and what the head needs to compute the same log-probabilities."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    mask: Tensor
    old: Tensor
    advantages: Tensor

    def logprobs(self) -> Tensor:
        return linear_logprobs(self.hidden, self.weight, self.labels).logprobs

    def verl_inputs(self) -> dict[str, Tensor]:
        return {
            "old_log_prob": self.old,
            "log_prob": self.logprobs(),
            "advantages": self.advantages,
            "response_mask": self.mask,
        }


@pytest.fixture
def rows() -> Rows:
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    hidden = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    made = Rows(hidden, weight, labels, mask, labels.double(), labels.double())
    # Ratios on both sides of the clip, near and far.
    made.old = made.logprobs().detach() + 0.4 * torch.randn(ROWS, LENGTH, dtype=torch.float64)
    made.old[~mask] = torch.nan
    signs = torch.tensor([1.5, -2.0, -0.5, 3.0], dtype=torch.float64)
    made.advantages = signs[:, None].expand(ROWS, LENGTH).contiguous()
    return made


def make_config(**changes: Any) -> Any:
    values = {
        "strategy": "fsdp",
        "rollout_n": 1,
        "ppo_micro_batch_size_per_gpu": 1,
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.1,
        "clip_ratio_high": 0.3,
    }
    config = actor.ActorConfig(**values | changes)
    config.global_batch_info.update(INFO)
    return config


def by_the_head(rows: Rows, options: dict[str, Any]) -> Tensor:
    labels = torch.where(rows.mask, rows.labels, -100).flatten()
    lengths = rows.mask.sum(1)
    documents = torch.arange(ROWS).repeat_interleave(LENGTH)
    batch = BatchKwargs(
        tokens=torch.zeros_like(labels),
        positions=torch.arange(LENGTH).repeat(ROWS),
        labels=labels,
        document_index=documents,
        label_counts=lengths.double()[documents],
        num_documents=ROWS,
        num_labels_in_batch=23,
        num_documents_in_batch=7,
        advantages=rows.advantages.flatten(),
        old_logprobs=torch.where(rows.mask, rows.old, 0).flatten(),
    )
    losses: Any = {"policy": options}
    config = LanguageModelHeadConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, losses=losses)
    head = LanguageModelHead(config, ParallelGroups(), owns_weight=False)
    flat = rows.hidden.reshape(-1, WIDTH)
    output: HeadOutput = head(flat, batch, weight=rows.weight, compute_loss=True)
    loss = output.loss
    assert loss is not None
    return 2 * loss  # FSDP takes the mean over two data ranks


@pytest.mark.parametrize("mode", NORMALISATIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_losses_are_those_of_the_head(name: str, mode: str, rows: Rows) -> None:
    loss = core_algos.get_policy_loss_fn(name)
    found, metrics = loss(**rows.verl_inputs(), loss_agg_mode=mode, config=make_config())
    options = OPTIONS[name] | NORMALISATIONS[mode] | {"epsilon_low": 0.1, "epsilon_high": 0.3}
    expected = by_the_head(rows, options)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    leaves = [rows.hidden, rows.weight]
    torch.testing.assert_close(
        torch.autograd.grad(1.7 * found, leaves),
        torch.autograd.grad(1.7 * expected, leaves),
        atol=1e-12,
        rtol=1e-9,
    )
    assert {"actor/pg_clipfrac", "actor/ppo_kl", "actor/ratio"} <= set(metrics)
    assert all(value.isfinite() and value.ndim == 0 for value in metrics.values())


@pytest.mark.parametrize(
    ("ours", "verls"),
    [("fastrl_grpo", "vanilla"), ("fastrl_gspo", "gspo"), ("fastrl_cispo", "cispo")],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradient_are_verls_own(ours: str, verls: str, weighted: bool, rows: Rows) -> None:
    rows.old = torch.where(rows.mask, rows.old, 0)  # verl multiplies by its mask: no NaN there
    weights = 2 * torch.rand(ROWS, 1, dtype=torch.float64).expand(ROWS, LENGTH)
    inputs = rows.verl_inputs() | {"rollout_is_weights": weights if weighted else None}
    found = {}
    for name in (ours, verls):
        loss = core_algos.get_policy_loss_fn(name)
        value, _ = loss(**inputs, loss_agg_mode="seq-mean-token-mean", config=make_config())
        (grad,) = torch.autograd.grad(value, rows.hidden, retain_graph=True)
        found[name] = value, grad
    # verl divides by the number of tokens plus 1e-8. Where a ratio is clipped cispo's value alone
    # differs by what has no gradient.
    torch.testing.assert_close(found[ours][1], found[verls][1], atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(found[ours][0], found[verls][0], atol=1e-7, rtol=1e-6)


def test_one_rank_without_counts_is_a_step(rows: Rows) -> None:
    config = make_config()
    config.global_batch_info.clear()
    loss = core_algos.get_policy_loss_fn("fastrl_grpo")
    own, _ = loss(**rows.verl_inputs(), config=config)
    config.global_batch_info.update(INFO)
    counted, _ = loss(**rows.verl_inputs(), config=config)
    torch.testing.assert_close(own * sum(LENGTHS), counted * 23 / 2)
    config.global_batch_info["batch_num_tokens"] = None
    with pytest.raises(ValueError, match="`batch_num_tokens` must be in"):
        loss(**rows.verl_inputs(), config=config)


def test_any_policy_loss_can_be_registered(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))
    adapter.register_loss("mine", {"type": "sapo", "tau_negative": 1.5})
    loss = core_algos.get_policy_loss_fn("mine")
    found, _ = loss(**rows.verl_inputs(), config=make_config())
    options = {"type": "sapo", "tau_negative": 1.5, "normalisation": "tokens"}
    torch.testing.assert_close(found, by_the_head(rows, options), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "grpo", "normalisation": "tokens"}, "`normalisation` must not be an option"),
        ({"type": "grpo", "kl": {"coefficient": 0.1}}, r"options that need \['ref_logprobs'\]"),
        ({"type": "kl_cov"}, "compares the tokens of all ranks"),
        ({"type": "cross_entropy"}, "must be a policy-gradient loss"),
    ],
)
def test_what_verl_decides_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter.register_loss("mine", options)


def test_a_sum_without_a_count_is_refused(rows: Rows) -> None:
    loss = core_algos.get_policy_loss_fn("fastrl_grpo")
    with pytest.raises(ValueError, match="`loss_agg_mode` must be one of"):
        loss(**rows.verl_inputs(), loss_agg_mode="token-sum", config=make_config())
