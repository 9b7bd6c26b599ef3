"""Attention over shared prefixes by FlashAttention's kernels, which dense ones stand for here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from fastrl import Llama, TokenBatch
from fastrl.models import prefix_attention as module
from fastrl.models import tree_attention as operator
from fastrl.models.attend import DocumentLengths
from fastrl.models.prefix_tree import PrefixTree, Runs, runs_of
from fastrl.models.tree_attention import TreeAttention
from tests.helpers import dense_kernels
from tests.helpers.model_cases import tiny_config
from tests.helpers.shared_prefixes import (
    LOSSES,
    grouped_documents,
    tree_of_paths,
    visible_until_of,
)

CASES = ["one_token", "padding_only", "full_blocks", "small", "wide_0", "wide_1", "chain"]


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "_kernels", lambda name: dense_kernels)
    monkeypatch.setattr(module, "check_varlen", lambda *arguments: None)


def until_of(name: str) -> Tensor:
    if name != "chain":
        return visible_until_of(name)
    # Each turn has a short branch beside the next one.
    ends = torch.full((60,), 60)
    for turn in range(12):
        ends[5 * turn + 3 : 5 * turn + 5] = 5 * turn + 5
    return ends


def parts_of(tree: PrefixTree) -> list[Runs]:
    return list(runs_of(tree.starts, tree.rows, tree.sizes))


@pytest.mark.parametrize("name", CASES)
def test_the_parts_hold_each_visible_pair_once(name: str) -> None:
    until = until_of(name)
    count = torch.zeros(len(until), len(until), dtype=torch.int64)
    for runs in parts_of(PrefixTree.of(until, until.device)):
        row, column = (torch.arange(len(until))[each] for each in (runs.queries, runs.keys))
        count[row[:, None], column[None, :]] += dense_kernels.sees(runs)
    assert torch.equal(count, tree_of_paths(until).long())


def test_a_part_is_a_stretch_where_it_can_be() -> None:
    """A prompt and its answers take no copies; several prompts do."""
    one = parts_of(PrefixTree.of(until_of("full_blocks"), torch.device("cpu")))
    assert [(runs.queries, runs.keys) for runs in one] == [
        (slice(0, 1216), slice(0, 1216)),
        (slice(256, 1216), slice(0, 256)),
    ]
    several = parts_of(PrefixTree.of(until_of("small"), torch.device("cpu")))
    assert len(several) > 2
    assert all(isinstance(runs.queries, Tensor) for runs in several[1:])


def test_a_part_for_each_depth() -> None:
    assert len(parts_of(PrefixTree.of(until_of("chain"), torch.device("cpu")))) == 12


def test_no_slot_has_no_part_beside_its_own() -> None:
    (nodes,) = parts_of(PrefixTree.of(torch.empty(0, dtype=torch.int64), torch.device("cpu")))
    assert nodes.query_starts.tolist() == nodes.key_starts.tolist() == [0]


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_definition(name: str, compiles: bool) -> None:
    until = until_of(name)
    heads = [torch.randn(len(until), number, 16, dtype=torch.float64) for number in (4, 2, 2)]
    for tensor in heads:
        tensor.requires_grad_()
    attention = TreeAttention(PrefixTree.of(until, until.device), "varlen")

    def scaled(*states: Tensor) -> Tensor:
        return 3 * attention(*states)

    call = torch.compile(scaled, fullgraph=True, backend="aot_eager") if compiles else scaled
    got = call(*heads)
    query, key, value = heads[0], *(each.repeat_interleave(2, dim=1) for each in heads[1:])
    scores = torch.einsum("qhd,khd->hqk", query, key) / 4
    scores = scores.masked_fill(~tree_of_paths(until), float("-inf"))
    expected = 3 * torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(got)
    for gradient, reference in zip(
        torch.autograd.grad(got, heads, upstream),
        torch.autograd.grad(expected, heads, upstream),
        strict=True,
    ):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-11)


@pytest.mark.usefixtures("dense")
def test_few_graphs_serve_trees_of_any_depth() -> None:
    """Lengths and depths become dynamic one after the other; rows may also be none."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(
        lambda attention, *states: attention(*states), fullgraph=True, backend=counter
    )
    counts = []
    for name in ["small", "wide_0", "chain", "full_blocks", "wide_1", "small", "chain"]:
        until = until_of(name)
        heads = [torch.randn(len(until), count, 16) for count in (4, 2, 2)]
        compiled(TreeAttention(PrefixTree.of(until, until.device), "varlen"), *heads)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[3] <= 4


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
@pytest.mark.parametrize("implementation", ["varlen", "flash4"])
def test_a_model_s_step_is_that_of_the_flat_sequence(implementation: Any, loss: str) -> None:
    results = []
    for share in (False, True):
        torch.manual_seed(3)
        chosen: Any = implementation if share else "per_document"
        config = tiny_config(
            head={"losses": {"loss": LOSSES[loss]}}, attention_implementation=chosen
        )
        llama = Llama(config, dtype=torch.float64)
        batch = TokenBatch.from_documents(
            grouped_documents(), share_prefixes=share, pad_to_multiple=64
        )
        (kwargs,) = batch.to_kwargs()
        output = llama(kwargs)
        output.loss.backward()
        results.append([output.loss.detach(), *(each.grad for each in llama.parameters())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("dense")
def test_no_wait_for_the_device_where_the_host_knows_the_tree() -> None:
    """Nothing on the meta device can be read."""
    until = until_of("small")
    lengths = DocumentLengths(9, 40, until)
    attention = module.prefix_attention(
        until.to("meta"),
        implementation="flash4",
        head_dim=16,
        dtype=torch.bfloat16,
        lengths=lengths,
    )
    assert isinstance(attention, TreeAttention)
    assert attention.kernel == "flash4"
    assert len(parts_of(attention.tree)) > 2


def test_the_host_s_copy_stays_on_the_host() -> None:
    batch = TokenBatch.from_documents(grouped_documents(), share_prefixes=True)
    (kwargs,) = batch.to_kwargs()
    assert kwargs.visible_until is not None
    assert kwargs.host_visible_until is not None
    assert torch.equal(kwargs.host_visible_until, kwargs.visible_until)
    moved = kwargs.to("meta")
    assert moved.visible_until is not None
    assert moved.visible_until.is_meta
    assert moved.host_visible_until is kwargs.host_visible_until
    assert kwargs.select(slice(0, 3)).host_visible_until is None
