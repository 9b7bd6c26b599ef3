"""One global problem of the head from one seed, and how ranks run and one process assembles it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from fastrl.config.losses import KeepSetConfig, LanguageModelHeadConfig
from fastrl.data.batch import BatchCounts, TokenBatch
from fastrl.data.documents import Document
from fastrl.data.equal_batches import equal_batches
from fastrl.data.slices import shard_slots
from fastrl.functional.batch import BatchKwargs
from fastrl.layers.language_model_head import LanguageModelHead
from fastrl.layers.losses import add_metrics, reduce_metrics
from fastrl.parallel import ParallelGroups, group_rank, group_size, vocab_shard
from tests.helpers.layouts import Ranks
from tests.helpers.ranks import rank_device

UPSTREAM = 0.7
CPU = torch.device("cpu")
COLUMNS = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")


@dataclass(frozen=True)
class HeadRun:
    """What is computed: the losses and the head's options."""

    losses: tuple[tuple[str, Any], ...]
    strategy: Literal["auto", "recompute", "single_pass"] = "auto"
    chunk_size: int | None = None
    micro_batches: int = 1
    bias: bool = True
    metrics: bool = True
    temperature: bool = False
    drop_inactive_rows: bool = False
    main_grad: bool = False
    recorded_every: int = 0  # sets of every so-many-th document, over which its head is; 0: none


@dataclass(frozen=True)
class DocumentCase:
    """A batch of documents: (prompt length, completion length, advantage) each.

    The documents of a data rank's micro-batches are every n-th of the list.
    """

    name: str
    documents: tuple[tuple[int, int, float], ...]
    vocab_size: int = 13
    padded_vocab_size: int | None = None
    hidden_size: int = 6
    sequence_length: int | None = None

    @cache  # noqa: B019 (the cases are module constants)
    def draw(self, number: int) -> tuple[Document, Tensor]:
        """Document `number` and its hidden states [n, D]: the same wherever it is packed."""
        prompt, completion, advantage = self.documents[number]
        generator = torch.Generator().manual_seed(1000 + number)
        length = prompt + completion
        tokens = torch.randint(self.vocab_size, (length,), generator=generator)
        # Every vocabulary shard has labels.
        start = min(prompt, length - 1)
        cycle = torch.arange(length - start) * 5 + number
        tokens[start:] = cycle % self.vocab_size
        vectors = torch.randn(3, completion, generator=generator) * 0.3 - 1.5
        hidden = torch.randn(length, self.hidden_size, generator=generator, dtype=torch.float64)
        old, ref, rollout = vectors.tolist() if completion else ([], [], [])
        document = Document(
            tokens=tokens.tolist(),
            prompt_length=prompt,
            logprobs=old,
            ref_logprobs=ref,
            rollout_logprobs=rollout,
            advantage=advantage,
            temperature=(0.7, 1.0, 1.3)[number % 3],
        )
        return document, hidden

    def with_sets(self, number: int, document: Document) -> Document:
        """The document with sampling sets of one id to four; the same wherever it is packed."""
        generator = torch.Generator().manual_seed(2000 + number)
        counts = torch.randint(1, 5, (self.documents[number][1],), generator=generator).tolist()
        sets = [torch.randint(self.vocab_size, (n,), generator=generator).tolist() for n in counts]
        return replace(document, kept_tokens=sets)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the whole head."""
        generator = torch.Generator().manual_seed(7)
        rows = self.padded_vocab_size or self.vocab_size
        weight = torch.randn(rows, self.hidden_size, generator=generator, dtype=torch.float64)
        bias = torch.randn(rows, generator=generator, dtype=torch.float64)
        return weight, bias


@dataclass(frozen=True)
class RankResult:
    """What one rank gives back; per micro-batch where it is a list."""

    loss: Tensor
    grad_hidden: list[Tensor]
    grad_weight: Tensor
    grad_bias: Tensor | None
    metrics: dict[str, Tensor]
    strategies: list[str | None]


@dataclass(frozen=True)
class WholeResult:
    """The same of all ranks together; `grad_hidden` a document."""

    loss: Tensor
    grad_hidden: list[Tensor]
    grad_weight: Tensor
    grad_bias: Tensor | None
    metrics: dict[str, Tensor]


CASES = {
    case.name: case
    for case in (
        # Straddles every cut; a document without advantage, one without label, one token.
        DocumentCase(
            "ragged",
            (
                (2, 7, 0.8),
                (1, 4, -1.1),
                (3, 9, 0.0),
                (1, 0, 0.0),
                (4, 2, 0.5),
                (2, 12, -0.6),
                (1, 1, 1.3),
                (5, 3, -0.2),
            ),
        ),
        # Prompts alone at the start: some ranks get no label.
        DocumentCase("no_label_on_a_rank", ((15, 0, 0.0), (9, 0, 0.0), (3, 4, 1.0), (2, 6, -0.7))),
        # Padding to 64 slots: some ranks get no document; with dp, one rank gets no label at all.
        DocumentCase("no_document_on_a_rank", ((2, 5, 0.9),), sequence_length=64),
        DocumentCase("nothing_to_learn", ((6, 0, 0.0), (2, 0, 0.0)), sequence_length=16),
        DocumentCase("vocabulary_below_tp", ((2, 7, 0.8), (1, 4, -1.1)), vocab_size=3),
        DocumentCase(
            "padded_vocabulary", ((2, 7, 0.8), (1, 4, -1.1)), vocab_size=9, padded_vocab_size=14
        ),
    )
}


def buckets(case: DocumentCase, parts: int) -> list[list[int]]:
    """Document numbers of each data rank's micro-batches, rank after rank."""
    return [list(range(part, len(case.documents), parts)) for part in range(parts)]


