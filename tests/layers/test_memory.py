"""No tensor of [T, V] exists, in forward or backward, and none of [V, D] for a frozen head."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastrl import (
    Document,
    LanguageModelHead,
    LanguageModelHeadConfig,
    kernels,
    linear_logprobs,
)
from fastrl.functional.head.distillation import Teacher
from tests.helpers.batches import pack
from tests.helpers.lora import lora_layer

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 96, 32, 640


class Recorder(TorchDispatchMode):
    """Records the shape of every tensor that an operator returns, but for views of some others."""

    def __init__(self, *others: Tensor) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []
        self.others = {other.untyped_storage().data_ptr() for other in others}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.others:
                self.shapes.append(leaf.shape)
        return result

    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(shape.numel() for shape in self.shapes)

    def rows_of_logits(self) -> int:
        """Rows of the tallest tensor that has the vocabulary as its last dimension."""
        return max(shape[0] for shape in self.shapes if shape[1:] == (VOCAB_SIZE,))


class LogitBytes(TorchDispatchMode):
    """Counts the bytes of whole rows that are alive at a time, but for views of some others."""

    def __init__(self, *others: Tensor) -> None:
        super().__init__()
        self.peak = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.others = {other.untyped_storage().data_ptr() for other in others}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.shape[1:] == (VOCAB_SIZE,):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self.others:
                    self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self.alive.values()))
        return result


def make(loss: str, **options: object) -> tuple[LanguageModelHead, Tensor, Any]:
    generator = torch.Generator().manual_seed(0)
    documents = [
        Document(
            tokens=torch.randint(VOCAB_SIZE, (12,), generator=generator).tolist(),
            prompt_length=1,
            logprobs=[-6.5] * 12,
            advantage=1.0 - 2 * (index % 2),
        )
        for index in range(NUM_TOKENS // 12)
    ]
    config = {
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "losses": {"policy": {"type": loss}},
    }
    head = LanguageModelHead(LanguageModelHeadConfig.model_validate(config | options))
    batch = pack(documents)
    hidden = torch.randn(batch.num_tokens, HIDDEN_SIZE, generator=generator, requires_grad=True)
    return head, hidden, batch


@pytest.mark.parametrize("loss", ["cross_entropy", "grpo", "gspo"])
@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_no_logits_of_all_tokens_exist(loss: str, strategy: str) -> None:
    elements = VOCAB_SIZE * 12
    head, hidden, batch = make(loss, strategy=strategy, max_logits_bytes=4 * elements)
    with Recorder(head.weight) as recorder:
        head(hidden, batch).loss.backward()
    assert recorder.largest() == max(elements, head.weight.numel()) < NUM_TOKENS * VOCAB_SIZE
    head, hidden, batch = make(loss, strategy=strategy)
    with Recorder(head.weight) as recorder:
        head(hidden, batch).loss.backward()
    assert recorder.largest() >= VOCAB_SIZE * batch.num_labels_in_batch


@pytest.mark.parametrize("loss", ["cross_entropy", "grpo", "gspo"])
@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_a_frozen_head_allocates_nothing_of_its_weight(loss: str, strategy: str) -> None:
    head, hidden, batch = make(loss, strategy=strategy, max_logits_bytes=VOCAB_SIZE * 12 * 4)
    head.requires_grad_(False)
    with Recorder(head.weight) as recorder:
        head(hidden, batch).loss.backward()
    assert recorder.largest() < head.weight.numel()
    assert hidden.grad is not None
    assert hidden.grad.count_nonzero() > 0


@pytest.mark.parametrize("chunk_size", [11, 24])
@pytest.mark.parametrize("strategy", ["recompute", "single_pass"])
def test_u2_the_chunk_size_bounds_every_pass(chunk_size: int, strategy: str) -> None:
    head, hidden, batch = make("gspo", strategy=strategy, chunk_size=chunk_size)
    with Recorder(head.weight) as recorder:
        head(hidden, batch, return_logprobs=True).loss.backward()
    assert 0 < recorder.rows_of_logits() <= chunk_size
    head.eval()
    with Recorder(head.weight) as recorder, torch.no_grad():
        head(hidden, batch)
    assert 0 < recorder.rows_of_logits() <= chunk_size


OF_WHOLE_ROWS: dict[str, dict[str, Any]] = {
    "keep_top_k": {"keep": {"top_k": 4}},
    "keep_all": {"keep": {"top_k": 9, "top_p": 0.8, "min_p": 0.05}},
    "smoothed": {"losses": {"a": {"type": "cross_entropy", "label_smoothing": 0.1}}},
    "forward_kl": {"losses": {"a": {"type": "distillation"}}},
    "jensen_shannon": {
        "losses": {"a": {"type": "distillation", "divergence": "jensen_shannon", "beta": 0.3}}
    },
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("name", OF_WHOLE_ROWS)
def test_functions_of_whole_rows_keep_to_the_bound(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is of the size of the logits counts: the kept columns, the teacher's, autograd's."""
    monkeypatch.setattr(kernels, "run_on_cpu", True)
    most = 32 * 4 * VOCAB_SIZE
    peaks = []
    for bound in ({"max_logits_bytes": most}, {}):
        head, hidden, batch = make("grpo", **OF_WHOLE_ROWS[name] | bound)
        head, hidden = head.to(device), hidden.detach().to(device).requires_grad_()
        batch = batch.to(device)
        weight = torch.randn(VOCAB_SIZE, 16, device=device)
        teacher = Teacher(torch.randn(NUM_TOKENS, 16, device=device), weight)
        is_distilled = any("divergence" in loss.needs for loss in head.losses.values())
        with LogitBytes(head.weight, weight) as logits:
            output = head(hidden, batch, teacher=teacher if is_distilled else None)
            output.loss.backward()
        peaks.append(logits.peak)
    assert 0 < peaks[0] <= most < peaks[1]


def test_recorded_entries_take_no_logits(device: torch.device) -> None:
    head, hidden, batch = make("grpo", keep={"recorded": True})
    head, hidden = head.to(device), hidden.detach().to(device).requires_grad_()
    batch = batch.replace(kept_tokens=torch.randint(VOCAB_SIZE, (NUM_TOKENS, 6))).to(device)
    with LogitBytes(head.weight) as logits:
        head(hidden, batch).loss.backward()
    assert logits.peak == 0


@pytest.mark.parametrize("strategy", ["recompute", "single_pass", "smoothed"])
def test_a_loss_that_is_held_keeps_no_hidden_states_after_its_backward(strategy: str) -> None:
    options = OF_WHOLE_ROWS["smoothed"] if strategy == "smoothed" else {"strategy": strategy}
    head, hidden, batch = make("grpo", **options)
    of_body = hidden.detach().requires_grad_() * 1.0
    alive = weakref.ref(of_body)
    output = head(of_body, batch)
    output.loss.backward()
    del of_body
    assert alive() is None
    assert output.loss is not None


def test_no_second_weight_exists_with_lora() -> None:
    """Slabs of the weight are joined with those of B, and only they."""
    base = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False).requires_grad_(False)
    layer = lora_layer(base, r=4)
    hidden = torch.randn(8, HIDDEN_SIZE, requires_grad=True)
    labels = torch.randint(VOCAB_SIZE, (8,))
    with Recorder(base.weight) as recorder:
        found = linear_logprobs(hidden, layer, labels, max_logits_bytes=VOCAB_SIZE * 8)
        found.logprobs.sum().backward()
    assert layer.lora_A["default"].weight.grad is not None
    assert recorder.largest() < VOCAB_SIZE * HIDDEN_SIZE / 2
