"""The FSDP engine of verl around the fused forward: what goes into the model, what comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from fastrl.integrations.verl.forward import HeadRequest

_verl_prepare_inputs = FSDPEngineWithLMHead.prepare_model_inputs
_verl_prepare_outputs = FSDPEngineWithLMHead.prepare_model_outputs


def prepare_model_inputs(self: Any, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's inputs of a micro-batch, with a `HeadRequest` as temperature."""
    is_fused = _option(micro_batch, "use_fused_kernels")
    if not is_fused or getattr(self.module, "_verl_fused_kernels_backend", None) != "torch":
        own: tuple[dict[str, Any], dict[str, Any]] = _verl_prepare_inputs(self, micro_batch)
        return own
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    inputs, outputs = _verl_prepare_inputs(self, _with(micro_batch, use_fused_kernels=False))
    temperature = micro_batch["temperature"]
    is_packed = _option(micro_batch, "use_remove_padding", default=True)
    if isinstance(temperature, Tensor):
        packed = outputs["temperature_rmpad"][None] if is_packed else None
        temperature = outputs["temperature"][:, None] if packed is None else packed
    request = HeadRequest(
        temperature,
        entropy=_option(micro_batch, "calculate_entropy"),
        sum_squares=_option(micro_batch, "calculate_sum_pi_squared"),
    )
    inputs |= {"temperature": request, "return_dict": True}
    if is_packed:
        inputs["shift_labels"] = outputs["input_ids_rmpad_rolled"][None]
    return inputs, outputs | {"head_request": request}


def prepare_model_outputs(
    self: Any,
    output: Any,
    output_args: dict[str, Any],
    micro_batch: Any,
    logits_processor_func: Any,
) -> dict[str, Tensor]:
    """What verl reads of the model's output, and the sum of squared probabilities."""
    request: HeadRequest | None = output_args.get("head_request")
    has_squares = request is not None and request.sum_squares
    if has_squares:
        micro_batch = _with(micro_batch, calculate_sum_pi_squared=False)
    found: dict[str, Tensor] = _verl_prepare_outputs(
        self, output, output_args, micro_batch, logits_processor_func
    )
    if request is None or not has_squares:
        return found
    values, offsets = request.found, micro_batch["input_ids"].offsets()
    assert values is not None
    if _option(micro_batch, "use_remove_padding", default=True):
        values = self._gather_and_unpad_packed(values.squeeze(0), output_args["pad_size"])
    else:
        slots = torch.arange(values.shape[1], device=values.device)
        values = values[slots < offsets.diff()[:, None]]
    found["sum_pi_squared"] = torch.nested.nested_tensor_from_jagged(values, offsets)
    return found


def _option(micro_batch: Any, name: str, *, default: bool = False) -> bool:
    return bool(tensordict_utils.get_non_tensor_data(micro_batch, name, default))


def _with(micro_batch: Any, **options: bool) -> Any:
    """The same tensors with other options."""
    changed = micro_batch.copy()
    tensordict_utils.assign_non_tensor(changed, **options)
    return changed
