"""Configs of the policy-gradient losses."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from fastrl.config.corrections import CorrectionConfig, check_correction, check_together, expanded
from fastrl.config.loss_options import (
    HIGHEST_RATIO,
    EntropyConfig,
    KLConfig,
    LossConfig,
    Normalisation,
    OffPolicyMaskConfig,
    OnPolicyDistillationConfig,
    ProximalConfig,
    RolloutCorrectionConfig,
)


class PolicyGradientLossConfig(LossConfig):
    """Options of every policy-gradient loss."""

    on_policy: bool = False
    """The policy is its own old one: wherever the loss reads `old_logprobs` it takes the pass's own
    log-probabilities, detached, so that the ratio is 1 and has its gradient. Exact for the one
    update that follows the sampling. A column of the batch is not read, as rollout files carry it
    for other uses."""

    proximal: ProximalConfig | None = None
    """Takes the old policy for one between sampler and policy instead of reading `old_logprobs`."""

    kl: KLConfig | None = None
    """A penalty on the KL divergence from the reference policy."""

    on_policy_distillation: OnPolicyDistillationConfig | None = None
    """Advantages from a teacher, beside those of the rewards or in their place."""

    rollout_correction: RolloutCorrectionConfig | None = None
    """Importance weights for the mismatch between sampler and trained policy."""

    off_policy_mask: OffPolicyMaskConfig | None = None
    """Drops negative tokens of documents far from the policy."""

    corrections: tuple[CorrectionConfig, ...] = ()
    """Weights and masks by the ratio of two policies, any number of them; their product counts,
    with `rollout_correction` and `off_policy_mask`, which are two cases of it."""

    max_staleness: int | None = Field(default=None, ge=0)
    """Drops documents sampled by weights more than so many versions old. The denominator stays the
    original count."""

    entropy: EntropyConfig | None = None
    """Entropy bonus and entropy mask."""

    def required_columns(self) -> frozenset[str]:
        """The advantages, the old policy of the ratio, and what the options compare with."""
        columns = super().required_columns() | {"advantages"}
        if self.proximal is not None:
            columns |= {"rollout_logprobs"}
            columns |= {"model_version"} if self.proximal.weight is None else set()
        elif not self.on_policy:
            columns |= {"old_logprobs"}
        if self.on_policy_distillation is not None and not self.on_policy_distillation.rewards:
            columns -= {"advantages"}
        if self.kl is not None or self.on_policy_distillation is not None:
            columns |= {"ref_logprobs"}
        has_old = not self.on_policy and self.proximal is None
        for correction in self.all_corrections(has_ratio=True).values():
            compared = correction.policies - {"current", *(() if has_old else ("old",))}
            columns |= {f"{policy}_logprobs" for policy in compared}
        if self.max_staleness is not None:
            columns |= {"model_version"}
        return columns

    def all_corrections(self, *, has_ratio: bool) -> dict[str, CorrectionConfig]:
        """The corrections by the option they come from, for a loss with a ratio or without."""
        rollout, off_policy = self.rollout_correction, self.off_policy_mask
        return expanded(rollout, off_policy, self.corrections, has_ratio=has_ratio)

    @property
    def _has_ratio(self) -> bool:
        """Whether the loss has a ratio to the old policy, or leaves its column out."""
        plain = {"on_policy": False, "rollout_correction": None, "off_policy_mask": None}
        bare = self.model_copy(update=plain | {"corrections": (), "proximal": None})
        return "old_logprobs" in bare.required_columns()

    @model_validator(mode="after")
    def _corrections_mean_something(self) -> "PolicyGradientLossConfig":
        has_ratio = self._has_ratio
        named = self.all_corrections(has_ratio=has_ratio)
        for number, entry in enumerate(self.corrections):
            check_correction(entry, f"corrections.{number}", has_ratio, self.on_policy, self.type)
        check_together(named)
        return self

    @model_validator(mode="after")
    def _proximal_has_an_effect(self) -> "PolicyGradientLossConfig":
        if self.proximal is None:
            return self
        if self.on_policy:
            raise ValueError(
                "`proximal` must not be given with `on_policy`, as both say what the old policy is;"
                " leave one of the two out"
            )
        if "old_logprobs" not in self.model_copy(update={"proximal": None}).required_columns():
            raise ValueError(
                f"`proximal` must not be given with `type: {self.type}`, which does not use"
                " `old_logprobs`; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _one_pull_to_the_reference(self) -> "PolicyGradientLossConfig":
        if self.kl is not None and self.on_policy_distillation is not None:
            raise ValueError(
                "`kl` must not be given with `on_policy_distillation`, as both are the gradient of"
                " KL(policy, reference) to the same `ref_logprobs`; use one, with a larger"
                " `coefficient`"
            )
        return self

    @model_validator(mode="after")
    def _on_policy_has_an_effect(self) -> "PolicyGradientLossConfig":
        if not self.on_policy:
            return self
        if not self._has_ratio:
            raise ValueError(
                f"`on_policy` must not be given with `type: {self.type}`, which does not use"
                " `old_logprobs`; leave it out"
            )
        if self.off_policy_mask is not None and self.off_policy_mask.behaviour == "old":
            raise ValueError(
                "`off_policy_mask.behaviour: old` has no effect with `on_policy`, as a policy has"
                " not drifted from itself; use `behaviour: rollout`"
            )
        return self


class ClippedLossConfig(PolicyGradientLossConfig):
    """A ratio that is clipped around 1."""

    epsilon_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped from below at 1 - `epsilon_low`."""

    epsilon_high: float = Field(default=0.2, ge=0, le=HIGHEST_RATIO)
    """The ratio is clipped from above at 1 + `epsilon_high`; larger than `epsilon_low` is DAPO's
    clip-higher."""

    delta: float | None = Field(default=None, gt=1, le=HIGHEST_RATIO)
    """Largest ratio that counts where the advantage is below 0 (two-sided or dual clip); none by
    default."""


