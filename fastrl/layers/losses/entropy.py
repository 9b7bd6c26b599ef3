"""The entropy bonus and its controller."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fastrl.config.loss_options import EntropyConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.layers.losses.normalisation import at_least_one, weighted_tokens


class EntropyBonus:
    """The factor of the entropy bonus: fixed, or adapted after each step to a target entropy.

    With a target H*, after a step of mean entropy H: bonus <- clip(bonus + step) if H <= H*, else
    clip(bonus - step); it acts in the next step only if H <= H*.

    Args:
        config: None for no bonus.

    References:
        Skywork-OR1, arXiv:2505.22312, section 4: adaptive entropy control.
    """

    def __init__(self, config: EntropyConfig | None) -> None:
        self.adaptive = None if config is None else config.adaptive
        self.factor = 0.0 if config is None else config.bonus
        self.is_acting = True

    @property
    def value(self) -> float:
        """The factor that acts in this step."""
        return self.factor if self.is_acting else 0.0

    @property
    def can_act(self) -> bool:
        """Whether the bonus may be non-zero in any step; follows from the config."""
        return self.factor > 0 or self.adaptive is not None

    def subtracted(
        self,
        loss: Tensor,
        kept_entropy: Tensor | None,  # [T]
        batch: BatchKwargs,
    ) -> Tensor:
        """The loss - factor * mean over the labels of the step."""
        if kept_entropy is None:
            return loss
        total = weighted_tokens(kept_entropy, batch, batch.stream).sum()
        return loss - self.value * (total / at_least_one(batch.num_labels_in_batch))

    def end_step(self, entropy: float) -> None:
        """Updates the factor from the mean entropy of the whole optimizer step (nats)."""
        if self.adaptive is None:
            return
        self.is_acting = entropy <= self.adaptive.target
        step = self.adaptive.step if self.is_acting else -self.adaptive.step
        self.factor = min(max(self.factor + step, self.adaptive.low), self.adaptive.high)

    def state_dict(self) -> dict[str, float]:
        """State for a checkpoint."""
        return {"factor": self.factor, "is_acting": float(self.is_acting)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores `state_dict`."""
        self.factor, self.is_acting = state["factor"], bool(state["is_acting"])
