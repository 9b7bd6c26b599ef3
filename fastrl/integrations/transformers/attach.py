"""A head attached to a model, under the model's own call, and taken away again."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fastrl.config.losses import LanguageModelHeadConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.integrations.transformers.call import HEAD_OPTIONS, STATE, Attached, run_head
from fastrl.integrations.transformers.layout import Layout, Packing
from fastrl.integrations.transformers.output_layer import Model
from fastrl.integrations.transformers.probe import Probe, probe_model, undisturbed
from fastrl.layers.language_model_head import LanguageModelHead
from fastrl.parallel import ParallelGroups

_LOGGER = logging.getLogger(__name__)
_FOUND_OUT = ("hidden_size", "vocab_size", "padded_vocab_size", "softcap", "logit_scale", "bias")


def attach_head(
    model: nn.Module,
    losses: Mapping[str, Any],
    *,
    groups: ParallelGroups | None = None,
    packing: Packing = "auto",
    **options: Any,
) -> LanguageModelHead:
    """The head that `model(batch=...)` runs from now on; every other call goes on as before.

    `model(batch=batch)` takes a `BatchKwargs` and gives a `HeadOutput`: the loss of the batch, or
    under `torch.no_grad()` its log-probabilities and entropies, of the same numbers that the
    model's own logits would give, without the logits. It is the model's module call, so that
    FSDP2, DDP, accelerate, gradient checkpointing and PEFT do in it what they do in any. It takes
    `compute_loss`, `return_logprobs`, `statistics` and `teacher` as the head does; `compute_loss`
    is by default whether gradients are enabled, also in evaluation mode. Under autocast the head's
    products have autocast's dtype, as the model's own output layer would.

    With `config.output_router_logits` the model's auxiliary loss is added as the model adds it,
    times `router_aux_loss_coef`, and weighted by the batch's share of the step's labels, so that
    the sum over micro-batches and data ranks is its mean; the metric `aux_loss` is that mean
    without the coefficient. The model is called on two short documents here, packed and alone:
    that tells whether it keeps packed documents apart (`packing_of`), and its own logits tell their
    scale, soft cap and size.

    Args:
        model: a causal language model of transformers, or a PEFT model around one, with its
            weights; under FSDP2 before the first or after the last `fully_shard`, on all ranks.
        losses: by name, as in `LanguageModelHeadConfig`; none for log-probabilities alone.
        groups: only `dp`: documents are whole on a rank.
        packing: `packed` puts the documents of a batch into one row, told apart by `position_ids`;
            `padded` gives each a row of the longest one's length. `auto` packs where the model
            keeps packed documents apart, else pads.
        options: further fields of `LanguageModelHeadConfig`.

    Raises:
        ValueError: naming what the model does that the head cannot do, or the option.
        TypeError: `model` is wrapped; attach to what is inside.
    """
    inner = _unwrapped(model)
    groups = groups or ParallelGroups()
    _check_arguments(inner, groups, packing, options)
    with undisturbed(model):
        found = probe_model(model, packing)
        head = _build_head(found, losses, groups, options)
        plain = _build_head(found, {}, ParallelGroups(), {})
        own_forward = inner.__dict__.get("forward")
        checked = Attached(plain, found.layout, inner.forward, own_forward)
        inner.__dict__[STATE] = checked
        inner.__dict__["forward"] = MethodType(_with_signature(inner.forward), inner)
        try:
            _check(model, found)
        except BaseException:
            detach_head(model)
            raise
        inner.__dict__[STATE] = replace(checked, head=head)
    _LOGGER.info("%s: documents are %s", type(inner).__name__, found.layout)
    return head


def detach_head(model: nn.Module) -> None:
    """Takes the head away: the model is as it was before `attach_head`.

    Raises:
        ValueError: there is none, or something has wrapped the model's forward since.
    """
    inner = _unwrapped(model)
    state = _state(inner)
    forward = inner.__dict__.get("forward")
    if getattr(forward, "__func__", None) is None or not hasattr(forward.__func__, STATE):
        raise ValueError(
            f"The forward of {type(inner).__name__} must be the one that `attach_head` put there,"
            f" got {forward}; undo what wrapped it since (`accelerator.unwrap_model`), then detach."
        )
    if state.own_forward is None:
        del inner.__dict__["forward"]
    else:
        inner.__dict__["forward"] = state.own_forward
    del inner.__dict__[STATE]


def packing_of(model: nn.Module) -> Layout:
    """`packed` or `padded`: how a model with a head is given the documents of a batch."""
    return _state(_unwrapped(model)).layout


def _unwrapped(model: Any) -> Model:
    """The transformers model, of itself or of a PEFT model."""
    if isinstance(model, PreTrainedModel):
        return model
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        prompts = [name for name, each in model.peft_config.items() if each.is_prompt_learning]
        if prompts:
            raise ValueError(
                f"`model` must not have prompt learning, got the adapters {prompts}: their virtual"
                " tokens have no place in a batch; use LoRA."
            )
        return _unwrapped(model.get_base_model())
    inside = next((name for name in ("module", "_orig_mod") if hasattr(model, name)), None)
    remedy = f"; attach to its `{inside}`" if inside else ""
    raise TypeError(
        f"`model` must be a model of transformers or a PEFT model, got {type(model)}{remedy}."
    )


def _state(inner: Model) -> Attached:
    if STATE not in inner.__dict__:
        raise ValueError(f"{type(inner).__name__} has no head; `attach_head` gives it one.")
    state: Attached = inner.__dict__[STATE]
    return state


def _check_arguments(
    inner: Model, groups: ParallelGroups, packing: str, options: Mapping[str, Any]
) -> None:
    if STATE in inner.__dict__:
        raise ValueError(f"{type(inner).__name__} has a head already; `detach_head` it first.")
    if any(parameter.is_meta for parameter in inner.parameters()):
        raise ValueError(
            f"{type(inner).__name__} must have its weights when a head is attached, which calls it,"
            " but some are on the meta device; load them first."
        )
    sharded = [name for name in ("tp", "sp", "sdp") if getattr(groups, name) is not None]
    if sharded:
        raise ValueError(
            f"`groups` must have `dp` alone, got {sharded}: {type(inner).__name__} computes whole"
            " documents and the whole vocabulary on each rank."
        )
    if packing not in ("auto", "packed", "padded"):
        raise ValueError(f"`packing` must be auto, packed or padded, got {packing!r}.")
    known = [name for name in _FOUND_OUT if name in options]
    if known:
        raise ValueError(f"{known} must not be given: the model says them.")


def _build_head(
    found: Probe, losses: Mapping[str, Any], groups: ParallelGroups, options: Mapping[str, Any]
) -> LanguageModelHead:
    rule = found.rule
    padded = None if rule.vocab_size == found.num_logits else found.num_logits
    config = LanguageModelHeadConfig(
        hidden_size=found.hidden_size,
        vocab_size=rule.vocab_size,
        padded_vocab_size=padded,
        softcap=rule.softcap,
        logit_scale=rule.logit_scale,
        losses=dict(losses),
        **options,
    )
    return LanguageModelHead(config, groups, owns_weight=False)


def _check(model: Model, found: Probe) -> None:
    """Refuses a model whose own logits give other log-probabilities than the head."""
    logprobs = model(batch=found.batch).logprobs
    error = float((logprobs.double() - found.logprobs).abs().max())
    if not error <= found.tolerance:
        raise ValueError(
            f"The head must give the log-probabilities that {type(_unwrapped(model)).__name__}'s"
            f" own logits give, but they differ by {error:.2g} nats; compute them from its logits."
        )


def _with_signature(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model with a head, with the signature of its own and the head's options.

    `generate` and trainers look at the signature. Unlike what `functools.wraps` makes, it does not
    lead to the model's own forward, which accelerate would restore.
    """

    def forward_with_head(
        self: Model, *args: Any, batch: BatchKwargs | None = None, **kwargs: Any
    ) -> Any:
        if batch is None:
            return _state(self).forward(*args, **kwargs)
        return run_head(self, _state(self), batch, args, kwargs)

    own = inspect.signature(forward)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    names = ("batch", *HEAD_OPTIONS)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names
    ]
    rest = [each for each in own.parameters.values() if each.kind is each.VAR_KEYWORD]
    others = [each for each in own.parameters.values() if each not in rest]
    signature = own.replace(parameters=[this, *others, *added, *rest])
    forward_with_head.__dict__.update({"__signature__": signature, STATE: True})
    return forward_with_head
