"""What loss configs refuse, expand and default to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from fastrl.config import (
    AnyLossConfig,
    CrossEntropyLossConfig,
    DPPOLossConfig,
    GRPOLossConfig,
    HeadOptions,
    PolicyGradientLossConfig,
    RunConfig,
    dump_config,
    parse_config,
)
from tests.helpers.loss_cases import CASES, LossCase
from tests.helpers.loss_documents import pack, policy_documents, random_statistics
from tests.helpers.loss_heads import capped_head

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "grpo", "normalisation": "constant"}, "`length` must be given with"),
    ({"type": "grpo", "length": 3}, "`length` must be given with"),
    ({"type": "grpo", "preset": "dr_grpo"}, "`length` must be given with"),
    ({"type": "grpo", "preset": "rloo"}, "'dapo', 'dr_grpo' or 'bnpo'"),
    ({"type": "grpo", "delta": 1.0}, "greater than 1"),
    ({"type": "grpo", "ratio_level": "document"}, "Extra inputs are not permitted"),
    ({"type": "reinforce", "epsilon_low": 0.1}, "Extra inputs are not permitted"),
    ({"type": "cispo", "ratio_level": "document_token"}, "'token' or 'document'"),
    ({"type": "luspo", "normalisation": "tokens"}, "'constant'"),
    ({"type": "dpo", "normalisation": "tokens"}, "'groups'"),
    ({"type": "cross_entropy", "label_smoothing": 1.0}, "less than 1"),
    ({"type": "distillation", "beta": 0.5}, "`beta` must be given with"),
    ({"type": "grpo", "kl": {}}, "coefficient"),
    ({"type": "grpo", "kl": {"coefficient": 0.0}}, "greater than 0"),
    (
        {"type": "grpo", "kl": {"coefficient": 1.0, "estimator": "k2"}},
        "`estimator: k2` must not go with `gradient: ratio`",
    ),
    (
        {
            "type": "grpo",
            "kl": {"coefficient": 1.0, "estimator": "k2", "gradient": "straight_through"},
        },
        "has no effect with `estimator: k2`",
    ),
    (
        {
            "type": "grpo",
            "kl": {"coefficient": 1.0, "gradient": "estimator", "ratio_level": "document"},
        },
        "`ratio_level: document` has no effect",
    ),
    (
        {"type": "grpo", "rollout_correction": {"level": "document"}},
        "`mean` must be given with `level: document`",
    ),
    (
        {"type": "grpo", "rollout_correction": {"mean": "product"}},
        "`mean` must be given with `level: document`",
    ),
    (
        {"type": "grpo", "rollout_correction": {"mode": "mask", "high": None}},
        "`mode: mask` must have `low` or `high`",
    ),
    (
        {"type": "grpo", "rollout_correction": {"low": 2.0, "high": 1.0}},
        "`low` must be below `high`",
    ),
    ({"type": "grpo", "entropy": {}}, "`entropy` must have"),
    (
        {"type": "grpo", "entropy": {"adaptive": {"target": 1.0, "low": 2.0}}},
        "`low` must be below `high`",
    ),
    (
        {"type": "grpo", "entropy": {"adaptive": {"target": 1.0, "low": 0.1}}},
        "`bonus` must be within `adaptive.low` and `adaptive.high`, 0.1 to 1.0, got 0.0",
    ),
    ({"type": "vespo", "rollout_correction": {}}, "`rollout_correction` must not be given"),
    (
        {"type": "clip_cov", "covariance_low": 5.0},
        "`covariance_low` must be below `covariance_high`, 5.0, got 5.0",
    ),
    ({"type": "clip_cov", "fraction": 0.0}, "greater than 0"),
    ({"type": "kl_cov", "on_policy": True}, "`on_policy` must not be given with `type: kl_cov`"),
    ({"type": "kl_cov", "epsilon_low": 0.1}, "Extra inputs are not permitted"),
    ({"type": "positive_nll", "normalisation": "documents"}, "'tokens'"),
    ({"type": "grpo", "proximal": {"weight": 1.0}}, "less than 1"),
    (
        {"type": "grpo", "proximal": {}, "on_policy": True},
        "`proximal` must not be given with `on_policy`",
    ),
    ({"type": "reinforce", "proximal": {}}, "`proximal` must not be given with `type: reinforce`"),
    ({"type": "vespo", "proximal": {}}, "`proximal` must not be given with `type: vespo`"),
    ({"type": "reinforce", "kl": {"coefficient": 1.0}}, "`kl.gradient: ratio` must not be given"),
    (
        {"type": "reinforce", "off_policy_mask": {"threshold": 1.0}},
        "`off_policy_mask.behaviour: old` must not be given",
    ),
    ({"type": "reinforce", "on_policy": True}, "`on_policy` must not be given with `type: reinf"),
    ({"type": "dpo", "on_policy": True}, "Extra inputs are not permitted"),
    ({"type": "cross_entropy", "on_policy": True}, "Extra inputs are not permitted"),
    (
        {"type": "grpo", "on_policy": True, "off_policy_mask": {"threshold": 1.0}},
        "`off_policy_mask.behaviour: old` has no effect with `on_policy`",
    ),
]

# A correction, options of its loss, what the message says.
REFUSED_CORRECTIONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "`mode: gate` must have `low` or `high`"),
    ({"mode": "mask"}, {}, "`mode: mask` must have `low` or `high`"),
    ({"low": 2.0, "high": 1.0}, {}, "`low` must be below `high`"),
    ({"low": -0.1}, {}, "`low` must be above 0"),
    ({"high": 0.0}, {}, "`high` must be above 0"),
    (
        {"statistic": "k2", "low": 0.1, "high": 0.2},
        {},
        "`low` must not be given with `statistic: k2",
    ),
    ({"statistic": "probability_difference", "high": 1.0}, {}, "`high` must be below 1"),
    ({"behaviour": "old", "high": 2.0}, {}, "`policy: old` must not go with `behaviour: old`"),
    ({"level": "document", "high": 2.0}, {}, "`aggregate` must be given with `level: document`"),
    ({"aggregate": "any", "high": 2.0}, {}, "`aggregate` must be given with `level: document`"),
    (
        {"mode": "truncate", "statistic": "k3", "high": 2.0},
        {},
        "`mode: truncate` must go with `statistic: ratio`",
    ),
    (
        {"mode": "mask", "level": "document", "aggregate": "any", "high": 2.0},
        {},
        "must not go with `aggregate: any`",
    ),
    ({"level": "batch", "high": 2.0}, {}, "`level: batch` must not go with `statistic: ratio`"),
    (
        {"level": "batch", "statistic": "k2", "high": 2.0, "advantage": "negative"},
        {},
        "`level: batch` must not go with `advantage: negative`",
    ),
    ({"high": 2.0}, {"type": "reinforce"}, "`corrections.0` must compare `policy: current`"),
    (
        {"policy": "current", "behaviour": "old", "high": 2.0},
        {"on_policy": True},
        "`corrections.0`: `behaviour: old` has no effect with `on_policy`",
    ),
    (
        {"policy": "current", "mode": "truncate"},
        {},
        "whose ratio current / old would count twice",
    ),
    ({"mode": "mask", "high": 2.0}, {"type": "vespo"}, "must not be given with `type: vespo`"),
    (
        {"mode": "truncate", "high": 2.0},
        {"rollout_correction": {}},
        "must differ from `rollout_correction`",
    ),
    (
        {"mode": "mask", "high": 3.0},
        {"rollout_correction": {}},
        "must not be a second weight",
    ),
]


@pytest.mark.parametrize(
    ("entry", "options", "message"), REFUSED_CORRECTIONS, ids=lambda value: str(value)[:60]
)
def test_a_correction_is_refused_by_name(
    entry: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    config = {"type": "grpo", "corrections": [entry], **options}
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(AnyLossConfig).validate_python(config)


def test_weights_may_differ_by_the_sign_of_the_advantage() -> None:
    entries = [
        {"mode": "truncate", "high": 2.0, "advantage": "negative"},
        {"mode": "mask", "high": 3.0, "advantage": "positive"},
    ]
    assert len(GRPOLossConfig.model_validate({"corrections": entries}).corrections) == 2


OLD_KEYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rollout_correction": {"high": 1.05}}, {"mode": "truncate", "high": 1.05}),
    (
        {"rollout_correction": {"level": "document", "mean": "geometric", "mode": "mask"}},
        {"mode": "mask", "level": "document", "aggregate": "mean", "high": 2.0},
    ),
    (
        {"off_policy_mask": {"threshold": 0.02}},
        {
            "policy": "current",
            "behaviour": "old",
            "level": "document",
            "aggregate": "mean",
            "statistic": "k1",
            "high": 0.02,
            "advantage": "negative",
        },
    ),
]


@pytest.mark.parametrize(("options", "entry"), OLD_KEYS, ids=["token", "document", "off_policy"])
def test_options_of_their_own_are_cases_of_corrections(
    options: dict[str, Any], entry: dict[str, Any]
) -> None:
    batch = pack(policy_documents())
    statistics = random_statistics(batch)
    cases = [LossCase("", {"type": "grpo", **x}) for x in (options, {"corrections": [entry]})]
    old, new = (case.loss() for case in cases)
    assert torch.equal(old(statistics, batch), new(statistics, batch))
    assert old.scope == new.scope
    assert old.config.required_columns() == new.config.required_columns()


class NoRatioConfig(PolicyGradientLossConfig):
    """Of a loss of one's own without a ratio."""

    type: str = "my_losses:NoRatio"

    def required_columns(self) -> frozenset[str]:
        return super().required_columns() - {"old_logprobs"}


