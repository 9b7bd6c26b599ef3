"""The output layer of a model as operands of the head: a tensor, or the module that owns it.

A module is read, not called: its forward would form the logits. What its forward would do beyond
h W^T + b is done here, or refused.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.functional.head.call import HeadOperands


def head_operands(
    hidden_states: Tensor,  # [T, D]
    weight: Tensor | nn.Module,  # [V, D]
    bias: Tensor | None = None,  # [V]
    dtype: torch.dtype | None = None,
) -> HeadOperands:
    """The operands of the products of an output layer.

    Args:
        hidden_states: after the final norm.
        weight: a tensor, or its module: `nn.Linear`, `nn.Embedding`, one of the two in PEFT's
            wrapper of modules to save, or PEFT's LoRA layer around `nn.Linear`, whose products are

                h W^T + b + sum_i scaling_i (dropout(h) A_i^T) B_i^T

            with gradients into A and B; B A is never formed. Hooks of the LoRA layer as a whole
            do not run: with FSDP2's the head belongs inside of that layer's call.
        bias: with a tensor only.
        dtype: of the operands (`compute_dtype`).

    Raises:
        TypeError: the module does something that is not honoured here.
        ValueError: `bias` beside a module.
    """
    if not isinstance(weight, nn.Module):
        return HeadOperands(hidden_states, weight, bias, dtype=dtype)
    if bias is not None:
        raise ValueError(
            "`bias` must not be given beside a module as `weight`, which brings its own; pass the"
            f" {type(weight).__name__} alone."
        )
    module = _saved_module(weight)
    adapters: list[str] = []
    if _is_of_peft(module, "peft.tuners.tuners_utils", "BaseTunerLayer"):
        if "forward" in vars(module):
            raise TypeError(_message(module, "has a forward of its own, which would not run"))
        adapters = _active_adapters(module)
        base: Any = module.base_layer
    else:
        base = module
    _check_base(base)
    of_base: Tensor | None = getattr(base, "bias", None)
    if not adapters:
        return HeadOperands(hidden_states, base.weight, of_base, dtype=dtype)
    return _with_adapters(hidden_states, module, adapters, of_base, dtype)


def _with_adapters(
    hidden_states: Tensor, layer: Any, adapters: list[str], bias: Tensor | None, dtype: Any
) -> HeadOperands:
    low_rank_hidden: list[Tensor] = []
    low_rank_weight: list[Tensor] = []
    for name in adapters:
        a, b, scaling = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
        _check_hooks(b)
        dropped = layer.lora_dropout[name](hidden_states.to(a.weight.dtype))
        low_rank_hidden.append(a(dropped) * scaling)
        low_rank_weight.append(b.weight)
        if b.bias is not None:
            scaled = b.bias * scaling
            bias = scaled if bias is None else bias + scaled.to(bias.dtype)
    parts = [hidden_states, *(part.to(hidden_states.dtype) for part in low_rank_hidden)]
    rank_weight = low_rank_weight[0] if len(adapters) == 1 else torch.cat(low_rank_weight, dim=1)
    weight = layer.base_layer.weight
    if bias is not None and dtype is None:
        bias = bias.to(weight.dtype)
    return HeadOperands(torch.cat(parts, dim=1), weight, bias, rank_weight, dtype)


def _saved_module(module: nn.Module) -> nn.Module:
    """The module that a wrapper of PEFT or of torch.compile runs."""
    compiled = getattr(module, "_orig_mod", None)
    if isinstance(compiled, nn.Module):
        return compiled
    if not _is_of_peft(module, "peft.utils.other", "AuxiliaryTrainingWrapper"):
        return module
    wrapper: Any = module
    if not _is_of_peft(module, "peft.utils.other", "ModulesToSaveWrapper"):
        raise TypeError(_message(module, "trains parts of a weight"))
    if wrapper.disable_adapters or not wrapper.active_adapters:
        original: nn.Module = wrapper.original_module
        return original
    saved: nn.Module = wrapper.modules_to_save[wrapper.active_adapters[0]]
    return saved


def _active_adapters(layer: Any) -> list[str]:
    """Names of the adapters that the layer would apply, of plain LoRA all."""
    if not _is_of_peft(layer, "peft.tuners.lora.layer", "Linear"):
        raise TypeError(_message(layer, "is not LoRA around an nn.Linear"))
    if layer.disable_adapters or layer.merged:
        if layer.disable_adapters and layer.merged:
            raise TypeError(_message(layer, "has merged adapters that are disabled"))
        return []
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    for name in active:
        if name in layer.lora_variant:
            variant = type(layer.lora_variant[name]).__name__.removesuffix("LinearVariant")
            raise TypeError(_message(layer, f"has the adapter '{name}' of the variant {variant}"))
    return active


def _check_base(base: Any) -> None:
    _check_hooks(base)
    if isinstance(base, nn.Embedding):
        return
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        raise TypeError(_message(base, "does something else than h W^T + b"))
    if base.weight.is_meta:
        raise TypeError(_message(base, "is offloaded: its weight is on the meta device"))


def _check_hooks(module: nn.Module) -> None:
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        raise TypeError(_message(module, "has hooks or a forward of its own, which would not run"))


def _is_of_peft(module: nn.Module, path: str, name: str) -> bool:
    """Whether the module is of a class of PEFT, which is then imported."""
    imported = sys.modules.get(path)
    return imported is not None and isinstance(module, getattr(imported, name))


def _message(module: nn.Module, problem: str) -> str:
    return (
        "`weight` must be a tensor, nn.Linear, nn.Embedding, or PEFT's LoRA layer around nn.Linear,"
        f" got a {type(module).__module__}.{type(module).__name__} that {problem}; pass the weight"
        " that it stands for, or merge it."
    )