def pack(case: DocumentCase, numbers: list[int], run: HeadRun, multiple: int) -> TokenBatch:
    """One packed sequence of some documents."""
    documents = [case.draw(number)[0] for number in numbers]
    if not run.temperature:
        documents = [replace(document, temperature=1.0) for document in documents]
    if run.recorded_every:
        documents = [
            document if number % run.recorded_every else case.with_sets(number, document)
            for number, document in zip(numbers, documents, strict=True)
        ]
    return TokenBatch.from_documents(
        documents,
        pad_to_multiple=multiple,
        sequence_length=case.sequence_length,
        columns=COLUMNS,
    )


def hidden_states(case: DocumentCase, numbers: list[int], length: int) -> Tensor:
    """[length, D] of packed documents; padding has values that must have no say."""
    parts = [case.draw(number)[1] for number in numbers]
    packed = torch.cat([torch.zeros(0, case.hidden_size, dtype=torch.float64), *parts])
    generator = torch.Generator().manual_seed(3)
    filler = torch.randn(
        length - len(packed), case.hidden_size, generator=generator, dtype=torch.float64
    )
    return torch.cat([packed, filler])


def in_float64(kwargs: BatchKwargs, device: torch.device = CPU) -> BatchKwargs:
    """The batch with float64 columns, so that nothing is summed in fp32."""
    vectors = {name: getattr(kwargs, name).double() for name in (*COLUMNS, "label_counts")}
    return kwargs.replace(**vectors).to(device)


def build_head(
    case: DocumentCase,
    run: HeadRun,
    groups: ParallelGroups | None,
    vocabulary_parallel: bool,
    device: torch.device = CPU,
) -> LanguageModelHead:
    """The head with this rank's rows of the case's weights."""
    config = LanguageModelHeadConfig(
        hidden_size=case.hidden_size,
        vocab_size=case.vocab_size,
        padded_vocab_size=case.padded_vocab_size,
        losses=dict(run.losses),
        strategy=run.strategy,
        chunk_size=run.chunk_size,
        bias=run.bias,
        metrics=run.metrics,
        drop_inactive_rows=run.drop_inactive_rows,
        vocabulary_parallel=vocabulary_parallel,
        keep=KeepSetConfig(recorded=True) if run.recorded_every else None,
        softcap=5.0,
    )
    head = LanguageModelHead(config, groups, dtype=torch.float64, device=device)
    weight, bias = case.weights()
    rows = slice(*vocab_shard(len(weight), group_rank(head.groups.tp), group_size(head.groups.tp)))
    with torch.no_grad():
        head.weight.copy_(weight[rows])
        if head.bias is not None:
            head.bias.copy_(bias[rows])
    return head


def run_on_rank(case_name: str, run: HeadRun, layout: Ranks) -> RankResult:
    """This rank's part of the case, forward and backward, on a rank of the pool."""
    case, groups = CASES[case_name], layout.groups()
    head = build_head(case, run, groups, layout.vocabulary_parallel, rank_device())
    first = group_rank(groups.dp) * run.micro_batches
    mine = buckets(case, layout.data * run.micro_batches)[first : first + run.micro_batches]
    batches = [pack(case, numbers, run, 1) for numbers in mine]
    if run.recorded_every:
        batches = equal_batches(batches, groups)
    counts = BatchCounts.of(batches, groups)
    losses, grads, metrics, strategies = [], [], [], []
    buffer = torch.zeros_like(head.weight) if run.main_grad else None
    for numbers, batch in zip(mine, batches, strict=True):
        (kwargs,) = batch.to_kwargs(groups, layout=layout.layout, counts=counts)
        kwargs = in_float64(kwargs, rank_device())
        hidden = local_hidden(case, numbers, kwargs, groups, layout).requires_grad_()
        output = head(hidden, kwargs, main_grad=buffer)
        assert output.loss is not None
        (output.loss * UPSTREAM).backward()
        assert hidden.grad is not None
        losses.append(output.loss.detach())
        grads.append(hidden.grad.cpu())
        metrics.append(output.metrics)
        strategies.append(output.strategy)
    assert (head.weight.grad is None) == run.main_grad
    grad_weight = head.weight.grad if buffer is None else buffer.detach()
    assert grad_weight is not None
    bias_grad = None if head.bias is None else head.bias.grad
    totals = reduce_metrics(add_metrics(metrics), head.loss_groups)
    return RankResult(
        torch.stack(losses).sum().cpu(),
        grads,
        grad_weight.cpu(),
        None if bias_grad is None else bias_grad.cpu(),
        {name: value.cpu() for name, value in totals.items()},
        strategies,
    )


