"""The recorded batch, how an optimizer step is cut, and what a framework gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastrl import Document
from fastrl.data.rollouts import read_rollouts

# Twelve documents in four groups: ragged, truncated (as long as the limit, without the end token),
# without advantage, of one token. Log-probabilities are those of the hidden states below plus
# noise, rounded to 1/1024, so that fp32 columns hold them exactly.
FILE = Path(__file__).parent / "batch.jsonl"
VOCAB_SIZE, HIDDEN_SIZE = 24, 16
LIMIT = 12  # tokens of a completion
END = 0  # token that ends a completion

# Numbers of the documents in each micro-batch of each rank.
Split = tuple[tuple[tuple[int, ...], ...], ...]
SPLITS: dict[str, Split] = {
    "one": ((tuple(range(12)),),),
    "even": (((0, 1, 2), (3, 4, 5)), ((6, 7, 8), (9, 10, 11))),
    "uneven": (((0, 1, 2, 3), (4, 5)), ((6,), (7, 8, 9, 10, 11))),
}


def random_state(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Hidden states [T, D] and the weight [V, D], float64."""
    generator = torch.Generator().manual_seed(2026)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    return normal(num_tokens, HIDDEN_SIZE), 0.3 * normal(VOCAB_SIZE, HIDDEN_SIZE)


@dataclass(frozen=True)
class RecordedBatch:
    """The documents with hidden states for all their tokens, one after the other."""

    documents: tuple[Document, ...]
    hidden: Tensor  # [T, D], requires grad
    weight: Tensor  # [V, D], requires grad

    @classmethod
    def load(cls) -> RecordedBatch:
        """The batch of the file."""
        columns = ("logprobs", "ref_logprobs", "rollout_logprobs", "advantage")
        documents = tuple(read_rollouts(FILE, require=columns))
        hidden, weight = random_state(sum(len(x.tokens) for x in documents))
        return cls(documents, hidden.requires_grad_(), weight.requires_grad_())

    def without_truncated(self) -> RecordedBatch:
        """The same with nothing to learn from truncated documents."""
        documents = tuple(
            replace(x, prompt_length=None, loss_mask=[False] * len(x.tokens), **whole(x))
            if is_truncated(x)
            else x
            for x in self.documents
        )
        return replace(self, documents=documents)

    def rows(self, numbers: Sequence[int]) -> Tensor:
        """Rows of `hidden` of the tokens of some documents."""
        ends = list(accumulate(len(x.tokens) for x in self.documents))
        return torch.cat(
            [torch.arange(ends[i] - len(self.documents[i].tokens), ends[i]) for i in numbers]
        )

    def piece(self, numbers: Sequence[int]) -> Piece:
        """A micro-batch."""
        rows = self.rows(numbers)
        return Piece(tuple(self.documents[i] for i in numbers), self.hidden[rows], self.weight)

    @property
    def num_labels(self) -> int:
        """Of the step."""
        return int(self.piece(range(len(self.documents))).mask.sum())

    @property
    def num_documents_with_labels(self) -> int:
        """Of the step."""
        return sum(x.has_labels for x in self.documents)


def is_truncated(document: Document) -> bool:
    """Whether the completion stopped at the limit."""
    return int(document.tokens[-1]) != END


def whole(document: Document) -> dict[str, Any]:
    """Log-probabilities with a value for every token, which a `loss_mask` asks for."""
    names = ("logprobs", "ref_logprobs", "rollout_logprobs")
    return {
        name: [0.0] * (len(document.tokens) - len(values)) + list(values)
        for name in names
        if (values := getattr(document, name)) is not None
    }


@dataclass(frozen=True)
class Piece:
    """A micro-batch as frameworks hold it: completions padded on the right to [B, C]."""

    documents: tuple[Document, ...]
    hidden: Tensor  # [T, D] of its tokens
    weight: Tensor  # [V, D]

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Tokens of the prompts."""
        return [[int(t) for t in x.tokens][:-n] for x, n in self._sized]

    @cached_property
    def completions(self) -> list[list[int]]:
        """Tokens of the completions, those to be learned and others."""
        return [[int(t) for t in x.tokens][-n:] for x, n in self._sized]

    @property
    def _sized(self) -> list[tuple[Document, int]]:
        """Documents with the length of their completion."""
        masked = [x.prompt_length is None for x in self.documents]
        return [
            (x, LIMIT if mask else len(x.tokens) - int(x.prompt_length or 0))
            for x, mask in zip(self.documents, masked, strict=True)
        ]

    @cached_property
    def slots(self) -> Tensor:  # [B, C]
        """The row of `hidden` that predicts each token of the completions; 0 at padding."""
        rows, start = [], 0
        for prompt, completion in zip(self.prompts, self.completions, strict=True):
            first = start + len(prompt) - 1
            rows.append(torch.arange(first, first + len(completion)))
            start += len(prompt) + len(completion)
        return pad(rows)

    @cached_property
    def ids(self) -> Tensor:  # [B, C]
        """Tokens of the completions; 0 at padding."""
        return pad([torch.tensor(x) for x in self.completions])

    @cached_property
    def present(self) -> Tensor:  # [B, C]
        """Where there is a token."""
        return pad([torch.ones(len(x), dtype=torch.bool) for x in self.completions])

    @cached_property
    def mask(self) -> Tensor:  # [B, C]
        """Where there is a token to be learned."""
        learned = torch.tensor([x.has_labels for x in self.documents])
        return self.present & learned[:, None]

    @property
    def advantages(self) -> Tensor:  # [B]
        """Of the documents."""
        return torch.tensor([x.advantage for x in self.documents], dtype=torch.float64)

    def column(self, name: str) -> Tensor:  # [B, C]
        """Recorded log-probabilities, 0 at padding."""
        values = [
            torch.as_tensor(getattr(x, name), dtype=torch.float64)[-n:] for x, n in self._sized
        ]
        return pad(values)

    @property
    def logits(self) -> Tensor:  # [B, C, V]
        """Of the current policy, differentiable; those of another token at padding."""
        return self.hidden[self.slots] @ self.weight.T

    def statistics(self) -> tuple[Tensor, Tensor]:  # [B, C] each
        """Log-probabilities and entropies of the current policy, differentiable, 0 at padding."""
        log_softmax = torch.log_softmax(self.logits, -1)
        logprobs = log_softmax.gather(-1, self.ids[..., None])[..., 0]
        entropies = -(log_softmax.exp() * log_softmax).sum(-1)
        return torch.where(self.present, logprobs, 0), torch.where(self.present, entropies, 0)


def pad(rows: list[Tensor]) -> Tensor:
    """Rows as one tensor, 0 on their right."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
