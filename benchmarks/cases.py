"""The cases that are timed: shapes named for models, batches with realistic shares of labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.data.batch import TokenBatch
from fastrl.data.documents import Document
from fastrl.functional.batch import BatchKwargs

EPSILON = 0.2


@dataclass(frozen=True)
class Shape:
    """Sizes of a head and of a batch of equally long documents."""

    name: str
    hidden_size: int
    vocab_size: int
    num_tokens: int = 8192
    num_documents: int = 16
    softcap: float | None = None
    rows_labelled: int | None = 5734  # None: all but the last token of each document
    rows_active: int | None = 4215  # None: as many as are labelled
    peaked: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def document_length(self) -> int:
        """Tokens of a document."""
        return self.num_tokens // self.num_documents


LLAMA: dict[str, Any] = {"hidden_size": 4096, "vocab_size": 128256}
QWEN: dict[str, Any] = {"hidden_size": 2048, "vocab_size": 151936}
QWEN_SMALL: dict[str, Any] = {"hidden_size": 1024, "vocab_size": 151936}
GEMMA: dict[str, Any] = {"hidden_size": 2304, "vocab_size": 256000, "softcap": 30.0}
SHARD: dict[str, Any] = {"hidden_size": 4096, "vocab_size": 32064}
ALL: dict[str, Any] = {"rows_labelled": None, "rows_active": None}

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama3-8b", **LLAMA),
        Shape("llama3-8b-all", **LLAMA, **ALL),
        Shape("llama3-8b-peaked", **LLAMA, peaked=True),
        Shape("llama3-8b-2k", **LLAMA, num_tokens=2048, rows_labelled=1434, rows_active=1054),
        Shape(
            "llama3-8b-32k",
            **LLAMA,
            num_tokens=32768,
            num_documents=64,
            rows_labelled=22936,
            rows_active=16860,
        ),
        Shape(
            "llama3-8b-128k",
            **LLAMA,
            num_tokens=131072,
            num_documents=256,
            rows_labelled=91744,
            rows_active=67440,
        ),
        Shape("qwen3-0.6b", **QWEN_SMALL),
        Shape("qwen3-1.7b", **QWEN),
        Shape("qwen3-1.7b-all", **QWEN, **ALL),
        Shape("gemma2-2b", **GEMMA),
        Shape("llama3-8b-tp4", **SHARD),
        Shape("tiny", 64, 1000, num_tokens=128, num_documents=4, rows_labelled=90, rows_active=66),
    )
}


@dataclass(frozen=True)
class Case:
    """A head's inputs, and what every implementation needs of the batch."""

    shape: Shape
    hidden_states: Tensor  # [T, D]
    weight: Tensor  # [V, D]
    batch: BatchKwargs
    labelled: Tensor  # [R] rows with a label
    active: Tensor  # [G] rows that carry gradient

    @property
    def labels(self) -> Tensor:
        """[T], -100 where there is none."""
        return self.batch.labels

    @property
    def advantages(self) -> Tensor:
        """[T]."""
        assert self.batch.advantages is not None
        return self.batch.advantages

    @property
    def old_logprobs(self) -> Tensor:
        """[T]."""
        assert self.batch.old_logprobs is not None
        return self.batch.old_logprobs

    def grpo(self, logprobs: Tensor) -> Tensor:
        """The GRPO loss of log-probabilities [T]: the definition that all are held to."""
        losses = clipped_losses(logprobs - self.old_logprobs, self.advantages)
        weight = (self.labels != -100).to(losses.dtype)
        return (losses * weight).sum() / len(self.labelled)

    def cross_entropy(self, logprobs: Tensor) -> Tensor:
        """The mean over the labels, for heads that take no gradient of single log-probabilities."""
        return -torch.where(self.labels == -100, 0, logprobs).sum() / len(self.labelled)


def clipped_losses(log_ratios: Tensor, advantages: Tensor) -> Tensor:
    """-min(r A, clip(r) A) of each label, r the ratio of the policy to the old one."""
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - EPSILON, 1 + EPSILON)
    return -torch.minimum(ratios * advantages, clipped * advantages)


def _prompt_lengths(shape: Shape) -> tuple[list[int], list[bool]]:
    """Of each document, and which of them have an advantage: as many rows as the shape says."""
    count, length = shape.num_documents, shape.document_length
    if shape.rows_labelled is None or shape.rows_active is None:
        return [1] * count, [True] * count
    num_active = count - count // 4
    completions = [
        *_split(shape.rows_active, num_active),
        *_split(shape.rows_labelled - shape.rows_active, count - num_active),
    ]
    return [length - c for c in completions], [i < num_active for i in range(count)]