def test_on_policy_is_refused_by_a_loss_of_ones_own_without_a_ratio() -> None:
    with pytest.raises(ValidationError, match="`on_policy` must not be given with `type: my_loss"):
        NoRatioConfig(on_policy=True)
    assert NoRatioConfig().required_columns() == {"advantages"}


SMOOTH = {"type": "cross_entropy", "label_smoothing": 0.1}


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(AnyLossConfig).validate_python(config)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({}, "`keep` must have"),
        ({"recorded": True, "top_k": 3}, "`recorded` must not be given with"),
        ({"top_p": 1.0}, "less than 1"),
        ({"top_k": 3}, "`keep` must not be given with `label_smoothing` of the loss `smooth`"),
    ],
)
def test_refused_keep_sets(keep: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HeadOptions.model_validate({"keep": keep, "losses": {"smooth": SMOOTH}})


def test_a_phase_has_no_loss_that_its_head_refuses() -> None:
    head = capped_head({"plain": {"type": "cross_entropy"}}, keep={"top_k": 3})
    smooth = CrossEntropyLossConfig.model_validate(SMOOTH)
    with pytest.raises(ValueError, match="`keep` must not be given with `label_smoothing`"):
        head.set_losses({"smooth": smooth})
    phase = {
        "type": "rl",
        "steps": 1,
        "rollouts": {"type": "files", "paths": ["x.jsonl"]},
        "losses": {"policy": {"type": "grpo"}, "smooth": SMOOTH},
    }
    model = {"type": "llama", "head": {"keep": {"top_k": 3}}}
    with pytest.raises(ValidationError, match="`keep` must not be given with `label_smoothing`"):
        RunConfig.model_validate({"model": model, "phases": [phase]})


def test_presets_expand_to_fields_that_can_be_overridden() -> None:
    dapo = GRPOLossConfig(preset="dapo")
    assert (dapo.epsilon_low, dapo.epsilon_high, dapo.normalisation) == (0.2, 0.28, "tokens")
    assert GRPOLossConfig(preset="dapo", epsilon_high=0.3).epsilon_high == 0.3
    dr_grpo = GRPOLossConfig(preset="dr_grpo", length=64)
    assert (dr_grpo.normalisation, dr_grpo.length) == ("constant", 64)
    assert GRPOLossConfig(preset="bnpo").normalisation == "tokens"


def test_bounds_of_dppo_follow_its_divergence() -> None:
    assert DPPOLossConfig().epsilon_low == DPPOLossConfig().epsilon_high == 0.2
    kl = DPPOLossConfig(divergence="kl", epsilon_high=0.1)
    assert (kl.epsilon_low, kl.epsilon_high) == (0.05, 0.1)


def test_the_resolved_config_shows_what_a_preset_stands_for() -> None:
    options = parse_config(HeadOptions, {"losses": {"policy": {"type": "grpo", "preset": "dapo"}}})
    text = dump_config(options)
    assert "epsilon_high: 0.28" in text
    assert "preset: dapo" in text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_configs_survive_a_round_trip(case: LossCase) -> None:
    dumped = case.parsed.model_dump()
    assert TypeAdapter(AnyLossConfig).validate_python(dumped) == case.parsed


OPTIONAL_COLUMNS = {
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "model_version",
    "group_index",
    "group_label_counts",
    "rl_weights",
    "ce_weights",
    "distill_weights",
    "teacher_tokens",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_required_columns_are_those_without_which_a_batch_is_refused(case: LossCase) -> None:
    batch = case.batch()
    statistics = random_statistics(batch).map(torch.Tensor.detach)
    loss, columns = case.loss(), case.parsed.required_columns()
    assert columns <= OPTIONAL_COLUMNS
    least = batch.replace(**dict.fromkeys(OPTIONAL_COLUMNS - columns))
    value, metrics = loss.with_metrics(statistics, least)
    assert torch.equal(value, loss(statistics, batch))
    assert metrics["loss"] == value
    for column in columns - {"teacher_tokens"}:  # the head reads these
        with pytest.raises(ValueError, match=f"`{column}` must be in the batch"):
            loss(statistics, batch.replace(**{column: None}))
