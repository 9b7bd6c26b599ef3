"""verl's `ppo_loss`, which its workers call on a micro-batch, with the counts of its engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.frameworks import rows
from benchmarks.frameworks.batch import LIMIT, Piece, RecordedBatch, Split
from benchmarks.frameworks.rows import Reason, Row, in_words, installed


def step(
    recorded: RecordedBatch,
    split: Split,
    *,
    rollout: dict[str, Any] | None = None,
    old: str = "logprobs",
    policy_loss: dict[str, Any],
    **settings: Any,
) -> Tensor:
    """Gradients add up over micro-batches, mean over ranks (FSDP)."""
    config = actor_config(policy_loss, settings)
    total = recorded.weight.new_zeros(())
    for rank in split:
        for numbers in rank:
            piece = recorded.piece(numbers)
            data = inputs(piece, rollout, old)
            counts = {
                "dp_size": len(split),
                "batch_num_tokens": recorded.num_labels,
                "global_batch_size": len(recorded.documents),
            }
            installed("verl.utils.tensordict_utils").assign_non_tensor(data, **counts)
            loss = installed("verl.workers.utils.losses").ppo_loss
            value, _ = loss(config, outputs(piece, settings), data)
            total = total + value / len(split)
    return total


def actor_config(policy_loss: dict[str, Any], settings: dict[str, Any]) -> Any:
    """`ActorConfig` with what the loss reads."""
    module = installed("verl.workers.config")
    return module.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=module.PolicyLossConfig(**policy_loss),
        **settings,
    )


def inputs(piece: Piece, rollout: dict[str, Any] | None, old: str) -> Any:
    """The micro-batch: jagged completions; `old` names the recorded column of the old policy."""
    columns = {
        "prompts": jagged([torch.tensor(x) for x in piece.prompts]),
        "responses": of_tokens(piece, piece.ids),
        "response_mask": of_tokens(piece, piece.mask.long()),
        "old_log_probs": of_tokens(piece, piece.column(old)),
        "ref_log_prob": of_tokens(piece, piece.column("ref_logprobs")),
        "advantages": of_tokens(piece, piece.advantages[:, None] * piece.mask),
    }
    if rollout is not None:
        correction = installed("verl.trainer.ppo.rollout_corr_helper")
        weights, kept, _ = correction.compute_rollout_correction_and_rejection_mask(
            piece.column("logprobs"), piece.column("rollout_logprobs"), piece.mask.long(), **rollout
        )
        columns["response_mask"] = of_tokens(piece, kept)
        if weights is not None:
            columns["rollout_is_weights"] = of_tokens(piece, weights.batch["rollout_is_weights"])
    return installed("tensordict").TensorDict(columns, batch_size=[len(piece.documents)])


def outputs(piece: Piece, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Of the model: values for all tokens of the micro-batch, without padding."""
    logprobs, entropies = piece.statistics()
    found = {"log_probs": logprobs}
    if settings.get("entropy_coeff"):
        found["entropy"] = entropies
    num_tokens = piece.hidden.shape[0]
    return {
        name: values.new_zeros(num_tokens).index_put(
            (piece.slots[piece.present],), values[piece.present]
        )
        for name, values in found.items()
    }


def jagged(values: list[Tensor]) -> Tensor:
    """A nested tensor."""
    return torch.nested.nested_tensor(values, layout=torch.jagged)


def of_tokens(piece: Piece, values: Tensor) -> Tensor:  # [B, C]
    """A nested tensor without the padding."""
    return jagged([row[kept] for row, kept in zip(values, piece.present, strict=True)])


CLIP = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25}
NARROW = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}

# loss_agg_mode and loss_scale_factor, fastrl's normalisation, why they differ where they do
MODES: list[tuple[dict[str, Any], dict[str, Any], Reason | None]] = [
    ({"loss_agg_mode": "token-mean"}, {"normalisation": "tokens"}, None),
    ({"loss_agg_mode": "seq-mean-token-mean"}, {"normalisation": "documents"}, None),
    (
        {"loss_agg_mode": "seq-mean-token-sum"},
        {"normalisation": "constant", "length": 1},
        None,
    ),
    (
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": LIMIT},
        {"normalisation": "constant", "length": LIMIT},
        None,
    ),
    (
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
        {"normalisation": "constant", "length": LIMIT},
        rows.WIDTH,
    ),
    ({"loss_agg_mode": "token-sum"}, {"normalisation": "tokens"}, rows.NO_DIVISOR),
]

