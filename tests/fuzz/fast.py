"""A case through the head: packed, split and sharded as it says, on one process or on ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.config.losses import LanguageModelHeadConfig
from fastrl.data.batch import TokenBatch
from fastrl.data.equal_batches import equal_batches
from fastrl.data.slices import shard_slots
from fastrl.data.step import OptimizerStep
from fastrl.functional.batch import BatchKwargs
from fastrl.layers.language_model_head import LanguageModelHead
from fastrl.parallel import ParallelGroups, group_rank, group_size, vocab_shard
from tests.fuzz.cases import VERSION, WEIGHTS, FuzzCase, draw_case
from tests.fuzz.definition import Answer

COLUMNS = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "model_version")
REFUSED = "`strategy: single_pass` must"


@dataclass(frozen=True)
class Part:
    """What a rank gives back, on the CPU in float64.

    Attributes:
        logprobs, entropy, grad_hidden: of each piece of its micro-batches.
        slots: of those pieces in their packed sequences.
    """

    loss: Tensor
    slots: list[Tensor]
    hidden_slots: list[Tensor]
    logprobs: list[Tensor]
    entropy: list[Tensor]
    grad_hidden: list[Tensor | None]
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    metrics: dict[str, Tensor]


def run_seed(seed: int) -> Part:
    """The part of the calling rank of the pool."""
    case = draw_case(seed)
    return run_part(case, case.layout.groups(), torch.device("cpu"))


def with_possible_strategy(case: FuzzCase) -> FuzzCase:
    """The case with `auto`, where its `single_pass` is not possible and refused."""
    return replace(case, head=case.head | {"strategy": "auto"})


def run_part(case: FuzzCase, groups: ParallelGroups, device: torch.device) -> Part:
    """This rank's losses, gradients and metrics of the step."""
    try:
        return _run(case, groups, device)
    except ValueError as error:
        if case.head["strategy"] != "single_pass" or REFUSED not in str(error):
            raise
        return _run(with_possible_strategy(case), groups, device)


def _run(case: FuzzCase, groups: ParallelGroups, device: torch.device) -> Part:
    head, rows = _build(case, groups, device)
    per_rank = len(case.packs) // case.layout.data
    first = group_rank(groups.dp) * per_rank
    mine = case.packs[first : first + per_rank]
    batches = [_pack(case, numbers) for numbers in mine]
    batches = equal_batches(batches, groups)
    step = OptimizerStep(batches, groups, device=device, layout=case.layout.layout)
    join = any(loss.scope != "token" for loss in head.losses.values())
    weight, bias = _parameters(case, head, rows, device)
    part = Part(torch.zeros(()), [], [], [], [], [], None, None, {})
    losses = []
    for numbers, batch in zip(mine, batches, strict=True):
        pieces = step.to_kwargs(batch, case.micro_sequences, join=join)
        slots = _slots(case, groups, sum(len(piece.labels) for piece in pieces), join)
        outputs = []
        for piece, where in zip(pieces, slots, strict=True):
            kwargs = piece.replace(current_version=VERSION)
            hidden_where = where.chunk(group_size(groups.sp))[group_rank(groups.sp)]
            output, hidden = _call(
                case, (head, weight, bias, rows), kwargs, (numbers, batch, hidden_where), device
            )
            outputs.append(output)
            losses.append(output.loss.detach().cpu().double())
            part.slots.append(where)
            part.hidden_slots.append(hidden_where)
            part.logprobs.append(_wide(output.logprobs))
            part.entropy.append(_wide(output.entropy))
            part.grad_hidden.append(None if hidden.grad is None else _wide(hidden.grad))
        step.add(*outputs)
    metrics = step.finish(head.loss_groups)
    del metrics["loss"]
    return replace(
        part,
        loss=torch.stack(losses).sum(),
        grad_weight=None if weight.grad is None else _wide(weight.grad),
        grad_bias=None if bias is None or bias.grad is None else _wide(bias.grad),
        metrics={name: _wide(value) for name, value in metrics.items()},
    )


