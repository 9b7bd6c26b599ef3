"""Random layouts of one batch, whose statistics must be the same bits: drawn and run."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fastrl import BatchKwargs, Document, LanguageModelHead, LanguageModelHeadConfig, TokenBatch
from fastrl.functional.head import sharding
from fastrl.functional.head.call import CallOptions, HeadCall, HeadOperands
from fastrl.functional.head.checks import check_inputs
from fastrl.functional.head.recompute import recompute_logprobs
from fastrl.functional.head.single_pass import single_pass
from fastrl.functional.statistics import TokenStatistics
from fastrl.kernels.arguments import LogitTransform
from fastrl.parallel import ParallelGroups, group_rank, group_size, vocab_shard

GRPO = {"type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "entropy": {"bonus": 0.01}}


@dataclass(frozen=True)
class Problem:
    """Documents, their hidden states and a weight; rows of some documents have huge logits.

    With a `group`, shards of the vocabulary are on its ranks, not one after the other.
    """

    documents: list[Document]
    hidden_states: list[Tensor]  # [length, D] a document
    weight: Tensor  # [V, D]
    softcap: float | None
    group: ProcessGroup | None = None

    @classmethod
    def draw(
        cls,
        num_documents: int,
        length: int,
        hidden_size: int,
        vocab_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        softcap: float | None = None,
        seed: int = 0,
    ) -> Problem:
        """Documents of 2 to `length` tokens, at three temperatures."""
        draws = random.Random(seed)
        generator = torch.Generator(device).manual_seed(seed)
        documents, hidden = [], []
        for number in range(num_documents):
            size = draws.randint(2, length)
            prompt = draws.randint(1, size - 1)
            documents.append(
                Document(
                    tokens=[draws.randrange(vocab_size) for _ in range(size)],
                    prompt_length=prompt,
                    logprobs=[-7.0] * (size - prompt),
                    advantage=draws.choice([0.0, 1.0, -0.7]),
                    temperature=draws.choice([1.0, 1.0, 0.625]),
                )
            )
            rows = torch.randn(size, hidden_size, generator=generator, device=device)
            hidden.append((rows * (40.0 if number % 5 == 4 else 1.0)).to(dtype))
        weight = torch.randn(vocab_size, hidden_size, generator=generator, device=device)
        return cls(documents, hidden, (weight * (3 / hidden_size**0.5)).to(dtype), softcap)

    @property
    def vocab_size(self) -> int:
        return len(self.weight)

    @cached_property
    def offsets(self) -> list[int]:
        """Where each document's tokens begin in the order of the problem."""
        sizes = torch.tensor([0, *(len(rows) for rows in self.hidden_states)])
        return [int(offset) for offset in sizes.cumsum(0)]

    def padded_weight(self, rows: int) -> Tensor:
        """The weight with rows of padding."""
        padding = torch.full_like(self.weight[:1], 9.0).expand(rows - self.vocab_size, -1)
        return torch.cat([self.weight, padding])


@dataclass(frozen=True)
class Layout:
    """How the documents are run.

    Attributes:
        order: of the documents, or of some of them.
        cuts: places in the order between micro-batches.
        path: "head", "evaluation", "op" or the strategy that shards run.
        size: vocabulary shards, where the strategy runs in shards.
        config: of the head.
        chunk_size: of the head or the call.
        padding: multiple of slots that a micro-batch is padded to.
    """

    order: list[int]
    cuts: list[int]
    path: str
    size: int
    config: dict[str, Any]
    chunk_size: int | None
    padding: int

    @classmethod
    def draw(cls, problem: Problem, draws: random.Random) -> Layout:
        """All of the documents, or some, in any order and any micro-batches."""
        number = len(problem.documents)
        order = draws.sample(range(number), draws.choice([number, draws.randint(1, number)]))
        cuts = sorted(draws.sample(range(1, number), draws.randint(0, min(3, number - 1))))
        strategy = draws.choice(["single_pass", "recompute"])
        config = {
            "strategy": strategy,
            "metrics": draws.random() < 0.5,
            "drop_inactive_rows": strategy == "recompute" and draws.random() < 0.5,
        }
        return cls(
            order=order,
            cuts=[cut for cut in cuts if cut < len(order)],
            path=draws.choice(["head", "head", "evaluation", "op", strategy]),
            size=draws.randint(2, 8),
            config=config,
            chunk_size=draws.choice([None, None, 7, 64, 300]),
            padding=draws.randint(1, 16),
        )


