"""The same numbers as the losses of the installed TRL and Liger, from their own code.

They work on padded batches [B, C]; ours on the same tokens, packed. Where they differ on purpose,
docs/losses.md says how.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.frameworks.trl import DEFAULTS, accelerator, importance_weights, trainer_state
from fastrl import BatchKwargs, TokenStatistics
from tests.helpers.loss_cases import LossCase
from tests.helpers.loss_documents import pack, policy_documents, random_statistics
from tests.helpers.loss_documents import preference_documents as pair_documents

MAX_LENGTH = 12


def installed(module: str) -> ModuleType:
    """A module of a peer; skips where it is not installed (the `test` extra installs both)."""
    pytest.importorskip(module.split(".")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(module)


@dataclass(frozen=True)
class Padded:
    """A packed batch of whole documents, and its labelled tokens in [B, C]."""

    batch: BatchKwargs
    statistics: TokenStatistics
    slots: Tensor  # [B, C] int64, 0 where there is no token
    mask: Tensor  # [B, C]

    def pad(self, values: Tensor) -> Tensor:  # [T] -> [B, C]
        """Values of the labelled tokens; 0 elsewhere."""
        return torch.where(self.mask, values[self.slots], 0)

    def column(self, name: str) -> Tensor:
        """A column of the batch, padded."""
        values: Tensor = getattr(self.batch, name)
        return self.pad(values)

    def optional(self, name: str) -> Tensor | None:
        """The same of a column that the batch need not have."""
        return None if getattr(self.batch, name) is None else self.column(name)

    @property
    def advantages(self) -> Tensor:
        """[B], one a document."""
        return self.column("advantages")[:, 0]

    def inputs(self) -> dict[str, Tensor]:
        """What TRL's trainers read of a batch."""
        return {
            "prompt_ids": torch.zeros(len(self.slots), 1, dtype=torch.int64),
            "prompt_mask": torch.ones(len(self.slots), 1, dtype=torch.int64),
            "completion_ids": torch.where(self.mask, self.batch.labels[self.slots], 0),
            "completion_mask": self.mask.long(),
            "advantages": self.advantages,
        }


# TRL's, on one process.
ACCELERATOR = accelerator(1)


def padded(documents: list[Any], with_old: bool = True) -> Padded:
    """Documents with labels, none so far off the policy that ratios saturate."""
    documents = [x for x in documents if not isinstance(x.advantage, list)]
    batch = pack([x for x in documents if len(x.tokens) > max(x.prompt_length or 0, 1)])
    batch = batch.replace(old_logprobs=batch.old_logprobs.clamp(min=-5))  # type: ignore[union-attr]
    statistics = random_statistics(batch)
    logprobs = statistics.logprobs.detach().clamp(-6, -0.01).requires_grad_()
    statistics = TokenStatistics(logprobs, statistics.entropy, statistics.logsumexp)
    rows = [
        ((batch.document_index == d) & (batch.labels != -100)).nonzero()[:, 0]
        for d in range(batch.num_documents)
    ]
    length = max(len(row) for row in rows)
    slots = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        slots[number, : len(row)] = row
        mask[number, : len(row)] = True
    if not with_old:
        batch = batch.replace(old_logprobs=None)
    return Padded(batch, statistics, slots, mask)


