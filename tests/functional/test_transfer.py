"""One buffer for a batch's tensors: every value arrives as it was."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import Document, TokenBatch
from fastrl.functional.batch import BatchKwargs, LabelFacts, RowSet
from fastrl.functional.transfer import send


def test_tensors_of_any_dtype_and_shape_arrive() -> None:
    tensors = [
        torch.arange(7),
        torch.randn(3, 5).t(),
        torch.tensor(True),
        torch.empty(0, 4),
        torch.randn(2, dtype=torch.float64),
        torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    ]
    sent = send(tensors, "cpu", pin_memory=False)
    for found, expected in zip(sent, tensors, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found.data_ptr() % 16 == 0 or not found.numel()


def test_a_batch_arrives_whole() -> None:
    documents = [
        Document(tokens=[5, 3, 8, 1], prompt_length=1, logprobs=[-1.0] * 3, advantage=0.7,
                 reward=1.0, group_id=0, temperature=0.5),
        Document(tokens=[5, 3], prompt_length=1, logprobs=[-1.0], advantage=-0.7, group_id=0),
    ]  # fmt: skip
    (batch,) = TokenBatch.from_documents(documents, pad_to_multiple=8).to_kwargs()
    sent = batch.sent_to("cpu", pin_memory=False)
    for name in BatchKwargs.__dataclass_fields__:
        found, expected = getattr(sent, name), getattr(batch, name)
        if isinstance(expected, RowSet):
            assert found.document_ends == expected.document_ends
            found, expected = found.index, expected.index
        elif isinstance(expected, LabelFacts):
            assert found.hold_of(sent.labels)
            found, expected = sent.label_bound, batch.label_bound
        if isinstance(expected, Tensor):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            assert found.data_ptr() != expected.data_ptr() or not found.numel()
        else:
            assert found == expected
