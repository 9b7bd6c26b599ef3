"""What a run needs on each rank: memory, and the bytes of every collective. Arithmetic only.

The formulas are those of docs/scaling.md; tests hold them against the parameters and the
collectives of real ranks. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastrl.config.model import LlamaConfig
from fastrl.config.training import ParallelConfig, RunConfig

_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2}
# Of the head's `recompute` strategy, and the bytes of its running statistics a row.
_TILE_BYTES = 128 * 2**20
_STATISTICS_BYTES = 16


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank that live at the same time at the peak of a step."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a micro-batch.

    Attributes:
        axis: of the mesh.
        name: all_gather, reduce_scatter or all_reduce.
        what: is sent.
        group_size: ranks that take part.
        num_bytes: of the whole tensor: the result of an all-gather, the input of the others.
        count: calls of it in a micro-batch, forward and backward.
        per_update: once an update, after its micro-batches, instead.
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


@dataclass(frozen=True)
class Shapes:
    """Sizes of one rank's work.

    Attributes:
        tokens: of the packed sequence, over all its sequence-data ranks.
        local: of them on this rank, all pieces.
        piece: of them on this rank in one piece.
        stream: rows of the residual stream on this rank in one piece.
        compute: bytes of an element of activations and gathered weights.
        stored: bytes of an element of parameters, gradient sums and optimizer states.
        shards: ranks that parameters are sharded over by FSDP2, 1 without.
    """

    tokens: int
    local: int
    piece: int
    stream: int
    compute: int
    stored: int
    shards: int

    @classmethod
    def of(cls, parallel: ParallelConfig, tokens: int, dtype: str) -> Shapes:
        """The sizes for packed sequences of `tokens` tokens and parameters of `dtype`."""
        local = -(-tokens // parallel.sequence_data)
        piece = -(-local // parallel.micro_sequences)
        return cls(
            tokens=tokens,
            local=local,
            piece=piece,
            stream=piece // (parallel.tensor if parallel.sequence_parallel else 1),
            compute=_SIZES[parallel.compute_dtype or dtype],
            stored=_SIZES[dtype],
            shards=parallel.data * parallel.sequence_data if parallel.fully_sharded else 1,
        )


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters on one tensor rank."""

    layer: int
    embedding: int
    norm: int
    head: int  # its bias alone where it is tied to the embedding
    num_layers: int
    is_tied: bool

    @classmethod
    def of(cls, model: LlamaConfig, tensor: int) -> Weights:
        """The parameters of a model with `tensor` ranks."""
        size, heads = model.hidden_size, model.num_attention_heads * model.head_dim
        key_value = model.num_key_value_heads * model.head_dim
        sharded = size * (2 * heads + 2 * key_value + 3 * model.intermediate_size)
        whole = 2 * size
        if model.attention_bias:
            sharded, whole = sharded + heads + 2 * key_value, whole + size
        if model.mlp_bias:
            sharded, whole = sharded + 2 * model.intermediate_size, whole + size
        rows = model.padded_vocab_size or model.vocab_size
        assert rows is not None
        shard = -(-rows // tensor)
        head = shard if model.head.vocabulary_parallel else rows
        is_tied = model.tie_word_embeddings
        return cls(
            layer=sharded // tensor + whole,
            embedding=size * (head if is_tied else shard),
            norm=size,
            head=(0 if is_tied else size * head) + (head if model.head.bias else 0),
            num_layers=model.num_hidden_layers,
            is_tied=is_tied,
        )

    @property
    def root(self) -> int:
        """Embedding, final norm and head."""
        return self.embedding + self.norm + self.head

    @property
    def total(self) -> int:
        """All parameters."""
        return self.layer * self.num_layers + self.root


def memory(model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes) -> list[Memory]:
    """Memory at the peak of a training step: in the backward of the last layer."""
    weights = Weights.of(model, parallel.tensor)
    own = -(-weights.total // shapes.shards) * shapes.stored
    items = [
        Memory("parameters", own),
        Memory("gradients", own),
        Memory("optimizer states (AdamW)", 2 * own),
    ]
    if parallel.fully_sharded:
        # The root's group from forward to backward, a layer in use and one on its way.
        gathered = (weights.root + 2 * weights.layer) * shapes.compute
        items.append(Memory("gathered weights", gathered))
        # Gradients of the root and of a layer before they are reduced, and the copy that is sent.
        pending = (weights.root + weights.layer) * shapes.compute + weights.layer * shapes.stored
        items.append(Memory("gradients not yet reduced", pending))
    layers = 1 if model.activation_checkpointing else model.num_hidden_layers
    items.append(
        Memory("activations of layers", layers * layer_activation_bytes(model, parallel, shapes))
    )
    if model.activation_checkpointing:
        stream = model.num_hidden_layers * shapes.stream * model.hidden_size * shapes.compute
        items.append(Memory("inputs of layers (checkpoints)", stream))
    if parallel.micro_sequences > 1:
        key_value = 2 * model.num_key_value_heads * model.head_dim // parallel.tensor
        kept = 2 * model.num_hidden_layers * shapes.local * key_value * shapes.compute
        items.append(Memory("keys and values of pieces, and their gradients", kept))
    items.append(Memory("head: hidden states, their gradient, tiles", head_bytes(model, shapes)))
    return items


def layer_activation_bytes(model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes) -> int:
    """What one layer keeps for its backward, in one piece.

    Inputs of both norms (stream); their outputs, gathered (all rows); queries and attention output;
    gate, up, silu(gate) and their product; keys and values of all tokens that the piece may see.
    """
    size, tensor = model.hidden_size, parallel.tensor
    query = model.num_attention_heads * model.head_dim // tensor
    key_value = 2 * model.num_key_value_heads * model.head_dim // tensor
    elements = 2 * shapes.stream * size + shapes.piece * (
        2 * size + 2 * query + 4 * model.intermediate_size // tensor
    )
    elements += shapes.tokens * key_value
    return elements * shapes.compute


def head_bytes(model: LlamaConfig, shapes: Shapes) -> int:
    """Hidden states and their gradient, both [T, D], and one tile of logits."""
    assert model.vocab_size is not None
    logits = shapes.local * model.vocab_size * max(shapes.compute, 4)
    tile = min(model.head.max_logits_bytes, _TILE_BYTES, logits)
    return 2 * shapes.local * model.hidden_size * shapes.compute + tile


def collectives(
    model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes
) -> Iterator[Collective]:
    """Every collective of vocabulary, token or parameter size in a micro-batch."""
    if parallel.tensor > 1:
        yield from _tensor_collectives(model, parallel, shapes)
    if parallel.sequence_data > 1:
        yield from _sequence_collectives(model, parallel, shapes)
    yield from _parameter_collectives(model, parallel, shapes)


def _passes(model: LlamaConfig, parallel: ParallelConfig) -> tuple[int, int]:
    """Forward passes of a layer that sends anything, and backward passes, in a micro-batch."""
    pieces = parallel.micro_sequences
    forward = pieces * (2 if pieces > 1 else 1)
    recomputed = pieces if model.activation_checkpointing else 0
    return forward + recomputed, pieces


def _tensor_collectives(
    model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes
) -> Iterator[Collective]:
    forward, backward = _passes(model, parallel)
    pieces = forward - (backward if model.activation_checkpointing else 0)
    layers, size = model.num_hidden_layers, parallel.tensor
    states = shapes.piece * model.hidden_size * shapes.compute
    embedding_is_split = model.head.vocabulary_parallel or not model.tie_word_embeddings

    def call(name: str, what: str, num_bytes: int, count: int) -> Collective:
        return Collective("tensor", name, what, size, num_bytes, count)

    if parallel.sequence_parallel:
        # Into attention and MLP gathered, out of them summed to slices; backward the other way.
        yield call("all_gather", "hidden states", states, 2 * layers * forward)
        yield call("reduce_scatter", "hidden states", states, 2 * layers * forward)
        yield call("reduce_scatter", "gradients of hidden states", states, 2 * layers * backward)
        yield call("all_gather", "gradients of hidden states", states, 2 * layers * backward)
        if embedding_is_split:
            yield call("reduce_scatter", "embeddings", states, pieces)
        yield call("all_gather", "gradients of embeddings", states, backward)
    else:
        yield call("all_reduce", "hidden states", states, 2 * layers * forward)
        yield call("all_reduce", "gradients of hidden states", states, 2 * layers * backward)
        if embedding_is_split:
            yield call("all_reduce", "embeddings", states, pieces)
    if parallel.sequence_parallel:
        # Of two norms a layer and the final one, each rank's from its tokens.
        at_end, count = not parallel.fully_sharded, 2 * layers + 1
        norms = model.hidden_size * (shapes.stored if at_end else shapes.compute)
        yield Collective(
            "tensor",
            "all_reduce",
            "gradients of norms",
            size,
            norms,
            count if at_end else count * backward,
            per_update=at_end,
        )
    yield from _head_collectives(model, parallel, shapes)


def _head_collectives(
    model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes
) -> Iterator[Collective]:
    """Of the head, once for all pieces, with a label at every token and `recompute`."""
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
    statistics = size * rows * _STATISTICS_BYTES * wide // 4
    yield Collective("tensor", "all_gather", "head: row statistics", size, statistics, 1)
    if parallel.sequence_parallel:
        gathered = states * shapes.compute
        yield Collective("tensor", "all_gather", "head: hidden states", size, gathered, 2)
        yield Collective("tensor", "reduce_scatter", "head: dh", size, states * wide, 1)
    else:
        yield Collective("tensor", "all_reduce", "head: dh", size, states * wide, 1)


def _sequence_collectives(
    model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes
) -> Iterator[Collective]:
    """Keys and values; of piece i of n those of pieces 1 to i, (n + 1) / 2 pieces on average."""
    forward, backward = _passes(model, parallel)
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
    forward, backward = _passes(model, parallel)

    def call(name: str, what: str, num_bytes: int, count: int) -> Collective:
        return Collective(axis, name, what, size, num_bytes, count)

    # Recomputation within a backward finds the layer gathered.
    gathers = forward - (backward if model.activation_checkpointing else 0) + backward
    layers = weights.layer * weights.num_layers
    yield call("all_gather", "layers", layers * shapes.compute, gathers)
    yield call("all_gather", "embedding, head", weights.root * shapes.compute, 1)
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


def report(model: LlamaConfig, parallel: ParallelConfig, *, tokens: int, dtype: str) -> str:
    """Memory and collectives of one rank as a text."""
    shapes = Shapes.of(parallel, tokens, dtype)
    num_parameters = Weights.of(model, 1).total
    lines = [
        f"{num_parameters:,} parameters; {tokens:,} tokens a packed sequence, over"
        f" {parallel.num_processes} rank(s) (data {parallel.data} x sequence_data"
        f" {parallel.sequence_data} x tensor {parallel.tensor})",
        "",
        "memory of one rank",
    ]
    items = memory(model, parallel, shapes)
    items.append(Memory("total", sum(item.num_bytes for item in items)))
    lines += [f"  {item.name:<66}{_size(item.num_bytes):>12}" for item in items]
    lines += [
        "",
        f"{'sent by one rank in a micro-batch':<68}{'a call':>12}{'calls':>7}{'sent':>12}",
    ]
    calls = list(collectives(model, parallel, shapes))
    for call in calls:
        name = f"{call.axis}: {call.name} of {call.what}" + " (an update)" * call.per_update
        size, sent = _size(call.num_bytes), _size(call.sent_bytes)
        lines.append(f"  {name:<66}{size:>12}{call.count:>7}{sent:>12}")
    if not calls:
        lines.append("  nothing")
    return "\n".join(lines)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"


def estimate_run(config: RunConfig, tokens: int | None = None) -> str:
    """The report for a run's config.

    Args:
        config: of the run; a model that it describes has its `vocab_size`.
        tokens: of a packed sequence. Default: the largest `max_tokens_per_micro_batch`.

    Raises:
        UserError: the folder of a pretrained model cannot be read.
    """
    if isinstance(config.model, LlamaConfig):
        model = config.model
    else:
        from fastrl.models.checkpoint import read_llama_config

        model = read_llama_config(config.model.path, head=config.model.head)
    if tokens is None:
        tokens = max(phase.max_tokens_per_micro_batch for phase in config.phases)
    return report(model, config.parallel, tokens=tokens, dtype=config.dtype)
