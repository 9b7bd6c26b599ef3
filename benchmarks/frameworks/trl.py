"""TRL's trainers: their `_compute_loss` on a trainer that has nothing but what the method reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.frameworks import rows
from benchmarks.frameworks.batch import LIMIT, Piece, RecordedBatch, Split
from benchmarks.frameworks.ours import OTHER_STEP
from benchmarks.frameworks.rows import CLIP, NARROW, Reason, Row, in_words, installed

GRPO = ("trl.trainer.grpo_trainer", "GRPOTrainer")
GMPO = ("trl.experimental.gmpo.gmpo_trainer", "GMPOTrainer")
DEFAULTS: dict[str, Any] = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    # Optimizer steps in a generation, 1 or 2.
    "steps_in_generation": 1,
}


def grpo_step(
    recorded: RecordedBatch,
    split: Split,
    *,
    trainer: tuple[str, str] = GRPO,
    loss_type: str,
    **settings: Any,
) -> Tensor:
    """The step of `GRPOTrainer` or a subclass: a sum over micro-batches, the mean of ranks."""
    trainer_class = getattr(installed(trainer[0]), trainer[1])
    settings = DEFAULTS | settings
    total = recorded.weight.new_zeros(())
    for rank in split:
        for numbers in rank:
            piece = recorded.piece(numbers)
            state = trainer_state(
                trainer_class,
                settings,
                loss_type,
                piece.statistics,
                LIMIT,
                corrects="vllm_importance_sampling_mode" in settings,
                micro_batches=len(rank),
                ranks=len(split),
            )
            labels = recorded.num_labels
            if settings["steps_in_generation"] == 2:
                labels += OTHER_STEP
            inputs = grpo_inputs(piece, settings, labels)
            total = total + trainer_class._compute_loss(state, None, inputs) / len(split)
    return total


def trainer_state(
    trainer_class: Any,
    settings: dict[str, Any],
    loss_type: str,
    statistics: Callable[[], tuple[Tensor, Tensor]],
    max_length: int,
    *,
    corrects: bool,
    micro_batches: int = 1,
    ranks: int = 1,
) -> SimpleNamespace:
    """A trainer's attributes.

    Args:
        trainer_class: whose methods are run.
        settings: all of `DEFAULTS`.
        loss_type: of TRL's config.
        statistics: gives log-probabilities and entropies [B, C].
        max_length: of a completion.
        corrects: whether the loss gets weights for the mismatch with the sampler.
        micro_batches: of an optimizer step.
        ranks: of the data axis.
    """
    steps_per_generation = micro_batches * settings["steps_in_generation"]
    state = SimpleNamespace(
        **settings,
        args=SimpleNamespace(**settings, steps_per_generation=steps_per_generation),
        loss_type=loss_type,
        model=SimpleNamespace(training=True),
        accelerator=accelerator(ranks),
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        use_vllm=corrects,
        vllm_importance_sampling_correction=corrects,
        current_gradient_accumulation_steps=micro_batches,
        max_completion_length=max_length,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (*statistics(), None),
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        get_gamma_weights=trainer_class.get_gamma_weights,
    )
    state.get_high_entropy_mask = partial(trainer_class.get_high_entropy_mask, state)
    return state


def accelerator(ranks: int) -> SimpleNamespace:
    """What a rank sees of the others: their number (collectives only serve metrics)."""
    return SimpleNamespace(
        device="cpu",
        num_processes=ranks,
        sync_gradients=True,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
        pad_across_processes=lambda value, dim, pad_index: value,
    )


def grpo_inputs(piece: Piece, settings: dict[str, Any], num_labels: int) -> dict[str, Tensor]:
    """The inputs of a micro-batch."""
    inputs = {
        "prompt_ids": torch.ones(len(piece.documents), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(piece.documents), 1, dtype=torch.int64),
        "completion_ids": piece.ids,
        "completion_mask": piece.mask.long(),
        "advantages": piece.advantages,
        "old_per_token_logps": piece.column("logprobs"),
        "ref_per_token_logps": piece.column("ref_logprobs"),
        "sampling_per_token_logps": piece.column("rollout_logprobs"),
        "num_items_in_batch": torch.tensor(num_labels),
    }
    if "vllm_importance_sampling_mode" in settings:
        inputs["importance_sampling_ratio"] = rollout_ratio(piece, **settings)
    return inputs


def rollout_ratio(
    piece: Piece,
    vllm_importance_sampling_mode: str,
    vllm_importance_sampling_clip_min: float | None = None,
    vllm_importance_sampling_clip_max: float = 2.0,
    **_: Any,
) -> Tensor:
    """The weights that are an input of the loss."""
    difference = (piece.column("logprobs") - piece.column("rollout_logprobs")) * piece.mask
    return importance_weights(
        difference,
        vllm_importance_sampling_mode,
        vllm_importance_sampling_clip_min,
        vllm_importance_sampling_clip_max,
    )


def importance_weights(
    difference: Tensor,  # [B, C], 0 at what is not learned from
    mode: str,
    low: float | None,
    high: float,
) -> Tensor:  # [B, C] or [B, 1]
    """The weights of log-ratios, as TRL's generation makes them (in no function)."""
    low = low or 0.0
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def rloo_step(recorded: RecordedBatch, split: Split) -> Tensor:
    """The step of `RLOOTrainer` on policy; transformers' trainer divides by the micro-batches."""
    trainer_class = installed("trl.trainer.rloo_trainer").RLOOTrainer
    total = recorded.weight.new_zeros(())
    for rank in split:
        for numbers in rank:
            piece = recorded.piece(numbers)
            logprobs, _ = piece.statistics()
            state = SimpleNamespace(
                epsilon_low=0.2,
                epsilon_high=0.2,
                model=SimpleNamespace(training=True),
                accelerator=accelerator(len(split)),
                aux_loss_enabled=False,
                _metrics=defaultdict(lambda: defaultdict(list)),
                _get_per_token_logps_and_entropies=lambda *_, p=piece, **__: (
                    *p.statistics(),
                    None,
                ),
            )
            inputs = grpo_inputs(piece, {}, recorded.num_labels)
            inputs["old_logps"] = (logprobs.detach() * piece.mask).sum(1)
            loss = trainer_class._compute_loss(state, None, inputs)
            total = total + loss / len(rank) / len(split)
    return total


