"""A Llama spread over a device mesh, from outside: tensor parallel, sequence parallel, FSDP2.

Parameters become DTensors, which record the part of the whole that a rank holds. The model stays
the single-device code of `llama.py`: its layers see plain tensors, the local part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fastrl.config.training import ReshardAfter
from fastrl.models.llama import Llama
from fastrl.parallel import ParallelGroups, all_reduce_tensors, vocab_shard


def parallelize_llama(
    llama: Llama,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = False,
    fully_sharded: bool = False,
    compute_dtype: torch.dtype | None = None,
    reshard_after: ReshardAfter = "forward",
) -> ParallelGroups:
    """The groups for the batches of a model, which is sharded over the mesh in place.

    Args:
        llama: built without groups, its weights the same on every rank, or on the meta device.
        mesh: of `fastrl.parallel.device_mesh`.
        sequence_parallel: the tensor axis also splits the residual stream by tokens.
        fully_sharded: FSDP2 over the data and sequence-data axes together; without it these axes
            hold replicas, whose gradients `reduce_gradients` sums.
        compute_dtype: of activations and gathered weights, while parameters keep their own dtype
            and gradients are reduced in it; only with `fully_sharded`.
        reshard_after: as in `fully_shard_layers`; only with `fully_sharded`.

    Raises:
        ValueError: sizes of the model that the tensor axis does not divide, or an option that has
            no effect; from facts that all ranks share, before any collective.
    """
    tensor = mesh["tensor"]
    _check(llama, tensor.size(), sequence_parallel)
    _check_sharding(fully_sharded, compute_dtype, reshard_after)
    groups = ParallelGroups.from_mesh(mesh, sequence_parallel=sequence_parallel)
    llama.groups = groups
    llama.lm_head.use_groups(groups)
    if tensor.size() > 1:
        _shard_tensor(llama, tensor, sequence_parallel)
    if fully_sharded:
        layers, data = llama.model.layers, _data_mesh(mesh)
        fully_shard_layers(llama, layers, data, compute_dtype, reshard_after)
        for method in ("hidden_states", "head_output"):
            register_fsdp_forward_method(llama, method)
    return groups


def _check(llama: Llama, tensor: int, sequence_parallel: bool) -> None:
    check_tensor_axis(llama, tensor)
    if sequence_parallel and tensor == 1:
        raise ValueError(
            "`sequence_parallel` must be false without a tensor axis, got true with `tensor` 1:"
            " it has no effect."
        )


def _check_sharding(
    fully_sharded: bool, compute_dtype: torch.dtype | None, reshard_after: ReshardAfter
) -> None:
    if compute_dtype is not None and not fully_sharded:
        raise ValueError(
            f"`compute_dtype` must be None without `fully_sharded`, got {compute_dtype}; FSDP2"
            " keeps the copy of the weights in the compute dtype."
        )
    if reshard_after != "forward" and not fully_sharded:
        raise ValueError(
            f"`reshard_after` must be 'forward' without `fully_sharded`, got {reshard_after!r}: no"
            " weights are gathered."
        )


def check_tensor_axis(llama: Llama, tensor: int) -> None:
    """Refuses sizes of a model that leave some of `tensor` ranks without a part.

    Raises:
        ValueError: by the name of the size; from facts that all ranks share.
    """
    config = llama.config
    for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
        size = getattr(config, name)
        if size % tensor:
            raise ValueError(
                f"`{name}` must be a multiple of the tensor axis, {tensor}, got {size}; use a"
                " smaller `parallel.tensor`."
            )
    rows = config.vocab_size or 0
    if _shards_embedding(llama) and vocab_shard(rows, tensor - 1, tensor)[0] >= rows:
        raise ValueError(
            f"`vocab_size` must leave each of the {tensor} ranks of the tensor axis a row of the"
            f" embedding, got {rows}, of which a rank has {-(-rows // tensor)}; use a smaller"
            " `parallel.tensor` or a larger vocabulary."
        )


def _shards_embedding(llama: Llama) -> bool:
    """Whether each tensor rank has rows of the embedding; a tied one is sharded as the head is."""
    return llama.lm_head.config.vocabulary_parallel or not llama.config.tie_word_embeddings


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The data and sequence-data axes as one: both sum gradients, so both shard parameters."""
    if mesh["sequence_data"].size() == 1:
        return mesh["data"]
    if mesh["data"].size() == 1:
        return mesh["sequence_data"]
    return mesh["data", "sequence_data"]._flatten("data_sequence_data")