def _split(total: int, parts: int) -> list[int]:
    """Integers of different sizes that add up to `total`."""
    even = [total // parts + (i < total % parts) for i in range(parts)]
    for i in range(parts // 2):
        shift = (i * 29) % max(even[i] // 8, 1)
        even[i] += shift
        even[-1 - i] -= shift
    return even


def make_batch(shape: Shape, seed: int = 0) -> BatchKwargs:
    """Equally long documents with as many labels and advantages as the shape says, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    prompts, has_advantage = _prompt_lengths(shape)
    documents = [
        Document(
            tokens=torch.randint(
                shape.vocab_size, (shape.document_length,), generator=generator
            ).tolist(),
            prompt_length=prompt,
            logprobs=[0.0] * (shape.document_length - prompt),
            advantage=float(torch.randn((), generator=generator)) if active else 0.0,
        )
        for prompt, active in zip(prompts, has_advantage, strict=True)
    ]
    (batch,) = TokenBatch.from_documents(documents).to_kwargs()
    return batch


def make_case(shape: Shape, device: str, seed: int = 0) -> Case:
    """Random tensors: near-uniform distributions, or peaked ones like those of a trained model."""
    generator = torch.Generator(device=device).manual_seed(seed)
    batch = make_batch(shape, seed)
    batch = batch.sent_to(device) if device == "cuda" else batch.to(device)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    weight = (normal(shape.vocab_size, shape.hidden_size) * 0.02).to(shape.dtype)
    hidden = normal(shape.num_tokens, shape.hidden_size)
    if shape.peaked:
        # Pulls each hidden state towards its label's row: probabilities from nearly 0 to nearly 1.
        labels = batch.labels.clamp(min=0)
        pull = 2 + 12 * torch.rand(shape.num_tokens, 1, generator=generator, device=device)
        hidden += pull * 4096 / shape.hidden_size * weight[labels].float()
    assert batch.labelled_rows is not None
    assert batch.active_rows is not None
    case = Case(
        shape,
        hidden.to(shape.dtype).requires_grad_(),
        weight.requires_grad_(),
        batch,
        batch.labelled_rows.index,
        batch.active_rows.index,
    )
    noise = 0.1 * normal(shape.num_tokens)
    old = torch.where(batch.labels == -100, 0, reference_logprobs(case) + noise)
    return replace(case, batch=batch.replace(old_logprobs=old))


@torch.no_grad()
def reference_logprobs(
    case: Case, dtype: torch.dtype = torch.float32, rows: Tensor | None = None
) -> Tensor:
    """[T] (or of `rows`) log-probabilities from logits in `dtype`; 0 without label."""
    hidden, labels = case.hidden_states, case.labels
    if rows is not None:
        hidden, labels = hidden[rows], labels[rows]
    weight = case.weight.to(dtype)
    parts = []
    for h, label in zip(hidden.split(512), labels.split(512), strict=True):
        z = _capped(h.to(dtype) @ weight.t(), case.shape.softcap)
        picked = z.gather(1, label.clamp(min=0)[:, None])[:, 0]
        parts.append(torch.where(label == -100, 0, picked - z.logsumexp(1)))
    return torch.cat(parts)


@dataclass(frozen=True)
class Truth:
    """The loss and gradients from fp32 products of fp32 operands."""

    loss: Tensor
    grad_hidden: Tensor  # [T, D] fp32
    grad_weight: Tensor  # [V, D] fp32
    grad_logits: Tensor  # [up to G, V] of rows with gradient, in the case's dtype


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def make_truth(
    case: Case,
    loss_of: Callable[[Tensor], Tensor],
    most_rows: int = 9000,
    rows: Tensor | None = None,
) -> Truth:
    """fp32 all the way, a chunk of rows at a time.

    Args:
        case: whose.
        loss_of: the loss of all tokens' log-probabilities [T].
        most_rows: keep the gradient of the logits, the floor's operand, of no more rows.
        rows: those with gradient; without, the active ones.
    """
    all_logprobs = reference_logprobs(case).requires_grad_()
    loss = loss_of(all_logprobs)
    (grad_logprobs,) = torch.autograd.grad(loss, all_logprobs)
    shape, device = case.shape, case.weight.device
    weight = case.weight.detach().float()
    grad_hidden = torch.zeros(case.hidden_states.shape, device=device)
    grad_weight = torch.zeros_like(weight)
    rows = case.active if rows is None else rows
    num_kept = min(len(rows), most_rows)
    kept = torch.empty(num_kept, shape.vocab_size, dtype=shape.dtype, device=device)
    for start in range(0, len(rows), 512):
        index = rows[start : start + 512]
        h = case.hidden_states.detach()[index].float()
        logits = (h @ weight.t()).requires_grad_()
        z = _capped(logits, shape.softcap)
        logprobs = torch.log_softmax(z, 1).gather(1, case.labels[index][:, None])[:, 0]
        (grad,) = torch.autograd.grad(logprobs, logits, grad_logprobs[index])
        grad_hidden[index] = grad @ weight
        grad_weight += grad.t() @ h
        room = max(num_kept - start, 0)
        kept[start : start + 512] = grad[:room]
    return Truth(loss.detach(), grad_hidden, grad_weight, kept)
