"""A row of the table: a framework's loss, fastrl's options for it, and how far they are apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.frameworks import ours
from benchmarks.frameworks.batch import SPLITS, RecordedBatch, Split

TOLERANCE = 1e-6
# Bounds of token clips and of document clips, in fastrl's names.
CLIP: dict[str, Any] = {"epsilon_low": 0.15, "epsilon_high": 0.25}
NARROW: dict[str, Any] = {"epsilon_low": 0.05, "epsilon_high": 0.08}


@dataclass(frozen=True)
class Reason:
    """Why a framework's loss differs.

    Attributes:
        name: short, as it stands in the table.
        text: what the framework does.
        explained: fastrl's loss with that in it, which must equal the framework's; None where
            fastrl has no such loss.
    """

    name: str
    text: str
    explained: Callable[[ours.Config, RecordedBatch, Split], Tensor] | None


@dataclass(frozen=True)
class Row:
    """A loss of a framework, and fastrl's options for it.

    Attributes:
        framework: whose code is run.
        theirs: their options, without bounds of a clip that are the same in `config`.
        loss: the scalar of the step whose gradient their optimizer gets.
        config: of fastrl's loss; None where it has none.
        reason: of a difference, where there is one.
        masked: truncated documents are not learned from.
        splits: names of the ways to cut the step that the row is about.
    """

    framework: str
    theirs: str
    loss: Callable[[RecordedBatch, Split], Tensor]
    config: ours.Config | None
    reason: Reason | None = None
    masked: bool = False
    splits: tuple[str, ...] = tuple(SPLITS)


MEAN_OF_MEANS = Reason(
    "tokens of a micro-batch",
    "divides by the tokens of a micro-batch, then by the number of micro-batches and ranks",
    ours.mean_of_means,
)
TOKENS_OF_MICRO_BATCH = Reason(
    "micro-batch of all ranks",
    "divides by the tokens of a micro-batch over all ranks, then by the number of micro-batches",
    ours.mean_over_micro_batches,
)
DOCUMENTS_OF_MICRO_BATCH = Reason(
    "documents of a micro-batch",
    "divides by the documents of a micro-batch, those without a token to be learned as well, then"
    " by the number of micro-batches and ranks",
    ours.mean_of_document_means,
)
ALL_DOCUMENTS = Reason(
    "empty documents",
    "the divisor counts documents without a token to be learned",
    ours.all_documents,
)
NOT_OVER_MICRO_BATCHES = Reason(
    "summed",
    "means over the documents of a micro-batch are added up over micro-batches: with twice as many"
    " of them the gradient is twice as large",
    ours.sum_of_document_means,
)
NO_DIVISOR = Reason("no divisor", "sum over tokens, undivided", ours.sum_of_tokens)
WIDTH = Reason(
    "width",
    "divides by the longest completion of the micro-batch where no constant is given",
    ours.width_of_micro_batch,
)
ENTROPY_OF_MICRO_BATCH = Reason(
    "entropy of a micro-batch",
    "the entropy bonus is a mean over the tokens of a micro-batch, then over micro-batches and"
    " ranks",
    ours.entropy_by_micro_batch,
)
ENTROPY_OF_DOCUMENTS = Reason(
    "entropy by documents",
    "the entropy bonus is normalised as the loss is; fastrl's is a mean over tokens",
    ours.entropy_by_documents,
)
RATIOS = Reason(
    "ratio",
    "the loss is that of ratios, which are 1 on policy: another value with the same gradient; and"
    " it divides by the documents of a micro-batch",
    ours.ratios_of_one,
)

OF_GENERATION = Reason(
    "generation",
    "divides by the mean number of tokens of the optimizer steps of a generation",
    ours.tokens_of_generation,
)
NONE = Reason("none", "fastrl has no such loss", None)
PLAIN_K1 = Reason("plain k1", "fastrl refuses k1's plain gradient, whose mean is 0", None)


def installed(name: str) -> ModuleType:
    """A module of a framework, imported without its warnings.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


def compared(row: Row, recorded: RecordedBatch) -> dict[str, Any]:
    """The row's results, one for each way to cut the step."""
    batch = recorded.without_truncated() if row.masked else recorded
    splits = {name: compared_split(row, batch, SPLITS[name]) for name in row.splits}
    named = {"framework": row.framework, "theirs": row.theirs, "config": row.config}
    return named | {"reason": row.reason and row.reason.name, "splits": splits}


def compared_split(row: Row, batch: RecordedBatch, split: Split) -> dict[str, float]:
    """Both losses and their errors; where they differ, the errors once the reason is in ours."""
    theirs = row.loss(batch, split)
    result = {"loss": theirs.item()}
    if row.config is None:
        return result
    loss = ours.step_loss(row.config, batch, split)
    result |= {"loss_fastrl": loss.item(), **errors(theirs, loss, batch)}
    if worst(result) > TOLERANCE and row.reason is not None and row.reason.explained is not None:
        explained = row.reason.explained(row.config, batch, split)
        found = errors(theirs, explained, batch)
        result |= {f"explained_{name}": value for name, value in found.items()}
    return result


def errors(theirs: Tensor, loss: Tensor, batch: RecordedBatch) -> dict[str, float]:
    """Of the loss, and of its gradients over the largest element of each."""
    leaves = [batch.hidden, batch.weight]
    pairs = zip(
        torch.autograd.grad(theirs, leaves, retain_graph=True),
        torch.autograd.grad(loss, leaves, retain_graph=True),
        strict=True,
    )
    gradient = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    return {"error_loss": abs(theirs.item() - loss.item()), "error_gradient": gradient}


def worst(result: Mapping[str, float], kind: str = "") -> float:
    """The larger error; `kind` is "explained_" for what a reason leaves."""
    return max(result[f"{kind}error_loss"], result[f"{kind}error_gradient"])


def unexplained(row: Mapping[str, Any]) -> list[str]:
    """Names of the splits with a difference that no reason accounts for."""
    if row["config"] is None:
        return []
    return [
        name
        for name, result in row["splits"].items()
        if not worst(result) <= TOLERANCE
        and not ("explained_error_loss" in result and worst(result, "explained_") <= TOLERANCE)
    ]


def in_words(settings: Mapping[str, Any], *bounds: Mapping[str, Any]) -> str:
    """Options as one line of YAML, without those of `bounds` where all of one are there."""
    for left_out in bounds:
        if left_out.items() <= settings.items():
            settings = {name: value for name, value in settings.items() if name not in left_out}
    return ", ".join(f"{name}: {_in_words(value)}" for name, value in settings.items())


def _in_words(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{in_words(value)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_words, value))}]"
    return str(value)
