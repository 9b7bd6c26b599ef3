"""One call of a model with a head: the batch in, the head's output out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.functional.batch import BatchKwargs
from fastrl.integrations.layer_call import autocast_dtype, layer_operands
from fastrl.integrations.transformers.layout import Layout, model_inputs, packed_hidden_states
from fastrl.integrations.transformers.output_layer import (
    Model,
    call_options,
    output_layer,
    replaced,
)
from fastrl.layers.language_model_head import HeadOutput, LanguageModelHead
from fastrl.layers.losses.normalisation import at_least_one

# The attribute of a model with a head; not a submodule, so that no name of a parameter changes.
STATE = "_fastrl_attached"
HEAD_OPTIONS = ("compute_loss", "return_logprobs", "statistics", "teacher")
# What the coefficient of the auxiliary loss is called, on models and in configs.
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
# Where a config without `layer_types` says that layers see a part of what is before a token.
_BOUNDS = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True)
class Attached:
    """What a model with a head carries, outside of its parameters and submodules.

    Attributes:
        head: the losses; without parameters.
        layout: of the model's inputs.
        forward: the model's own.
        own_forward: the forward that the instance had, where it had one.
    """

    head: LanguageModelHead
    layout: Layout
    forward: Callable[..., Any]
    own_forward: Callable[..., Any] | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        """What a copy of the model carries: its own forward, and the same head."""
        forward, own = deepcopy((self.forward, self.own_forward), memo)
        return replace(self, forward=forward, own_forward=own)

    def __reduce__(self) -> str:
        raise TypeError(
            "A model with a head must not be pickled, as its forward could not be found again;"
            " `detach_head` it first, or save it by `save_pretrained` or its `state_dict`."
        )


# Not compiled: the layer's forward is another in each call. A body compiled by itself stays so.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_head(
    model: Model,
    attached: Attached,
    batch: BatchKwargs,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> HeadOutput:
    """The head's output for a batch, with the model's auxiliary loss.

    The model's own forward runs, and the head in the place of its output layer.

    Raises:
        ValueError: the batch cuts documents, shares prefixes that the model cannot, or comes with
            other inputs of the model.
        TypeError: it is no `BatchKwargs`.
    """
    layout = attached.layout
    options = _head_options(attached.head, args, kwargs)
    _check_batch(model, batch, layout)
    layer = output_layer(model)
    outputs: list[HeadOutput] = []

    def in_place_of_logits(hidden_states: Tensor) -> Tensor:
        output: HeadOutput = attached.head(
            packed_hidden_states(hidden_states, batch, layout),
            batch,
            **layer_operands(layer),
            compute_dtype=autocast_dtype(hidden_states.device),
            **options,
        )
        if output.loss is None:
            outputs.append(output)
            return hidden_states.new_zeros(1, 1, 1)
        # No view, and the loss taken before it is out of hand: FSDP2 hangs its hooks on what a
        # module returns, and the model scales it, perhaps in place.
        in_place = output.loss + output.loss.new_zeros(1, 1, 1)
        outputs.append(replace(output, loss=in_place.sum()))
        return in_place

    with replaced(layer, in_place_of_logits):
        result = attached.forward(**model_inputs(batch, layout), **call_options(model))
    (output,) = outputs
    auxiliary = getattr(result, "aux_loss", None)
    if output.loss is None or auxiliary is None:
        return output
    return _with_auxiliary(output, output.loss, auxiliary, model, batch)


def _head_options(
    head: LanguageModelHead, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    given = {name: value for name, value in kwargs.items() if value is not None}
    others = [*given.keys() - HEAD_OPTIONS]
    if args or others:
        raise ValueError(
            f"`batch` must come alone or with {list(HEAD_OPTIONS)}: it holds the model's inputs;"
            f" got {sorted(others) or 'positional arguments'} too."
        )
    return {"compute_loss": bool(head.losses) and torch.is_grad_enabled(), **given}


def _check_batch(model: Model, batch: object, layout: Layout) -> None:
    if not isinstance(batch, BatchKwargs):
        raise TypeError(
            f"`batch` must be a BatchKwargs, got {type(batch).__name__}; `TokenBatch.to_kwargs` and"
            " `OptimizerStep` give them."
        )
    if batch.cut_by_pieces or not batch.whole_documents:
        raise ValueError(
            f"`batch` must hold whole documents, but its split cuts some, and"
            f" {type(model).__name__} sees a rank's tokens alone; split by documents (`groups.dp`,"
            " micro-batches), with `sdp` None and one micro-sequence."
        )
    problem = None if batch.visible_until is None else _prefix_problem(model, layout)
    if problem is not None:
        raise ValueError(
            "`batch` must not share prefixes (`share_prefixes`), whose attention is FlexAttention's"
            f" over whole documents, but {type(model).__name__} {problem}."
        )


def _prefix_problem(model: Model, layout: Layout) -> str | None:
    """Why a model cannot attend over documents that share slots; None if it can."""
    if layout != "packed":
        return "gets a row for each document (`packing_of`); leave `share_prefixes` out"
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    bounds = [name for name in _BOUNDS if getattr(config, name, None) is not None]
    if set(kinds) != {"full_attention"} if kinds is not None else bounds:
        return f"has layers that see less ({kinds or bounds}); leave `share_prefixes` out"
    implementation = getattr(model.config, "_attn_implementation", None)
    if implementation != "flex_attention":
        return f"runs {implementation!r}; call `model.set_attn_implementation('flex_attention')`"
    return None


def _with_auxiliary(
    output: HeadOutput, loss: Tensor, auxiliary: Tensor, model: Model, batch: BatchKwargs
) -> HeadOutput:
    """Adds the routers' auxiliary loss, a mean over tokens, by the batch's share of the labels."""
    config = model.config.get_text_config()
    found = [getattr(each, name, None) for each in (model, config) for name in _COEFFICIENTS]
    coefficients = [each for each in found if each is not None]
    if not coefficients:
        raise ValueError(
            f"{type(model).__name__} must say by {list(_COEFFICIENTS)} what its auxiliary loss is"
            " multiplied by, but does not; set `config.output_router_logits` to False."
        )
    share = len(batch.rows_with_labels) / at_least_one(batch.num_labels_in_batch)
    mean = auxiliary * share
    return replace(
        output,
        loss=loss + coefficients[0] * mean.to(loss.dtype),
        metrics={**output.metrics, "aux_loss": mean.detach()},
    )
