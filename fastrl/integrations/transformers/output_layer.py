"""The output layer of a model: what runs in its place, and what becomes of its logits.

The head runs inside the output layer's module call, so that what hangs on the layer (FSDP2's
gathering, a PEFT wrapper) happens to the head too, and so that whatever the model does before the
layer (a scale of the hidden states, a projection) needs no knowledge of the model here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.integrations.layer_call import replaced_forward

# Magnitudes of the logits at which the model is asked what it makes of them; the first is small
# enough for a soft cap to be linear, the last saturates any.
_MAGNITUDES = (1e-3, 1e-1, 1.0, 5.0, 20.0, 60.0, 300.0, 1e9)
# A model that computes its logits in fp32 gives constants rounded to fp32.
_TOLERANCE = 1e-6

Model = Any
"""A `PreTrainedModel`: its `forward` and `config` are as many as there are families."""


@dataclass(frozen=True)
class LogitRule:
    """What a model makes of its output layer's z: softcap * tanh(logit_scale * z / softcap).

    Attributes:
        logit_scale: factor.
        softcap: bound; None: logit_scale * z.
        vocab_size: number of logits, the first ones of z.
    """

    logit_scale: float
    softcap: float | None
    vocab_size: int

    def __call__(
        self,
        logits: Tensor,  # [..., V]
    ) -> Tensor:
        """[..., vocab_size] the model's logits of the output layer's."""
        scaled = logits[..., : self.vocab_size] * self.logit_scale
        return scaled if self.softcap is None else self.softcap * (scaled / self.softcap).tanh()


def output_layer(model: Model) -> nn.Module:
    """The module that gives the logits, looked up anew: PEFT and others replace it.

    Raises:
        ValueError: there is none.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Module):
        raise ValueError(
            f"`model` must have one output layer, but {_name(model)}.get_output_embeddings() gives"
            f" {layer}; compute the hidden states yourself and call `linear_logprobs`."
        )
    return layer


def replaced(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Lets `layer` give `forward(hidden_states)` where the model asks it for logits."""
    return replaced_forward(layer, forward, otherwise="keep the layer on one device")


def read_logit_rule(
    model: Model,
    tokens: Tensor,  # [n]
    num_logits: int,
) -> LogitRule:
    """What the model makes of its output layer's logits, found by giving it chosen ones.

    Its config names the constants (`final_logit_softcapping`, `logit_scale`, `logits_scaling`,
    `lm_head_multiplier`, ...) but not what is done with them: Granite divides by
    `logits_scaling`, HyperCLOVA X multiplies, MiniCPM3 divides the hidden states. So the numbers
    are measured in float64, and replaced by those of the config that they equal.

    Args:
        model: called once, without gradients.
        tokens: a document.
        num_logits: of the output layer.

    Raises:
        ValueError: it is something else than a scale and a soft cap.
    """
    device = tokens.device
    rows = torch.tensor(_MAGNITUDES, dtype=torch.float64, device=device)
    columns = torch.linspace(0.5, 1.0, num_logits, dtype=torch.float64, device=device)
    columns[::2] *= -1
    given = rows[:, None] * columns
    with torch.no_grad(), replaced(output_layer(model), lambda _: given[None].clone()):
        found = model(input_ids=tokens[None, : len(rows)], **call_options(model)).logits
    found = found.detach()[0].double()
    small, large = found[0, 0].item() / given[0, 0].item(), abs(found[-1, 0].item())
    config = model.config.get_text_config()
    softcap = None
    if large < 0.1 * abs(small * given[-1, 0].item()):
        softcap = _constant(large, config)
        small = softcap * math.atanh(found[0, 0].item() / softcap) / given[0, 0].item()
    rule = LogitRule(_constant(small, config), softcap, found.shape[-1])
    expected = rule(given)
    if expected.shape != found.shape or not torch.allclose(
        found, expected, rtol=10 * _TOLERANCE, atol=0
    ):
        raise ValueError(
            f"{_name(model)} must make softcap * tanh(scale * z / softcap) of the output layer's z,"
            f" or scale * z, but what it makes of it is neither (the nearest: {rule}); compute its"
            " log-probabilities from its own logits."
        )
    return rule


def accepts(model: Model, name: str) -> bool:
    """Whether the model's forward takes an argument of this name, or any."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def call_options(model: Model) -> dict[str, bool]:
    """`use_cache=False` where the model has a cache, which hides where documents begin."""
    has_cache = hasattr(model.config.get_text_config(), "use_cache")
    return {"use_cache": False} if has_cache and accepts(model, "use_cache") else {}


def _constant(value: float, config: Any) -> float:
    """The number of the config, or its inverse, or 1, that a measured one equals; else itself."""
    numbers = [each for each in vars(config).values() if type(each) in (int, float) and each]
    candidates = [1.0, *numbers, *(1 / number for number in numbers)]
    near = [each for each in candidates if math.isclose(each, value, rel_tol=_TOLERANCE)]
    return float(min(near, key=lambda each: abs(each - value), default=value))


def _name(model: Model) -> str:
    return type(model).__name__
