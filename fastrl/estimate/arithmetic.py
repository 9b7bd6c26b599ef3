"""Floating-point operations of a packed sequence, and the speed that they would allow."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.estimate.head import head_ops
from fastrl.estimate.memory import Step
from fastrl.models.flops import TrainingFlops

# Of a GPU a second: the dense bf16 peak of an H100 or H200.
PEAK = 989e12


@dataclass(frozen=True)
class Arithmetic:
    """Operations of forward and backward of one packed sequence that is one document.

    Attributes:
        needed: 6 a weight and token, and attention's.
        recomputed: under checkpointing, in pieces, and by the head's `recompute`.
    """

    needed: float
    recomputed: float

    @classmethod
    def of(cls, step: Step) -> Arithmetic:
        """Of a training step, every token with a label and a gradient."""
        model, tokens = step.model, step.shapes.tokens
        flops = TrainingFlops.of(model)
        forward = (flops.body * tokens + flops.attention * tokens**2) / 3
        recomputed = 0.0
        # Gate and up are, and what the down projection gives is not kept.
        matrix = 2.0 * model.num_hidden_layers * model.hidden_size * model.intermediate_size
        if model.activation_checkpointing == "full":
            recomputed += forward - matrix * tokens
        elif model.activation_checkpointing == "attention":
            recomputed += 2 * matrix * tokens
        if step.parallel.micro_sequences > 1:
            recomputed += forward
        if not head_ops(model.head, step.losses, step.head_shape)[0].is_single_pass:
            recomputed += flops.head * tokens / 3
        return cls(flops.document(tokens, tokens), recomputed)

    def tokens_per_second(self, tokens: int, num_gpus: int) -> float:
        """The speed of a sequence of `tokens` on `num_gpus` at their peak."""
        return tokens * num_gpus * PEAK / (self.needed + self.recomputed)


def arithmetic_line(step: Step) -> str:
    """The line of `fastrl estimate`."""
    arithmetic, tokens = Arithmetic.of(step), step.shapes.tokens
    gpus = step.parallel.sequence_data * step.parallel.tensor
    speed = arithmetic.tokens_per_second(tokens, gpus)
    return (
        f"  arithmetic, as one document: {arithmetic.needed / 1e12:,.3g} TFLOP and"
        f" {arithmetic.recomputed / 1e12:,.3g} recomputed; at the peak of {gpus} GPU(s) of"
        f" {PEAK / 1e12:.0f} TFLOP/s {speed:,.0f} tokens/s"
    )