def assert_same(data: Padded, ours: Tensor, theirs: Tensor, names: tuple[str, ...]) -> None:
    """Equal values and gradients with respect to the statistics."""
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    leaves = [getattr(data.statistics, name) for name in names]
    for got, wanted in zip(
        torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


# fastrl config, TRL loss_type, TRL settings
SEQUENCE = {"importance_sampling_level": "sequence"}
CLIP = {"epsilon_low": 0.15, "epsilon_high": 0.25}
NARROW = {"epsilon_low": 0.05, "epsilon_high": 0.08}
POLICY_LOSSES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "grpo": ({"type": "grpo", "normalisation": "documents"} | CLIP, "grpo", CLIP),
    "bnpo": ({"type": "grpo", "preset": "bnpo"} | CLIP, "bnpo", CLIP),
    "dapo": ({"type": "grpo", "preset": "dapo"} | CLIP, "dapo", CLIP),
    "dr_grpo": (
        {"type": "grpo", "preset": "dr_grpo", "length": MAX_LENGTH} | CLIP,
        "dr_grpo",
        CLIP,
    ),
    "delta": ({"type": "grpo", "delta": 1.4} | CLIP, "dapo", CLIP | {"delta": 1.4}),
    "gspo": ({"type": "gspo"} | NARROW, "grpo", NARROW | SEQUENCE),
    "gspo_tokens": (
        {"type": "gspo", "normalisation": "tokens"} | NARROW,
        "dapo",
        NARROW | SEQUENCE,
    ),
    "luspo": ({"type": "luspo"} | NARROW, "luspo", NARROW | SEQUENCE),
    "cispo": ({"type": "cispo", "epsilon_high": 0.2}, "cispo", {"epsilon_high": 1.2}),
    # As tensors: TRL chooses between Python numbers by `torch.where`, which makes them fp32.
    "sapo": (
        {"type": "sapo"},
        "sapo",
        {
            "sapo_temperature_pos": torch.tensor(1.0, dtype=torch.float64),
            "sapo_temperature_neg": torch.tensor(1.05, dtype=torch.float64),
        },
    ),
    "vespo": ({"type": "vespo"}, "vespo", {}),
    "kl": ({"type": "grpo", "kl": {"coefficient": 0.3}} | CLIP, "dapo", CLIP | {"beta": 0.3}),
    "kl_plain": (
        {"type": "grpo", "kl": {"coefficient": 0.3, "gradient": "estimator"}} | CLIP,
        "dapo",
        CLIP | {"beta": 0.3, "use_bias_correction_kl": False},
    ),
    "kl_document": (
        {"type": "gspo", "kl": {"coefficient": 0.3, "ratio_level": "document"}} | NARROW,
        "grpo",
        NARROW | SEQUENCE | {"beta": 0.3},
    ),
}

# Those that only TRL's trainer has.
TRAINER_LOSSES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "top_entropy": (
        {"type": "grpo", "entropy": {"top_fraction": 0.3}} | CLIP,
        "dapo",
        CLIP | {"top_entropy_quantile": 0.3},
    ),
    "bonus": (
        {"type": "grpo", "normalisation": "documents", "entropy": {"bonus": 0.2}} | CLIP,
        "grpo",
        CLIP | {"entropy_coef": 0.2},
    ),
    "off_policy": (
        {"type": "grpo", "off_policy_mask": {"threshold": 0.03, "behaviour": "rollout"}} | CLIP,
        "dapo",
        CLIP | {"off_policy_mask_threshold": 0.03},
    ),
    "token_truncate": (
        {"type": "grpo", "rollout_correction": {"low": 0.95, "high": 1.05}} | CLIP,
        "dapo",
        CLIP | {"mode": "token_truncate", "low": 0.95, "high": 1.05},
    ),
    "token_mask": (
        {"type": "grpo", "rollout_correction": {"mode": "mask", "high": 1.05}} | CLIP,
        "dapo",
        CLIP | {"mode": "token_mask", "low": None, "high": 1.05},
    ),
    "sequence_truncate": (
        {"type": "gspo", "rollout_correction": {"level": "document", "mean": "product"}} | NARROW,
        "grpo",
        NARROW | SEQUENCE | {"mode": "sequence_truncate", "low": None, "high": 2.0},
    ),
    "sequence_mask": (
        {
            "type": "grpo",
            "rollout_correction": {
                "level": "document",
                "mean": "product",
                "mode": "mask",
                "high": 1.1,
            },
        }
        | CLIP,
        "dapo",
        CLIP | {"mode": "sequence_mask", "low": None, "high": 1.1},
    ),
}


def trl_loss(data: Padded, loss_type: str, settings: dict[str, Any]) -> Tensor:
    """`GRPOTrainer._compute_loss` on a trainer that has nothing but what this method reads."""
    module = installed("trl.trainer.grpo_trainer")
    return computed_loss(module.GRPOTrainer, data, loss_type, settings)