class GRPOLossConfig(ClippedLossConfig):
    """Clipped surrogate of token ratios (GRPO, arXiv:2402.03300)."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "dapo": {"epsilon_low": 0.2, "epsilon_high": 0.28, "normalisation": "tokens"},
        "dr_grpo": {"epsilon_low": 0.2, "epsilon_high": 0.2, "normalisation": "constant"},
        "bnpo": {"epsilon_low": 0.2, "epsilon_high": 0.2, "normalisation": "tokens"},
    }

    type: Literal["grpo"] = "grpo"
    """Names the loss."""

    preset: Literal["dapo", "dr_grpo", "bnpo"] | None = None
    """Gives the fields below their values of a paper; fields that are set go first. `dapo`:
    arXiv:2503.14476. `dr_grpo`: arXiv:2503.20783, needs `length`. `bnpo`: the token mean of the
    whole batch, as TRL names it."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("preset"), str):
            return cls.PRESETS.get(values["preset"], {}) | values
        return values


class DocumentRatioLossConfig(ClippedLossConfig):
    """Defaults of the clipped losses whose ratio is that of a document."""

    normalisation: Normalisation = "documents"
    """As in the other losses; the paper weighs each document once."""

    epsilon_low: float = Field(default=3e-4, ge=0, le=1)
    """The ratio is clipped from below at 1 - `epsilon_low`; the paper's value."""

    epsilon_high: float = Field(default=4e-4, ge=0, le=HIGHEST_RATIO)
    """The ratio is clipped from above at 1 + `epsilon_high`; the paper's value."""


class GSPOLossConfig(DocumentRatioLossConfig):
    """Clipped surrogate of a document's length-normalised ratio (GSPO, arXiv:2507.18071)."""

    type: Literal["gspo"] = "gspo"
    """Names the loss."""


class GSPOTokenLossConfig(DocumentRatioLossConfig):
    """GSPO with per-token advantages and gradients (GSPO-token, arXiv:2507.18071)."""

    type: Literal["gspo_token"] = "gspo_token"
    """Names the loss."""


class LUSPOLossConfig(DocumentRatioLossConfig):
    """GSPO with each document's loss times its length (LUSPO, arXiv:2602.05261)."""

    type: Literal["luspo"] = "luspo"
    """Names the loss."""

    normalisation: Literal["constant"] = "constant"
    """The sum over tokens / documents in the batch: each document weighs its length."""

    length: int = Field(default=1, gt=0, le=10**9)
    """Divides the loss; 1 in the paper."""


class CISPOLossConfig(PolicyGradientLossConfig):
    """REINFORCE weighted by a clipped, detached ratio (CISPO, arXiv:2506.13585)."""

    type: Literal["cispo"] = "cispo"
    """Names the loss."""

    ratio_level: Literal["token", "document"] = "token"
    """`token`: each token its own ratio. `document`: the geometric mean over its document."""

    epsilon_low: float | None = Field(default=None, ge=0, le=1)
    """The ratio is clipped from below at 1 - `epsilon_low`; not at all by default, as in the
    paper."""

    epsilon_high: float = Field(default=4.0, ge=0, le=HIGHEST_RATIO)
    """The ratio is clipped from above at 1 + `epsilon_high`; 4 is the cap of 5 of ScaleRL."""


class SAPOLossConfig(PolicyGradientLossConfig):
    """A sigmoid gate instead of the clip (SAPO, arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    """Names the loss."""

    ratio_level: Literal["token", "document", "document_token"] = "token"
    """`token`: each token its own ratio. `document`: the geometric mean over its document.
    `document_token`: its value with the gradient of the token's own ratio."""

    normalisation: Normalisation = "documents"
    """As in the other losses; the paper weighs each document once."""

    tau_positive: float = Field(default=1.0, gt=0, le=HIGHEST_RATIO)
    """Steepness of the gate where the advantage is above 0."""

    tau_negative: float = Field(default=1.05, gt=0, le=HIGHEST_RATIO)
    """Steepness of the gate elsewhere."""


