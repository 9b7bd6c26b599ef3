"""The head in place of Megatron-core's output layer (`GPTModel`, 0.16 and from 0.18 on).

`token_statistics` calls a model for log-probabilities and entropy, `head_output` for the losses of
a `LanguageModelHead`; neither forms logits. The weight stays Megatron's: sharded over the tensor
axis, tied or not, its gradient added to `main_grad` where Megatron's data parallelism keeps one.

From 0.18 on `GPTModel.forward` takes an `output_processor`; before, `_postprocess` of the instance
is replaced while the call runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from fastrl.functional.batch import BatchKwargs
from fastrl.functional.head.extra_statistics import StatisticName
from fastrl.functional.linear_logprobs import linear_logprobs
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.language_model_head import HeadOutput, LanguageModelHead
from fastrl.parallel import ParallelGroups, group_size

# (hidden states [S, B, D], output layer, weight [V / tp, D], its main_grad) -> the model's output
_Processor = Callable[[Tensor, Any, Tensor, Tensor | None], Any]


def token_statistics(
    model: Any,
    labels: Tensor,  # [B, S]
    *,
    temperature: float | Tensor = 1.0,  # scalar or [B, S]
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    entropy: bool = False,
    statistics: Collection[StatisticName] = (),
    **inputs: Any,
) -> TokenStatistics | Tensor:
    """Statistics [B, S] of `labels` under the model, differentiable; see `linear_logprobs`.

    The backward skips tokens without an upstream gradient, which it synchronises to find.

    Args:
        model: `GPTModel`, also inside Megatron's `Float16Module` and `DistributedDataParallel`.
        labels: int64, shifted; -100 = none. All S tokens, also under sequence parallelism.
        temperature: as in `linear_logprobs`.
        softcap: bound of the logits, of which Megatron's own output has none.
        logit_scale: factor on the logits, likewise.
        vocab_size: size of the vocabulary without Megatron's padding; default: with it, as in
            Megatron's own loss.
        entropy: whether the entropy is computed.
        statistics: names of others.
        inputs: keyword arguments of the model's forward, without `labels`.

    Returns:
        The statistics; on a pipeline stage without output layer what the stage gives.

    Raises:
        ValueError: the model does something that the head would leave out.
    """

    def process(hidden: Tensor, layer: Any, weight: Tensor, main_grad: Tensor | None) -> Any:
        flat = _in_megatrons_order(labels)
        has_label, shape = flat != -100, labels.t().shape
        found = linear_logprobs(
            hidden.flatten(0, 1),
            weight,
            # Every slot gets some label, so that nothing has to be counted on the host.
            flat.clamp(min=0),
            bias=layer.bias,
            temperature=_in_megatrons_order(temperature),
            softcap=softcap,
            logit_scale=logit_scale,
            vocab_size=vocab_size,
            entropy=entropy,
            statistics=statistics,
            groups=_groups(layer),
            weight_rows=layer.output_size,
            rows=torch.arange(flat.shape[0], device=flat.device),
            drop_inactive_rows=True,
            main_grad=main_grad,
        )
        return found.map(lambda values: torch.where(has_label, values, 0).view(shape).t())

    result: TokenStatistics | Tensor = _call(model, process, inputs)
    return result


def _in_megatrons_order(values: Any) -> Any:  # [B, S] -> [S B]
    """Values of the tokens as Megatron flattens its hidden states [S, B, D]; a scalar as it is."""
    has_tokens = isinstance(values, Tensor) and values.ndim
    return values.t().reshape(-1) if has_tokens else values


def head_output(
    model: Any,
    head: LanguageModelHead,
    batch: BatchKwargs,
    *,
    compute_loss: bool | None = None,
    return_logprobs: bool = False,
    **inputs: Any,
) -> HeadOutput | Tensor:
    """Losses and metrics of `head` under the model, whose output layer gives the weight.

    Args:
        model: as in `token_statistics`.
        head: without parameters (`owns_weight=False`) and with the groups of `head_groups(model)`,
            beside `dp`.
        batch: of the model's one row of S packed tokens.
        compute_loss: as in the head.
        return_logprobs: as in the head.
        inputs: keyword arguments of the model's forward: the tokens of `batch` as [1, S].

    Returns:
        The head's output; on a pipeline stage without output layer what the stage gives.

    Raises:
        ValueError: the groups of the head are not the model's, or as in `token_statistics`.
    """

    def process(
        hidden_states: Tensor, layer: Any, weight: Tensor, main_grad: Tensor | None
    ) -> HeadOutput:
        groups = _groups(layer)
        if (head.groups.tp, head.groups.sp) != (groups.tp, groups.sp):
            raise ValueError(
                f"`head` must have the model's groups tp and sp, {groups.tp} and {groups.sp}, got"
                f" {head.groups.tp} and {head.groups.sp}; build it with `head_groups(model)`."
            )
        output: HeadOutput = head(
            hidden_states.flatten(0, 1),
            batch,
            weight=weight,
            bias=layer.bias,
            compute_loss=compute_loss,
            return_logprobs=return_logprobs,
            main_grad=main_grad,
        )
        return output

    result: HeadOutput | Tensor = _call(model, process, inputs)
    return result


def head_groups(model: Any) -> ParallelGroups:
    """The groups `tp` and `sp` of the model's output layer; `dp` and `sdp` are the caller's."""
    return _groups(_gpt_model(model).output_layer)


def _groups(layer: Any) -> ParallelGroups:
    tensor = layer.tp_group if group_size(layer.tp_group) > 1 else None
    return ParallelGroups(tp=tensor, sp=tensor if layer.sequence_parallel else None)


def _call(model: Any, process: _Processor, inputs: Mapping[str, Any]) -> Any:
    """`model(**inputs)`, with `process` in the place of output layer and loss."""
    if "labels" in inputs:
        raise ValueError(
            "`labels` must not be among the inputs of the model: it would compute its own loss;"
            " they are an argument here."
        )
    gpt = _gpt_model(model)
    _check(gpt)

    def on_hidden_states(*, hidden_states: Tensor, **_: Any) -> Any:
        shared = gpt.share_embeddings_and_output_weights
        weight = gpt.shared_embedding_or_output_weight() if shared else gpt.output_layer.weight
        return process(hidden_states, gpt.output_layer, *_into_main_grad(weight))

    if "output_processor" in inspect.signature(gpt.forward).parameters:
        return model(**inputs, output_processor=on_hidden_states)

    def postprocess(**arguments: Any) -> Any:
        return on_hidden_states(**arguments) if gpt.post_process else arguments["hidden_states"]

    gpt._postprocess = postprocess
    try:
        return model(**inputs)
    finally:
        del gpt._postprocess


def _gpt_model(model: Any) -> Any:
    """The `GPTModel` inside Megatron's wrappers."""
    inner = model
    while not isinstance(inner, GPTModel) and hasattr(inner, "module"):
        inner = inner.module
    if not isinstance(inner, GPTModel):
        raise ValueError(
            f"`model` must be a GPTModel of Megatron-core or wrap one, got a"
            f" {type(model).__name__}."
        )
    return inner