def statistics_of(problem: Problem, layout: Layout, deterministic: bool = True) -> Tensor:
    """[3, T] of the labelled tokens by the order of the problem, NaN where there are none.

    The heads give no log-sum-exp, which is then NaN.
    """
    total = problem.weight.new_full((3, problem.offsets[-1]), torch.nan, dtype=torch.float64)
    for first, last in zip([0, *layout.cuts], [*layout.cuts, len(layout.order)], strict=True):
        order = layout.order[first:last]
        packed = TokenBatch.from_documents(
            [problem.documents[number] for number in order], pad_to_multiple=layout.padding
        )
        (batch,) = packed.to_kwargs(device=problem.weight.device)
        hidden = torch.cat([problem.hidden_states[number] for number in order])
        hidden = nn.functional.pad(hidden, (0, 0, 0, batch.num_tokens - len(hidden)), value=3.0)
        found = _RUNS.get(layout.path, _shards)(problem, layout, batch, hidden, deterministic)
        places = torch.cat(
            [torch.arange(problem.offsets[n], problem.offsets[n + 1]) for n in order]
        ).to(problem.weight.device)
        labelled = batch.rows_with_labels.index
        for row, values in zip(total, found, strict=True):
            if values is not None:
                of_labels = values.detach()[labelled].to(row)
                # NaN would stand for numbers that a layout does not have, and equal all others.
                assert not of_labels.isnan().any()
                row[places[labelled]] = of_labels
    return total


def _head(
    problem: Problem, layout: Layout, batch: BatchKwargs, hidden: Tensor, deterministic: bool
) -> list[Tensor | None]:
    config = {"losses": {"policy": GRPO}, "chunk_size": layout.chunk_size, **layout.config}
    if layout.config["strategy"] == "single_pass":
        # Several chunks: more than one is drawn by `chunk_size`.
        config["max_logits_bytes"] = 2**31
    head = LanguageModelHead(
        LanguageModelHeadConfig(
            hidden_size=hidden.shape[1],
            vocab_size=problem.vocab_size,
            softcap=problem.softcap,
            deterministic=deterministic,
            **config,
        ),
        device="meta",
        dtype=hidden.dtype,
    )
    head.weight = nn.Parameter(problem.weight)
    head.train(layout.path == "head")
    output = head(hidden.requires_grad_(), batch, return_logprobs=True)
    if output.loss is not None:
        (1.7 * output.loss).backward()
    return [output.logprobs, output.entropy, None]


def _call(
    problem: Problem,
    layout: Layout,
    batch: BatchKwargs,
    hidden: Tensor,
    rows: int,
    deterministic: bool,
) -> HeadCall:
    return check_inputs(
        HeadOperands(hidden, problem.padded_weight(rows)),
        batch.labels,
        transform=LogitTransform(batch.temperature, problem.softcap),
        vocab_size=problem.vocab_size,
        weight_rows=None,
        groups=None,
        rows=batch.rows_with_labels.index,
        options=CallOptions(True, layout.chunk_size, 2**26, deterministic=deterministic),
    )


def _op(
    problem: Problem, layout: Layout, batch: BatchKwargs, hidden: Tensor, deterministic: bool
) -> list[Tensor | None]:
    rows = problem.vocab_size
    found = recompute_logprobs(_call(problem, layout, batch, hidden, rows, deterministic))
    return [found.logprobs, found.entropy, found.logsumexp]


