"""Faults that users met in other losses, each with the right value; named after their ids."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fastrl import (
    BatchCounts,
    BatchKwargs,
    Document,
    LanguageModelHead,
    LanguageModelHeadConfig,
    RowSet,
    TokenBatch,
    linear_logprobs,
)
from fastrl.config import GRPOLossConfig
from fastrl.functional.statistics import TokenStatistics
from fastrl.layers.losses import GRPOLoss
from tests.helpers.batches import pack
from tests.helpers.bf16_heads import grpo_batch, grpo_head

STRATEGIES = ["recompute", "single_pass"]
CROSS_ENTROPY = {"answers": {"type": "cross_entropy"}}


def uniform_head(loss: dict[str, object], strategy: str = "auto") -> LanguageModelHead:
    """A head of four entries with a bias of zeros: all logits are 0 and can be trained."""
    config = {
        "hidden_size": 1,
        "vocab_size": 4,
        "bias": True,
        "strategy": strategy,
        "losses": {"policy": loss},
    }
    head = LanguageModelHead(LanguageModelHeadConfig.model_validate(config), dtype=torch.float64)
    torch.nn.init.zeros_(head.weight)
    return head


def on_policy(num_labels: int, advantage: float = 1.0) -> Document:
    """Labels 0 under the uniform head, whose own log-probabilities are the old ones."""
    length = num_labels + 1
    old = [-math.log(4)] * length
    return Document(tokens=[0] * length, prompt_length=1, logprobs=old, advantage=advantage)


def run(head: LanguageModelHead, batch: BatchKwargs) -> Tensor:
    loss = head(torch.ones(batch.num_tokens, 1, dtype=torch.float64), batch).loss
    assert isinstance(loss, Tensor)
    loss.backward()
    return loss.detach()


def bias_grad(head: LanguageModelHead) -> list[float]:
    assert head.bias is not None
    assert head.bias.grad is not None
    return [round(value, 6) for value in head.bias.grad.tolist()]


def micro_batches(parts: list[list[Document]]) -> list[BatchKwargs]:
    batches = [TokenBatch.from_documents(part) for part in parts]
    counts = BatchCounts.of(batches)
    return [batch.to_kwargs(counts=counts)[0] for batch in batches]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_n1_micro_batches_add_up_to_the_batch(strategy: str) -> None:
    head = uniform_head({"type": "grpo"}, strategy)
    losses = [run(head, batch) for batch in micro_batches([[on_policy(3)], [on_policy(3)]])]
    assert sum(losses).item() == pytest.approx(-1.0)  # type: ignore[union-attr]
    # Each of six labels moves its logit by -(1/6) (1 - 1/4).
    assert bias_grad(head) == [-0.75, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("split", [False, True])
def test_n4_every_token_of_a_step_weighs_the_same(split: bool, strategy: str) -> None:
    head = uniform_head({"type": "grpo"}, strategy)
    documents = [on_policy(1), on_policy(9, advantage=-1.0)]
    parts = [[document] for document in documents] if split else [documents]
    losses = [run(head, batch) for batch in micro_batches(parts)]
    assert sum(losses).item() == pytest.approx(0.8)  # type: ignore[union-attr]
    assert bias_grad(head) == [0.6, -0.2, -0.2, -0.2]


def test_n6_only_tokens_that_something_predicts_are_counted() -> None:
    documents = [Document(tokens=[1] * length, prompt_length=0) for length in (4, 6)]
    head = uniform_head({"type": "cross_entropy"})
    (batch,) = TokenBatch.from_documents(documents).to_kwargs()
    assert batch.num_labels_in_batch == 8
    assert run(head, batch).item() == pytest.approx(1.386294, abs=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("normalisation", ["tokens", "documents", "constant"])
@pytest.mark.parametrize("loss", ["cross_entropy", "grpo", "gspo"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_d1_nothing_labelled_gives_exactly_zero(
    loss: str, normalisation: str, strategy: str, as_tensor: bool
) -> None:
    config: dict[str, object] = {"type": loss, "normalisation": normalisation}
    if normalisation == "constant":
        config["length"] = 3
    head = uniform_head(config, strategy)
    batch = pack([on_policy(2)])
    zero: int | Tensor = torch.tensor(0) if as_tensor else 0
    batch = BatchKwargs(
        tokens=batch.tokens,
        positions=batch.positions,
        labels=torch.full_like(batch.labels, -100),
        document_index=batch.document_index,
        label_counts=torch.zeros_like(batch.label_counts),
        num_documents=1,
        num_labels_in_batch=zero,
        num_documents_in_batch=zero,
        advantages=batch.advantages,
        old_logprobs=torch.full_like(batch.label_counts, torch.nan),
    )
    hidden = torch.ones(batch.num_tokens, 1, dtype=torch.float64, requires_grad=True)
    head(hidden, batch).loss.backward()
    assert run(head, batch).item() == 0
    assert bias_grad(head) == [0, 0, 0, 0]
    assert hidden.grad is not None
    assert hidden.grad.count_nonzero() == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d1_a_prompt_without_completion_changes_nothing(strategy: str) -> None:
    prompt_only = Document(tokens=[0, 1, 2], prompt_length=3, advantage=1.0)
    for loss in ("grpo", "gspo"):
        head = uniform_head({"type": loss}, strategy)
        alone = run(head, pack([on_policy(2)])), bias_grad(head)
        head.zero_grad()
        together = run(head, pack([prompt_only, on_policy(2)])), bias_grad(head)
        assert together == alone


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d5_zero_advantages_stay_in_the_count_unless_dropped(strategy: str) -> None:
    head = uniform_head({"type": "grpo"}, strategy)
    kept = [on_policy(4), on_policy(4, advantage=0.0)]
    assert run(head, pack(kept)).item() == pytest.approx(-0.5)
    assert run(head, pack(kept[:1])).item() == pytest.approx(-1.0)


@pytest.mark.parametrize("old", [-150.0, -math.inf, math.inf, math.nan])
def test_e1_masked_slots_never_reach_the_exponential(old: float) -> None:
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    batch = pack([on_policy(3)])
    batch = BatchKwargs(
        tokens=batch.tokens[:3],
        positions=batch.positions[:3],
        labels=torch.tensor([0, 0, -100]),
        document_index=torch.zeros(3, dtype=torch.int64),
        label_counts=torch.full((3,), 2.0),
        num_documents=1,
        num_labels_in_batch=2,
        num_documents_in_batch=1,
        advantages=torch.ones(3),
        old_logprobs=torch.tensor([-1.0, -1.0, old]),
    )
    loss = GRPOLoss(GRPOLossConfig())(TokenStatistics(logprobs, None, logprobs), batch)
    (grad,) = torch.autograd.grad(loss, [logprobs])
    assert loss.item() == -1.0
    assert grad.tolist() == [-0.5, -0.5, 0.0]


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
@pytest.mark.parametrize("old", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_e1_ratios_out_of_range_saturate(loss: str, old: float, advantage: float) -> None:
    head = uniform_head({"type": loss}).float()
    document = Document(tokens=[0, 0], prompt_length=1, logprobs=[0, old], advantage=advantage)
    value = head(torch.ones(2, 1), pack([document])).loss
    value.backward()
    assert value.isfinite()
    assert head.bias is not None
    assert head.bias.grad is not None
    assert head.bias.grad.isfinite().all()


@pytest.mark.parametrize("alignment", ["whole document", "completion only"])
def test_m2_old_logprobs_meet_their_own_tokens(alignment: str) -> None:
    head = uniform_head({"type": "grpo"})
    tokens = [2, 3, 0, 1]
    bias = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64)
    assert head.bias is not None
    head.bias.data.copy_(bias)
    own = bias.log_softmax(0)[tokens].tolist()
    logprobs = [0.0, *own[1:]] if alignment == "whole document" else own[1:]
    document = Document(tokens=tokens, prompt_length=1, logprobs=logprobs, advantage=1.0)
    batch = pack([document])
    output = head(torch.ones(4, 1, dtype=torch.float64), batch)
    assert output.metrics["policy/ratio"].item() == pytest.approx(1.0, abs=1e-7)
    assert output.metrics["policy/kl_old_new"].item() == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="old_logprobs"):
        batch.replace(old_logprobs=torch.zeros(3))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("loss", "depth", "vocab_size"), [("gspo", 8, 50), ("grpo", 256, 1000)])
def test_i1_ratio_is_one_on_policy(
    loss: str, depth: int, vocab_size: int, strategy: str, device: torch.device
) -> None:
    losses = {"policy": {"type": loss}}
    head = grpo_head(depth, vocab_size, device=device, strategy=strategy, losses=losses)
    batch = grpo_batch(2, 90, vocab_size, device=device)
    hidden = torch.randn(batch.num_tokens, depth).to(device, torch.bfloat16).requires_grad_()
    with torch.no_grad():
        old = head.eval()(hidden, batch).logprobs
    head.train()
    output = head(hidden, batch.replace(old_logprobs=old), return_logprobs=True)
    # On a GPU the chunks of one pass and the forward alone are not the same kernel.
    bound = 0.0 if device.type == "cpu" else 1e-5
    assert ((output.logprobs - old).exp() - 1).abs().max() <= bound
    assert output.metrics["policy/ratio"].item() == pytest.approx(1.0, abs=1e-6 + bound)
    assert abs(output.metrics["policy/kl_old_new"].item()) <= bound
    assert output.metrics["policy/clip_fraction"].item() == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_i3_many_chunks_add_up_in_fp32(strategy: str, device: torch.device) -> None:
    """1024 chunks of one token, each adding the same to an entry: a bf16 sum would stop early."""
    depth, vocab_size, count = 64, 8, 1024
    head = grpo_head(
        depth, vocab_size, device=device, strategy=strategy, chunk_size=1, metrics=False
    )
    torch.nn.init.zeros_(head.weight)
    logprobs = [-math.log(vocab_size)] * count
    document = Document(tokens=[0] * (count + 1), prompt_length=1, logprobs=logprobs, advantage=1.0)
    batch = pack([document]).to(device)
    hidden = torch.ones(count + 1, depth, device=device, dtype=torch.bfloat16, requires_grad=True)
    loss = head(hidden, batch).loss
    loss.backward(torch.tensor(float(count), device=device))
    assert head.weight.grad is not None
    assert head.weight.grad[0, 0].item() == pytest.approx(-count * 0.875, rel=4e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("frozen", ["weight", "bias", "hidden"])
def test_w3_frozen_parts_of_a_head(strategy: str, frozen: str) -> None:
    head = uniform_head({"type": "grpo"}, strategy)
    batch = pack([on_policy(3), on_policy(2, advantage=-2.0)])
    hidden = torch.ones(batch.num_tokens, 1, dtype=torch.float64, requires_grad=frozen != "hidden")
    torch.nn.init.normal_(head.weight)
    parts = {"weight": head.weight, "bias": head.bias, "hidden": hidden}
    head(hidden, batch).loss.backward()
    everything = {name: None if part is None else part.grad for name, part in parts.items()}
    head.zero_grad()
    hidden.grad = None
    if frozen != "hidden":
        getattr(head, frozen).requires_grad_(False)
    head(hidden, batch).loss.backward()
    for name, part in parts.items():
        assert part is not None
        if name == frozen:
            assert part.grad is None
        else:
            torch.testing.assert_close(part.grad, everything[name])


class LowRank(nn.Module):
    """W + s B A, with W frozen beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(4, 2, dtype=torch.float64))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.5 * self.b @ self.a


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_w2_a_low_rank_update_of_the_head_is_used_and_trained(strategy: str) -> None:
    config = LanguageModelHeadConfig.model_validate(
        {"hidden_size": 3, "vocab_size": 4, "strategy": strategy} | {"losses": CROSS_ENTROPY}
    )
    head = LanguageModelHead(config, dtype=torch.float64)
    nn.init.normal_(head.weight).requires_grad_(False)
    dense = head.weight.clone()
    update = LowRank()
    parametrize.register_parametrization(head, "weight", update)
    (batch,) = TokenBatch.from_documents([Document([0, 2, 1, 3], prompt_length=1)]).to_kwargs()
    hidden = torch.randn(4, 3, dtype=torch.float64)
    output = head(hidden, batch, return_logprobs=True)
    output.loss.backward()

    logits = hidden @ (dense + 0.5 * update.b @ update.a).T
    logprobs = logits.log_softmax(-1)[torch.arange(3), batch.labels[:3]]
    torch.testing.assert_close(output.logprobs[:3], logprobs)
    expected = torch.autograd.grad(-logprobs.mean(), (update.a, update.b))
    torch.testing.assert_close((update.a.grad, update.b.grad), expected)


