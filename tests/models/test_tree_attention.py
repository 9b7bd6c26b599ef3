"""Attention over shared prefixes by FlashAttention's kernels, which dense ones stand for here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from fastrl import Llama, TokenBatch
from fastrl.models import attention
from fastrl.models import prefix_attention as module
from fastrl.models import tree_attention as operator
from fastrl.models.attend import DocumentLengths
from fastrl.models.compiled import compile_layers
from fastrl.models.prefix_tree import PrefixTree, Runs, runs_of
from fastrl.models.tree_attention import TreeAttention
from tests.helpers import dense_kernels
from tests.helpers.model_cases import tiny_config
from tests.helpers.shared_prefixes import (
    LOSSES,
    attention_over_paths,
    grouped_documents,
    tree_of_paths,
    visible_until_of,
)

# torch warns of itself when it compiles.
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = ["one_token", "padding_only", "full_blocks", "small", "wide_0", "wide_1", "chain"]


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "_kernels", lambda name: dense_kernels)
    for each in (attention, module):
        monkeypatch.setattr(each, "check_varlen", lambda *arguments: None)


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
    attend = TreeAttention(PrefixTree.of(until, until.device), "varlen")

    def scaled(*states: Tensor) -> Tensor:
        return 3 * attend(*states)

    call = torch.compile(scaled, fullgraph=True, backend="aot_eager") if compiles else scaled
    got = call(*heads)
    query, key, value = heads
    expected = 3 * attention_over_paths(query, key, value, until)
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
    for share, compiles in ((False, False), (True, False), (True, True)):
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
        if compiles:
            compile_layers(llama.model.layers, backend="aot_eager")
        output = llama(kwargs)
        output.loss.backward()
        results.append([output.loss.detach(), *(each.grad for each in llama.parameters())])
    flat, *shared = results
    for result in shared:
        for mine, theirs in zip(result, flat, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("share", [False, True])
def test_a_compiled_model_makes_the_tree_on_the_host(share: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    config = tiny_config(
        head={"losses": {"loss": LOSSES["grpo"]}}, attention_implementation="flash4"
    )
    llama = Llama(config, dtype=torch.float64)
    (kwargs,) = TokenBatch.from_documents(grouped_documents(), share_prefixes=share).to_kwargs()
    compiled = torch.compile(llama, backend="eager")(kwargs)
    torch.testing.assert_close(compiled.loss, llama(kwargs).loss, rtol=1e-10, atol=0)
    # Around what is made on the host, and around the head.
    assert len(counters["graph_break"]) <= 2


@pytest.mark.usefixtures("dense")
def test_no_wait_for_the_device_where_the_host_knows_the_tree() -> None:
    """Nothing on the meta device can be read."""
    until = until_of("small")
    lengths = DocumentLengths(9, 40, until)
    attend = module.prefix_attention(
        until.to("meta"),
        implementation="flash4",
        head_dim=16,
        dtype=torch.bfloat16,
        lengths=lengths,
    )
    assert isinstance(attend, TreeAttention)
    assert attend.kernel == "flash4"
    assert len(parts_of(attend.tree)) > 2


def test_the_host_s_copy_stays_on_the_host() -> None:
    batch = TokenBatch.from_documents(grouped_documents(), share_prefixes=True)
    (kwargs,) = batch.to_kwargs()
    until, host = kwargs.visible_until, kwargs.host_visible_until
    assert until is not None
    assert host is not None
    assert torch.equal(host, until)
    moved = kwargs.to("meta")
    assert moved.visible_until is not None
    assert moved.visible_until.is_meta
    assert moved.host_visible_until is host
    assert moved.replace(temperature=2.0).host_visible_until is host
    sent = kwargs.sent_to("cpu", pin_memory=False)
    assert sent.visible_until is not until
    assert sent.host_visible_until is host
    assert kwargs.select(slice(0, 3)).host_visible_until is None


def test_the_host_s_copy_is_of_no_other_tree() -> None:
    (kwargs,) = TokenBatch.from_documents(grouped_documents(), share_prefixes=True).to_kwargs()
    other = torch.arange(kwargs.num_tokens) + 1
    assert kwargs.replace(visible_until=other).host_visible_until is None
    assert replace(kwargs, visible_until=other).host_visible_until is None


def test_padding_is_few_runs_on_the_host() -> None:
    """Kernels take memory for each run; no document of the sequence is made longer by them."""
    batch = TokenBatch.from_documents(grouped_documents(), share_prefixes=True)
    longest, length = max(batch.document_lengths), batch.padded_length
    (kwargs,) = batch.padded(length + 3 * longest + 2).to_kwargs()
    assert kwargs.host_visible_until is not None
    tree = PrefixTree.of(kwargs.host_visible_until, torch.device("cpu"))
    assert batch.visible_until is not None
    bare = PrefixTree.of(batch.visible_until, torch.device("cpu"))
    runs, bare_runs = parts_of(tree)[0], parts_of(bare)[0]
    assert len(runs.query_starts) == len(bare_runs.query_starts) + 4
    assert runs.query_starts[-5:].diff().tolist() == [longest, longest, longest, 2]
    assert len(parts_of(tree)) == len(parts_of(bare))


@pytest.mark.usefixtures("dense")
def test_a_sequence_without_tokens() -> None:
    tree = PrefixTree.of(torch.empty(0, dtype=torch.int64), torch.device("cpu"))
    heads = [torch.randn(0, number, 16, requires_grad=True) for number in (4, 2, 2)]
    output = TreeAttention(tree, "varlen")(*heads)
    assert output.shape == (0, 4, 16)
    grads = torch.autograd.grad(output.sum(), heads)
    assert [grad.shape for grad in grads] == [each.shape for each in heads]