def _wide(values: Tensor) -> Tensor:
    return values.detach().cpu().double()


def _build(
    case: FuzzCase, groups: ParallelGroups, device: torch.device
) -> tuple[LanguageModelHead, slice]:
    """The head, and this rank's rows of the weight."""
    sizes = {
        "hidden_size": case.weight.shape[1],
        "vocab_size": case.vocab_size,
        "padded_vocab_size": len(case.weight),
        "vocabulary_parallel": case.layout.vocabulary_parallel,
        "losses": case.losses,
    }
    options = dict(case.head)
    if case.is_guest:
        del options["bias"]
    config = LanguageModelHeadConfig.model_validate(options | sizes)
    if case.is_guest:
        head = LanguageModelHead(config, groups, owns_weight=False)
    else:
        head = LanguageModelHead(config, groups, device=device, dtype=case.dtype)
    tp = head.groups.tp
    return head, slice(*vocab_shard(len(case.weight), group_rank(tp), group_size(tp)))


def _parameters(
    case: FuzzCase, head: LanguageModelHead, rows: slice, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the head, or those that a head without any is given."""
    weight = case.weight[rows].to(device, case.dtype)
    bias = None if case.bias is None else case.bias[rows].to(device, case.dtype)
    if not case.is_guest:
        with torch.no_grad():
            head.weight.copy_(weight)
            if head.bias is not None and bias is not None:
                head.bias.copy_(bias)
        weight, bias = head.weight, head.bias
    elif case.is_strided:
        weight = weight.T.contiguous().T
    weight.requires_grad_(case.needs_gradient[1])
    if bias is not None:
        bias.requires_grad_(case.needs_gradient[1])
    return weight, bias


def _pack(case: FuzzCase, numbers: list[int]) -> TokenBatch:
    return TokenBatch.from_documents(
        [case.texts[number].document for number in numbers],
        pad_to_multiple=case.pad_to_multiple,
        columns=COLUMNS + (WEIGHTS if case.has("stream") else ()),
        share_prefixes=case.share_prefixes,
    )


def _slots(case: FuzzCase, groups: ParallelGroups, local: int, join: bool) -> list[Tensor]:
    """Slots of the packed sequence of each piece of this rank."""
    size = group_size(groups.sdp)
    slots = shard_slots(
        local * size,
        rank=group_rank(groups.sdp),
        size=size,
        micro_sequences=case.micro_sequences,
        layout=case.layout.layout,
    )
    return [slots.flatten()] if join else list(slots)


def paths(batch: TokenBatch) -> list[Tensor]:
    """The slots of each document in the packed sequence."""
    if batch.paths is not None:
        return list(batch.paths)
    return list(torch.arange(batch.num_tokens).split(batch.document_lengths))


def _states(
    documents: list[Tensor],
    batch: TokenBatch,
    slots: Tensor,
    case_and_width: tuple[FuzzCase, int],
    device: torch.device,
) -> Tensor:
    """[R, D] of some slots; what has no label or is padding has values that must have no say."""
    case, width = case_and_width
    last = max(int(slots.max()) + 1 if len(slots) else 0, batch.padded_length)
    packed = torch.linspace(-3, 3, last * width, dtype=torch.float64).view(last, width)
    for path, states in zip(paths(batch), documents, strict=True):
        labelled = batch.labels[path] != -100
        packed[path[labelled]] = states[labelled]
    states = packed[slots].to(device, case.dtype)
    if case.is_strided:
        states = torch.stack([states, states + 1], 2)[:, :, 0]
    return states


def _call(
    case: FuzzCase,
    operands: tuple[LanguageModelHead, Tensor, Tensor | None, slice],
    kwargs: BatchKwargs,
    where: tuple[list[int], TokenBatch, Tensor],
    device: torch.device,
) -> tuple[Any, Tensor]:
    """One forward and backward; the hidden states carry their gradient."""
    head, weight, bias, rows = operands
    numbers, batch, slots = where
    texts = [case.texts[number] for number in numbers]
    states = [text.hidden for text in texts]
    hidden = _states(states, batch, slots, (case, case.weight.shape[1]), device)
    hidden.requires_grad_(case.needs_gradient[0])
    given: dict[str, Any] = {"weight": weight, "bias": bias} if case.is_guest else {}
    if case.teacher_weight is not None:
        width = case.teacher_weight.shape[1]
        states = [text.teacher_hidden for text in texts]
        local = _states(states, batch, slots, (case, width), device)
        given["teacher"] = case.teacher(local, rows)
    output = head(hidden, kwargs, return_logprobs=True, compute_dtype=case.compute_dtype, **given)
    assert output.loss is not None
    (output.loss * case.upstream).backward()
    return output, hidden


def assemble(case: FuzzCase, parts: list[Part]) -> Answer:
    """All ranks' parts as the definition gives them; ranks that must be alike are compared."""
    layout = case.layout
    at = {layout.coordinates(rank): part for rank, part in enumerate(parts)}
    outer = [(d, s) for d in range(layout.data) for s in range(layout.sequence_data)]

    def over_ranks(value: Any, *, split: bool, joined: bool = False) -> Tensor:
        """Sum over the outer ranks, and over the tensor ranks, join of them, or one's."""
        total = []
        for d, s in outer:
            values = [value(at[d, s, t]) for t in range(layout.tensor)]
            if joined:
                total.append(torch.cat(values))
            elif split:
                total += values
            else:
                total.append(_same(values))
        return torch.stack(total).sum(0)

    gradients: dict[str, Tensor] = {}
    if parts[0].grad_weight is not None:
        joined = layout.vocabulary_parallel
        gradients["weight"] = over_ranks(lambda part: part.grad_weight, split=False, joined=joined)
        if parts[0].grad_bias is not None:
            gradients["bias"] = over_ranks(lambda part: part.grad_bias, split=False, joined=joined)
    if parts[0].grad_hidden and parts[0].grad_hidden[0] is not None:
        gradients["hidden_states"] = _by_document(case, at, "grad_hidden")
    return Answer(
        over_ranks(lambda part: part.loss, split=layout.head_splits_tokens),
        _by_document(case, at, "logprobs"),
        _by_document(case, at, "entropy"),
        {name: _same([part.metrics[name] for part in parts]) for name in parts[0].metrics},
        gradients,
    )


def _by_document(case: FuzzCase, at: dict[tuple[int, int, int], Part], name: str) -> Tensor:
    """[T, ...] of the case's documents one after the other, from the pieces of all ranks."""
    layout = case.layout
    per_rank = len(case.packs) // layout.data
    found: dict[int, Tensor] = {}
    for d in range(layout.data):
        pieces = len(at[d, 0, 0].slots) // per_rank
        for micro in range(per_rank):
            numbers = case.packs[d * per_rank + micro]
            batch = _pack(case, numbers)
            values: dict[int, Tensor] = {}
            for (data, _, t), part in at.items():
                is_split = layout.sequence_parallel and name == "grad_hidden"
                if data != d or (t and not is_split):
                    continue
                slots = part.hidden_slots if name == "grad_hidden" else part.slots
                for piece in range(micro * pieces, (micro + 1) * pieces):
                    numbers_of = slots[piece].tolist()
                    values |= dict(zip(numbers_of, getattr(part, name)[piece], strict=True))
            for number, path in zip(numbers, paths(batch), strict=True):
                found[number] = torch.stack([values[slot] for slot in path.tolist()])
    return torch.cat([found[number] for number in range(len(case.texts))])


def _same(values: list[Tensor]) -> Tensor:
    """The value that all ranks have."""
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=1e-4, atol=1e-6)
    return values[0]
