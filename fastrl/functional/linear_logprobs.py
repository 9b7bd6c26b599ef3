"""The public op: statistics of labels under softmax(h W^T), differentiable, without logits.

It uses the `recompute` strategy; the parts of the op are in `fastrl.functional.head`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, nn

from fastrl.config.losses import DEFAULT_MAX_LOGITS_BYTES
from fastrl.functional.head.call import CallOptions
from fastrl.functional.head.checks import check_inputs, check_tensor
from fastrl.functional.head.extra_statistics import (
    StatisticName,
    check_names,
    extra_statistics,
)
from fastrl.functional.head.main_grad import with_main_grad
from fastrl.functional.head.output_layer import head_operands
from fastrl.functional.head.recompute import recompute_logprobs
from fastrl.functional.statistics import TokenStatistics
from fastrl.functional.value_checks import require_all
from fastrl.kernels.arguments import LogitTransform
from fastrl.parallel import ParallelGroups


def linear_logprobs(
    hidden_states: Tensor,  # [..., D], [T / sp, D] under sequence and vocabulary parallelism
    weight: Tensor | nn.Module,  # [V, D], [V_local, D] under vocabulary parallelism
    labels: Tensor,  # [...]
    *,
    bias: Tensor | None = None,  # [V] or [V_local]
    temperature: float | Tensor = 1.0,  # scalar or [...]
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    entropy: bool = False,
    statistics: Collection[StatisticName] = (),
    compute_dtype: torch.dtype | None = None,
    groups: ParallelGroups | None = None,
    weight_rows: int | None = None,
    rows: Tensor | None = None,  # [R]
    gradient_rows: Tensor | None = None,  # [G]
    drop_inactive_rows: bool = False,
    deterministic: bool = False,
    chunk_size: int | None = None,
    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES,
    main_grad: Tensor | None = None,  # [V, D]
) -> TokenStatistics:
    """Log-probability, entropy and log-sum-exp of each token, without [T, V] logits.

        z = cap(logit_scale (h W^T + b)) / temperature_t,  cap(x) = softcap tanh(x / softcap)
        logprob = z[label] - lse(z),  entropy = lse - sum p z,  p = exp(z - lse)

    The gradient is dz = g_logprob (onehot - p) + g_logsumexp p - g_entropy p (log p + entropy).
    Slots with label -100 give 0 and receive exactly zero gradient.

    Args:
        hidden_states: bf16, fp16, fp32 or float64, after the final norm. Any strides; T tokens in
            any shape, packed [T, D] or padded [B, L, D].
        weight: same dtype and device, `nn.Linear` layout. Under `groups.tp` this rank's rows of
            it (`vocab_shard`). Or the module that owns it: `nn.Linear`, a tied `nn.Embedding`, or
            PEFT's LoRA layer, whose product of low rank is added (`head_operands`).
        labels: int64, already shifted inside their document; -100 = none. Not sharded over `tp`.
        bias: added to h W^T before the scale.
        temperature: positive; a tensor gives each token its own.
        softcap: bound of the logits (Gemma's tanh cap), None for none.
        logit_scale: factor on h W^T + b (Cohere's `logit_scale`, Granite's 1 / `logits_scaling`).
        vocab_size: rows of the whole weight from this one on are padding, not in the softmax.
        entropy: whether the entropy is computed.
        statistics: names of `mean_logit`, `sum_squares`, `is_argmax` to compute as well; the first
            two take a separate pass over the logits.
        compute_dtype: dtype of the operands of the products, as of autocast: hidden states and
            weight, of any dtype, are converted to it, sums stay fp32, and gradients come back
            unrounded in the tensors' own dtypes. None: both must have one dtype.
        groups: `tp` shards the vocabulary, `sp` the tokens. With both, `hidden_states` is this
            rank's slice of the tokens, everything else is whole, and the gradient of
            `hidden_states` is the slice's. With `sp` alone, everything is this rank's slice and
            the gradients of `weight` and `bias` are summed over `sp`.
        weight_rows: rows of the whole weight under `groups.tp`; default: V_local times its size.
        rows: indices of the labelled tokens among all T, in rising order; default: found from
            `labels`, which synchronises.
        gradient_rows: the subset of `rows` that can have a non-zero gradient; default: all.
        drop_inactive_rows: whether the backward skips rows without a gradient (clipped, filtered);
            finding them synchronises.
        deterministic: whether a token's statistics are, to the bit, a function of its hidden state,
            the weight, its label and its transform alone, whatever the batch and its layout
            (docs/determinism.md).
        chunk_size: maximum number of rows of logits in memory at a time.
        max_logits_bytes: maximum number of bytes of logits in memory at a time.
        main_grad: a buffer like this rank's weight, in its dtype or in fp32, to which the backward
            adds the weight's gradient. Autograd gets none for the weight then, and hooks on it see
            none.

    Returns:
        Statistics of the shape of `labels` in fp32 (float64 for float64 inputs).

    Raises:
        ValueError: a shape, dtype, device or bound does not fit; a label is outside
            [0, vocab_size) or `rows` do not rise (on CUDA a device-side assertion, without
            synchronisation); `deterministic` with `statistics`, a LoRA layer, or shards that cut a
            block.
        TypeError: a tensor is none, or a DTensor; the module does more than is honoured.
    """
    check_tensor("hidden_states", hidden_states)
    check_tensor("labels", labels)
    check_names(statistics, deterministic)
    if rows is not None:
        _check_rows(rows)
    shape = labels.shape
    if hidden_states.ndim > 2 and hidden_states.shape[:-1] != shape:
        raise ValueError(
            "`labels` must be of the shape of `hidden_states` without the last dimension,"
            f" {list(hidden_states.shape[:-1])}, got {list(shape)}."
        )
    if labels.ndim > 1 and isinstance(temperature, Tensor) and temperature.shape == shape:
        temperature = temperature.flatten()
    hidden_states = hidden_states.flatten(0, -2) if hidden_states.ndim > 2 else hidden_states
    call = check_inputs(
        with_main_grad(head_operands(hidden_states, weight, bias, compute_dtype), main_grad),
        labels.flatten() if labels.ndim > 1 else labels,
        transform=LogitTransform(temperature, softcap, logit_scale),
        vocab_size=vocab_size,
        weight_rows=weight_rows,
        groups=groups,
        rows=rows,
        options=CallOptions(
            entropy,
            chunk_size,
            max_logits_bytes,
            drop_inactive_rows,
            "is_argmax" in statistics,
            deterministic,
        ),
    )
    result = recompute_logprobs(call, gradient_rows)
    others = [name for name in statistics if name != "is_argmax"]
    if others:
        extra = extra_statistics(call, others, gradient_rows=gradient_rows)
        result = replace(result, **extra)
    return result if labels.ndim == 1 else result.map(lambda value: value.view(shape))


def _check_rows(rows: Tensor) -> None:
    """Refuses rows out of order: all T of them are taken as they come, without being scattered."""
    rises = rows[1:] > rows[:-1]

    def found() -> str:
        place = int((~rises).nonzero()[0])
        return f", got {int(rows[place])} before {int(rows[place + 1])}; sort them."

    require_all(rises, "`rows` must be in rising order", found)
