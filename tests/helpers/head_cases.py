"""Problems of the streaming head, shared by the tests of its strategies, kernels and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fastrl.functional.reference import head as reference
from fastrl.functional.statistics import TokenStatistics


@dataclass(frozen=True)
class HeadCase:
    """One head: sizes, logit transform, and which tokens have labels."""

    name: str
    num_tokens: int = 13
    hidden_size: int = 5
    vocab_size: int = 37
    padding: int = 0
    unlabelled: tuple[int, ...] = (0, 5, 12)
    bias: bool = False
    temperature: float | str = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    spread: float = 1.0
    impossible: tuple[int, ...] = ()  # vocabulary entries with a bias of -inf

    def tensors(
        self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> HeadTensors:
        """Inputs drawn from a generator of their own; the same for every caller and device."""
        generator = torch.Generator().manual_seed(1234)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

        rows = self.vocab_size + self.padding
        hidden = normal(self.num_tokens, self.hidden_size) * self.spread
        weight, bias = normal(rows, self.hidden_size), normal(rows)
        bias[list(self.impossible)] = -torch.inf
        possible = [v for v in range(self.vocab_size) if v not in self.impossible]
        size = (self.num_tokens,)
        picks = torch.randint(len(possible), size, generator=generator, device="cpu")
        labels = torch.tensor(possible, device="cpu")[picks]
        labels[[slot for slot in self.unlabelled if slot < self.num_tokens]] = -100
        temperature: float | Tensor = 1.0
        if isinstance(self.temperature, str):
            temperature = torch.linspace(0.4, 1.6, *size, dtype=torch.float64, device="cpu")
        else:
            temperature = self.temperature
        return HeadTensors(
            hidden.to(device, dtype).requires_grad_(),
            weight.to(device, dtype).requires_grad_(),
            bias.to(device, dtype).requires_grad_() if self.bias or self.impossible else None,
            labels.to(device),
            temperature.to(device) if isinstance(temperature, Tensor) else temperature,
            self,
        )


@dataclass(frozen=True)
class HeadTensors:
    """The tensors of a case."""

    hidden_states: Tensor  # [T, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    labels: Tensor  # [T]
    temperature: float | Tensor
    case: HeadCase = field(repr=False)

    @property
    def inputs(self) -> list[Tensor]:
        """The differentiable tensors."""
        return [t for t in (self.hidden_states, self.weight, self.bias) if t is not None]

    @property
    def options(self) -> dict[str, object]:
        """Keyword arguments of the op and of the reference."""
        return {
            "bias": self.bias,
            "temperature": self.temperature,
            "softcap": self.case.softcap,
            "logit_scale": self.case.logit_scale,
            "vocab_size": self.case.vocab_size,
        }

    def in_float64(self) -> HeadTensors:
        """The same numbers, wider."""
        return replace(
            self,
            hidden_states=self.hidden_states.detach().double().requires_grad_(),
            weight=self.weight.detach().double().requires_grad_(),
            bias=None if self.bias is None else self.bias.detach().double().requires_grad_(),
        )

    def reference(self) -> TokenStatistics:
        """The statistics by the definition."""
        z = reference.logits(self.hidden_states, self.weight, **self.options)  # type: ignore[arg-type]
        return TokenStatistics(*reference.token_statistics(z, self.labels))

    def upstream(self) -> list[Tensor]:
        """Upstream gradients of logprobs, entropy and logsumexp."""
        generator = torch.Generator().manual_seed(99)
        shape, device = self.labels.shape, self.labels.device
        draws = torch.randn(3, *shape, generator=generator, dtype=torch.float64, device="cpu")
        return [draw.to(device) for draw in draws]


CASES = [
    HeadCase("plain"),
    HeadCase("one_token", num_tokens=1, unlabelled=()),
    HeadCase("one_label", unlabelled=tuple(range(1, 13))),
    HeadCase("no_label", unlabelled=tuple(range(13))),
    HeadCase("all_labelled", unlabelled=()),
    HeadCase("vocabulary_of_one", vocab_size=1),
    HeadCase("vocabulary_above_a_tile", vocab_size=129, num_tokens=9),
    HeadCase("bias", bias=True),
    HeadCase("padding", padding=7, bias=True),
    HeadCase("temperature", temperature=0.6),
    HeadCase("temperature_per_token", temperature="per token"),
    HeadCase("softcap", softcap=1.5),
    HeadCase("logit_scale", logit_scale=0.3),
    HeadCase(
        "everything", padding=3, bias=True, temperature="per token", softcap=4.0, logit_scale=1.7
    ),
    HeadCase("peaked", spread=30.0),
    HeadCase("impossible_entries", impossible=(0, 3, 36), bias=True),
]
