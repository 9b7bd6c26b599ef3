"""fastrl's loss of the step, and the same with another framework's divisors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from benchmarks.frameworks.batch import HIDDEN_SIZE, VOCAB_SIZE, RecordedBatch, Split
from fastrl import LanguageModelHead, LanguageModelHeadConfig, TokenBatch, linear_logprobs
from fastrl.data.batch import BatchCounts

Config = dict[str, Any]  # of a loss, or of several by name
OTHER_STEP = 200  # labels of the other optimizer step of a generation


def step_loss(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """The sum of the losses of all micro-batches and ranks, under the counts of the step."""
    return sum_of_pieces(config, recorded, split, "step", [[1.0] * len(rank) for rank in split])


def sum_of_pieces(
    config: Config,
    recorded: RecordedBatch,
    split: Split,
    counts: Literal["step", "piece"],
    factors: Sequence[Sequence[float]],
) -> Tensor:
    """The micro-batches' losses times a factor each, under counts of the step or their own."""
    head = LanguageModelHead(
        LanguageModelHeadConfig.model_validate(
            {
                "hidden_size": HIDDEN_SIZE,
                "vocab_size": VOCAB_SIZE,
                "losses": {"policy": config} if "type" in config else config,
            }
        ),
        owns_weight=False,
    )
    pieces = [
        piece
        for rank, of_rank in zip(split, factors, strict=True)
        for piece in zip(rank, of_rank, strict=True)
    ]
    batches = [
        TokenBatch.from_documents([recorded.documents[i] for i in numbers]) for numbers, _ in pieces
    ]
    of_step = BatchCounts.of(batches)
    total = recorded.weight.new_zeros(())
    for (numbers, factor), batch in zip(pieces, batches, strict=True):
        (kwargs,) = batch.to_kwargs(counts=of_step if counts == "step" else None)
        hidden = recorded.hidden[recorded.rows(numbers)]
        output = head(hidden, kwargs, weight=recorded.weight)
        total = total + factor * output.loss
    return total


def num_pieces(split: Split) -> int:
    """Micro-batches of all ranks."""
    return sum(len(rank) for rank in split)


def mean_of_means(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """Each micro-batch divided by its own counts; the mean over micro-batches and ranks."""
    factors = [[1 / num_pieces(split)] * len(rank) for rank in split]
    return sum_of_pieces(config, recorded, split, "piece", factors)


def mean_over_micro_batches(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """Each micro-batch divided by its labels on all ranks; the mean over micro-batches."""
    labels = [[int(recorded.piece(n).mask.sum()) for n in rank] for rank in split]
    totals = [sum(of_ranks) for of_ranks in zip(*labels, strict=True)]
    factors = [[recorded.num_labels / total / len(totals) for total in totals] for _ in split]
    return sum_of_pieces(config, recorded, split, "step", factors)


def mean_of_document_means(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """The same, where documents without a token to be learned count."""
    factors = [[learned(recorded, n) / num_pieces(split) for n in rank] for rank in split]
    return sum_of_pieces(config, recorded, split, "piece", factors)


def sum_of_document_means(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """The same, added up over micro-batches; the mean over ranks."""
    return mean_of_document_means(config, recorded, split) * num_pieces(split) / len(split)


def all_documents(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """The step's documents, with those that have no token to be learned."""
    share = recorded.num_documents_with_labels / len(recorded.documents)
    return step_loss(config, recorded, split) * share


def sum_of_tokens(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """No divisor."""
    return step_loss(config, recorded, split) * recorded.num_labels


def tokens_of_generation(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """The mean of the labels of this step and of one with `OTHER_STEP` in place of its own."""
    mean = (recorded.num_labels + OTHER_STEP) / 2
    return step_loss(config, recorded, split) * recorded.num_labels / mean


def width_of_micro_batch(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """The longest completion of a micro-batch in place of `length`."""
    factors = [
        [config["length"] / recorded.piece(numbers).mask.shape[1] for numbers in rank]
        for rank in split
    ]
    return sum_of_pieces(config, recorded, split, "step", factors)


def entropy_by_micro_batch(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """The loss under the step's counts, its entropy bonus as a mean of micro-batches' means."""
    without = {key: value for key, value in config.items() if key != "entropy"}
    bonus = mean_of_means(config, recorded, split) - mean_of_means(without, recorded, split)
    return step_loss(without, recorded, split) + bonus


def entropy_by_documents(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """The loss with an entropy bonus that is a mean over documents of their means."""
    without = {key: value for key, value in config.items() if key != "entropy"}
    batch = TokenBatch.from_documents(recorded.documents)
    statistics = linear_logprobs(recorded.hidden, recorded.weight, batch.labels, entropy=True)
    assert statistics.entropy is not None
    (kwargs,) = batch.to_kwargs()
    mean = (statistics.entropy / kwargs.label_counts.clamp(min=1))[batch.labels != -100].sum()
    bonus: float = config["entropy"]["bonus"]
    mean = mean / recorded.num_documents_with_labels
    return step_loss(without, recorded, split) - bonus * mean


def ratios_of_one(config: Config, recorded: RecordedBatch, split: Split) -> Tensor:
    """REINFORCE's gradient with the value of ratios that are 1: minus the mean advantage."""
    loss = mean_of_document_means(config, recorded, split)
    total = recorded.weight.new_zeros(())
    for rank in split:
        for numbers in rank:
            total = total - recorded.piece(numbers).advantages.mean() / num_pieces(split)
    return loss - loss.detach() + total


def learned(recorded: RecordedBatch, numbers: Sequence[int]) -> float:
    """The share of documents that have a token to be learned."""
    return sum(recorded.documents[i].has_labels for i in numbers) / len(numbers)
