"""Memory at the moments of a training step that can be its peak, in bytes on one rank.

For the trainer's step on a Hopper GPU: packed sequences of one length, every token with a label and
a gradient, documents that fit a chunk of the head's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastrl.config.losses import AnyLossConfig
from fastrl.config.model import LlamaConfig
from fastrl.config.training import ParallelConfig
from fastrl.estimate.head import HeadOp, HeadShape, Memory, head_ops, total
from fastrl.estimate.sizes import Shapes, Weights
from fastrl.parallel import vocab_shard

# Workspaces of cuBLAS on Hopper, one each for the threads of forward and backward.
WORKSPACE_BYTES = 2 * 32 * 2**20

PARAMETERS, STATES = "parameters", "optimizer states (AdamW)"
GRADIENTS, REFERENCE = "gradients", "reference model"
GATHERED, PENDING = "gathered weights", "gradients not yet reduced"
ACTIVATIONS, CHECKPOINTS = "activations of layers", "inputs of layers (checkpoints)"
HIDDEN, PIECES = "final hidden states", "keys and values of pieces, and their gradients"
BACKWARD, WORKSPACES = "gradients of a layer's activations", "workspaces of cuBLAS"


@dataclass(frozen=True)
class Step:
    """The inputs of the memory of a step.

    Attributes:
        model: the architecture, `vocab_size` included.
        parallel: sizes of the axes.
        shapes: of one rank.
        losses: of the phase.
        accumulates: whether an update has several micro-batches, and a micro-batch thus begins with
            gradients of all parameters.
        has_reference: whether a frozen copy of the model is kept.
    """

    model: LlamaConfig
    parallel: ParallelConfig
    shapes: Shapes
    losses: Mapping[str, AnyLossConfig]
    accumulates: bool = True
    has_reference: bool = False

    @property
    def weights(self) -> Weights:
        return Weights.of(self.model, self.parallel.tensor)

    @property
    def reduced(self) -> int:
        """Bytes of an element of gradients while FSDP2 sums them."""
        return max(self.shapes.stored, 4) if self.parallel.compute_dtype else self.shapes.stored

    @property
    def head_shape(self) -> HeadShape:
        """The head's sizes: its tokens are those of all pieces."""
        parallel, tokens = self.parallel, self.shapes.local
        rows = self.model.padded_vocab_size or self.model.vocab_size
        assert rows is not None
        shares = self.model.head.vocabulary_parallel and parallel.tensor > 1
        own = tokens // (parallel.tensor if parallel.sequence_parallel else 1)
        whole = tokens if shares else own
        is_cut = parallel.sequence_data > 1 or (
            parallel.sequence_parallel and (not shares or parallel.micro_sequences > 1)
        )
        return HeadShape(
            tokens=whole,
            slice=own,
            labelled=whole,
            active=whole,
            columns=vocab_shard(rows, 0, parallel.tensor if shares else 1)[1],
            hidden_size=self.model.hidden_size,
            dtype=self.shapes.dtype,
            is_cut=is_cut,
            shares_vocabulary=shares,
        )


def peak(step: Step) -> tuple[str, list[Memory]]:
    """The moment with the most bytes, and what is alive then.

    Raises:
        ValueError: the losses' strategy is not possible.
    """
    resident = _resident(step)
    every = {name: [*resident, *items] for name, items in moments(step)}
    name = max(every, key=lambda name: total(every[name]))
    return name, [item for item in every[name] if item.num_bytes]


