"""FlashAttention 4: what is handed to the package and back, compiled too, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import Llama
from fastrl.config.model import LlamaConfig
from fastrl.models import flash4
from fastrl.models.attend import DocumentLengths
from fastrl.models.attention import document_attention
from fastrl.models.prefix_tree import PrefixTree
from fastrl.models.split_attention import Pieces, packed_attention
from fastrl.models.tree_attention import TreeAttention
from fastrl.models.varlen import document_starts

LENGTHS = (3, 1, 6)
INDEX = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))


class Package:
    """`flash_attn.cute.interface` by its signatures, on any device."""

    @staticmethod
    def _flash_attn_fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        return_lse: bool,
    ) -> tuple[Any, ...]:
        assert causal
        assert return_lse
        assert max_seqlen_q == max_seqlen_k == max(LENGTHS)
        assert cu_seqlens_q.tolist()[:4] == cu_seqlens_k.tolist()[:4] == [0, 3, 4, 10]
        return mixed(q, k, v), torch.full((q.shape[1], q.shape[0]), 7.0), None, None, None

    @staticmethod
    def _flash_attn_bwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, ...]:
        assert torch.equal(lse, torch.full((q.shape[1], q.shape[0]), 7.0))
        assert not deterministic
        assert torch.equal(out, mixed(q, k, v))
        shared = dout.unflatten(1, (k.shape[1], -1)).sum(2)
        return dout.clone(), 2 * shared, 5 * shared


def mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What the package is made to compute: three coefficients tell whose gradient is whose."""
    group = query.shape[1] // key.shape[1]
    return query + (2 * key + 5 * value).repeat_interleave(group, 1)


@pytest.mark.parametrize("compiles", [False, True])
def test_values_and_gradients_are_those_of_the_package(
    monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    monkeypatch.setattr(flash4, "_interface", Package)
    starts, longest = document_starts(INDEX, DocumentLengths(3, 6))
    attention = TreeAttention(PrefixTree.of_documents(starts, len(INDEX), longest), "flash4")
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(10, heads, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    ]
    upstream = torch.randn(10, 4, 4, generator=generator, dtype=torch.float64)

    def scaled(*states: Tensor) -> Tensor:
        return 3 * attention(*states)

    call = torch.compile(scaled, fullgraph=True, backend="aot_eager") if compiles else scaled
    found = [output := call(*states), *torch.autograd.grad(output, states, upstream)]
    expected = [output := 3 * mixed(*states), *torch.autograd.grad(output, states, upstream)]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", ["varlen", "flash4"])
def test_what_cannot_be_is_refused_by_name(implementation: Any) -> None:
    with pytest.raises(ValueError, match=f"`attention_implementation: {implementation}` needs a C"):
        document_attention(INDEX, implementation=implementation, head_dim=4, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"`attention_implementation: {implementation}` must not"):
        packed_attention(
            INDEX,
            INDEX,
            group=None,
            pieces=Pieces(),
            implementation=implementation,
            head_dim=4,
            dtype=torch.float32,
        )
    model = Llama(LlamaConfig(vocab_size=11, attention_implementation=implementation))
    with pytest.raises(ValueError, match=f"`attention_implementation: {implementation}` needs a C"):
        model.hidden_states(INDEX, INDEX, INDEX, visible_until=INDEX + 1)


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ((9, 0), "needs the flash-attn-4 package; install it with: pip install 'fastrl[flash4]'"),
        ((8, 6), "needs a GPU of compute capability 9 or 10, got 8.6"),
    ],
)
def test_a_gpu_or_a_package_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flash4, "find_spec", lambda name: None)
    assert flash4.refusal(torch.device("cuda")) == message
