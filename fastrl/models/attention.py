"""What a token of packed documents may see: the choice of an implementation, and two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fastrl.config.model import WHOLE_DOCUMENTS, AttentionImplementation
from fastrl.models.attend import DocumentLengths, LayerAttention, StatelessAttention
from fastrl.models.prefix_tree import PrefixTree
from fastrl.models.tree_attention import TreeAttention
from fastrl.models.varlen import check_varlen, document_starts

FLEX_BLOCK_SIZE = 128
FLEX_MIN_HEAD_DIM = 16


def document_attention(
    document_index: Tensor,  # [T]
    *,
    implementation: AttentionImplementation,
    head_dim: int,
    dtype: torch.dtype,
    lengths: DocumentLengths | None = None,
) -> LayerAttention:
    """Causal attention inside documents of a packed sequence.

    A token sees the tokens of its own document up to itself. A padding token (document_index -1)
    sees itself, so that no softmax is over an empty set.

    Args:
        document_index: the rows of one document must be adjacent and in order.
        implementation: as `LlamaConfig.attention_implementation`.
        head_dim: size of one head.
        dtype: dtype of query, key and value.
        lengths: known on the host, for `varlen` and `flash4`, which otherwise wait for the device
            once.

    Raises:
        ValueError: the implementation does not run here, or (`per_document`) a document's rows are
            not adjacent.
    """
    if implementation in WHOLE_DOCUMENTS:
        check_varlen(implementation, document_index.device, dtype)
        starts, longest = document_starts(document_index, lengths)
        tree = PrefixTree.of_documents(starts, len(document_index), longest)
        return TreeAttention(tree, implementation)
    flex = uses_flex(implementation, document_index.device, head_dim, dtype)
    if flex and len(document_index) > 0:  # its kernel has no empty launch
        return FlexDocumentAttention(document_block_mask(document_index))
    groups: DocumentGroups = _document_groups(document_index)
    return PerDocumentAttention(groups)


def uses_flex(
    implementation: AttentionImplementation,
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
) -> bool:
    """Whether FlexAttention computes the attention.

    Raises:
        ValueError: `flex` is asked for and does not run here.
    """
    flex_refusal = _flex_refusal(device, head_dim, dtype)
    if implementation == "flex" and flex_refusal is not None:
        raise ValueError(
            f"`attention_implementation: flex` needs {flex_refusal}; use `per_document`"
        )
    return implementation != "per_document" and flex_refusal is None


def _flex_refusal(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """The requirement of FlexAttention that is not met here; None if it runs."""
    if device.type != "cuda":
        return f"a CUDA device, got {device}"
    if dtype == torch.float64:
        return "at most 32 bits, got float64"
    if head_dim < FLEX_MIN_HEAD_DIM:
        return f"a `head_dim` of at least {FLEX_MIN_HEAD_DIM}, got {head_dim}"
    return None


@dataclass(frozen=True)
class DocumentGroups:
    """Documents of similar length, padded to one length within each group.

    Attributes:
        rows: one [documents, length] tensor a group: rows of the packed sequence. A document
            shorter than the group's length repeats its last row.
        slots: [T], index of each packed row in the groups' rows, one group after the other.
    """

    rows: tuple[Tensor, ...]
    slots: Tensor


# On the host, where lengths decide shapes: nothing to compile.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _document_groups(
    document_index: Tensor,  # [T]
) -> DocumentGroups:
    """The documents by length, such that padding at most doubles the work of long ones."""
    device = document_index.device
    index = document_index.cpu()
    # Each padding row gets a number of its own: a document of one token.
    index = torch.where(index < 0, -1 - torch.arange(len(index), device="cpu"), index)
    values, lengths = torch.unique_consecutive(index, return_counts=True)
    if len(torch.unique(values)) != len(values):
        raise ValueError(
            "`document_index` must have the rows of a document next to one another; some document "
            "comes in several pieces. Pack whole documents one after the other."
        )
    starts = lengths.cumsum(0) - lengths
    group = similar_lengths(lengths)
    slots = torch.empty_like(index)
    rows = []
    num_slots = 0
    for number in group.unique().tolist():
        chosen = group == number
        start, length = starts[chosen, None], lengths[chosen, None]
        offset = torch.arange(int(length.max()), device="cpu")
        members = start + offset.minimum(length - 1)
        is_real = offset < length
        slots[members[is_real]] = num_slots + is_real.flatten().nonzero().squeeze(1)
        num_slots += members.numel()
        rows.append(members.to(device))
    return DocumentGroups(tuple(rows), slots.to(device))


def similar_lengths(
    lengths: Tensor,  # [N]
) -> Tensor:  # [N]
    """A group's number: one for single tokens, one up to 16, then one per power of two."""
    return torch.where(lengths == 1, 0, (lengths - 1).clamp(min=8).log2().floor().long())


