"""Faults of several ranks that users met in other losses, each with the right value; by id."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fastrl import BatchKwargs, Document, LanguageModelHead, LanguageModelHeadConfig, TokenBatch
from fastrl.config import LlamaConfig
from fastrl.data.slices import Layout, shard_slots
from fastrl.functional.linear_logprobs import linear_logprobs
from fastrl.models.llama import Llama
from fastrl.parallel import ParallelGroups
from tests.helpers.ranks import RankPool, parallel_groups

POLICY: dict[str, object] = {"type": "grpo"}
LOG_4 = math.log(4)


def uniform_head(
    loss: dict[str, object], groups: ParallelGroups | None = None
) -> LanguageModelHead:
    """Four entries with a weight of zeros: all logits are 0; hidden states are 1."""
    head = LanguageModelHead(
        LanguageModelHeadConfig.model_validate(
            {"hidden_size": 1, "vocab_size": 4, "losses": {"policy": loss}}
        ),
        groups,
        dtype=torch.float64,
    )
    nn.init.zeros_(head.weight)
    return head


def on_policy(num_labels: int, advantage: float = 1.0) -> Document:
    """Labels 0, whose log-probabilities under the uniform head are the old ones."""
    old = [-LOG_4] * num_labels
    tokens = [0] * (num_labels + 1)
    return Document(tokens=tokens, prompt_length=1, logprobs=old, advantage=advantage)


def ones(batch: BatchKwargs) -> Tensor:
    return torch.ones(batch.num_tokens, 1, dtype=torch.float64, requires_grad=True)


def loss_and_grad(head: nn.Module, batch: BatchKwargs) -> tuple[float, list[float]]:
    """The loss, and the weight's gradient, of one rank."""
    loss = head(ones(batch), batch).loss
    loss.backward()
    (weight,) = head.parameters()
    assert weight.grad is not None
    return loss.item(), rounded(weight.grad)


def rounded(values: Tensor) -> list[float]:
    values = values.full_tensor() if isinstance(values, DTensor) else values
    return [round(value, 6) for value in values.flatten().tolist()]


def summed(values: list[list[float]]) -> list[float]:
    return [round(sum(parts), 6) for parts in zip(*values, strict=True)]


def n4_rank() -> tuple[float, list[float]]:
    groups = parallel_groups(2, 1, 1)
    documents = [on_policy(1), on_policy(9, advantage=-1.0)]
    batch = TokenBatch.from_documents([documents[dist.get_rank()]])
    return loss_and_grad(uniform_head(POLICY, groups), batch.to_kwargs(groups)[0])


def test_n4_tokens_of_short_and_long_data_ranks_weigh_the_same(ranks: RankPool) -> None:
    (loss_0, grad_0), (loss_1, grad_1) = ranks(n4_rank, 2)
    assert loss_0 + loss_1 == pytest.approx(0.8)
    # -(1 - 9) / 10 of onehot - p.
    assert summed([grad_0, grad_1]) == [0.6, -0.2, -0.2, -0.2]


def n8_rank(wrapper: str) -> tuple[float, list[float]]:
    """Eight labels on two sequence-data ranks; what the wrapper leaves as gradient."""
    groups = parallel_groups(1, 2, 1)
    (batch,) = TokenBatch.from_documents([on_policy(8)], sequence_length=10).to_kwargs(groups)
    head: nn.Module = uniform_head(POLICY, groups)
    mesh = init_device_mesh("cpu", (2,))
    factor = 1.0
    if wrapper == "ddp_average":
        head = DistributedDataParallel(head)
        factor = 2.0
    if wrapper == "fsdp_average":
        fully_shard(head, mesh=mesh)
        factor = 2.0
    if wrapper == "fsdp_sum":
        wrapped = fully_shard(head, mesh=mesh)
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
    loss = head(ones(batch), batch).loss
    (loss * factor).backward()
    (weight,) = head.parameters()
    assert weight.grad is not None
    if wrapper == "sum":
        dist.all_reduce(weight.grad)
    return loss.item(), rounded(weight.grad)


@pytest.mark.parametrize("wrapper", ["sum", "ddp_average", "fsdp_average", "fsdp_sum"])
def test_n8_the_factor_counts_every_rank_that_is_averaged_over(
    ranks: RankPool, wrapper: str
) -> None:
    (loss_0, grad_0), (loss_1, grad_1) = ranks(n8_rank, 2, wrapper)
    assert loss_0 + loss_1 == pytest.approx(-1.0)
    assert grad_0 == grad_1 == [-0.75, 0.25, 0.25, 0.25]