# loss_mode, their settings, fastrl's config
LOSSES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # The dual clip is always on, at 3 if nothing else is said.
    ("vanilla", CLIP | {"clip_ratio_c": 1.4}, {"type": "grpo", "delta": 1.4} | rows.CLIP),
    ("gspo", NARROW, {"type": "gspo_token"} | rows.NARROW),
    ("gpg", {}, {"type": "reinforce"}),
    (
        "cispo",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
        {"type": "cispo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    ),
    (
        "dppo_tv",
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1.5},
        {"type": "dppo", "epsilon_low": 0.02, "epsilon_high": 0.03, "max_ratio": 1.5},
    ),
    (
        "dppo_kl",
        {"clip_ratio_low": 0.002, "clip_ratio_high": 0.003, "clip_ratio_c": 1.5},
        {
            "type": "dppo",
            "divergence": "kl",
            "epsilon_low": 0.002,
            "epsilon_high": 0.003,
            "max_ratio": 1.5,
        },
    ),
]
DOCUMENTS = {"normalisation": "documents"}
BY_DOCUMENTS = {"loss_agg_mode": "seq-mean-token-mean"}
VANILLA = {"clip_ratio_c": 1.4} | CLIP
GRPO = {"type": "grpo", "delta": 1.4} | rows.CLIP


def row(
    loss_mode: str,
    settings: dict[str, Any],
    config: dict[str, Any] | None,
    reason: Reason | None = None,
    **options: Any,
) -> Row:
    """A row, its options in words."""
    rollout = options.pop("rollout", None)
    policy_loss = options.pop("policy_loss", {})
    shown = {"loss_mode": loss_mode, **settings, **policy_loss, **(rollout or {})}
    policy_loss = policy_loss | {"loss_mode": loss_mode}
    old = "rollout_logprobs" if loss_mode == "bypass_mode" else "logprobs"
    loss = partial(step, rollout=rollout, old=old, policy_loss=policy_loss, **settings)
    words = in_words(shown, CLIP, NARROW)
    if options.get("masked"):
        words += ", truncated completions masked"
    return Row("verl", words, loss, config, reason, **options)


def all_rows() -> list[Row]:
    """Every row of verl."""
    found = [
        row(loss_mode, settings | mode, config | normalisation, reason)
        for loss_mode, settings, config in LOSSES
        for mode, normalisation, reason in MODES
    ]
    found.append(row("gspo", NARROW | BY_DOCUMENTS, {"type": "gspo"} | rows.NARROW))
    # Always by documents, whatever the mode.
    found.append(row("sapo", {}, {"type": "sapo"}))
    wide = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.1}
    same = {"type": "gmpo", "epsilon_low": 0.2, "epsilon_high": 0.1}
    found.append(row("geo_mean", wide, same, rows.NOT_OVER_MICRO_BATCHES))
    dro = {
        "policy": {"type": "reinforce"},
        "square": {"type": "squared_log_ratio", "weight": 0.05},
    }
    found.append(row("dro", {}, dro, policy_loss={"dro_beta": 0.1}))
    found += [
        row("vanilla", VANILLA, GRPO, masked=True),
        row("vanilla", VANILLA | BY_DOCUMENTS, GRPO | DOCUMENTS, rows.ALL_DOCUMENTS, masked=True),
    ]
    return [*found, *covariances(), *terms(), *missing()]


def covariances() -> list[Row]:
    """Rows of the losses that choose tokens by covariance, where verl draws none of them."""
    bounds = {"clip_cov_lb": 0.2, "clip_cov_ub": 1.5}
    same = {"type": "clip_cov", "covariance_low": 0.2, "covariance_high": 1.5, "fraction": 1.0}
    of_all = {"clip_cov_ratio": 1.0} | bounds
    chosen = {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.3}
    kl = {"type": "kl_cov", "fraction": 0.1, "coefficient": 0.3}
    # In a micro-batch of equal advantages all covariances are 0, and verl penalises any token.
    one: Any = {"policy_loss": chosen, "splits": ("one",)}
    return [
        row("clip_cov", CLIP, same | rows.CLIP, policy_loss=of_all),
        row("kl_cov", {}, kl, **one),
        row("kl_cov", BY_DOCUMENTS, kl | DOCUMENTS, **one),
    ]