def computed_loss(
    trainer_class: Any, data: Padded, loss_type: str, settings: dict[str, Any]
) -> Tensor:
    entropy, logprobs = data.statistics.entropy, data.statistics.logprobs
    assert entropy is not None
    settings = DEFAULTS | settings
    inputs = data.inputs() | {
        "old_per_token_logps": data.optional("old_logprobs"),
        "ref_per_token_logps": data.column("ref_logprobs"),
        "sampling_per_token_logps": data.column("rollout_logprobs"),
        "num_items_in_batch": data.mask.sum(),
    }
    if "mode" in settings:
        old = data.optional("old_logprobs")
        old = data.pad(logprobs.detach()) if old is None else old
        difference = (old - data.column("rollout_logprobs")) * data.mask
        bounds = (settings["low"], settings["high"])
        weights = importance_weights(difference, settings["mode"], *bounds)
        inputs["importance_sampling_ratio"] = weights
    trainer = trainer_state(
        trainer_class,
        settings,
        loss_type,
        lambda: (data.pad(logprobs), data.pad(entropy)),
        MAX_LENGTH,
        corrects="mode" in settings,
    )
    loss: Tensor = trainer_class._compute_loss(trainer, None, inputs)
    return loss


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("name", [*POLICY_LOSSES, *TRAINER_LOSSES])
def test_trl(name: str, on_policy: bool) -> None:
    """On policy TRL's loss is given no old log-probabilities."""
    config, loss_type, settings = (POLICY_LOSSES | TRAINER_LOSSES)[name]
    data = padded(policy_documents(), with_old=not on_policy)
    config = config | {"on_policy": on_policy}
    ours = LossCase(name, config).loss()(data.statistics, data.batch)
    needed = ("logprobs", "entropy") if name == "bonus" else ("logprobs",)
    assert_same(data, ours, trl_loss(data, loss_type, settings), needed)


def test_trl_gmpo() -> None:
    module = installed("trl.experimental.gmpo.gmpo_trainer")
    data = padded(policy_documents())
    epsilons = {"epsilon_low": 0.2, "epsilon_high": 0.1}
    ours = LossCase("gmpo", {"type": "gmpo"} | epsilons).loss()(data.statistics, data.batch)
    theirs = computed_loss(module.GMPOTrainer, data, "grpo", epsilons)
    assert_same(data, ours, theirs, ("logprobs",))


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_liger(name: str, on_policy: bool) -> None:
    module = installed("liger_kernel.chunked_loss.grpo_loss")
    config, loss_type, settings = POLICY_LOSSES[name]
    data = padded(policy_documents(), with_old=not on_policy)
    ours = LossCase(name, config | {"on_policy": on_policy}).loss()(data.statistics, data.batch)
    theirs, _ = module.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        data.pad(data.statistics.logprobs),
        data.mask,
        data.advantages,
        data.mask,
        ref_per_token_logps=data.column("ref_logprobs"),
        old_per_token_logps=data.optional("old_logprobs"),
        loss_type=loss_type,
        max_completion_length=MAX_LENGTH,
        **({"beta": 0.0, "use_bias_correction_kl": True} | settings),
    )
    assert_same(data, ours, theirs, ("logprobs",))


def test_trl_rloo() -> None:
    """Its clipped ratio of whole documents is 1 on policy, where its gradient is REINFORCE's."""
    trainer_class = installed("trl.trainer.rloo_trainer").RLOOTrainer
    data = padded(policy_documents())
    config = {"type": "reinforce", "normalisation": "constant", "length": 1}
    ours = LossCase("rloo", config).loss()(data.statistics, data.batch)
    logprobs, entropy = data.statistics.logprobs, data.statistics.entropy
    assert entropy is not None
    trainer = SimpleNamespace(
        epsilon_low=0.2,
        epsilon_high=0.2,
        model=SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            data.pad(logprobs),
            data.pad(entropy),
            None,
        ),
    )
    inputs = data.inputs() | {"old_logps": data.pad(logprobs.detach()).sum(1)}
    theirs = trainer_class._compute_loss(trainer, None, inputs)
    (got,), (wanted,) = (torch.autograd.grad(loss, logprobs) for loss in (ours, theirs))
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