def _check(gpt: Any) -> None:
    """Refuses what the output layer or its place would do and the head does not."""
    config = gpt.config
    problems = {
        "mtp_num_layers": config.mtp_num_layers is not None,
        "defer_embedding_wgrad_compute": config.defer_embedding_wgrad_compute,
        "use_mup": getattr(config, "use_mup", False),
    }
    found = [name for name, is_set in problems.items() if is_set]
    if gpt.post_process and gpt.output_layer.skip_bias_add and gpt.output_layer.bias is not None:
        found.append("skip_bias_add")
    if found:
        raise ValueError(
            f"the model must not set {found}, which the head leaves out; turn it off, or call the"
            " model for its logits."
        )


class _IntoMainGrad(torch.autograd.Function):
    """A weight whose gradient the head adds to its `main_grad`, as Megatron's output layer does.

    The head then gives no gradient. What comes back only wakes the hook that starts the reduction;
    the hook adds it to `main_grad` for a weight that is the embedding's as well, whose gradient
    comes this way.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor:
        weight = ctx.weight
        assert grads[0] is None
        weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight)


def _into_main_grad(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """The weight for the head, and the buffer for its gradient where Megatron keeps one."""
    if not (hasattr(weight, "main_grad") and hasattr(weight, "grad_added_to_main_grad")):
        return weight, None
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return weight, None
    return _IntoMainGrad.apply(weight), weight.main_grad
