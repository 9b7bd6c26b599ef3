"""What a model is, found by calling it on two short documents: its layout and its logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.data.batch import TokenBatch
from fastrl.data.documents import Document
from fastrl.functional.batch import BatchKwargs
from fastrl.integrations.transformers.layout import (
    Layout,
    Packing,
    model_inputs,
    packed_hidden_states,
)
from fastrl.integrations.transformers.output_layer import (
    LogitRule,
    Model,
    accepts,
    call_options,
    output_layer,
    read_logit_rule,
    replaced,
)
from fastrl.models.parallelize import reshard_all

# Tokens of the two documents: more than the convolutions of the models that have some reach.
_LENGTHS = (11, 9)


@dataclass(frozen=True)
class Probe:
    """What is known of a model.

    Attributes:
        layout: how documents are given to it.
        rule: what it makes of its output layer's logits.
        hidden_size: D of the output layer's input.
        num_logits: V of its output.
        batch: two documents.
        logprobs: [T] fp64 nats of their labels by the model's own logits, each document alone.
        tolerance: nats by which log-probabilities may differ through rounding.
    """

    layout: Layout
    rule: LogitRule
    hidden_size: int
    num_logits: int
    batch: BatchKwargs
    logprobs: Tensor  # [T]
    tolerance: float


@contextmanager
def undisturbed(model: Model) -> Iterator[None]:
    """Evaluation mode without gradients, and afterwards everything as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        reshard_all(model)  # the root keeps its parameters gathered after a forward


def probe_model(model: Model, packing: Packing) -> Probe:
    """Calls the model on two documents, alone, packed and padded; under `undisturbed`.

    A layout keeps documents apart when the distributions of each are those of the document alone,
    and do not move when the other's tokens change. What is admitted for rounding is a small share
    of what the other document does where it is really a part of the context; least where tokens
    change, since the arithmetic stays the same (bitwise, but for routed experts).

    Args:
        model: with weights; all ranks of its collectives probe it together.
        packing: the layout, or `auto`.

    Raises:
        ValueError: the model mixes documents in the layout asked for, or in both; it is not
            causal, or has logits that are no scale and soft cap of one output layer's.
    """
    first, second, other = _documents(model)
    sizes: list[tuple[int, int]] = []
    dtypes = {model.dtype, torch.float32}  # and autocast's, where that is on
    layer = output_layer(model)

    def record(hidden_states: Tensor) -> Tensor:
        logits: Tensor = layer.forward(hidden_states)
        sizes.append((hidden_states.shape[-1], logits.shape[-1]))
        dtypes.add(logits.dtype)
        return logits

    with replaced(layer, record):
        alone = [_distributions(model, input_ids=_ids(model, each)) for each in (first, second)]
    if len(sizes) != 2:
        raise ValueError(
            f"{_name(model)} must call its output layer {type(layer).__name__} once, but calls it"
            f" {len(sizes) // 2} times; compute its log-probabilities from its own logits."
        )
    joined = _distributions(model, input_ids=_ids(model, first + second))
    before, after = joined.split([len(first), len(second)])
    effect = _distance(after, alone[1])
    rounding = 16 * max(torch.finfo(each).eps for each in dtypes) * float(joined.abs().max())
    tolerance = min(max(rounding, 1e-3 * effect), 0.1 * effect)
    if (ahead := _distance(before, alone[0])) > tolerance:
        raise ValueError(
            f"{_name(model)} must be causal, but what follows a token changes its distribution by"
            f" {ahead:.2g} nats; set `config.is_decoder` where it has that."
        )

    def mixing(layout: Layout) -> tuple[float, float]:
        found = []
        for beside in (first, other):
            batch = _batch(model, beside, second)
            rows = _distributions(model, **model_inputs(batch, layout))
            found.append(packed_hidden_states(rows, batch, layout).split(_LENGTHS))
        (a, b), (_, moved) = found
        return max(_distance(a, alone[0]), _distance(b, alone[1])), _distance(b, moved)

    layout = _choose(model, packing, mixing, (tolerance, min(tolerance, 5e-3 * effect)))
    batch = _batch(model, first, second)
    labels = batch.labels.clamp(min=0)[:, None]
    logprobs = torch.cat(alone).gather(1, labels)[:, 0].where(batch.labels >= 0, 0)
    rule = read_logit_rule(model, batch.tokens, sizes[0][1])
    return Probe(layout, rule, *sizes[0], batch, logprobs, rounding)


def _choose(
    model: Model,
    packing: Packing,
    mixing: Callable[[Layout], tuple[float, float]],
    tolerances: tuple[float, float],
) -> Layout:
    """The first layout, of those that `packing` admits, in which documents are kept apart."""
    layouts: tuple[Layout, ...] = ("packed", "padded") if packing == "auto" else (packing,)
    found: dict[Layout, str] = {}
    for layout in layouts:
        if layout == "packed" and not accepts(model, "position_ids"):
            found[layout] = "it takes no position_ids"
            continue
        mixed = mixing(layout)
        if mixed[0] <= tolerances[0] and mixed[1] <= tolerances[1]:
            return layout
        found[layout] = f"{max(mixed):.2g} nats"
    remedy = "use `packing='auto'`" if packing == "packed" else "give it one document a batch"
    raise ValueError(
        f"{_name(model)} must keep the documents of a batch apart, but one changes the"
        f" log-probabilities of another by more than rounding ({tolerances[1]:.2g} nats): {found};"
        f" {remedy}."
    )


def _distributions(model: Model, **inputs: Tensor) -> Tensor:
    """[rows, V] fp64, or [N, L, V], the log of the model's distributions."""
    logits: Tensor = model(**inputs, **call_options(model)).logits
    logprobs = logits.double().log_softmax(-1)
    return logprobs[0] if len(logprobs) == 1 else logprobs


def _distance(
    a: Tensor,  # [n, V]
    b: Tensor,  # [n, V]
) -> float:
    """Most nats by which distributions differ; infinite where one is not a number."""
    return float((a - b).abs().max().nan_to_num(nan=math.inf))


def _ids(model: Model, tokens: list[int]) -> Tensor:
    return torch.tensor([tokens], device=next(model.parameters()).device)


def _batch(model: Model, *documents: list[int]) -> BatchKwargs:
    whole = [Document(tokens=tokens, prompt_length=1) for tokens in documents]
    (batch,) = TokenBatch.from_documents(whole).to_kwargs()
    return batch.to(next(model.parameters()).device)


def _name(model: Model) -> str:
    return type(model).__name__


def _documents(model: Model) -> list[list[int]]:
    """Three documents of ordinary tokens: two, and one to stand in the first one's place."""
    config = model.config.get_text_config()
    special = {
        value
        for each in (model.config, config)
        for name, value in vars(each).items()
        if name.endswith(("_id", "_index", "_ids")) and isinstance(value, int)
    }
    # The first half of the tokens, since some models have fewer logits than tokens.
    usual = [token for token in range(min(config.vocab_size // 2, 4096)) if token not in special]
    generator = torch.Generator().manual_seed(0)
    lengths = (*_LENGTHS, _LENGTHS[0])
    return [
        [usual[i] for i in torch.randint(len(usual), (length,), generator=generator).tolist()]
        for length in lengths
    ]