@pytest.mark.parametrize("entry_point", ["functional", "head", "loss"])
def test_m3_labels_are_shifted_once_and_never_over_a_boundary(entry_point: str) -> None:
    # The second document begins with what follows the first one's last label.
    documents = [
        Document(tokens=[3, 1, 4, 2, 5], prompt_length=3),
        Document(tokens=[0, 2, 1], prompt_length=1),
    ]
    (batch,) = TokenBatch.from_documents(documents).to_kwargs()
    assert batch.labels.tolist() == [-100, -100, 2, 5, -100, 2, 1, -100]
    hidden = torch.zeros(8, 6)
    hidden[torch.arange(7), batch.tokens[1:]] = 10.0
    config = {"hidden_size": 6, "vocab_size": 6, "losses": {"nll": {"type": "cross_entropy"}}}
    head = LanguageModelHead(LanguageModelHeadConfig.model_validate(config))
    torch.nn.init.eye_(head.weight)
    if entry_point == "functional":
        logprobs = linear_logprobs(hidden, head.weight, batch.labels).logprobs
    elif entry_point == "head":
        logprobs = head.eval()(hidden, batch).logprobs
    else:
        assert head(hidden, batch).loss.item() == pytest.approx(0.000227, abs=1e-6)
        return
    expected = torch.where(batch.labels != -100, -0.000227, 0.0)
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)