def m4_rank(lengths: tuple[int, ...]) -> tuple[list[int], int, float]:
    groups = parallel_groups(1, 2, 1)
    documents, first = [], 11
    for length in lengths:
        documents.append(Document(tokens=range(first, first + length), prompt_length=1))
        first += length
    (batch,) = TokenBatch.from_documents(documents).to_kwargs(groups)
    config = {"hidden_size": 1, "vocab_size": 32, "losses": {"ce": {"type": "cross_entropy"}}}
    head = LanguageModelHead(LanguageModelHeadConfig.model_validate(config), groups)
    nn.init.zeros_(head.weight)
    output = head(torch.ones(batch.num_tokens, 1), batch)
    num_labels = batch.num_labels_in_batch
    assert isinstance(num_labels, int)
    return batch.labels.tolist(), num_labels, output.loss.item()


@pytest.mark.parametrize(
    ("lengths", "labels"),
    [((6,), [[12, 13, 14], [15, 16, -100]]), ((3, 3), [[12, 13, -100], [15, 16, -100]])],
)
def test_m4_no_label_is_lost_at_the_end_of_a_shard(
    ranks: RankPool, lengths: tuple[int, ...], labels: list[list[int]]
) -> None:
    answers = ranks(m4_rank, 2, lengths)
    assert [answer[0] for answer in answers] == labels
    assert {answer[1] for answer in answers} == {sum(lengths) - len(lengths)}
    assert sum(answer[2] for answer in answers) == pytest.approx(math.log(32))


def z1_rank(length: int, prompt: int, layout: Layout) -> tuple[list[int], list[float]]:
    """Slots that this rank holds and the log-probabilities there."""
    groups = parallel_groups(1, 2, 1)
    document = Document(tokens=range(length), prompt_length=prompt)
    (batch,) = TokenBatch.from_documents([document]).to_kwargs(groups, layout=layout)
    head = uneven_head(groups).eval()
    output = head(batch.positions[:, None].double(), batch, return_logprobs=True)
    slots = shard_slots(2 * batch.num_tokens, rank=dist.get_rank(), size=2, layout=layout)
    return slots[0].tolist(), output.logprobs.tolist()


def uneven_head(groups: ParallelGroups | None) -> LanguageModelHead:
    config = LanguageModelHeadConfig(hidden_size=1, vocab_size=8)
    head = LanguageModelHead(config, groups, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None])
    return head


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("length", [8, 7])
def test_z1_each_prompt_length_under_each_layout(
    ranks: RankPool, length: int, layout: Layout
) -> None:
    for prompt in (1, 2, 3, 4, 7):
        document = Document(tokens=range(length), prompt_length=prompt)
        (batch,) = TokenBatch.from_documents([document], pad_to_multiple=4).to_kwargs()
        head = uneven_head(None).eval()
        whole = head(batch.positions[:, None].double(), batch, return_logprobs=True).logprobs
        assert whole is not None
        found: dict[int, float] = {}
        answers = ranks(z1_rank, 2, length, prompt, layout)
        for slots, logprobs in answers:
            found.update(zip(slots, logprobs, strict=True))
        first = [0, 1, 6, 7] if layout == "zigzag" else [0, 1, 2, 3]
        assert answers[0][0] == first
        expected = whole.tolist()
        assert [found[slot] for slot in range(8)] == pytest.approx(expected)
        assert sum(value != 0 for value in expected) == length - prompt


def d4_rank() -> tuple[list[float], list[float], bool]:
    groups = parallel_groups(1, 2, 1)
    document = Document(tokens=[0] * 6, prompt_length=4, logprobs=[-LOG_4] * 2, advantage=1.0)
    (batch,) = TokenBatch.from_documents([document]).to_kwargs(groups)
    head, hidden = uniform_head({"type": "gspo"}, groups), ones(batch)
    nn.init.constant_(head.weight[1], 0.5)
    loss = head(hidden, batch).loss
    loss.backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    has_label = bool((batch.labels != -100).any())
    return rounded(hidden.grad), rounded(head.weight.grad), has_label


def test_d4_a_rank_without_labels_runs_backward_with_zeros(ranks: RankPool) -> None:
    (hidden_0, weight_0, has_0), (hidden_1, weight_1, has_1) = ranks(d4_rank, 2)
    assert (has_0, has_1) == (False, True)
    assert not any(hidden_0)
    assert not any(weight_0)
    assert [bool(value) for value in hidden_1] == [True, True, False]
    assert any(weight_1)