def rejection(name: str, threshold: str | float) -> dict[str, Any]:
    """verl's options of one mode of `rollout_rs`."""
    return {"rollout_rs": name, "rollout_rs_threshold": threshold}


DOCUMENT = {"level": "document"}
ANY: dict[str, Any] = DOCUMENT | {"aggregate": "any"}
SUM: dict[str, Any] = DOCUMENT | {"aggregate": "sum"}
MEAN: dict[str, Any] = DOCUMENT | {"aggregate": "mean"}
# verl's options and fastrl's corrections. verl's bounds of k1 are exp(k1): those of 1 / ratio.
REJECTIONS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (rejection("token_k1", "0.9765625_1.25"), [{"low": 0.8, "high": 1.024}]),
    (rejection("token_k2", 0.002), [{"statistic": "k2", "high": 0.002}]),
    (rejection("token_k3", 0.001), [{"statistic": "k3", "high": 0.001}]),
    (rejection("seq_sum_k1", "0.8_1.024"), [SUM | {"low": 0.9765625, "high": 1.25}]),
    (rejection("seq_sum_k2", 0.03), [SUM | {"statistic": "k2", "high": 0.03}]),
    (rejection("seq_sum_k3", 0.02), [SUM | {"statistic": "k3", "high": 0.02}]),
    (rejection("seq_mean_k1", "0.9765625_1.024"), [MEAN | {"low": 0.9765625, "high": 1.024}]),
    (rejection("seq_mean_k2", 0.002), [MEAN | {"statistic": "k2", "high": 0.002}]),
    (rejection("seq_mean_k3", 0.003), [MEAN | {"statistic": "k3", "high": 0.003}]),
    (rejection("seq_max_k2", 0.01), [ANY | {"statistic": "k2", "high": 0.01}]),
    (rejection("seq_max_k3", 0.015), [ANY | {"statistic": "k3", "high": 0.015}]),
    (
        {"rollout_is": "token", "rollout_is_threshold": 1.05}
        | rejection("token_k2,seq_mean_k1", "0.005,0.9765625_1.024"),
        [
            {"mode": "truncate", "high": 1.05},
            {"statistic": "k2", "high": 0.005},
            MEAN | {"low": 0.9765625, "high": 1.024},
        ],
    ),
]


def terms() -> list[Row]:
    """Rows of KL, entropy and rollout correction."""
    found = []
    for kind, kl in {
        "low_var_kl": {"gradient": "estimator"},
        "k3+": {"gradient": "straight_through"},
        "k1+": {"estimator": "k1", "gradient": "straight_through"},
        "k2": {"estimator": "k2", "gradient": "estimator"},
    }.items():
        settings = VANILLA | {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": kind}
        found.append(row("vanilla", settings, GRPO | {"kl": {"coefficient": 0.3} | kl}))
    bonus = {"entropy": {"bonus": 0.2}}
    entropy = VANILLA | {"entropy_coeff": 0.2}
    found.append(row("vanilla", entropy, GRPO | bonus))
    by_documents = GRPO | bonus | DOCUMENTS
    found.append(row("vanilla", entropy | BY_DOCUMENTS, by_documents, rows.ENTROPY_OF_DOCUMENTS))
    product = {"level": "document", "mean": "product"}
    for rollout, correction in (
        ({"rollout_is": "token", "rollout_is_threshold": 1.05}, {"high": 1.05}),
        ({"rollout_is": "sequence", "rollout_is_threshold": 1.1}, product | {"high": 1.1}),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.95_1.05"},
            {"mode": "mask", "low": 0.95, "high": 1.05},
        ),
    ):
        config = GRPO | {"rollout_correction": correction}
        found.append(row("vanilla", VANILLA, config, rollout=rollout))
    for rollout, corrections in REJECTIONS:
        config = GRPO | {"corrections": corrections}
        found.append(row("vanilla", VANILLA, config, rollout=rollout))
    # Its old policy is the sampler, to which the weights are taken.
    rollout = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.05}
    config = {"type": "reinforce", "rollout_correction": {"high": 1.05}}
    found.append(row("bypass_mode", {}, config, policy_loss={"rollout_correction": rollout}))
    return found


def missing() -> list[Row]:
    """Losses that fastrl has not."""
    return [
        row(
            "vanilla",
            VANILLA | {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k1"},
            None,
            rows.PLAIN_K1,
        ),
        row(
            "vanilla",
            VANILLA | {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "abs"},
            None,
            rows.NONE,
        ),
    ]
