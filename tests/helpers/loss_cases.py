"""Every loss and option as a named case.

The tests of the [T] functions, of the head, of kernels and of ranks share this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

from pydantic import TypeAdapter
from torch import Tensor

from fastrl import BatchKwargs, Document, TokenBatch, TokenStatistics
from fastrl.config import AnyLossConfig, PolicyGradientLossConfig
from fastrl.functional.reference.losses import LOSSES
from fastrl.functional.reference.tokens import Tokens
from fastrl.functional.reference.tokens import of_stream as reference_of_stream
from fastrl.functional.streams import of_stream
from fastrl.layers.losses import LanguageModelLoss, build_loss
from tests.helpers.loss_documents import (
    policy_documents,
    preference_documents,
    widen,
    with_recorded_teacher,
    with_weights,
)

# Built once: it costs as much as a small test.
_LOSS_CONFIG: TypeAdapter[AnyLossConfig] = TypeAdapter(AnyLossConfig)


@dataclass(frozen=True)
class LossCase:
    """A loss config, and what kind of documents it is for."""

    name: str
    config: Mapping[str, Any] = field(hash=False)
    pairs: bool = False

    @property
    def parsed(self) -> AnyLossConfig:
        """The validated config."""
        return _LOSS_CONFIG.validate_python(dict(self.config))

    @property
    def options(self) -> dict[str, Any]:
        """All fields, as the definition takes them."""
        return self.parsed.model_dump()

    @property
    def recorded(self) -> bool:
        """Whether it is a distillation from recorded entries."""
        return bool(self.config.get("recorded"))

    @property
    def columns(self) -> list[str]:
        """The weights that the loss needs."""
        return [name for name in self.parsed.required_columns() if name.endswith("_weights")]

    def documents(self) -> list[Document]:
        """Documents with every column that the loss needs."""
        return list(_documents(self.pairs, self.recorded, bool(self.columns)))

    def packed(self, pad_to_multiple: int = 8) -> TokenBatch:
        """The documents in one sequence."""
        return _packed(self.pairs, self.recorded, bool(self.columns), pad_to_multiple)

    def batch(self) -> BatchKwargs:
        """The batch of all documents on one rank, in float64."""
        return widen(self.packed().to_kwargs()[0])

    def loss(self) -> LanguageModelLoss[Any]:
        """The loss on one rank, to be called with a batch of all labels."""
        loss = build_loss(self.parsed)
        return loss if self.parsed.stream is None else cast(Any, OfStream(loss))

    def reference(self, tokens: Tokens) -> Tensor:
        """The definition's value, without the loss's weight."""
        if self.parsed.stream is not None:
            tokens = reference_of_stream(tokens, self.parsed.stream)
        return LOSSES[self.config["type"]](tokens, self.options)


@cache
def _documents(pairs: bool, recorded: bool, weighted: bool) -> tuple[Document, ...]:
    documents = preference_documents() if pairs else policy_documents()
    if recorded:
        documents = with_recorded_teacher(documents)
    return tuple(with_weights(documents) if weighted else documents)


@cache
def _packed(pairs: bool, recorded: bool, weighted: bool, pad_to_multiple: int) -> TokenBatch:
    documents = _documents(pairs, recorded, weighted)
    return TokenBatch.from_documents(documents, pad_to_multiple=pad_to_multiple)


class OfStream:
    """A loss that takes the part of its stream of a batch, as the head hands it over."""

    def __init__(self, loss: LanguageModelLoss[Any]) -> None:
        self._loss = loss

    def __call__(self, statistics: TokenStatistics, batch: BatchKwargs) -> Tensor:
        return self._loss(statistics, of_stream(batch, self._loss.config.stream))

    def metrics(self, statistics: TokenStatistics, batch: BatchKwargs) -> dict[str, Tensor]:
        return self._loss.metrics(statistics, of_stream(batch, self._loss.config.stream))

    def with_metrics(
        self, statistics: TokenStatistics, batch: BatchKwargs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self._loss.with_metrics(statistics, of_stream(batch, self._loss.config.stream))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)


def _cases(loss: str, *variants: tuple[str, dict[str, Any]]) -> list[LossCase]:
    return [
        LossCase("_".join(filter(None, (loss, name))), {"type": loss, **config})
        for name, config in variants
    ]


# A clip that some of the ratios of `policy_documents` exceed on either side.
CLIP = {"epsilon_low": 0.15, "epsilon_high": 0.25}
NARROW = {"epsilon_low": 0.05, "epsilon_high": 0.08}
_GATE = {"level": "document"}

CASES = [
    *_cases(
        "cross_entropy",
        ("", {}),
        ("documents", {"normalisation": "documents"}),
        ("groups", {"normalisation": "groups"}),
        ("smoothed", {"label_smoothing": 0.2}),
    ),
    *_cases("z_loss", ("", {"weight": 0.5})),
    *_cases("positive_nll", ("", {"weight": 0.5})),
    *_cases(
        "grpo",
        ("", CLIP),
        ("constant", CLIP | {"normalisation": "constant", "length": 16}),
        ("documents", CLIP | {"normalisation": "documents"}),
        ("groups", CLIP | {"normalisation": "groups"}),
        ("delta", CLIP | {"delta": 1.3}),
        ("delta_inside", CLIP | {"delta": 1.1}),
        ("dapo", {"preset": "dapo"}),
    ),
    *_cases("gspo", ("", NARROW), ("tokens", NARROW | {"normalisation": "tokens"})),
    *_cases("gspo_token", ("", NARROW | {"delta": 1.2})),
    *_cases("luspo", ("", NARROW)),
    *_cases(
        "cispo",
        ("", {}),
        ("both", {"epsilon_low": 0.1, "epsilon_high": 0.1}),
        ("document", {"epsilon_high": 0.05, "ratio_level": "document"}),
    ),
    *_cases(
        "clip_cov",
        ("", CLIP | {"fraction": 0.1, "covariance_low": 0.1}),
        (
            "options",
            CLIP
            | {
                "fraction": 0.3,
                "covariance_low": -0.5,
                "covariance_high": 2.0,
                "delta": 1.2,
                "rollout_correction": {"low": 0.9, "high": 1.05},
            },
        ),
    ),
    *_cases(
        "kl_cov",
        ("", {"fraction": 0.2}),
        ("options", {"coefficient": 0.3, "max_staleness": 2, "kl": {"coefficient": 0.3}}),
    ),
    *_cases(
        "sapo",
        ("", {}),
        ("document", {"ratio_level": "document", "tau_positive": 3.0}),
        ("document_token", {"ratio_level": "document_token"}),
    ),
    *_cases("gmpo", ("", {"epsilon_low": 0.2, "epsilon_high": 0.1})),
    *_cases("vespo", ("", {}), ("flat", {"power_positive": 0.5, "rate_negative": 0.1})),
    *_cases(
        "dppo",
        ("", {"epsilon_low": 0.01, "epsilon_high": 0.02}),
        ("kl", {"divergence": "kl", "epsilon_low": 0.005, "epsilon_high": 0.005}),
        ("unbounded", {"max_ratio": None}),
    ),
    *_cases("reinforce", ("", {}), ("sums", {"normalisation": "constant", "length": 1})),
    # Options, on a token-level and on a document-level loss.
    *_cases(
        "grpo",
        ("kl_ratio", CLIP | {"kl": {"coefficient": 0.3}}),
        ("kl_k1_ratio", CLIP | {"kl": {"coefficient": 0.3, "estimator": "k1"}}),
        ("kl_plain", {"kl": {"coefficient": 0.3, "gradient": "estimator"}}),
        ("kl_clamp", {"kl": {"coefficient": 0.3, "estimator": "k1", "clamp": 0.2}}),
        ("kl_k2", {"kl": {"coefficient": 0.3, "estimator": "k2", "gradient": "estimator"}}),
        ("kl_through", {"kl": {"coefficient": 0.3, "gradient": "straight_through"}}),
        ("kl_document", {"kl": {"coefficient": 0.3, "ratio_level": "document"}}),
        ("kl_product", {"kl": {"coefficient": 0.3, "ratio_level": "document_product"}}),
        ("truncated", CLIP | {"rollout_correction": {"low": 0.9, "high": 1.05}}),
        ("masked", {"rollout_correction": {"mode": "mask", "low": 0.9, "high": 1.1}}),
        (
            "product",
            {"rollout_correction": {"level": "document", "mean": "product", "high": 1.1}},
        ),
        (
            "geometric_masked",
            {
                "rollout_correction": {
                    "level": "document",
                    "mean": "geometric",
                    "mode": "mask",
                    "low": 0.97,
                    "high": 1.03,
                }
            },
        ),
        ("off_policy", CLIP | {"off_policy_mask": {"threshold": 0.02}}),
        ("stale", {"max_staleness": 2}),
        ("bonus", CLIP | {"entropy": {"bonus": 0.1}}),
        ("top_entropy", {"entropy": {"bonus": 0.1, "top_fraction": 0.4}}),
        (
            "everything",
            CLIP
            | {
                "delta": 1.4,
                "normalisation": "groups",
                "kl": {"coefficient": 0.2},
                "rollout_correction": {"high": 1.1},
                "off_policy_mask": {"threshold": 0.05, "behaviour": "rollout"},
                "max_staleness": 3,
                "entropy": {"bonus": 0.05, "top_fraction": 0.7},
            },
        ),
    ),
    *_cases(
        "gspo",
        ("kl", NARROW | {"kl": {"coefficient": 0.3, "ratio_level": "document"}}),
        ("truncated", NARROW | {"rollout_correction": {"high": 1.02}}),
        ("off_policy", {"off_policy_mask": {"threshold": 0.02, "behaviour": "rollout"}}),
        ("bonus", {"entropy": {"bonus": 0.1}}),
    ),
    *_cases(
        "reinforce",
        (
            "options",
            {
                "kl": {"coefficient": 0.2, "gradient": "straight_through"},
                "rollout_correction": {"high": 1.05},
                "off_policy_mask": {"threshold": 0.05, "behaviour": "rollout"},
            },
        ),
    ),
    *_cases(
        "grpo",
        (
            "on_policy",
            CLIP
            | {
                "on_policy": True,
                "kl": {"coefficient": 0.2, "ratio_level": "document_product"},
                "rollout_correction": {"low": 0.9, "high": 1.1},
                "off_policy_mask": {"threshold": 0.05, "behaviour": "rollout"},
                "entropy": {"bonus": 0.05},
            },
        ),
    ),
    *_cases(
        "gspo",
        (
            "on_policy",
            {
                "on_policy": True,
                "normalisation": "tokens",
                "rollout_correction": {"level": "document", "mean": "product", "high": 1.1},
            },
        ),
    ),
    # Corrections: every statistic, level, aggregate and mode, in few cases.
    *_cases(
        "grpo",
        (
            "seq_mask_tis",
            {
                "corrections": [
                    _GATE | {"aggregate": "mean", "low": 0.97, "high": 1.02},
                    {"mode": "truncate", "high": 1.05},
                ]
            },
        ),
        (
            "outlier_k3_difference",
            CLIP
            | {
                "corrections": [
                    _GATE | {"aggregate": "any", "low": 0.9, "high": 1.15},
                    _GATE | {"aggregate": "sum", "statistic": "k2", "high": 0.04},
                    {"policy": "current", "statistic": "k3", "high": 0.1, "advantage": "negative"},
                    {
                        "policy": "current",
                        "behaviour": "old",
                        "statistic": "probability_difference",
                        "high": 0.02,
                        "advantage": "positive",
                    },
                ]
            },
        ),
        (
            "second_moment",
            CLIP
            | {
                "corrections": [
                    {"policy": "current", "level": "batch", "statistic": "k2", "high": 0.04},
                    {"mode": "mask", "low": 0.95, "high": 1.05, "advantage": "negative"},
                ]
            },
        ),
    ),
    *_cases(
        "gspo",
        (
            "corrections",
            {
                "on_policy": True,
                "corrections": [
                    {"mode": "mask", "level": "document", "aggregate": "sum", "high": 2.0},
                    _GATE | {"aggregate": "any", "statistic": "k1", "low": -0.4, "high": 2.5},
                ],
            },
        ),
    ),
    *_cases(
        "reinforce",
        (
            "corrections",
            {
                "corrections": [
                    {"policy": "current", "mode": "truncate", "low": 0.8, "high": 1.2},
                    _GATE
                    | {"policy": "current", "aggregate": "mean", "statistic": "k3", "high": 0.1},
                ]
            },
        ),
    ),
    *_cases(
        "squared_log_ratio",
        ("", {"weight": 0.05}),
        ("document", {"level": "document", "behaviour": "rollout", "normalisation": "documents"}),
    ),
    *_cases(
        "grpo",
        (
            "proximal",
            {"proximal": {}, "epsilon_low": 0.05, "rollout_correction": {"low": 0.9, "high": 1.1}},
        ),
    ),
    *_cases("gspo", ("proximal", NARROW | {"proximal": {"weight": 0.3}})),
    *_cases("sapo", ("on_policy", {"on_policy": True, "ratio_level": "document_token"})),
    LossCase("dpo", {"type": "dpo"}, pairs=True),
    LossCase("dpo_mean", {"type": "dpo", "log_ratio": "mean", "beta": 2.0}, pairs=True),
    LossCase("dpo_ipo", {"type": "dpo", "variant": "ipo", "beta": 0.3}, pairs=True),
    LossCase("dpo_hinge", {"type": "dpo", "variant": "hinge", "beta": 0.5}, pairs=True),
    *_cases(
        "distillation",
        ("", {}),
        ("reverse", {"divergence": "reverse_kl", "normalisation": "documents"}),
        ("jensen_shannon", {"divergence": "jensen_shannon", "beta": 0.3}),
        ("recorded", {"recorded": True}),
        ("recorded_reverse", {"recorded": True, "divergence": "reverse_kl", "stream": "distill"}),
        ("recorded_jensen_shannon", {"recorded": True, "divergence": "jensen_shannon"}),
    ),
    *_cases("cross_entropy", ("stream", {"stream": "ce"})),
    *_cases(
        "grpo",
        (
            "stream",
            CLIP
            | {
                "stream": "rl",
                "normalisation": "documents",
                "kl": {"coefficient": 0.2, "ratio_level": "document_product"},
                "rollout_correction": {"level": "document", "mean": "geometric", "high": 1.02},
                "entropy": {"bonus": 0.1},
            },
        ),
        ("distilled", CLIP | {"on_policy_distillation": {"coefficient": 0.7, "bound": 0.5}}),
    ),
    *_cases("gspo", ("distilled", NARROW | {"on_policy_distillation": {"coefficient": 1.5}})),
    *_cases(
        "dppo",
        (
            "distilled",
            {
                "epsilon_low": 0.01,
                "epsilon_high": 0.02,
                "stream": "distill",
                "on_policy_distillation": {"coefficient": 0.3, "rewards": False},
                "off_policy_mask": {"threshold": 0.02, "behaviour": "rollout"},
            },
        ),
    ),
]

# What `on_policy` is refused with: no ratio, a mask that keeps all that is on policy, no distance.
ALWAYS_OFF_POLICY = {
    "reinforce",
    "reinforce_sums",
    "reinforce_options",
    "reinforce_corrections",
    "grpo_off_policy",
    "grpo_outlier_k3_difference",
    "kl_cov",
    "kl_cov_options",
    "grpo_proximal",
    "gspo_proximal",
}
# Every policy-gradient case with a ratio, as it is and with `on_policy`.
BOTH_POLICIES = [
    (case, replace(case, name=f"{case.name}_on_policy", config={**case.config, "on_policy": True}))
    for case in CASES
    if isinstance(case.parsed, PolicyGradientLossConfig)
    and not case.parsed.on_policy
    and case.name not in ALWAYS_OFF_POLICY
]

BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)