def v3_rank() -> tuple[list[float], list[float]]:
    """Gradients of one label's log-probability under two vocabulary shards of two entries."""
    groups = parallel_groups(1, 1, 2)
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    # Zero logits, but a weight through which the gradient of hidden can be seen.
    bias = -torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    weight = (-bias)[mine, None].clone().requires_grad_()
    statistics = linear_logprobs(hidden, weight, torch.tensor([0]), bias=bias[mine], groups=groups)
    statistics.logprobs.sum().backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    return rounded(weight.grad), rounded(hidden.grad)


def test_v3_every_vocabulary_shard_gets_its_gradient(ranks: RankPool) -> None:
    (logits_0, hidden_0), (logits_1, hidden_1) = ranks(v3_rank, 2)
    assert (logits_0, logits_1) == ([0.75, -0.25], [-0.25, -0.25])
    assert hidden_0 == hidden_1 == [1 * 0.75 - (2 + 3 + 4) * 0.25]


def s4_rank() -> tuple[float, list[float]]:
    groups = parallel_groups(1, 1, 2)
    config = LanguageModelHeadConfig.model_validate(
        {
            "hidden_size": 1,
            "vocab_size": 2,
            "bias": True,
            "losses": {"ce": {"type": "cross_entropy"}},
        }
    )
    head = LanguageModelHead(config, groups, dtype=torch.float64)
    assert head.bias is not None
    nn.init.zeros_(head.weight)
    nn.init.constant_(head.bias, [math.log(3), 0.0][dist.get_rank()])
    (batch,) = TokenBatch.from_documents([Document(tokens=[1, 0], prompt_length=1)]).to_kwargs()
    loss = head(ones(batch), batch).loss
    (-loss).backward()
    assert head.bias.grad is not None
    return -loss.item(), rounded(head.bias.grad)


def test_s4_a_sharded_bias_enters_value_and_gradient(ranks: RankPool) -> None:
    (logprob_0, grad_0), (logprob_1, grad_1) = ranks(s4_rank, 2)
    assert logprob_0 == logprob_1 == pytest.approx(-0.287682, abs=1e-6)
    assert (grad_0, grad_1) == ([0.25], [-0.25])


def g4_documents(first: list[float]) -> list[Document]:
    """A document with the log-ratios `first` under the uniform head, and one of two labels."""
    log_ratios = [first, [0.05, 0.15]]
    return [
        Document(
            tokens=[0] * (len(values) + 1),
            prompt_length=1,
            logprobs=[-LOG_4 - value for value in values],
            advantage=1.0,
        )
        for values in log_ratios
    ]


def g4_rank() -> tuple[float, list[float], float]:
    groups = parallel_groups(1, 4, 1)
    batch = TokenBatch.from_documents(g4_documents([0.4, 0.4, -0.2, -0.2]), sequence_length=12)
    (kwargs,) = batch.to_kwargs(groups)
    head = uniform_head(g4_loss(), groups)
    output = head(ones(kwargs), kwargs)
    output.loss.backward()
    assert head.weight.grad is not None
    return output.loss.item(), rounded(head.weight.grad), float(kwargs.labels.max())


def g4_loss() -> dict[str, object]:
    return {"type": "gspo", "epsilon_low": 0.2, "epsilon_high": 0.2}


def test_g4_a_document_over_ranks_has_one_ratio(ranks: RankPool) -> None:
    """Labels 3 + 1 + 2 + 0 on four ranks: the first document on two, the last rank empty."""
    answers = ranks(g4_rank, 4)
    assert [answer[2] >= 0 for answer in answers] == [True, True, True, False]
    expected = -(math.exp(0.1) + math.exp(0.1)) / 2
    assert sum(answer[0] for answer in answers) == pytest.approx(expected, rel=1e-6)
    (batch,) = TokenBatch.from_documents(g4_documents([0.4, 0.4, -0.2, -0.2])).to_kwargs()
    _, grad = loss_and_grad(uniform_head(g4_loss()), batch)
    assert summed([answer[1] for answer in answers]) == pytest.approx(grad, abs=1e-5)
    assert grad[0] == pytest.approx(expected * 0.75, abs=1e-5)  # not clipped