SEQUENCE = {"importance_sampling_level": "sequence"}
MASKED = {"mask_truncated_completions": True}
MEANS, DOCUMENTS = rows.MEAN_OF_MEANS, rows.DOCUMENTS_OF_MICRO_BATCH

# loss_type, their settings, fastrl's config, why they differ where they do
Case = tuple[str, dict[str, Any], dict[str, Any], Reason | None]
BY_DOCUMENTS = {"type": "grpo", "normalisation": "documents"} | CLIP
LOSSES: list[Case] = [
    ("grpo", CLIP, BY_DOCUMENTS, DOCUMENTS),
    ("grpo", CLIP | MASKED, BY_DOCUMENTS, DOCUMENTS),
    ("bnpo", CLIP, {"type": "grpo", "preset": "bnpo"} | CLIP, MEANS),
    ("dapo", CLIP, {"type": "grpo"} | CLIP, None),
    ("dapo", CLIP | MASKED, {"type": "grpo"} | CLIP, None),
    ("dr_grpo", CLIP, {"type": "grpo", "preset": "dr_grpo", "length": LIMIT} | CLIP, DOCUMENTS),
    ("dapo", CLIP | {"delta": 1.4}, {"type": "grpo", "delta": 1.4} | CLIP, None),
    ("grpo", NARROW | SEQUENCE, {"type": "gspo"} | NARROW, DOCUMENTS),
    ("dapo", NARROW | SEQUENCE, {"type": "gspo", "normalisation": "tokens"} | NARROW, None),
    ("luspo", NARROW | SEQUENCE, {"type": "luspo"} | NARROW, DOCUMENTS),
    ("cispo", {"epsilon_high": 1.2}, {"type": "cispo", "epsilon_high": 0.2}, None),
    ("sapo", {}, {"type": "sapo"}, DOCUMENTS),
    ("vespo", {}, {"type": "vespo"}, None),
    ("dapo", CLIP | {"beta": 0.3}, {"type": "grpo", "kl": {"coefficient": 0.3}} | CLIP, None),
    (
        "dapo",
        CLIP | {"beta": 0.3, "use_bias_correction_kl": False},
        {"type": "grpo", "kl": {"coefficient": 0.3, "gradient": "estimator"}} | CLIP,
        None,
    ),
    (
        "grpo",
        NARROW | SEQUENCE | {"beta": 0.3},
        {"type": "gspo", "kl": {"coefficient": 0.3, "ratio_level": "document"}} | NARROW,
        DOCUMENTS,
    ),
]

