"""The cases of `benchmarks.trl`: a model, a batch, and the gradients that it should get."""

from __future__ import annotations

import copy
import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import clipped_losses
from fastrl.data.batch import TokenBatch
from fastrl.data.documents import Document
from fastrl.functional.batch import BatchKwargs

PRECISIONS = ("bf16 weights", "fp32 weights, bf16 autocast")
CHUNK = 512


@dataclass(frozen=True)
class Sizes:
    """The model and the batch; the defaults are Qwen3-0.6B and 8 x 2,048 tokens."""

    documents: int = 8
    length: int = 2048
    prompt: int = 614
    inactive: int = 2
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936


@dataclass(frozen=True)
class Case:
    """A model, what it is trained on, and the gradients that it should get."""

    sizes: Sizes
    model: Any
    batch: BatchKwargs
    precision: str

    @property
    def tokens(self) -> Tensor:  # [B, L]
        return self.rows(self.batch.tokens)

    @property
    def labels(self) -> Tensor:  # [B, L]
        return self.rows(self.batch.labels)

    def rows(self, values: Tensor | None) -> Tensor:  # [T] -> [B, L]
        assert values is not None
        return values.view(self.sizes.documents, self.sizes.length)

    def autocast(self) -> AbstractContextManager[Any]:
        """As a trainer runs the forward."""
        on = self.precision == PRECISIONS[1]
        return torch.autocast(self.batch.tokens.device.type, torch.bfloat16, enabled=on)

    def twin(self) -> Any:
        """A model of the same parameters, which may be patched."""
        return copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})

    def loss_of(self, logprobs: Tensor) -> Tensor:  # [B, L - 1]
        """TRL's `dapo`: clipped ratios over the number of completion tokens."""
        batch = self.batch
        old, advantages = (
            self.rows(values)[:, :-1] for values in (batch.old_logprobs, batch.advantages)
        )
        mask = self.labels[:, :-1] != -100
        losses = clipped_losses(logprobs - old, advantages)
        return (losses * mask).sum() / batch.num_labels_in_batch


def make_case(sizes: Sizes, precision: str, device: str) -> Case:
    """Random weights and tokens; the old log-probabilities are those of the weights."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    names = [f.name for f in fields(Sizes)][4:]
    config = transformers.Qwen3Config(
        **{name: getattr(sizes, name) for name in names}, tie_word_embeddings=True
    )
    with torch.device(device):
        model = transformers.Qwen3ForCausalLM(config)
    dtype = torch.bfloat16 if precision == PRECISIONS[0] else torch.float32
    model = model.to(dtype).train()
    model.gradient_checkpointing_enable()
    documents = [
        Document(
            tokens=torch.randint(sizes.vocab_size, (sizes.length,)).tolist(),
            prompt_length=sizes.prompt,
            logprobs=[0.0] * (sizes.length - sizes.prompt),
            advantage=0.0 if number < sizes.inactive else (-1.0) ** number,
        )
        for number in range(sizes.documents)
    ]
    (batch,) = TokenBatch.from_documents(documents).to_kwargs()
    case = Case(sizes, model, batch.to(device), precision)
    with torch.no_grad(), case.autocast():
        hidden = model.model(case.tokens, use_cache=False).last_hidden_state.flatten(0, 1)
    old = torch.zeros(len(hidden), device=device)
    for rows in torch.arange(len(hidden), device=device).split(CHUNK):
        old[rows] = exact_logprobs(case, hidden[rows], rows).detach()
    return replace(case, batch=case.batch.replace(old_logprobs=old))


def exact_logprobs(case: Case, hidden: Tensor, rows: Tensor) -> Tensor:
    """[R] from fp32 products of the operands in bf16; 0 without label."""
    hidden, weight = (x.bfloat16().float() for x in (hidden, case.model.lm_head.weight))
    labels = case.batch.labels[rows]
    logprobs = torch.log_softmax(hidden @ weight.t(), 1)
    return torch.where(labels == -100, 0, logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0])


def true_gradients(case: Case) -> list[Tensor]:
    """Of all parameters, with the head in fp32, a chunk of rows at a time."""
    model, sizes = case.model, case.sizes
    model.zero_grad(set_to_none=True)
    with case.autocast():
        hidden = model.model(case.tokens, use_cache=False).last_hidden_state
    leaf = hidden.detach().requires_grad_()
    weight_grad = torch.zeros_like(model.lm_head.weight, dtype=torch.float32)
    for rows in torch.arange(sizes.documents * sizes.length, device=leaf.device).split(CHUNK):
        all_logprobs = case.batch.old_logprobs
        assert all_logprobs is not None
        logprobs = exact_logprobs(case, leaf.flatten(0, 1)[rows], rows)
        all_logprobs = all_logprobs.index_copy(0, rows, logprobs)
        loss = case.loss_of(case.rows(all_logprobs)[:, :-1])
        (grad,) = torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)
        weight_grad += grad
        loss.backward(inputs=[leaf])
    hidden.backward(leaf.grad)
    model.lm_head.weight.grad += weight_grad.to(model.lm_head.weight.dtype)
    return [parameter.grad.clone() for parameter in model.parameters()]


def gradient_error(case: Case, truth: list[Tensor]) -> float:
    """||grad - truth|| / ||truth|| over all parameters; NaN shows."""
    parameters = list(case.model.parameters())
    errors = [
        (p.grad.float() - true.float()).square().sum().item()
        for p, true in zip(parameters, truth, strict=True)
    ]
    norms = [true.float().square().sum().item() for true in truth]
    return float((sum(errors) / sum(norms)) ** 0.5)
