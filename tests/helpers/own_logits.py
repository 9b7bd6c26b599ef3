"""A batch through a Hugging Face model's own logits, each document alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastrl import BatchKwargs, Document, LanguageModelHead
from fastrl.functional.reference import losses as reference
from fastrl.functional.reference.tokens import Tokens
from tests.helpers.batches import pack


def some_documents(vocab_size: int) -> list[Document]:
    """Ragged ones: among them one of one token, one without advantage, one without label."""
    generator = torch.Generator().manual_seed(5)

    def document(length: int, prompt_length: int, advantage: float) -> Document:
        old = -4.6 + 0.2 * torch.randn(length, generator=generator, dtype=torch.float64)
        return Document(
            tokens=torch.randint(3, vocab_size, (length,), generator=generator).tolist(),
            prompt_length=prompt_length,
            logprobs=old.tolist(),
            advantage=advantage,
        )

    return [
        document(9, 2, 1.0),
        document(1, 0, 1.0),
        document(13, 4, -0.6),
        document(4, 4, 2.0),
        document(6, 1, 0.0),
        document(5, 2, 0.8),
    ]


def some_batch(vocab_size: int, dtype: torch.dtype = torch.float64) -> BatchKwargs:
    """`some_documents`, with padding."""
    batch = pack(some_documents(vocab_size), pad_to_multiple=16)
    vectors = ("advantages", "old_logprobs", "label_counts")
    return batch.replace(**{name: getattr(batch, name).to(dtype) for name in vectors})


def own_logprobs(model: Any, batch: BatchKwargs) -> Tensor:
    """[T] fp64 nats of the batch's labels, 0 without; differentiable."""
    found = torch.zeros(batch.num_tokens, dtype=torch.float64)
    has_cache = hasattr(model.config.get_text_config(), "use_cache")
    options = {"use_cache": False} if has_cache else {}
    for document in range(batch.num_documents):
        slots = (batch.document_index == document).nonzero()[:, 0]
        logits = model(input_ids=batch.tokens[slots][None], **options).logits[0]
        labels = batch.labels[slots]
        picked = logits.double().log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
        found = found.index_copy(0, slots, picked.where(labels >= 0, 0))
    return found


def own_loss(head: LanguageModelHead, logprobs: Tensor, batch: BatchKwargs) -> Tensor:
    """The head's losses of the model's log-probabilities, by their definition."""
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    tokens = Tokens(
        labels=batch.labels,
        document_index=batch.document_index,
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs.double(),
        advantages=batch.advantages.double(),
    )
    terms = [
        loss.weight * reference.LOSSES[loss.type](tokens, loss.model_dump())
        for loss in head.config.losses.values()
    ]
    return torch.stack(terms).sum()


def gradients(model: Any) -> dict[str, Tensor]:
    """The parameters' gradients by name, which are then cleared; zero where there is none."""
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    model.zero_grad()
    return found


class Float64(TorchFunctionMode):
    """Lets what asks for fp32 have float64: norms, routers and logits of many models do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)