def _shard_tensor(llama: Llama, tensor: DeviceMesh, sequence_parallel: bool) -> None:
    """Megatron's layout: columns of the first, rows of the second matrix of attention and MLP."""
    stream: Placement = Shard(0) if sequence_parallel else Replicate()
    norm = SequenceParallel(sequence_dim=0, use_local_output=True) if sequence_parallel else Whole()
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=stream)

    def gathered(num_inputs: int) -> PrepareModuleInput:
        # A DTensor input, so that the gradients of its two or three uses are summed first.
        others = [None] * (num_inputs - 1)
        return PrepareModuleInput(
            input_layouts=(stream, *others),
            desired_input_layouts=(Replicate(), *others),
        )

    layer: dict[str, ParallelStyle] = {
        "input_layernorm": norm,
        "self_attn": gathered(3),
        "self_attn.q_proj": columns,
        "self_attn.k_proj": columns,
        "self_attn.v_proj": columns,
        "self_attn.o_proj": rows,
        "post_attention_layernorm": norm,
        "mlp": gathered(1),
        "mlp.gate_proj": columns,
        "mlp.up_proj": columns,
        "mlp.down_proj": rows,
    }
    if llama.config.qk_norm:
        # Each rank norms its own heads; the gradients of the shared weight are summed.
        layer |= dict.fromkeys(
            ("self_attn.q_norm", "self_attn.k_norm"),
            SequenceParallel(sequence_dim=1, use_local_output=True),
        )
    for block in llama.model.layers:
        parallelize_module(block, tensor, layer)
    head_shards = llama.lm_head.config.vocabulary_parallel
    embedding = (
        RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        if _shards_embedding(llama)
        else Whole(output_layout=stream)
    )
    parallelize_module(llama.model, tensor, {"embed_tokens": embedding, "norm": norm})
    llama.model.embed_tokens.register_forward_hook(_arrived)
    placement: Placement = Shard(0) if head_shards else Replicate()
    for name, parameter in list(llama.lm_head.named_parameters()):
        if not isinstance(parameter, DTensor):
            _distribute(llama.lm_head, name, parameter, tensor, placement)
    llama.tie_weights()


def _arrived(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output of a collective as a plain tensor: a compiled layer has no backward for another.

    A copy, as waiting for it would leave the graph.
    """
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def _distribute(
    module: nn.Module, name: str, parameter: Tensor, mesh: DeviceMesh, placement: Placement
) -> None:
    distributed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))


class Whole(ParallelStyle):
    """A module that runs whole on every tensor rank, its parameters replicated DTensors.

    Args:
        output_layout: what is handed on of the output: all of it, or this rank's rows.
    """

    def __init__(self, output_layout: Placement | None = None) -> None:
        self.output_layout = output_layout or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            _distribute(module, name, parameter, device_mesh, Replicate())

        def wrap(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(
                DTensor.from_local(tensor, device_mesh, [Replicate()]) for tensor in inputs
            )

        def unwrap(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
            return output.redistribute(placements=[self.output_layout]).to_local()

        module.register_forward_pre_hook(wrap)
        module.register_forward_hook(unwrap)
        return module


def fully_shard_layers(
    root: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
    reshard_after: ReshardAfter = "forward",
) -> None:
    """FSDP2 with a group for each layer, and the root's for the rest.

    That is embedding, final norm and head, of which two may be tied.
    The root's group stays gathered from forward to backward: one all-gather a step for the head's
    weight, whatever its number of chunks.

    Args:
        root: the model.
        layers: of it.
        mesh: of one axis.
        compute_dtype: of activations and gathered weights, as in `parallelize_llama`.
        reshard_after: when a layer's gathered weights are freed. After its `forward`: they are
            gathered again for its backward. After its `backward`: once a micro-batch, with all
            layers gathered in between. After the `update`: once for all of its micro-batches, until
            `reshard_all` frees them.
    """
    # Inputs are not cast: a batch's log-probabilities and the rotary angles stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=None if compute_dtype is None else torch.float32,
        cast_forward_inputs=False,
    )
    modules = [*layers, root]
    for module in modules:
        frees = reshard_after == "forward" and module is not root
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
    for module in modules:
        assert isinstance(module, FSDPModule)
        module.set_reshard_after_backward(reshard_after != "update", recurse=False)
        if mesh.size() > 1:
            # The global loss is the sum of the ranks' losses: gradients are summed, not averaged.
            # A single rank would divide by the factor all the same, in a pass over all gradients.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard_all(root: nn.Module) -> None:
    """Frees all weights that FSDP2 has gathered, which are stale once the sharded ones change."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reduce_gradients(llama: Llama) -> None:
    """Sums the gradients of replicas; to be called once a step, after all backward passes.

    Gradients over the tensor axis that autograd left as partial sums (of norms under sequence
    parallelism) are summed as well. Under FSDP2 nothing is left to sum; what is still gathered of
    the weights, which are to change, is freed.
    """
    if isinstance(llama, FSDPModule):
        reshard_all(llama)
        return
    grads = []
    for parameter in llama.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            assert isinstance(parameter, DTensor)
            parameter.grad = grad = grad.redistribute(placements=parameter.placements)
            grad = grad.to_local()
        if grad is not None:
            grads.append(grad)
    for group in (llama.groups.dp, llama.groups.sdp):
        all_reduce_tensors(grads, group)