def _shards(
    problem: Problem, layout: Layout, batch: BatchKwargs, hidden: Tensor, deterministic: bool
) -> list[Tensor | None]:
    """Ranks one after the other: what each sends, then what one of them makes of all of it."""
    size = layout.size if problem.group is None else group_size(problem.group)
    rows = -(-problem.vocab_size // (256 * size)) * 256 * size
    whole = _call(problem, layout, batch, hidden, rows, deterministic)
    run = _single_pass if layout.path == "single_pass" else recompute_logprobs
    if problem.group is None:
        found = in_shards(whole, size, run)
    else:
        groups = ParallelGroups(tp=problem.group)
        found = run(shard(whole, groups, group_rank(problem.group)))
    return [found.logprobs, found.entropy, found.logsumexp]


def _single_pass(call: HeadCall) -> TokenStatistics:
    rows = call.rows
    step = call.options.chunk_size or len(rows)
    ends = [*range(step, len(rows), step), len(rows)] if len(rows) else []

    def loss(statistics: TokenStatistics, start: int, stop: int) -> Tensor:
        return statistics.logprobs.sum()

    _, statistics = single_pass(call, loss, gradient_rows=rows, chunk_ends=ends)
    assert statistics is not None
    return statistics


_RUNS = {"head": _head, "evaluation": _head, "op": _op}


class _Group:
    """The size of a group; nothing is sent through it."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def in_shards(
    whole: HeadCall, size: int, run: Callable[[HeadCall], TokenStatistics]
) -> TokenStatistics:
    """What the last of `size` vocabulary-parallel ranks gives, all run in this process."""
    sent: list[list[Tensor]] = []
    groups = ParallelGroups(tp=_Group(size))  # type: ignore[arg-type]
    for rank in range(size):
        call = shard(whole, groups, rank)
        with _gather(lambda tensor, _: torch.cat([tensor] * size), sent):
            run(call)

    def of_all(tensor: Tensor, number: int) -> Tensor:
        return torch.cat([tensors[number] for tensors in sent[:size]])

    with _gather(of_all, sent):
        return run(call)


def shard(whole: HeadCall, groups: ParallelGroups, rank: int) -> HeadCall:
    """The call of a vocabulary-parallel rank."""
    start, stop = vocab_shard(whole.weight_rows, rank, group_size(groups.tp))
    weight = whole.weight[start:stop].clone()
    return replace(whole, weight=weight, first_column=start, groups=groups)


@contextmanager
def _gather(answer: Callable[[Tensor, int], Tensor], sent: list[list[Tensor]]) -> Iterator[None]:
    """Keeps what is gathered in a new list of `sent`, and answers with a tensor of one's own."""
    own: list[Tensor] = []
    sent.append(own)

    def gather(tensor: Tensor, group: object) -> Tensor:
        own.append(tensor.clone())
        return answer(tensor, len(own) - 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "gather_first_dim", gather)
        yield


def check_gradients(head: LanguageModelHead, hidden: Tensor, batch: BatchKwargs) -> None:
    """The same twice, and those of a document's hidden states beside other documents."""

    def gradients(hidden: Tensor) -> tuple[Tensor, ...]:
        hidden = hidden.clone().requires_grad_()
        return torch.autograd.grad(1.7 * head(hidden, batch).loss, [hidden, head.weight])

    first = gradients(hidden)
    assert all(map(torch.equal, first, gradients(hidden)))
    # Not a document all of whose tokens are clipped: its gradient is 0 beside any other.
    own = batch.document_index == batch.document_index[first[0].abs().sum(1).argmax()]
    assert first[0][own].any()
    beside, _ = gradients(torch.where(own[:, None], hidden, torch.randn_like(hidden)))
    assert torch.equal(beside[own], first[0][own])
    assert not torch.equal(beside, first[0])


class Hashes:
    """Of each statistic of each token, whatever layouts it came from.

    Layouts leave out documents, and heads the log-sum-exp: a layout's bits are compared where it
    has any, and what is hashed is the batch with every other number as it was first seen.
    """

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self.found: set[str] = set()
        self.count = 0
        self.largest_difference = 0.0

    def add(self, statistics: Tensor) -> bool:
        """Whether the bits are those of the layouts before."""
        statistics = statistics.cpu()
        if self._first is None:
            self._first = statistics.clone()
        is_new = self._first.isnan()
        self._first = torch.where(is_new, statistics, self._first)
        filled = torch.where(statistics.isnan(), self._first, statistics)
        difference = (filled - self._first).abs().nan_to_num().max().item()
        self.largest_difference = max(self.largest_difference, difference)
        same = torch.equal(filled.view(torch.int64), self._first.view(torch.int64))
        # Numbers that no layout before had are no difference.
        digest = "same" if same else hashlib.sha256(filled.numpy().tobytes()).hexdigest()
        self.found.add(digest)
        self.count += 1
        return same