def rows(*index: int, ends: tuple[int, ...] | None = None) -> RowSet:
    return RowSet(
        index=torch.tensor(index, dtype=torch.int64),
        document_ends=((len(index),) if index else ()) if ends is None else ends,
    )


WRONG_ROWS = {
    "one of five": ({"labelled_rows": rows(0)}, "all rows with a label, which row 1 contradicts"),
    "none": ({"labelled_rows": rows()}, "all rows with a label, which row 0 contradicts"),
    "too many": ({"labelled_rows": rows(0, 1, 2, 3, 4)}, "a label alone, which row 2 contradicts"),
    "out of order": ({"labelled_rows": rows(1, 0, 3, 4, 5)}, "rows in increasing order"),
    "twice": ({"labelled_rows": rows(0, 1, 1, 3, 4, 5)}, "rows in increasing order"),
    "outside": ({"labelled_rows": rows(0, 1, 3, 4, 9)}, "rows from 0 to 6, got"),
    "ends": ({"labelled_rows": rows(0, 1, 3, 4, 5, ends=(2, 4))}, "`document_ends` that increase"),
    "active": ({"active_rows": rows(0)}, "an advantage other than 0, which row 1 contradicts"),
    "no label": ({"active_rows": rows(0, 1, 2)}, "rows with a label alone, which row 2"),
    "documents": ({"active_document_rows": rows(0)}, "an advantage other than 0, which row 1"),
}