class GMPOLossConfig(PolicyGradientLossConfig):
    """The geometric mean of clipped token ratios (GMPO, arXiv:2507.20673)."""

    type: Literal["gmpo"] = "gmpo"
    """Names the loss."""

    normalisation: Normalisation = "documents"
    """As in the other losses; the paper weighs each document once."""

    epsilon_low: float = Field(default=0.4, ge=0, le=HIGHEST_RATIO)
    """A token's log-ratio is clipped from below at -`epsilon_low`: the ratio at its exponential."""

    epsilon_high: float = Field(default=0.4, ge=0, le=HIGHEST_RATIO)
    """A token's log-ratio is clipped from above at `epsilon_high`: the ratio at its exponential."""


class VESPOLossConfig(PolicyGradientLossConfig):
    """REINFORCE weighted by a smooth function of the whole document's ratio (arXiv:2602.10693)."""

    type: Literal["vespo"] = "vespo"
    """Names the loss."""

    power_positive: float = Field(default=2.0, gt=0, le=HIGHEST_RATIO)
    """k in W^k exp(rate (1 - W)) where the advantage is at least 0."""

    rate_positive: float = Field(default=3.0, gt=0, le=HIGHEST_RATIO)
    """The rate where the advantage is at least 0."""

    power_negative: float = Field(default=3.0, gt=0, le=HIGHEST_RATIO)
    """k where the advantage is below 0."""

    rate_negative: float = Field(default=2.0, gt=0, le=HIGHEST_RATIO)
    """The rate where the advantage is below 0."""

    @model_validator(mode="after")
    def _owns_the_rollout_weight(self) -> "VESPOLossConfig":
        if self.rollout_correction is not None:
            raise ValueError(
                "`rollout_correction` must not be given with `type: vespo`, whose weight is the"
                " ratio to the behaviour policy already; give the sampler's log-probabilities as"
                " the documents' `logprobs`"
            )
        for number, entry in enumerate(self.corrections):
            if entry.is_weight:
                raise ValueError(
                    f"`corrections.{number}.mode: {entry.mode}` must not be given with"
                    " `type: vespo`, whose weight is the ratio to the behaviour policy already; use"
                    " `mode: gate`"
                )
        if self.proximal is not None:
            raise ValueError(
                "`proximal` must not be given with `type: vespo`, whose ratio is that to the"
                " behaviour policy; leave it out"
            )
        return self


class DPPOLossConfig(PolicyGradientLossConfig):
    """A mask on tokens by the change of their probability (DPPO, arXiv:2602.04879)."""

    type: Literal["dppo"] = "dppo"
    """Names the loss."""

    divergence: Literal["tv", "kl"] = "tv"
    """Of the two-way split into the label and the rest: total variation |p - p_old|, or
    KL(old, new)."""

    epsilon_low: float = Field(default=0.2, gt=0, le=HIGHEST_RATIO)
    """Where the advantage is below 0, a token whose probability fell by a divergence of more is
    masked; 0.05 by default under `divergence: kl`."""

    epsilon_high: float = Field(default=0.2, gt=0, le=HIGHEST_RATIO)
    """Where the advantage is above 0, a token whose probability rose by a divergence of more is
    masked; 0.05 by default under `divergence: kl`."""

    max_ratio: float | None = Field(default=20.0, gt=1, le=HIGHEST_RATIO)
    """The detached ratio that weighs a token is truncated here; not at all with null."""

    @model_validator(mode="before")
    @classmethod
    def _default_bounds(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("divergence") == "kl":
            return {"epsilon_low": 0.05, "epsilon_high": 0.05} | values
        return values


class ReinforceLossConfig(PolicyGradientLossConfig):
    """-advantage logprob: REINFORCE, and RLOO with leave-one-out advantages (arXiv:2402.14740)."""

    type: Literal["reinforce"] = "reinforce"
    """Names the loss."""

    def required_columns(self) -> frozenset[str]:
        """No old policy, as there is no ratio."""
        return super().required_columns() - {"old_logprobs"}

    @model_validator(mode="after")
    def _has_no_ratio(self) -> "ReinforceLossConfig":
        if self.kl is not None and self.kl.gradient == "ratio":
            raise ValueError(
                "`kl.gradient: ratio` must not be given with `type: reinforce`, which has no ratio;"
                " use `straight_through`, or `type: cispo`"
            )
        if self.off_policy_mask is not None and self.off_policy_mask.behaviour == "old":
            raise ValueError(
                "`off_policy_mask.behaviour: old` must not be given with `type: reinforce`, which"
                " does not use `old_logprobs`; use `behaviour: rollout`"
            )
        return self