def local_hidden(
    case: DocumentCase,
    numbers: list[int],
    kwargs: BatchKwargs,
    groups: ParallelGroups,
    layout: Ranks,
) -> Tensor:
    """This rank's hidden states: its slots, and its slice of them under sequence parallelism."""
    size = group_size(groups.sdp)
    length = kwargs.num_tokens * size
    slots = shard_slots(length, rank=group_rank(groups.sdp), size=size, layout=layout.layout)[0]
    hidden = hidden_states(case, numbers, length)[slots]
    hidden = hidden.chunk(group_size(groups.sp))[group_rank(groups.sp)]
    return hidden.clone().to(rank_device())


@cache
def one_process(case_name: str, run: HeadRun) -> WholeResult:
    """The case in one process without groups, float64, all documents in one sequence."""
    case = CASES[case_name]
    head = build_head(case, run, None, True)
    numbers = list(range(len(case.documents)))
    batch = pack(case, numbers, run, 1)
    kwargs = in_float64(batch.to_kwargs()[0])
    hidden = hidden_states(case, numbers, kwargs.num_tokens).requires_grad_()
    output = head(hidden, kwargs)
    assert output.loss is not None
    (output.loss * UPSTREAM).backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    return WholeResult(
        output.loss.detach(),
        list(hidden.grad[: batch.num_tokens].split(batch.document_lengths)),
        head.weight.grad,
        None if head.bias is None else head.bias.grad,
        reduce_metrics(output.metrics, ()),
    )


def assemble(
    case: DocumentCase, run: HeadRun, layout: Ranks, results: list[RankResult]
) -> WholeResult:
    """All ranks' results as one process would give them; checks what ranks must have alike."""
    at = {layout.coordinates(rank): result for rank, result in enumerate(results)}
    outer = [(d, s) for d in range(layout.data) for s in range(layout.sequence_data)]
    tensor = range(layout.tensor)

    def over_tensor(name: str) -> Tensor:
        """Sum over the data axes of the tensor ranks' values, which they have alike."""
        return sum_of([same([getattr(at[d, s, t], name) for t in tensor]) for d, s in outer])

    def sharded(name: str) -> Tensor:
        if not layout.vocabulary_parallel:
            return over_tensor(name)
        return sum_of([torch.cat([getattr(at[d, s, t], name) for t in tensor]) for d, s in outer])

    if layout.head_splits_tokens:
        loss = sum_of([result.loss for result in results])
    else:
        loss = over_tensor("loss")
    metrics = {
        name: same([result.metrics[name] for result in results]) for name in results[0].metrics
    }
    return WholeResult(
        loss,
        _document_grads(case, run, layout, at),
        sharded("grad_weight"),
        sharded("grad_bias") if run.bias else None,
        metrics,
    )


def _document_grads(
    case: DocumentCase,
    run: HeadRun,
    layout: Ranks,
    at: dict[tuple[int, int, int], RankResult],
) -> list[Tensor]:
    grads: dict[int, Tensor] = {}
    dealt = buckets(case, layout.data * run.micro_batches)
    for part, numbers in enumerate(dealt):
        data, micro = divmod(part, run.micro_batches)
        shards = []
        for s in range(layout.sequence_data):
            of_tensor = [at[data, s, t].grad_hidden[micro] for t in range(layout.tensor)]
            shards.append(torch.cat(of_tensor) if layout.sequence_parallel else same(of_tensor))
        size, length = layout.sequence_data, sum(len(shard) for shard in shards)
        packed = torch.full((length, case.hidden_size), torch.nan, dtype=torch.float64)
        for s, shard in enumerate(shards):
            slots = shard_slots(length, rank=s, size=size, layout=layout.layout)[0]
            packed[slots] = shard
        lengths = [sum(case.documents[number][:2]) for number in numbers]
        *pieces, padding = packed.split([*lengths, length - sum(lengths)])
        assert not padding.any()
        grads.update(zip(numbers, pieces, strict=True))
    return [grads[number] for number in range(len(case.documents))]


def same(values: list[Tensor]) -> Tensor:
    """The value that all ranks have."""
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=1e-12, atol=1e-14)
    return values[0]


def sum_of(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum(0)