def two_documents() -> BatchKwargs:
    """Rows 0, 1 and 3 to 5 have a label; the second document has an advantage of 0."""
    documents = [on_policy(2, 0.5), on_policy(3, 0.0)]
    return TokenBatch.from_documents(documents).to_kwargs()[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", WRONG_ROWS)
def test_rl26_row_sets_that_are_not_the_batch_s_are_refused(name: str, strategy: str) -> None:
    changes, message = WRONG_ROWS[name]
    batch = two_documents()
    run(uniform_head({"type": "grpo"}, strategy), batch)
    with pytest.raises(ValueError, match=message):
        run(uniform_head({"type": "grpo"}, strategy), batch.replace(**changes))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rl26_changed_labels_and_advantages_have_rows_of_their_own(strategy: str) -> None:
    results = []
    labels = torch.tensor([0, -100, -100, 0, 0, 0, -100])
    changed = {"labels": labels, "advantages": torch.tensor([0.5, 0, 0, -2.0, 0.25, 1.0, 0])}
    for fresh in (False, True):
        batch = two_documents().replace(**changed)
        assert batch.row_sets == {}
        if fresh:
            sets = ("labelled_rows", "active_rows", "active_document_rows")
            chosen = rows(0, 3, 4, 5, ends=(1, 4))
            batch = batch.replace(**dict.fromkeys(sets, chosen))
        head = uniform_head({"type": "grpo", "epsilon_low": 0.9}, strategy)
        results.append((run(head, batch), bias_grad(head)))
    assert results[0] == results[1]
    assert any(results[0][1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rl26_advantages_that_are_no_longer_0_need_their_rows(strategy: str) -> None:
    advantages = torch.tensor([0.5, 0.5, 0, 0, 0.25, 0, 0])
    head: dict[str, object] = {"type": "grpo"}
    message = r"`active_rows` .* row 4 contradicts; set the row sets to None"
    with pytest.raises(ValueError, match=message):
        two_documents().replace(advantages=advantages)
    derived = two_documents().replace(
        advantages=advantages, active_rows=None, active_document_rows=None
    )
    run(uniform_head(head, strategy), derived)
    # Of another dtype or scale they are those of the batch.
    run(uniform_head(head, strategy), _scaled(two_documents()))


def _scaled(batch: BatchKwargs) -> BatchKwargs:
    assert batch.advantages is not None
    return batch.replace(advantages=0.1 * batch.advantages.double())
