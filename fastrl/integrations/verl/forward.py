"""verl's fused forward by the head, with what the running model makes of its logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from verl.models.transformers import monkey_patch
from verl.utils.experimental.torch_functional import FusedLinearForPPO

from fastrl.functional.head.extra_statistics import StatisticName
from fastrl.functional.linear_logprobs import linear_logprobs
from fastrl.integrations.layer_call import autocast_dtype, layer_operands, replaced_forward
from fastrl.integrations.verl.logits import LogitOptions, logit_options

_verl_fused_forward = FusedLinearForPPO.forward
_verl_patch_forward = monkey_patch.patch_forward_with_backends

# The model whose forward runs: verl's fused forward hands on no more than the weight.
_model: ContextVar[nn.Module | None] = ContextVar("_model", default=None)


class HeadRequest:
    """What the fused forward is to compute; it travels in the place of verl's `temperature`.

    Neither a tensor nor a container or dataclass of tensors: FSDP's mixed precision looks into
    those, and would round the temperatures to 16 bits on their way into the model.

    Args:
        temperature: a number, or a tensor that broadcasts to the labels.
        entropy: whether the entropy is computed.
        sum_squares: whether the sum of squared probabilities is computed.

    Attributes:
        found: the sum of squared probabilities, of the shape of the labels, detached.
    """

    def __init__(
        self, temperature: float | Tensor, *, entropy: bool = True, sum_squares: bool = False
    ) -> None:
        self.temperature = temperature
        self.entropy = entropy
        self.sum_squares = sum_squares
        self.found: Tensor | None = None


def _under_model(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, the patched method of a model, with the model at hand for `fused_forward`."""

    @wraps(forward)
    def with_model(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        token = _model.set(self)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _model.reset(token)

    return with_model


def fused_forward(
    self: FusedLinearForPPO,
    hidden_states: Tensor,  # [..., D]
    vocab_weights: Tensor,  # [V, D]
    input_ids: Tensor,  # [...]
    temperature: float | Tensor | HeadRequest = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability and entropy of the labels `input_ids`, under the running model's head."""
    if self.impl_backend != "torch":
        found: tuple[Tensor, Tensor] = _verl_fused_forward(
            self, hidden_states, vocab_weights, input_ids, temperature
        )
        return found
    request = temperature
    if not isinstance(request, HeadRequest):
        request = HeadRequest(request)
    model = _model.get()
    if model is None:
        operands = {"weight": vocab_weights}
        return _statistics(hidden_states, operands, input_ids, request, LogitOptions())
    layer: Any = model.get_output_embeddings()  # type: ignore[operator]
    options = logit_options(model.config)

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        return _statistics(hidden, layer_operands(layer), input_ids, request, options)

    with replaced_forward(layer, forward, otherwise="set `use_fused_kernels: false`"):
        result: tuple[Tensor, Tensor | None] = layer(hidden_states)
    return result


def _statistics(
    hidden_states: Tensor,  # [..., D]
    operands: Mapping[str, Any],
    labels: Tensor,  # [...]
    request: HeadRequest,
    options: LogitOptions,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability and entropy; the sum of squares goes into the request."""
    temperature = request.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.expand(labels.shape).contiguous()
    names: tuple[StatisticName, ...] = ("sum_squares",) if request.sum_squares else ()
    statistics = linear_logprobs(
        hidden_states,
        labels=labels.to(torch.int64),
        **operands,
        temperature=temperature,
        entropy=request.entropy,
        statistics=names,
        compute_dtype=autocast_dtype(hidden_states.device),
        # All slots have a label here; the loss's mask leaves those without gradient out.
        rows=torch.arange(labels.numel(), device=labels.device),
        drop_inactive_rows=True,
        softcap=options.softcap,
        logit_scale=options.logit_scale,
    )
    if statistics.sum_squares is not None:
        request.found = statistics.sum_squares.detach()
    entropy = None if statistics.entropy is None else statistics.entropy.clone()
    # FSDP2 warns of views among a module's outputs: writing into one would lose its hook.
    return statistics.logprobs.clone(), entropy


def patch_forward(
    model: nn.Module, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
) -> None:
    """verl's patch of a model's forward, which then runs with the model at hand."""
    is_ours = use_fused_kernels and fused_kernels_backend == "torch"
    if is_ours:
        logit_options(model.config)  # refuses what the head cannot do before any step
    _verl_patch_forward(model, use_fused_kernels, fused_kernels_backend)
    if is_ours:
        type(model).forward = _under_model(type(model).forward)