def _resident(step: Step) -> list[Memory]:
    """Memory that is alive throughout a step."""
    weights, shapes = step.weights, step.shapes
    own = -(-weights.total // shapes.shards) * shapes.stored
    return [
        Memory(PARAMETERS, own),
        Memory(STATES, 2 * own),
        Memory(REFERENCE, own if step.has_reference else 0),
        Memory(WORKSPACES, WORKSPACE_BYTES),
    ]


def moments(step: Step) -> Iterator[tuple[str, list[Memory]]]:
    """Moments that can be the peak, and what is alive then beside the resident memory."""
    ops = head_ops(step.model.head, step.losses, step.head_shape)
    yield from _head_moments(step, ops)
    yield from _layer_moments(step)
    yield from _end_moments(step)


def _head_moments(step: Step, ops: Sequence[HeadOp]) -> Iterator[tuple[str, list[Memory]]]:
    """Forward and backward of the head's operations, one after the other."""
    shapes, weights = step.shapes, step.weights
    before = [_gradients(step, 0)] if step.parallel.micro_sequences == 1 or step.accumulates else []
    hidden = step.head_shape.slice * step.model.hidden_size * shapes.compute
    if step.parallel.micro_sequences > 1:
        before.append(_key_values(step, with_gradients=False))
        # Of the pieces, and joined.
        before.append(Memory(HIDDEN, 2 * hidden))
    else:
        before += _activations(step, step.model.num_hidden_layers)
        before.append(Memory(HIDDEN, 2 * hidden))  # and what the final norm saves
    before.append(_gathered(step, 1 if shapes.shards > 1 else 0, 0))
    kept: list[Memory] = []
    for op in ops:
        yield "forward of the head", [*before, *kept, *op.forward]
        kept += op.kept
    # The gradients of an operation live until those of the others are there.
    done: list[Memory] = []
    while ops:
        *ops, op = ops
        waiting = [item for other in ops for item in other.kept]
        yield "backward of the head", [*before, *waiting, *op.kept, *op.backward, *done]
        done = _head_gradients(step)
    if step.parallel.fully_sharded and step.parallel.micro_sequences > 1:
        matrix = weights.embedding if weights.is_tied else weights.head
        yield "reduction of the head", [*before, done[0], *_reduction(step, matrix)]


def _head_gradients(step: Step) -> list[Memory]:
    """Results of the head's backward."""
    shape = step.head_shape
    size = shape.hidden_size * shape.narrow
    return [
        Memory("head: gradient of hidden states", shape.slice * size),
        Memory("head: gradient of the weight", shape.columns * size),
    ]


def _gradients(step: Step, num_layers: int) -> Memory:
    """Gradients of parameters after the backward of `num_layers` layers."""
    shapes, weights, parallel = step.shapes, step.weights, step.parallel
    # The first piece in the backward leaves gradients to the others, most with fewer keys.
    is_whole = step.accumulates or parallel.micro_sequences > 1
    number = weights.total if is_whole else num_layers * weights.layer
    if parallel.micro_sequences > 1 and parallel.fully_sharded and weights.is_tied:
        # The final norm's gradient is a view into all that FSDP2 reduced with it.
        number += weights.embedding
    return Memory(GRADIENTS, -(-number // shapes.shards) * shapes.stored)


def _activations(step: Step, num_layers: int) -> list[Memory]:
    """Tensors that `num_layers` layers save for their backward."""
    model, shapes = step.model, step.shapes
    if model.activation_checkpointing == "full":
        stream = num_layers * shapes.stream * model.hidden_size * shapes.compute
        return [Memory(CHECKPOINTS, stream)]
    with_mlp = model.activation_checkpointing == "none"
    layer = layer_activation_bytes(model, step.parallel, shapes, with_mlp=with_mlp)
    return [Memory(ACTIVATIONS, num_layers * layer)]


def layer_activation_bytes(
    model: LlamaConfig, parallel: ParallelConfig, shapes: Shapes, *, with_mlp: bool = True
) -> int:
    """Bytes that one layer saves for its backward, in one piece, with or without those of the MLP.

    Inputs of both norms (stream); their outputs, gathered (all rows); queries and attention output;
    gate, up, silu(gate) and their product; keys and values of all tokens that the piece may see;
    queries and keys before their norms, where they have them.
    """
    size, tensor = model.hidden_size, parallel.tensor
    query = model.num_attention_heads * model.head_dim // tensor
    key_value = 2 * model.num_key_value_heads * model.head_dim // tensor
    elements = 2 * shapes.stream * size + shapes.piece * (size + 2 * query)
    elements += shapes.tokens * key_value
    if model.qk_norm:
        elements += shapes.piece * (query + key_value // 2)
    if with_mlp:
        elements += shapes.piece * (size + 4 * model.intermediate_size // tensor)
    return elements * shapes.compute


def _layer_moments(step: Step) -> Iterator[tuple[str, list[Memory]]]:
    """The backward of the last layer, of the one before, and of the first."""
    model, parallel, shapes = step.model, step.parallel, step.shapes
    weights, compute = step.weights, shapes.compute
    layer = layer_activation_bytes(model, parallel, shapes)
    inner = shapes.piece * model.intermediate_size // parallel.tensor
    stream = shapes.stream * model.hidden_size
    # Through the product of the MLP: two more of its activations; the residual stream's gradient.
    gradients = (2 * inner + 2 * stream) * compute
    matrix = weights.mlp_matrix * compute
    is_sharded = parallel.fully_sharded
    for name, number in (("last", 0), ("last but one", 1), ("first", model.num_hidden_layers - 1)):
        left = model.num_hidden_layers - number
        before = [_gradients(step, number), *_waiting(step)]
        before += _activations(step, left if model.activation_checkpointing == "full" else left - 1)
        own = [
            Memory(ACTIVATIONS, layer),
            Memory(BACKWARD, gradients + (0 if is_sharded else matrix)),
        ]
        if is_sharded:
            before.append(_gathered(step, 2 if shapes.shards > 1 else 1, number))
            sent = weights.layer * step.reduced if number else 0
            own.append(Memory(PENDING, sent + matrix))
        yield f"backward of the {name} layer", [*before, *own]
        if is_sharded:
            yield f"reduction of the {name} layer", [*before, *_reduction(step, weights.layer)]


def _gathered(step: Step, at_a_time: int, num_done: int) -> Memory:
    """Weights that FSDP2 holds gathered: the root's and some of the layers'.

    Args:
        step: whose weights.
        at_a_time: layers, where each is freed after its forward.
        num_done: layers whose backward is over.
    """
    parallel, weights = step.parallel, step.weights
    if not parallel.fully_sharded:
        return Memory(GATHERED, 0)
    layers = {
        "forward": at_a_time,
        "backward": weights.num_layers - num_done,
        "update": weights.num_layers,
    }
    number = weights.root + weights.layer * layers[parallel.reshard_after]
    return Memory(GATHERED, number * step.shapes.compute)


def _waiting(step: Step) -> list[Memory]:
    """Memory that is alive from the head's backward to the end of the layers'."""
    if step.parallel.micro_sequences > 1:
        # Hidden states of the pieces, joined, and their gradient.
        hidden = step.head_shape.slice * step.model.hidden_size * step.shapes.compute
        return [_key_values(step, with_gradients=True), Memory(HIDDEN, 3 * hidden)]
    if step.parallel.fully_sharded or step.weights.is_tied or not step.accumulates:
        # It is kept for the sum with the embedding's, or becomes the parameter's gradient.
        return [_head_gradients(step)[1]]
    return []


def _key_values(step: Step, *, with_gradients: bool) -> Memory:
    """Keys and values of all pieces and layers, in the backward also of the recomputed piece."""
    model, shapes = step.model, step.shapes
    key_value = 2 * model.num_key_value_heads * model.head_dim // step.parallel.tensor
    tokens = 2 * shapes.local + shapes.piece if with_gradients else shapes.local
    return Memory(PIECES, model.num_hidden_layers * tokens * key_value * shapes.compute)


def _reduction(step: Step, number: int) -> list[Memory]:
    """The gradients of `number` parameters while FSDP2 reduces them."""
    shapes = step.shapes
    sent = number * step.reduced
    return [Memory(PENDING, sent + max(number * shapes.compute, sent // shapes.shards))]


def _end_moments(step: Step) -> Iterator[tuple[str, list[Memory]]]:
    """After the layers: the embedding's gradient, FSDP2's reduction of it, the update."""
    weights, shapes, parallel = step.weights, step.shapes, step.parallel
    gradients = _gradients(step, step.model.num_hidden_layers)
    gathered = _gathered(step, 0, step.model.num_hidden_layers)
    embedding = Memory("gradient of the embedding", weights.embedding * shapes.compute)
    before = [gradients, *_waiting(step)]
    if parallel.fully_sharded:
        if parallel.micro_sequences > 1:
            reduction = _reduction(step, weights.embedding + weights.norm)
            yield "reduction of the embedding", [*before, gathered, *reduction]
        else:
            reduction = _reduction(step, weights.root)
            if parallel.reshard_after == "update":
                reduction.append(gathered)
            yield "reduction of embedding and head", [gradients, *reduction]
        before.append(gathered)
    yield "backward of the embedding", [*before, embedding]
    own = -(-weights.total // shapes.shards) * shapes.stored
    yield "update", [Memory(GRADIENTS, own)]