# fastrl config, TRL's and Liger's loss_type
PREFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "sigmoid": ({"variant": "sigmoid"}, "sigmoid"),
    "sigmoid_norm": ({"variant": "sigmoid", "log_ratio": "mean"}, "sigmoid_norm"),
    "hinge": ({"variant": "hinge"}, "hinge"),
    "ipo": ({"variant": "ipo", "log_ratio": "mean"}, "ipo"),
}


def preferences(name: str) -> tuple[Padded, Tensor, Tensor, Tensor]:
    """Pairs, our loss of them, and the rows of the chosen and of the rejected documents."""
    data = padded(pair_documents())
    config = {"type": "dpo", "beta": 0.4} | PREFERENCES[name][0]
    ours = LossCase("dpo", config, pairs=True).loss()(data.statistics, data.batch)
    assert data.batch.group_index is not None
    groups = data.pad(data.batch.group_index)[:, 0]
    order = groups.argsort(stable=True)
    chosen, rejected = (
        order[(data.advantages[order] * sign > 0).nonzero()[:, 0]] for sign in (1, -1)
    )
    return data, ours, chosen, rejected


@pytest.mark.parametrize("name", PREFERENCES)
def test_trl_dpo(name: str) -> None:
    trainer_class = installed("trl.trainer.dpo_trainer").DPOTrainer
    data, ours, chosen, rejected = preferences(name)
    rows = torch.cat([chosen, rejected])
    # Theirs has a first token that nothing predicts, and as many documents of each side.
    mask = torch.nn.functional.pad(data.mask[rows].long(), (1, 0))
    nothing = torch.zeros(len(rows), data.mask.shape[1], dtype=torch.float64)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[PREFERENCES[name][1]],
        loss_weights=[1.0],
        beta=0.4,
        use_weighting=False,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": data.column("ref_logprobs")[chosen].sum(1),
        "ref_rejected_logps": data.column("ref_logprobs")[rejected].sum(1),
    }
    outputs = SimpleNamespace(
        log_probs=data.pad(data.statistics.logprobs)[rows],
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing > 0,
    )
    theirs = trainer_class._compute_loss(trainer, lambda **_: outputs, inputs, False)
    assert_same(data, ours, theirs, ("logprobs",))


@pytest.mark.parametrize("name", ["sigmoid", "hinge"])
def test_liger_dpo(name: str) -> None:
    module = installed("liger_kernel.chunked_loss.dpo_loss")
    data, ours, chosen, rejected = preferences(name)
    sums = data.pad(data.statistics.logprobs).sum(1)
    ref_sums = data.column("ref_logprobs").sum(1)
    theirs = module.LigerFusedLinearDPOFunction.preference_loss_fn(
        sums[chosen],
        sums[rejected],
        torch.empty(len(data.slots), 1),
        ref_sums[chosen],
        ref_sums[rejected],
        beta=0.4,
        loss_type=PREFERENCES[name][1],
    )[0]
    assert_same(data, ours, theirs, ("logprobs",))


@pytest.mark.parametrize(
    ("divergence", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jensen_shannon", 0.3)]
)
def test_divergences_of_trl_and_liger(divergence: str, beta: float) -> None:
    from fastrl.functional.head.distillation import column_divergence

    gkd = installed("trl.experimental.gkd.gkd_trainer").GKDTrainer
    liger = installed("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDFunction
    student = torch.randn(6, 19, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, 19, dtype=torch.float64)
    log_s, log_t = torch.log_softmax(student, 1), torch.log_softmax(teacher, 1)
    ours = column_divergence(log_s, log_t, divergence, beta).sum()  # type: ignore[arg-type]
    for theirs in (
        gkd.generalized_jsd_loss(student, teacher, beta=beta, reduction="sum"),
        liger.distillation_loss_fn(student, teacher, beta=beta),
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
        (got,) = torch.autograd.grad(ours, student, retain_graph=True)
        (wanted,) = torch.autograd.grad(theirs, student, retain_graph=True)
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)
