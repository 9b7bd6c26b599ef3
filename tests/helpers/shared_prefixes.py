"""Prompt groups of every shape, and a small Llama's step on them with and without sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastrl import Document, Llama, OptimizerStep, ParallelGroups, TokenBatch
from fastrl.data.partition import micro_batches_of_rank
from fastrl.data.preferences import preference_pairs
from fastrl.models.parallelize import parallelize_llama, reduce_gradients
from fastrl.parallel import group_rank, group_size
from tests.helpers.layouts import Ranks
from tests.helpers.model_cases import VOCAB_SIZE, randomised, tiny_config
from tests.helpers.ranks import rank_mesh

POLICY = {"type": "grpo", "epsilon_low": 0.15, "epsilon_high": 0.25}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": POLICY,
    "grpo by document": POLICY | {"normalisation": "documents"},
    "grpo by group": POLICY | {"normalisation": "groups"},
    "gspo": {"type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.08},
    "kl and entropy": POLICY | {"kl": {"coefficient": 0.3}, "entropy": {"bonus": 0.1}},
    "cross_entropy": {"type": "cross_entropy", "label_smoothing": 0.2},
    "dpo": {"type": "dpo", "beta": 0.3},
}

_GENERATOR = torch.Generator()


def _ids(count: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (count,), generator=_GENERATOR).tolist()


def _document(tokens: list[int], first_label: int | None, group: object, **values: Any) -> Document:
    """A document whose labels begin at a token; of a mask with holes if `first_label` is None."""
    length = len(tokens)

    def numbers(scale: float) -> Tensor:
        return -3.4 + scale * torch.randn(length, generator=_GENERATOR, dtype=torch.float64)

    advantage = torch.randn((), generator=_GENERATOR, dtype=torch.float64)
    defaults: dict[str, Any] = {
        "prompt_length": first_label,
        "logprobs": numbers(0.3),
        "ref_logprobs": numbers(0.3),
        "advantage": advantage,
        "reward": float(advantage) + 0.5,
        "group_id": group,
        "temperature": 1.0 + 0.1 * (length % 3),
    }
    return Document(tokens, **defaults | values)


def _masked(labels: Sequence[int], length: int) -> dict[str, Any]:
    return {"loss_mask": [position in labels for position in range(length)]}


def grouped_documents() -> list[Document]:
    """Ragged prompt groups, trees of turns and the corners, groups in turn with one another."""
    _GENERATOR.manual_seed(23)
    prompt, root, short, long, one = _ids(9), _ids(5), _ids(1), _ids(20), _ids(6)
    left, right = [*root, 1, *_ids(4)], [*root, 2, *_ids(2)]
    same = [*_ids(6), *_ids(3)]
    turns = [*root, *_ids(3), *_ids(2)]
    groups = [
        [_document([*prompt, *_ids(n)], 9, "prompt") for n in (4, 1, 7, 2)],
        # Branches that no label marks, each with branches of its own.
        [
            _document(ids, None, "tree", **_masked(range(len(head), len(ids), 2), len(ids)))
            for head in (left, right, left, right, right)
            for ids in [[*head, *_ids(3)]]
        ],
        # A turn that one document learns and others only read.
        [
            _document(turns[:8], 5, "turns"),
            _document([*turns, *_ids(4)], 10, "turns"),
            _document([*turns, *_ids(2)], 10, "turns"),
        ],
        [_document(same, 6, "identical") for _ in range(3)],
        # Documents without labels: twice the prompt, a part of it, and the prompt of another.
        [
            _document(long[:n], n, "prefixes", advantage=None, logprobs=None, ref_logprobs=None)
            for n in (20, 12, 20)
        ],
        [
            _document([*long, *_ids(3)], 20, "prefixes"),
            _document([*long, *_ids(1)], 20, "prefixes"),
        ],
        [_document([*short, *_ids(n)], 1, "short") for n in (3, 2)],
        [_document([*one, *_ids(4)], 6, "alone")],
        [_document([*prompt, *_ids(3)], 9, None) for _ in range(2)],
    ]
    longest = max(map(len, groups))
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def pairs() -> list[Document]:
    """Pairs for DPO, each of one prompt."""
    _GENERATOR.manual_seed(29)
    result = []
    for length, (chosen, rejected) in {3: (2, 5), 7: (4, 4), 1: (2, 3)}.items():
        prompt = _ids(length)
        sides = [_document([*prompt, *_ids(n)], length, None) for n in (chosen, rejected)]
        result.append((sides[0], sides[1]))
    return preference_pairs(result)


@dataclass(frozen=True)
class Result:
    """A step: its metrics (with the loss), all gradients, and log-probabilities by document."""

    metrics: dict[str, Tensor]
    grads: dict[str, Tensor]
    logprobs: list[Tensor]
    num_tokens: int


def documents_for(loss: str) -> list[Document]:
    """Documents that a loss takes."""
    return pairs() if loss == "dpo" else grouped_documents()


def step_of(
    loss: str,
    *,
    share_prefixes: bool,
    ranks: Ranks | None = None,
    fully_sharded: bool = False,
    max_tokens: int = 10000,
    pad_to_multiple: int = 1,
) -> Result:
    """The step of this rank, gradients whole; the loss is scaled before its backward."""
    ranks = ranks or Ranks()
    torch.manual_seed(5)
    head = {
        "losses": {"loss": LOSSES[loss]},
        "vocabulary_parallel": ranks.vocabulary_parallel,
    }
    config = tiny_config(head=head)
    llama = randomised(Llama(config, dtype=torch.float64))
    groups = ParallelGroups()
    if ranks.world_size > 1:
        mesh = rank_mesh(ranks.data, ranks.sequence_data, ranks.tensor)
        groups = parallelize_llama(
            llama, mesh, sequence_parallel=ranks.sequence_parallel, fully_sharded=fully_sharded
        )
    packs = micro_batches_of_rank(
        documents_for(loss),
        group_rank(groups.dp),
        group_size(groups.dp),
        max_tokens,
        share_prefixes=share_prefixes,
    )
    options: dict[str, Any] = {"share_prefixes": share_prefixes, "pad_to_multiple": pad_to_multiple}
    step = OptimizerStep([TokenBatch.from_documents(pack, **options) for pack in packs], groups)
    logprobs = []
    for batch in step:
        output = llama(batch, return_logprobs=True)
        assert output.loss is not None
        (0.7 * output.loss).backward()
        step.add(output)
        logprobs.append(output.logprobs.detach())
    reduce_gradients(llama)
    metrics = step.finish(llama.lm_head.loss_groups)
    grads = {name: _whole(parameter.grad) for name, parameter in llama.named_parameters()}
    pieces = [] if ranks.sequence_parallel else list(step.split_by_document(logprobs))
    return Result(metrics, grads, pieces, sum(batch.num_tokens for batch in step.batches))


def _whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _of(name: str) -> Callable[[str], str]:
    """A message with what it is of."""
    return lambda message: f"{name}: {message}"


def assert_same_step(actual: Result, expected: Result, tolerance: float = 1e-10) -> None:
    """Holds loss, metrics and gradients to those of another step."""
    assert actual.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        torch.testing.assert_close(
            actual.metrics[name], value, rtol=tolerance, atol=tolerance, msg=_of(name)
        )
    assert actual.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        assert grad.norm() > 1e-6, name
        torch.testing.assert_close(actual.grads[name], grad, rtol=0, atol=tolerance, msg=_of(name))


def tree_of_paths(visible_until: Tensor) -> Tensor:
    """[T, T]: which key each query sees, by the definition."""
    slot = torch.arange(len(visible_until))
    return (slot <= slot[:, None]) & (slot[:, None] < visible_until)


def attention_over_paths(query: Tensor, key: Tensor, value: Tensor, until: Tensor) -> Tensor:
    """[T, H, head_dim]: attention over a tree by the definition, pair by pair."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~tree_of_paths(until).to(query.device), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def wide_batch(seed: int, num_padding: int = 0) -> TokenBatch:
    """Some random groups over several blocks of FlexAttention, with trees of prompts."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def ids(count: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()

    documents = []
    for group in range(3):
        root = ids(number(1, 300))
        heads = [[*root, *ids(number(0, 150))] for _ in range(number(1, 3))]
        for head in heads:
            for _ in range(number(1, 5)):
                tokens = [*head, *ids(number(1, 180))]
                documents.append(Document(tokens, prompt_length=len(head), group_id=group))
    batch = TokenBatch.from_documents(documents, share_prefixes=True)
    return batch.padded(batch.padded_length + num_padding)


def with_group(documents: Sequence[Document], group: int | str | None) -> list[Document]:
    """The documents in one group, or in none."""
    return [replace(document, group_id=group) for document in documents]


def visible_until_of(name: str) -> Tensor:  # [T]
    """Trees of slots by name, padding among them."""
    if name == "one_token":
        return torch.tensor([1])
    if name == "padding_only":
        return torch.arange(150) + 1
    if name == "full_blocks":  # one root of two blocks under three long branches
        ends = torch.cat(
            [torch.full((256,), 1216), *(torch.full((320,), 576 + 320 * n) for n in range(3))]
        )
        return ends
    if name == "small":
        batch = TokenBatch.from_documents(grouped_documents(), share_prefixes=True)
        batch = batch.padded(batch.padded_length + 9)
    else:
        batch = wide_batch(int(name[-1]), num_padding=200 * int(name[-1]))
    assert batch.visible_until is not None
    return batch.visible_until