# Those of the trainer alone.
DOCUMENT: dict[str, Any] = {"level": "document", "mean": "product"}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "token_truncate": {"high": 1.05},
    "token_mask": {"mode": "mask", "high": 1.05},
    "sequence_truncate": DOCUMENT | {"high": 1.1},
    "sequence_mask": DOCUMENT | {"mode": "mask", "high": 1.1},
}
TRAINER_LOSSES: list[Case] = [
    (
        "dapo",
        CLIP | {"entropy_coef": 0.2},
        {"type": "grpo", "entropy": {"bonus": 0.2}} | CLIP,
        rows.ENTROPY_OF_MICRO_BATCH,
    ),
    (
        "dapo",
        CLIP | {"off_policy_mask_threshold": 0.03},
        {"type": "grpo", "off_policy_mask": {"threshold": 0.03, "behaviour": "rollout"}} | CLIP,
        None,
    ),
    *(
        (
            "dapo",
            CLIP
            | {
                "vllm_importance_sampling_mode": mode,
                "vllm_importance_sampling_clip_max": correction["high"],
            },
            {"type": "grpo", "rollout_correction": correction} | CLIP,
            None,
        )
        for mode, correction in CORRECTIONS.items()
    ),
]


def all_rows() -> list[Row]:
    """Every row of TRL."""
    found = [
        Row(
            "TRL",
            theirs(loss_type, settings),
            partial(grpo_step, loss_type=loss_type, **without_mask(settings)),
            config,
            reason,
            masked="mask_truncated_completions" in settings,
        )
        for loss_type, settings, config, reason in [*LOSSES, *TRAINER_LOSSES]
    ]
    # Its quantile is over the tokens of a micro-batch on all ranks, on either side.
    found.append(
        Row(
            "TRL",
            "loss_type: dapo, top_entropy_quantile: 0.3",
            partial(grpo_step, loss_type="dapo", top_entropy_quantile=0.3, **CLIP),
            {"type": "grpo", "entropy": {"top_fraction": 0.3}} | CLIP,
            splits=("one",),
        )
    )
    found.append(
        Row(
            "TRL",
            "loss_type: dapo, steps_per_generation: 2 * gradient_accumulation_steps",
            partial(grpo_step, loss_type="dapo", steps_in_generation=2, **CLIP),
            {"type": "grpo"} | CLIP,
            rows.OF_GENERATION,
        )
    )
    bounds: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.1}
    gmpo = partial(grpo_step, trainer=GMPO, loss_type="grpo", **bounds)
    found.append(
        Row(
            "TRL",
            "GMPOTrainer, epsilon: 0.2, epsilon_high: 0.1",
            gmpo,
            {"type": "gmpo"} | bounds,
            DOCUMENTS,
        )
    )
    sums = {"type": "reinforce", "normalisation": "constant", "length": 1}
    found.append(Row("TRL", "RLOOTrainer, on policy", rloo_step, sums, rows.RATIOS))
    return found


def without_mask(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that the loss reads: truncated completions are masked before it."""
    return {name: value for name, value in settings.items() if name not in MASKED}


def theirs(loss_type: str, settings: dict[str, Any]) -> str:
    """Their options in words."""
    return in_words({"loss_type": loss_type} | settings, CLIP, NARROW)
