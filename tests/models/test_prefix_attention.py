"""Attention over shared prefixes: masks pair by pair, and steps equal to those of flat packing."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fastrl import Llama, OptimizerStep, TokenBatch
from fastrl.models.attention import (
    FLEX_BLOCK_SIZE,
    PerDocumentAttention,
    document_attention,
    document_block_mask,
)
from fastrl.models.micro_sequences import backward_in_pieces
from fastrl.models.prefix_attention import path_groups, prefix_attention, prefix_block_mask
from fastrl.models.split_attention import Pieces
from tests.helpers.block_masks import assert_block_mask, block_sets
from tests.helpers.model_cases import tiny_config
from tests.helpers.shared_prefixes import (
    LOSSES,
    Result,
    assert_same_step,
    attention_over_paths,
    documents_for,
    grouped_documents,
    step_of,
    tree_of_paths,
    visible_until_of,
    wide_batch,
)

CASES = ["one_token", "padding_only", "full_blocks", "small", "wide_0", "wide_1", "wide_2"]


@pytest.mark.parametrize("name", CASES)
def test_block_mask_is_the_definition(name: str) -> None:
    until = visible_until_of(name)
    assert_block_mask(prefix_block_mask(until), tree_of_paths(until))


def test_blocks_inside_of_prefixes_are_full() -> None:
    _, full = block_sets(prefix_block_mask(visible_until_of("full_blocks")))
    # Each branch is 2.5 blocks long and sees both blocks of the root whole.
    assert full[3:, :2].all()


def test_flat_documents_are_trees_without_branches() -> None:
    lengths = [5, 130, 300, 1, 70]
    index = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    ends = torch.tensor(lengths).cumsum(0)[index]
    for mine, theirs in zip(
        block_sets(prefix_block_mask(ends)), block_sets(document_block_mask(index)), strict=True
    ):
        assert torch.equal(mine, theirs)
    flat = document_attention(
        index, implementation="per_document", head_dim=16, dtype=torch.float32
    )
    assert isinstance(flat, PerDocumentAttention)
    groups = path_groups(ends)
    for mine, theirs in zip(groups.rows, flat.groups.rows, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(groups.slots, flat.groups.slots)


def test_no_wait_for_the_device_in_the_block_mask() -> None:
    """Nothing on the meta device can be read, so what builds the mask there reads nothing."""
    mask = prefix_block_mask(torch.arange(300, device="meta"))
    assert mask.kv_indices.device.type == "meta"
    assert FLEX_BLOCK_SIZE * mask.kv_indices.shape[-1] == 384


@pytest.mark.parametrize("name", ["one_token", "padding_only", "small", "wide_1"])
def test_paths_are_the_definition(name: str) -> None:
    until = visible_until_of(name)
    heads = [torch.randn(len(until), number, 16, dtype=torch.float64) for number in (4, 2, 2)]
    for tensor in heads:
        tensor.requires_grad_()
    attention = prefix_attention(
        until, implementation="auto", head_dim=16, dtype=torch.float64
    ).of_layer(0)
    got = attention(*heads)
    query, key, value = heads
    expected = attention_over_paths(query, key, value, until)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(got)
    for gradient, reference in zip(
        torch.autograd.grad(got, heads, upstream),
        torch.autograd.grad(expected, heads, upstream),
        strict=True,
    ):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-11)


@cache
def flat(loss: str) -> Result:
    return step_of(loss, share_prefixes=False)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", [{}, {"pad_to_multiple": 64}, {"max_tokens": 40}], ids=str)
def test_a_step_is_that_of_the_flat_sequence(loss: str, options: dict[str, Any]) -> None:
    shared = step_of(loss, share_prefixes=True, **options)
    assert shared.num_tokens < flat(loss).num_tokens - (7 if loss == "dpo" else 60)
    assert_same_step(shared, flat(loss))
    for mine, theirs in (
        zip(shared.logprobs, flat(loss).logprobs, strict=True) if not options else ()
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_the_steps_would_differ_without_the_tree() -> None:
    """What the equality rests on: hidden states of branches without their prefix are others."""
    llama = Llama(tiny_config(), dtype=torch.float64)
    batch = TokenBatch.from_documents(grouped_documents(), share_prefixes=True)
    (kwargs,) = batch.to_kwargs()
    inputs = (kwargs.tokens, kwargs.positions, kwargs.document_index)
    with torch.no_grad():
        whole = llama.hidden_states(*inputs, visible_until=kwargs.visible_until)
        cut = llama.hidden_states(*inputs)
    differs = (whole - cut).abs().amax(1) > 1e-3
    labelled = kwargs.labels != -100
    assert (differs & labelled).sum() > labelled.sum() / 2


def test_what_attention_cannot_do_is_refused_by_name() -> None:
    (kwargs,) = wide_batch(0).to_kwargs()
    inputs = (kwargs.tokens, kwargs.positions, kwargs.document_index)
    with pytest.raises(ValueError, match="`attention_implementation: varlen` needs a CUDA device"):
        Llama(tiny_config(attention_implementation="varlen")).hidden_states(
            *inputs, visible_until=kwargs.visible_until
        )
    with pytest.raises(ValueError, match="`attention_implementation: flex` needs a CUDA device"):
        Llama(tiny_config(attention_implementation="flex")).hidden_states(
            *inputs, visible_until=kwargs.visible_until
        )
    llama = Llama(tiny_config(head={"losses": {"loss": LOSSES["cross_entropy"]}}))
    with pytest.raises(ValueError, match="split over micro-sequences"):
        llama.hidden_states(*inputs, Pieces(), visible_until=kwargs.visible_until)
    with pytest.raises(ValueError, match="split over micro-sequences"):
        backward_in_pieces(llama, [kwargs], kwargs)


def test_a_step_from_documents_shares_too() -> None:
    documents = documents_for("grpo")
    step = OptimizerStep.from_documents(documents, 60, share_prefixes=True)
    assert any(batch.visible_until is not None for batch in step.batches)
    assert sum(batch.num_tokens for batch in step.batches) < sum(len(d.tokens) for d in documents)