def o1_rank(reshard: bool) -> tuple[float, list[float], list[int]]:
    groups = ParallelGroups()
    mesh = init_device_mesh("cpu", (2,))
    config = LanguageModelHeadConfig.model_validate(
        {"hidden_size": 4, "vocab_size": 6, "losses": {"ce": {"type": "cross_entropy"}}}
    )
    head = LanguageModelHead(config, groups, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(o1_weight())
    fully_shard(head, mesh=mesh, reshard_after_forward=reshard)
    hidden, batch = o1_batch()
    loss = head(hidden, batch).loss
    loss.backward()
    grad = head.weight.grad
    assert isinstance(grad, DTensor)
    return loss.item(), rounded(grad), list(grad.to_local().shape)


def o1_weight() -> Tensor:
    return torch.arange(24, dtype=torch.float64).view(6, 4).sin()


def o1_batch() -> tuple[Tensor, BatchKwargs]:
    document = Document(tokens=[0, 3, 5, 1, 4], prompt_length=1)
    (batch,) = TokenBatch.from_documents([document]).to_kwargs()
    return torch.arange(20, dtype=torch.float64).view(5, 4).cos(), batch


@pytest.mark.parametrize("reshard", [True, False])
def test_o1_the_head_inside_fully_shard_equals_the_dense_one(
    ranks: RankPool, reshard: bool
) -> None:
    hidden, batch = o1_batch()
    weight = o1_weight().requires_grad_()
    loss = -linear_logprobs(hidden, weight, batch.labels).logprobs.sum() / 4
    loss.backward()
    assert weight.grad is not None
    for value, grad, shape in ranks(o1_rank, 2, reshard):
        assert value == pytest.approx(loss.item())
        assert grad == rounded(weight.grad)
        assert shape == [3, 4]


def o1_errors() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    hidden, batch = o1_batch()
    sharded_hidden = distribute_tensor(hidden[:4], mesh, [Shard(0)])
    sharded_weight = distribute_tensor(o1_weight(), mesh, [Shard(0)])
    calls: list[tuple[Any, Any]] = [
        (hidden, sharded_weight),
        (sharded_hidden, o1_weight()),
        (hidden, torch.empty(0, dtype=torch.float64)),
    ]
    messages = []
    for first, second in calls:
        with pytest.raises((TypeError, ValueError)) as error:
            linear_logprobs(first, second, batch.labels)
        messages.append(f"{error.type.__name__}: {error.value}")
    return messages


def test_o1_a_sharded_or_empty_operand_is_refused_by_name(ranks: RankPool) -> None:
    for weight, hidden, empty in ranks(o1_errors, 2):
        assert weight.startswith("TypeError: `weight` must be a plain tensor, got a DTensor")
        assert hidden.startswith("TypeError: `hidden_states` must be a plain tensor, got a DTensor")
        assert empty.startswith("ValueError: `weight` must be torch.float64 of shape [V, 4]")
        assert "ZeRO-3" in empty


def tied_llama(device: str) -> Llama:
    config = LlamaConfig.model_validate(
        {
            "vocab_size": 8,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "tie_word_embeddings": True,
            "head": {"losses": {"ce": {"type": "cross_entropy"}}},
        }
    )
    return Llama(config, device=device, dtype=torch.float64)


def w5_rank(shard: bool, state: dict[str, Tensor]) -> tuple[bool, Tensor, Tensor]:
    """A tied model from the meta device, one step: still tied, its gradient, its weight."""
    llama = tied_llama("meta")
    if shard:
        mesh = init_device_mesh("cpu", (2,))
        wrapped = fully_shard(llama, mesh=mesh)
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
    llama.to_empty(device="cpu")
    if shard:
        own = llama.state_dict()
        sharded = {
            name: distribute_tensor(value, own[name].device_mesh, own[name].placements)
            for name, value in state.items()
        }
        llama.load_state_dict(sharded, assign=True)
    else:
        llama.load_state_dict(state)
    groups = parallel_groups(1, 2, 1) if shard else None
    document = Document(tokens=[0, 3, 5, 1, 4, 4, 2, 7], prompt_length=1)
    (batch,) = TokenBatch.from_documents([document, document]).to_kwargs(groups)
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.5)
    llama(batch).loss.backward()
    weight = llama.model.embed_tokens.weight
    assert isinstance(weight, nn.Parameter)
    grad = weight.grad
    assert grad is not None
    optimizer.step()
    tied = llama.lm_head.weight is weight
    return tied, whole(grad), whole(weight.detach())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_w5_a_tied_model_stays_tied_and_gets_both_gradients(ranks: RankPool) -> None:
    # Each rank of two holds one of the two documents whole: no attention over ranks.
    torch.manual_seed(1)
    state = tied_llama("cpu").state_dict()
    tied, grad, weight = w5_rank(False, state)
    assert tied
    assert grad[6].any()  # token 6 is no input and no label: the head's side alone
    for sharded_tied, sharded_grad, sharded_weight in ranks(w5_rank, 2, True, state):
        assert sharded_tied
        torch.testing.assert_close(sharded_grad, grad)
        torch.testing.assert_close(sharded_weight, weight)