@dataclass(frozen=True, eq=False)
class PerDocumentAttention(StatelessAttention):
    """Documents unpacked into a few batches, each under plain causal SDPA.

    The work is that of the documents alone (a [T, T] mask would cost all pairs of tokens). The
    padding of a batch follows the end of the document, where causal attention does not look.
    """

    groups: DocumentGroups

    def __call__(
        self,
        query: Tensor,  # [T, H, head_dim]
        key: Tensor,  # [T, K, head_dim]
        value: Tensor,  # [T, K, head_dim]
    ) -> Tensor:  # [T, H, head_dim]
        outputs = [query[:0].flatten(1)]  # so that `cat` has an input when there are no tokens
        for rows in self.groups.rows:
            q, k, v = (_unpacked(tensor, rows) for tensor in (query, key, value))
            gqa = query.shape[1] != key.shape[1]
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
            outputs.append(output.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.groups.slots).view(query.shape)


def _unpacked(
    tensor: Tensor,  # [T, heads, head_dim]
    rows: Tensor,  # [documents, length]
) -> Tensor:  # [documents, heads, length, head_dim]
    # Flat rows: index_select's backward adds whole rows at once.
    gathered = tensor.flatten(1).index_select(0, rows.flatten())
    return gathered.view(*rows.shape, *tensor.shape[1:]).transpose(1, 2)


def document_block_mask(
    document_index: Tensor,  # [T]
) -> BlockMask:
    """FlexAttention's mask of `document_attention`, without evaluating [T, T] pairs.

    Documents are runs of rows, so whether a block of 128 x 128 pairs is empty, full or mixed
    follows from the first and last rows of its two sides. No host synchronisation.
    """
    num_tokens = len(document_index)
    device = document_index.device
    row = torch.arange(num_tokens, device=device)
    is_padding = document_index < 0
    begins = torch.ones_like(is_padding)
    begins[1:] = (document_index[1:] != document_index[:-1]) | is_padding[1:]
    document_start = torch.where(begins, row, 0).cummax(0).values

    first_row = row[::FLEX_BLOCK_SIZE]
    last_row = (first_row + FLEX_BLOCK_SIZE - 1).clamp(max=num_tokens - 1)
    block = torch.arange(len(first_row), device=device)
    query_block, key_block = block[:, None], block[None, :]
    seen_from = (document_start[first_row] // FLEX_BLOCK_SIZE)[:, None]
    needed = (key_block >= seen_from) & (key_block <= query_block)
    # One document from the first key to the last query, and no key after a query.
    one_document = document_start[last_row][:, None] <= first_row[None, :]
    full = needed & one_document & (key_block < query_block)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (document_start[query] == document_start[key]) & (key <= query)
        return same

    return packed_block_mask(needed, full, visible, (num_tokens, num_tokens))


def packed_block_mask(
    needed: Tensor,  # [query blocks, key blocks] bool
    full: Tensor,  # [query blocks, key blocks] bool
    visible: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    lengths: tuple[int, int],
) -> BlockMask:
    """FlexAttention's mask with `visible` evaluated in the needed blocks that are not full."""
    return BlockMask.from_kv_blocks(
        *_blocks_in_order(needed & ~full),
        *_blocks_in_order(full),
        BLOCK_SIZE=FLEX_BLOCK_SIZE,
        mask_mod=visible,
        seq_lengths=lengths,
    )


def _blocks_in_order(
    blocks: Tensor,  # [query blocks, key blocks] bool
) -> tuple[Tensor, Tensor]:  # [1, 1, query blocks] and [1, 1, query blocks, key blocks] int32
    """Number of chosen key blocks per query block, and the key blocks with the chosen first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    count = blocks.sum(-1, dtype=torch.int32)
    return count[None, None], order.to(torch.int32)[None, None]


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """FlexAttention as one kernel."""
    # Below 128 tokens torch would choose its decoding kernel, which dynamic sizes break.
    return partial(torch.compile(flex_attention), kernel_options={"BACKEND": "TRITON"})


def flex_output(
    query: Tensor,  # [T, H, head_dim]
    key: Tensor,  # [keys, K, head_dim]
    value: Tensor,  # [keys, K, head_dim]
    block_mask: BlockMask,
) -> Tensor:  # [T, H, head_dim]
    """The attention output of packed queries under a block mask."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    gqa = query.shape[1] != key.shape[1]
    attention = compiled_flex_attention()
    output: Tensor = attention(q, k, v, block_mask=block_mask, enable_gqa=gqa)
    return output[0].transpose(0, 1)


@dataclass(frozen=True, eq=False)
class FlexDocumentAttention(StatelessAttention):
    """One compiled FlexAttention kernel over the packed sequence; empty blocks are skipped."""

    block_mask: BlockMask

    def __call__(
        self,
        query: Tensor,  # [T, H, head_dim]
        key: Tensor,  # [T, K, head_dim]
        value: Tensor,  # [T, K, head_dim]
    ) -> Tensor:  # [T, H, head_dim]
        return flex_output(query, key, value, self.block_mask)
