"""The collectives of vocabulary, token or parameter size, and the bytes that each rank sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastrl.config.model import LlamaConfig
from fastrl.config.training import ParallelConfig
from fastrl.estimate.sizes import Shapes, Weights
from fastrl.functional.head.merge_tree import MergeTree

# Bytes of the running statistics of a row, in fp32.
_STATISTICS_BYTES = 16


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a micro-batch.

    Attributes:
        axis: of the mesh.
        name: all_gather, reduce_scatter or all_reduce.
        what: name of the tensor.
        group_size: ranks that take part.
        num_bytes: of the whole tensor: the result of an all-gather, the input of the others.
        count: calls of it in a micro-batch, forward and backward.
        per_update: whether it is called once an update instead.
    """

    axis: str
    name: str
    what: str
    group_size: int
    num_bytes: int
    count: int
    per_update: bool = False

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends in all calls, by the ring algorithm."""
        rounds = 2 if self.name == "all_reduce" else 1
        return rounds * self.count * self.num_bytes * (self.group_size - 1) // self.group_size


def collectives(
    model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes, *, is_single_pass: bool
) -> Iterator[Collective]:
    """Every collective of vocabulary, token or parameter size in a micro-batch.

    Args:
        model: the architecture.
        parallel: sizes of the axes.
        shapes: of one rank.
        is_single_pass: the head's strategy.
    """
    if parallel.tensor > 1:
        yield from _tensor_collectives(model, parallel, shapes)
        yield from _head_collectives(model, parallel, shapes, is_single_pass)
    if parallel.sequence_data > 1:
        yield from _sequence_collectives(model, parallel, shapes)
    yield from _parameter_collectives(model, parallel, shapes)


def _passes(parallel: ParallelConfig) -> tuple[int, int]:
    """Forward passes of a layer without recomputed ones, and backward passes, in a micro-batch."""
    pieces = parallel.micro_sequences
    return pieces * (2 if pieces > 1 else 1), pieces


def _recomputed(model: LlamaConfig, backward: int, *, of_mlp: bool) -> int:
    """Recomputed passes of a layer's attention, or of its MLP.

    That of the MLP ends with the last tensor that the backward needs: its inputs are gathered once
    more, its outputs are not summed.
    """
    modes = ("attention", "full") if of_mlp else ("full",)
    return backward if model.activation_checkpointing in modes else 0


def _tensor_collectives(
    model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes
) -> Iterator[Collective]:
    pieces, backward = _passes(parallel)
    outputs = 2 * pieces + _recomputed(model, backward, of_mlp=False)
    inputs = outputs + _recomputed(model, backward, of_mlp=True)
    layers, size = model.num_hidden_layers, parallel.tensor
    states = shapes.piece * model.hidden_size * shapes.compute
    embedding_is_split = model.head.vocabulary_parallel or not model.tie_word_embeddings

    def call(name: str, what: str, num_bytes: int, count: int) -> Collective:
        return Collective("tensor", name, what, size, num_bytes, count)

    if parallel.sequence_parallel:
        # Into attention and MLP gathered, out of them summed to slices; backward the other way.
        yield call("all_gather", "hidden states", states, layers * inputs)
        yield call("reduce_scatter", "hidden states", states, layers * outputs)
        yield call("reduce_scatter", "gradients of hidden states", states, 2 * layers * backward)
        yield call("all_gather", "gradients of hidden states", states, 2 * layers * backward)
        if embedding_is_split:
            yield call("reduce_scatter", "embeddings", states, pieces)
        yield call("all_gather", "gradients of embeddings", states, backward)
    else:
        yield call("all_reduce", "hidden states", states, layers * outputs)
        yield call("all_reduce", "gradients of hidden states", states, 2 * layers * backward)
        if embedding_is_split:
            yield call("all_reduce", "embeddings", states, pieces)
    # Of the norms that ranks apply to tokens or heads of their own: two a layer and the final one
    # under sequence parallelism, and Qwen3's of queries and keys.
    at_end = not parallel.fully_sharded
    element = shapes.stored if at_end else shapes.compute
    norms = [(model.hidden_size, 2 * layers + 1)] if parallel.sequence_parallel else []
    norms += [(model.head_dim, 2 * layers)] if model.qk_norm else []
    for length, count in norms:
        yield Collective(
            "tensor",
            "all_reduce",
            "gradients of norms",
            size,
            length * element,
            count if at_end else count * backward,
            per_update=at_end,
        )


def _head_collectives(
    model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes, is_single_pass: bool
) -> Iterator[Collective]:
    """Collectives of the head, for all pieces, with a label and a gradient at every token.

    Those of `single_pass` run per chunk, with the same bytes in total.
    """
    size, rows = parallel.tensor, shapes.local
    states = rows * model.hidden_size
    wide = max(shapes.compute, 4)  # sums over the vocabulary are not rounded before they are added
    if not model.head.vocabulary_parallel:
        if parallel.sequence_parallel:
            vocabulary = model.padded_vocab_size or model.vocab_size
            assert vocabulary is not None
            num_bytes = vocabulary * model.hidden_size * wide
            yield Collective("tensor", "all_reduce", "head: dW", size, num_bytes, 1)
        return
    of_row = _STATISTICS_BYTES
    if model.head.deterministic:
        vocabulary = model.padded_vocab_size or model.vocab_size
        assert vocabulary is not None
        of_row = 12 * MergeTree(vocabulary, size).num_roots + 4
    statistics = size * rows * of_row * wide // 4
    yield Collective("tensor", "all_gather", "head: row statistics", size, statistics, 1)
    if parallel.sequence_parallel:
        gathered = states * shapes.compute
        gathers = 1 if is_single_pass else 2
        yield Collective("tensor", "all_gather", "head: hidden states", size, gathered, gathers)
        yield Collective("tensor", "reduce_scatter", "head: dh", size, states * wide, 1)
    else:
        yield Collective("tensor", "all_reduce", "head: dh", size, states * wide, 1)


def _sequence_collectives(
    model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes
) -> Iterator[Collective]:
    """Keys and values: for piece i of n those of pieces 1 to i, (n + 1) / 2 pieces on average."""
    forward, backward = _passes(parallel)
    forward += _recomputed(model, backward, of_mlp=False)
    key_value = 2 * model.num_key_value_heads * model.head_dim // parallel.tensor
    pieces = parallel.micro_sequences
    num_bytes = shapes.piece * parallel.sequence_data * key_value * shapes.compute
    num_bytes = num_bytes * (pieces + 1) // 2
    layers, size = model.num_hidden_layers, parallel.sequence_data
    what = "keys and values"
    yield Collective("sequence_data", "all_gather", what, size, num_bytes, layers * forward)
    what = "gradients of keys and values"
    yield Collective("sequence_data", "reduce_scatter", what, size, num_bytes, layers * backward)


def _parameter_collectives(
    model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes
) -> Iterator[Collective]:
    weights = Weights.of(model, parallel.tensor)
    if not parallel.fully_sharded:
        for axis in ("data", "sequence_data"):
            num_bytes, size = weights.total * shapes.stored, getattr(parallel, axis)
            if size > 1:
                yield Collective(axis, "all_reduce", "gradients", size, num_bytes, 1, True)
        return
    size, axis = parallel.data * parallel.sequence_data, "data x sequence_data"
    if size == 1:
        return
    forward, backward = _passes(parallel)

    def call(name: str, what: str, num_bytes: int, count: int) -> Collective:
        return Collective(axis, name, what, size, num_bytes, count)

    layers = weights.layer * weights.num_layers
    # Recomputation within a backward finds the layer gathered. With pieces the head has a backward
    # of its own, which frees the layers too.
    once_a_backward = backward + (1 if backward > 1 else 0)
    gathers = {"forward": forward + backward, "backward": once_a_backward, "update": 1}
    number = gathers[parallel.reshard_after]
    once = parallel.reshard_after == "update"
    for what, elements, count in (("layers", layers, number), ("embedding, head", weights.root, 1)):
        num_bytes = elements * shapes.compute
        yield Collective(axis, "all_gather", what, size, num_bytes, count, per_update=once)
    reduced = max(shapes.stored, 4) if parallel.compute_dtype else shapes.stored
    yield call("reduce_scatter", "gradients of layers", layers * reduced, backward)
    head, rest = weights.head * reduced, (weights.embedding + weights.norm) * reduced
    if backward == 1:
        yield call("reduce_scatter", "gradients of embedding, head", head + rest, 1)
        return
    # The head is reduced after its own backward, the embedding after that of every piece.
    head += weights.embedding * reduced * weights.is_tied
    yield call("reduce_scatter", "gradients of head", head, 1)
    yield call("reduce_scatter", "gradients of embedding", rest, backward)
